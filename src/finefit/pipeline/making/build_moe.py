"""Trained copies of one model become a mixture of experts, or their average. Where a mixture's router starts; the proof that nothing was lost."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finefit.artifacts.pipelines import Order
from finefit.artifacts.records import write_record
from finefit.data.budget import Budget
from finefit.data.built import builder
from finefit.data.examples import Rendered
from finefit.data.read import open_source
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Row
from finefit.data.selection import sampled
from finefit.errors import DataError, SpecError
from finefit.evaluate.answering import held_bytes
from finefit.evaluate.routing import measure_routing, own_share, routing_map
from finefit.facts.machine import MEMORY_LIMITS, read_free_memory_bytes
from finefit.facts.model import read_model_folder
from finefit.model.attention import attention_here
from finefit.model.centroids import Centroids, divided, fit_centroids
from finefit.model.load import load_base, quiet
from finefit.model.locate import locate
from finefit.model.moe import Built, Router, average, build_moe
from finefit.model.moe_proof import prove_experts
from finefit.pipeline.outlines import mixture_of
from finefit.spec.rows import Source
from finefit.spec.stages import BuildMoe, CentroidRouter, ForcedRouter

RECORD = "routing.json"
MAP = "routing.svg"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROOM = 1.2
"""Of a model's weights, for what is computed beside them."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A router, from rows."""

    centroids: Centroids
    left_out: dict[str, list[str]]
    """Of each expert the rows that could not be taken, and why."""
    loaded_bytes: int
    """What was held when the base was there and had seen no row yet."""


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with a model folder, and where the router starts from rows with routing.json and routing.svg."""
    quiet()
    stage = order.stage
    assert isinstance(stage, BuildMoe)
    base = locate(order.models["base"].model, Path(order.base)).folder
    experts = {name: _expert(order, name) for name in stage.experts}
    mixture = mixture_of(stage)
    if mixture is None:
        return asdict(average(base, experts, out, copies=stage.copies)) | {"merge": "average"}
    if isinstance(stage.router, ForcedRouter):
        experts = {stage.router.expert: experts[stage.router.expert]}
    started: list[_Started] = []
    built = build_moe(
        base,
        experts,
        out,
        top_k=mixture.top_k,
        shared=stage.shared,
        copies=stage.copies,
        start=partial(_from_rows, order, stage.router, base, started.append)
        if isinstance(stage.router, CentroidRouter)
        else None,
        seed=order.seed,
    )
    size = read_model_folder(base).num_parameters or 0
    top_k = min(mixture.top_k, len(built.experts))
    asked = {
        "merge": "mixture",
        "router": stage.router.kind,
        "top_k": top_k,
        "shared": stage.shared,
        "base_parameters": size,
    }
    proof = {"proof": _proof(stage, built, size, experts, base, out)}
    return asdict(built) | asked | proof | (_routing(order, built, started[0], out) if started else {})


def _expert(order: Order, name: str) -> Path:
    found = order.models[f"experts.{name}"]
    if found.adapter is not None:
        raise SpecError(
            f"expert {name} is an adapter over its base, and a mixture is built of whole models",
            "put a stage of kind merge_adapter between, and name that as the expert",
        )
    return locate(found.model, Path(order.base)).folder


def _from_rows(
    order: Order, asked: CentroidRouter, base: Path, keep: Callable[[_Started], None], names: tuple[str, ...]
) -> Router:
    """Rows of a copy are left to the expert that it is a copy of, which has rows of its own."""
    if len(names) == 1:
        return lambda _: torch.zeros(1, _hidden_size(base))
    renderer = open_renderer(base, asked.template, template_options=asked.template_options)
    taken = starting_rows(asked, names, renderer, Path(order.base), order.seed)
    attention = attention_here(order.device, order.precision, base)
    model = load_base(base, device=order.device, dtype=_DTYPES[order.precision], attention=attention).eval()
    loaded_bytes = held_bytes(order.device)
    found = fit_centroids(model, {name: rows for name, (rows, _) in taken.items()})
    keep(_Started(found, {name: faults for name, (_, faults) in taken.items() if faults}, loaded_bytes))
    return lambda layer: found.routers_EH[layer]


def starting_rows(
    asked: CentroidRouter, names: Sequence[str], renderer: Renderer, base: Path, seed: int
) -> dict[str, tuple[list[tuple[int, ...]], list[str]]]:
    """Of each expert its rows in tokens, and what is wrong with those that cannot be taken. Rows that no router can start from are refused."""
    taken = {name: _rows(asked.data[name], asked, renderer, base, seed) for name in names}
    for name, (rows, faults) in taken.items():
        if not rows:
            raise DataError(
                f"no row of expert {name} can start its router; the first: {faults[0]}",
                "raise router.max_tokens, or mend the rows",
            )
        if len(rows) >= asked.rows and len(set(rows)) == 1:
            raise DataError(
                f"the {asked.rows} rows of expert {name} that router.rows takes are all the same, and one must be held out",
                "raise router.rows, or give it other rows",
            )
    divided({name: rows for name, (rows, _) in taken.items()})
    return taken


def _hidden_size(base: Path) -> int:
    return int(read_model_folder(base).config["hidden_size"])


def _rows(
    source: Source, asked: CentroidRouter, renderer: Renderer, base: Path, seed: int
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Built and rendered as in training, and what is wrong with rows that cannot be: a few are wanted, so others stand in for them."""
    reading = replace(open_source(source, base, split="train"), build=builder(asked.task, base=base))
    rows: list[Row] = []
    faults: list[str] = []
    for row in reading.rows():
        if isinstance(row, BadRow):
            faults.append(f"{row.place} {row.reason}")
        else:
            rows.append(row)
    taken = sampled(reading, source.weight, source.limit, seed).taken
    chosen = rows if taken is None else [row for row, takes_part in zip(rows, taken, strict=True) if takes_part]
    tokens, unfit = _rendered(chosen, asked, renderer, seed)
    return tokens, faults + unfit


def _rendered(
    rows: Sequence[Row], asked: CentroidRouter, renderer: Renderer, seed: int
) -> tuple[list[tuple[int, ...]], list[str]]:
    """A seeded sample in the order of the rows; a longer prompt is cut in its middle."""
    budget = Budget(max_tokens=asked.max_tokens, too_long="cut_prompt", turns="all")
    order = iter(np.random.RandomState(seed).permutation(len(rows)).tolist())
    found: dict[int, Rendered] = {}
    faults: list[str] = []
    while several := list(islice(order, asked.rows - len(found))):
        for at, rendered in zip(several, renderer.render([rows[at] for at in several], budget), strict=True):
            if rendered.problem:
                faults.append(f"{rows[at].place} {rendered.problem}")
            else:
                found[at] = rendered
    return [example.tokens for at in sorted(found) for example in found[at].examples], faults


def _proof(
    stage: BuildMoe, built: Built, dense: int, experts: Mapping[str, Path], base: Path, out: Path
) -> dict[str, float] | str:
    """By expert the largest difference of logits; or why there is none."""
    needed, free = round(4 * _ROOM * (built.parameters + dense)), read_free_memory_bytes(MEMORY_LIMITS)
    if needed > free:
        return f"left out: it needs {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
    return prove_experts(
        out, {name: experts[name] for name in built.experts}, shared=base if stage.shared == "base" else None
    )


def _routing(order: Order, built: Built, started: _Started, out: Path) -> dict[str, Any]:
    """Where held-out tokens would go by the base's hidden states; and where they go in the mixture, if it can be loaded here."""
    centroids = started.centroids
    left_out = {name: {"rows": len(faults), "first": faults[0]} for name, faults in started.left_out.items()}
    told: dict[str, Any] = {
        "own_in_base": {name: statistics.fmean(shares) for name, shares in centroids.own.items()},
        "left_out": left_out,
    }
    needed, free = round(_ROOM * built.parameters * _DTYPES[order.precision].itemsize), _free_bytes(order.device)
    if needed > free:
        reason = f"not measured: the mixture needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return told | {"routing": reason, "loaded_bytes": started.loaded_bytes}
    attention = attention_here(order.device, order.precision, out)
    model = load_base(out, device=order.device, dtype=_DTYPES[order.precision], attention=attention).eval()
    loaded_bytes = max(started.loaded_bytes, held_bytes(order.device))
    found = measure_routing(model, centroids.held, skipped=centroids.skipped)
    write_record(out / RECORD, found)
    (out / MAP).write_text(routing_map(found), encoding="utf-8")
    return told | {
        "own": own_share(found),
        "own_by_layer": own_share(found, by_layer=True),
        "held_tokens": {k: s.tokens for k, s in found.sources.items()},
        "loaded_bytes": loaded_bytes,
    }


def _free_bytes(device: str) -> int:
    if device != "cuda":
        return read_free_memory_bytes(MEMORY_LIMITS)
    gc.collect()
    torch.cuda.empty_cache()  # what the base has left with the allocator
    return int(torch.cuda.mem_get_info()[0])


def lines(summary: dict[str, Any]) -> list[str]:
    names, size = summary["experts"], _billions(summary["parameters"])
    copies = [f"{copy} is a copy of {of} and was left out" for copy, of in summary["collapsed"].items()]
    if summary["merge"] == "average":
        return [f"the mean of {', '.join(names)}: {size} parameters, of the base's architecture", *copies]
    before = _billions(summary["base_parameters"])
    first = f"{len(names)} experts ({', '.join(names)}), {summary['top_k']} answer each token: {size} parameters, where the base has {before}"
    return [first, *copies, *_choice(summary), *_left_out(summary), *_routes(summary), _proved(summary["proof"])]


def _choice(summary: Mapping[str, Any]) -> list[str]:
    if summary["router"] == "select_one":
        return ["every token goes to it: a router could not reach the other experts, so they were left out"]
    if summary["top_k"] == 1:
        return [
            "one expert answers each token at full weight: the language-model loss gives such a router no gradient; it stays as it starts"
        ]
    return ["the router starts at random: train it"] if summary["router"] == "random" else []


def _left_out(summary: Mapping[str, Any]) -> list[str]:
    told = summary.get("left_out", {})
    return [
        f"the router starts without {found['rows']} rows of {name}; the first: {found['first']}"
        for name, found in told.items()
    ]


def _routes(summary: Mapping[str, Any]) -> list[str]:
    chance = 1 / len(summary["experts"])
    if own := summary.get("own"):
        each = ", ".join(f"{name} {share:.0%}" for name, share in own.items())
        mean: Sequence[float] = [
            statistics.fmean(layer) for layer in zip(*summary["own_by_layer"].values(), strict=True)
        ]
        return [
            f"held-out tokens whose first choice is their own expert: {each} (by chance {chance:.0%}); by layer {min(mean):.0%} to {max(mean):.0%}",
            f"where they go: {RECORD}, {MAP}",
        ]
    if told := summary.get("own_in_base"):
        each = ", ".join(f"{name} {share:.0%}" for name, share in told.items())
        return [
            f"held-out tokens nearest to their own expert in the base: {each} (by chance {chance:.0%}); {summary['routing']}"
        ]
    return []


def _proved(proof: Mapping[str, float] | str) -> str:
    if isinstance(proof, str):
        return f"the proof that each expert alone answers as before was {proof}"
    return f"loaded again, with all tokens sent to one expert it answers as that expert: logits differ by at most {max(proof.values()):.1g}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"
