"""Trained copies of one model become a mixture of experts, or their average. Where a mixture's router starts; the proof that nothing was lost."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from finefit.artifacts.records import Order, write_record
from finefit.data.budget import Budget
from finefit.data.read import open_source
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Row
from finefit.data.selection import sampled
from finefit.errors import DataError, SpecError
from finefit.evaluate.routing import measure_routing, own_share, routing_map
from finefit.facts.model import read_model_folder
from finefit.model.attention import attention_here
from finefit.model.centroids import Centroids, fit_centroids
from finefit.model.load import load_base, quiet
from finefit.model.locate import locate
from finefit.model.moe import Built, Router, average, build_moe
from finefit.model.moe_proof import prove_experts
from finefit.pipeline.outlines import mixture_of
from finefit.spec.schema import Source
from finefit.spec.stages import BuildMoe, CentroidRouter, ForcedRouter

RECORD = "routing.json"
MAP = "routing.svg"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROOM = 1.2
"""Of a model's weights, for what is computed beside them."""


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with a model folder, and where the router starts from rows with routing.json and routing.svg."""
    quiet()
    stage = order.stage
    assert isinstance(stage, BuildMoe)
    base = locate(order.models["base"].model, Path(order.base)).folder
    experts = {name: _expert(order, name) for name in stage.experts}
    mixture = mixture_of(stage)
    if mixture is None:
        return asdict(average(base, experts, out)) | {"merge": "average"}
    if isinstance(stage.router, ForcedRouter):
        experts = {stage.router.expert: experts[stage.router.expert]}
    centroids: list[Centroids] = []
    built = build_moe(
        base,
        experts,
        out,
        top_k=mixture.top_k,
        shared=stage.shared,
        copies=stage.copies,
        start=partial(_from_rows, order, stage.router, base, centroids.append) if isinstance(stage.router, CentroidRouter) else None,
        seed=order.seed,
    )
    size = read_model_folder(base).num_parameters or 0
    top_k = min(mixture.top_k, len(built.experts))
    asked = {"merge": "mixture", "router": stage.router.kind, "top_k": top_k, "shared": stage.shared, "base_parameters": size}
    proof = {"proof": _proof(stage, built, size, experts, out)}
    return asdict(built) | asked | proof | (_routing(order, built, centroids[0], out) if centroids else {})


def _expert(order: Order, name: str) -> Path:
    found = order.models[f"experts.{name}"]
    if found.adapter is not None:
        raise SpecError(
            f"expert {name} is an adapter over its base, and a mixture is built of whole models",
            "put a stage of kind merge_adapter between, and name that as the expert",
        )
    return locate(found.model, Path(order.base)).folder


def _from_rows(order: Order, asked: CentroidRouter, base: Path, keep: Callable[[Centroids], None], names: tuple[str, ...]) -> Router:
    """Rows of a copy are left to the expert that it is a copy of, which has rows of its own."""
    if len(names) == 1:
        return lambda _: torch.zeros(1, _hidden_size(base))
    renderer = open_renderer(base, asked.template)
    rows = {name: _rows(asked.data[name], asked, renderer, Path(order.base), order.seed) for name in names}
    attention = attention_here(order.device, order.precision, base)
    model = load_base(base, device=order.device, dtype=_DTYPES[order.precision], attention=attention).eval()
    found = fit_centroids(model, rows)
    keep(found)
    return lambda layer: found.routers_EH[layer]


def _hidden_size(base: Path) -> int:
    return int(read_model_folder(base).config["hidden_size"])


def _rows(source: Source, asked: CentroidRouter, renderer: Renderer, base: Path, seed: int) -> list[tuple[int, ...]]:
    """Rendered as in training; a longer prompt is cut in its middle."""
    reading = open_source(source.path, source.fields, base, split="train")
    taken = sampled(reading, 1.0, min(asked.rows, source.limit or asked.rows), seed).taken
    rows: list[Row] = []
    for row in reading.rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "mend or remove this row")
        rows.append(row)
    chosen = [row for at, row in enumerate(rows) if taken is None or taken[at]]
    rendered = renderer.render(chosen, Budget(max_tokens=asked.max_tokens, too_long="cut_prompt", turns="all"))
    for row, found in zip(chosen, rendered, strict=True):
        if found.problem:
            raise DataError(f"{row.place} {found.problem}", found.remedy or "raise router.max_tokens, or mend the row")
    return [example.tokens for found in rendered for example in found.examples]


def _proof(stage: BuildMoe, built: Built, dense: int, experts: Mapping[str, Path], out: Path) -> dict[str, float] | str:
    """By expert the largest difference of logits; or why there is none."""
    needed, free = round(4 * _ROOM * (built.parameters + dense)), psutil.virtual_memory().available
    if needed > free:
        return f"left out: it needs {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
    return prove_experts(out, {name: experts[name] for name in built.experts}, is_shared=stage.shared == "base")


def _routing(order: Order, built: Built, centroids: Centroids, out: Path) -> dict[str, Any]:
    """Where held-out tokens would go by the base's hidden states; and where they go in the mixture, if it can be loaded here."""
    told: dict[str, Any] = {"own_in_base": {name: statistics.fmean(shares) for name, shares in centroids.own.items()}}
    needed, free = round(_ROOM * built.parameters * _DTYPES[order.precision].itemsize), _free_bytes(order.device)
    if needed > free:
        return told | {"routing": f"not measured: the mixture needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"}
    attention = attention_here(order.device, order.precision, out)
    model = load_base(out, device=order.device, dtype=_DTYPES[order.precision], attention=attention).eval()
    found = measure_routing(model, centroids.held, skipped=centroids.skipped)
    write_record(out / RECORD, found)
    (out / MAP).write_text(routing_map(found), encoding="utf-8")
    return told | {
        "own": own_share(found),
        "own_by_layer": own_share(found, by_layer=True),
        "held_tokens": {k: s.tokens for k, s in found.sources.items()},
    }


def _free_bytes(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else psutil.virtual_memory().available


def lines(summary: dict[str, Any]) -> list[str]:
    names, size = summary["experts"], _billions(summary["parameters"])
    copies = [f"{copy} is a copy of {of} and was left out" for copy, of in summary["collapsed"].items()]
    if summary["merge"] == "average":
        return [f"the mean of {', '.join(names)}: {size} parameters, of the base's architecture", *copies]
    before = _billions(summary["base_parameters"])
    first = f"{len(names)} experts ({', '.join(names)}), {summary['top_k']} answer each token: {size} parameters, where the base has {before}"
    return [first, *copies, *_choice(summary), *_routes(summary), _proved(summary["proof"])]


def _choice(summary: Mapping[str, Any]) -> list[str]:
    if summary["router"] == "select_one":
        return ["every token goes to it: a router could not reach the other experts, so they were left out"]
    if summary["top_k"] == 1:
        return ["one expert answers each token at full weight: the language-model loss gives such a router no gradient; it stays as it starts"]
    return ["the router starts at random: train it"] if summary["router"] == "random" else []


def _routes(summary: Mapping[str, Any]) -> list[str]:
    chance = 1 / len(summary["experts"])
    if own := summary.get("own"):
        each = ", ".join(f"{name} {share:.0%}" for name, share in own.items())
        mean: Sequence[float] = [statistics.fmean(layer) for layer in zip(*summary["own_by_layer"].values(), strict=True)]
        return [
            f"held-out tokens whose first choice is their own expert: {each} (by chance {chance:.0%}); by layer {min(mean):.0%} to {max(mean):.0%}",
            f"where they go: {RECORD}, {MAP}",
        ]
    if told := summary.get("own_in_base"):
        each = ", ".join(f"{name} {share:.0%}" for name, share in told.items())
        return [f"held-out tokens nearest to their own expert in the base: {each} (by chance {chance:.0%}); {summary['routing']}"]
    return []


def _proved(proof: Mapping[str, float] | str) -> str:
    if isinstance(proof, str):
        return f"the proof that each expert alone answers as before was {proof}"
    return f"loaded again, with all tokens sent to one expert it answers as that expert: logits differ by at most {max(proof.values()):.1g}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"
