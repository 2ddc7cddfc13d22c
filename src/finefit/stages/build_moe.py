"""Builds a mixture of experts, or an average, from trained copies of one model: how the router starts, and the proof
that nothing was lost."""

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

from finefit.artifacts.records import StageJob, write_record
from finefit.data.encode import Budget
from finefit.data.examples import RenderedRow
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Row
from finefit.data.sources import LEFT_OUT, open_source, sampled_rows
from finefit.errors import DataError, SpecError
from finefit.evaluate.worker import held_bytes
from finefit.facts.files import read_model_folder
from finefit.facts.machine import MEMORY_LIMITS, read_free_memory_bytes
from finefit.model.attention import attention_here
from finefit.model.load import load_base, quiet
from finefit.model.resolve_model import resolve_model
from finefit.moe.build import BuiltMoe, Router, average_experts, build_moe, prove_experts
from finefit.moe.routing import Centroids, divided, fit_centroids, measure_routing, own_share, routing_map
from finefit.plan.stage_forecasts import mixture_shape
from finefit.spec.data import Source
from finefit.spec.stages import BuildMoe, CentroidRouter, ForcedRouter
from finefit.stages.worker import serve
from finefit.tasks.custom import row_builder

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WORKING_MEMORY = 1.2
"""A multiple of the bytes of a model's weights."""


@dataclass(frozen=True, slots=True)
class _StartedRouter:
    centroids: Centroids
    left_out: dict[str, list[str]]
    """For each expert, the problems of rows that could not be used."""
    loaded_bytes: int
    """Memory after the base was loaded, before its first row."""


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Fills `out` with a model folder; if the router starts from rows, also with routing.json and routing.svg."""
    quiet()
    stage = job.stage
    assert isinstance(stage, BuildMoe)
    base = resolve_model(job.models["base"].model, Path(job.base)).folder
    wired = {name: job.models[f"experts.{name}"] for name in stage.experts}
    for name, one in wired.items():
        if one.adapter is not None:
            problem = f"expert {name} is an adapter over its base, but a mixture is built of whole models"
            raise SpecError(problem, "put a stage of kind merge_adapter between, and name that as the expert")
    experts = {name: resolve_model(one.model, Path(job.base)).folder for name, one in wired.items()}
    mixture = mixture_shape(stage)
    if mixture is None:
        return asdict(average_experts(base, experts, out, copies=stage.copies)) | {"merge": "average"}
    if isinstance(stage.router, ForcedRouter):
        experts = {stage.router.expert: experts[stage.router.expert]}
    started: list[_StartedRouter] = []
    router = stage.router if isinstance(stage.router, CentroidRouter) else None
    start = None if router is None else partial(_start_from_rows, job, router, base, started.append)
    built = build_moe(
        base, experts, out, top_k=mixture.top_k, shared=stage.shared, copies=stage.copies, start=start, seed=job.seed
    )
    size = read_model_folder(base).num_parameters or 0
    top_k = min(mixture.top_k, len(built.experts))
    asked = {"merge": "mixture", "router": stage.router.kind, "top_k": top_k}
    asked |= {"shared": stage.shared, "base_parameters": size}
    proof = {"proof": _proof(stage, built, size, experts, base, out)}
    return asdict(built) | asked | proof | (_routing(job, built, started[0], out) if started else {})


def _start_from_rows(
    job: StageJob, asked: CentroidRouter, base: Path, keep: Callable[[_StartedRouter], None], names: tuple[str, ...]
) -> Router:
    """`names` are the experts that are not copies, each with rows of its own."""
    if len(names) == 1:
        hidden_size = int(read_model_folder(base).config["hidden_size"])
        return lambda _: torch.zeros(1, hidden_size)
    renderer = open_renderer(base, asked.template, template_options=asked.template_options)
    taken = router_rows(asked, names, renderer, Path(job.base), job.seed)
    attention = attention_here(job.device, job.precision, base)
    model = load_base(base, device=job.device, dtype=_DTYPES[job.precision], attention=attention).eval()
    loaded_bytes = held_bytes(job.device)
    found = fit_centroids(model, {name: rows for name, (rows, _) in taken.items()})
    keep(_StartedRouter(found, {name: faults for name, (_, faults) in taken.items() if faults}, loaded_bytes))
    return lambda layer: found.routers_EH[layer]


def router_rows(
    asked: CentroidRouter, names: Sequence[str], renderer: Renderer, base: Path, seed: int
) -> dict[str, tuple[list[tuple[int, ...]], list[str]]]:
    """For each expert, rows as tokens and the problems of unusable rows. Raises if a router cannot start from these
    rows."""
    taken = {name: _rows(asked.data[name], asked, renderer, base, seed) for name in names}
    for name, (rows, faults) in taken.items():
        if not rows:
            problem = f"no row of expert {name} can start its router; the first: {faults[0]}"
            raise DataError(problem, "raise router.max_tokens, or fix the rows")
        if len(rows) >= asked.rows and len(set(rows)) == 1:
            problem = f"the {asked.rows} rows of expert {name} (router.rows) are all the same, but one must be held out"
            raise DataError(problem, "raise router.rows, or give it other rows")
    divided({name: rows for name, (rows, _) in taken.items()})
    return taken


def _rows(
    source: Source, asked: CentroidRouter, renderer: Renderer, base: Path, seed: int
) -> tuple[list[tuple[int, ...]], list[str]]:
    """A seeded sample, built and rendered as in training, in the order of the rows; prompts that are too long are cut
    in the middle. Other rows replace those that cannot be used, whose problems are returned."""
    reader = replace(open_source(source, base, split="train"), build=row_builder(asked.task, base=base))
    found = list(sampled_rows(reader, source, seed))
    rows = [row for row in found if isinstance(row, Row)]
    problems = [f"{row.place} {row.reason}" for row in found if isinstance(row, BadRow) and row.reason not in LEFT_OUT]
    budget = Budget(max_tokens=asked.max_tokens, too_long="cut_prompt", turns="all")
    order = iter(np.random.RandomState(seed).permutation(len(rows)).tolist())
    taken: dict[int, RenderedRow] = {}
    while several := list(islice(order, asked.rows - len(taken))):
        for at, rendered in zip(several, renderer.render([rows[at] for at in several], budget), strict=True):
            if rendered.problem:
                problems.append(f"{rows[at].place} {rendered.problem}")
            else:
                taken[at] = rendered
    return [example.tokens for at in sorted(taken) for example in taken[at].examples], problems


def _proof(
    stage: BuildMoe, built: BuiltMoe, dense: int, experts: Mapping[str, Path], base: Path, out: Path
) -> dict[str, float] | str:
    """For each expert the largest difference of logits, or why it was not measured."""
    needed, free = round(4 * _WORKING_MEMORY * (built.parameters + dense)), read_free_memory_bytes(MEMORY_LIMITS)
    if needed > free:
        return f"left out: it needs {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
    shared = base if stage.shared == "base" else None
    return prove_experts(out, {name: experts[name] for name in built.experts}, shared=shared)


def _routing(job: StageJob, built: BuiltMoe, started: _StartedRouter, out: Path) -> dict[str, Any]:
    """Where held-out tokens would be routed by the base's hidden states and, if the mixture can be loaded, where it
    routes them."""
    centroids = started.centroids
    left_out = {name: {"rows": len(faults), "first": faults[0]} for name, faults in started.left_out.items()}
    in_base = {name: statistics.fmean(shares) for name, shares in centroids.own.items()}
    summary: dict[str, Any] = {"own_in_base": in_base, "left_out": left_out}
    needed, free = round(_WORKING_MEMORY * built.parameters * _DTYPES[job.precision].itemsize), _free_bytes(job.device)
    if needed > free:
        reason = f"not measured: the mixture needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        return summary | {"routing": reason, "loaded_bytes": started.loaded_bytes}
    attention = attention_here(job.device, job.precision, out)
    model = load_base(out, device=job.device, dtype=_DTYPES[job.precision], attention=attention).eval()
    loaded_bytes = max(started.loaded_bytes, held_bytes(job.device))
    found = measure_routing(model, centroids.held, skipped=centroids.skipped)
    write_record(out / "routing.json", found)
    (out / "routing.svg").write_text(routing_map(found), encoding="utf-8")
    own = own_share(found)
    return summary | {
        "own": {name: statistics.fmean(shares) for name, shares in own.items()},
        "own_by_layer": own,
        "held_tokens": {k: s.tokens for k, s in found.sources.items()},
        "loaded_bytes": loaded_bytes,
    }


def _free_bytes(device: str) -> int:
    if device != "cuda":
        return read_free_memory_bytes(MEMORY_LIMITS)
    gc.collect()
    torch.cuda.empty_cache()  # which the base has used
    return int(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    serve(make)
