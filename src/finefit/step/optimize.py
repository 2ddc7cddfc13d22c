"""The one function that performs an optimizer step, the update inside backward, learning rates, fp16's loss scale.

Training calls it with real tensors, a rehearsal with fake ones, so it never reads a tensor on the host: counts come
with the batch, and the injected `decide` says whether the update is applied.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from finefit.artifacts.stage_records import LossScale
from finefit.errors import FinefitError, SpecError
from finefit.objective.batch import Batch, Forward, Objective
from finefit.step.engine import SINGLE_PROCESS, Engine

_LOSS = "loss"
Decide = Callable[[Tensor], bool]
"""Given whether loss and gradient are finite, decides whether the update is applied."""
Mark = Callable[[Literal["forward", "backward", "update"]], None]


def _unmarked(_: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    loss: Tensor
    """The mean over what the objective counts in the global batch."""
    grad_norm: Tensor
    """The norm before clipping."""
    applied: bool
    measures: dict[str, Tensor]
    """Further means of the objective."""


def optimizer_step(
    batches: Sequence[Batch],
    *,
    forward: Forward,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    decide: Decide,
    count: int | None = None,
    engine: Engine = SINGLE_PROCESS,
    loss_scale: float = 1.0,
    idle: Sequence[Batch] = (),
    update: Literal["after", "inside"] = "after",
    mark: Mark = _unmarked,
) -> StepOutcome:
    """loss = sum over what the objective counts / their number in the *global* batch, so any split into micro-batches
    gives the same gradient.

    `count` is that number over all ranks; None if these batches are all. `loss_scale` is for fp16 and divided out again
    before anything is read. `idle` micro-batches run after the others with weight zero, so that every rank runs as many
    as the rank with the most. `update` covers all tensors after backward, or each tensor inside it if nothing is
    clipped or accumulated. `mark` is told where forward, backward and update begin."""
    whole = sum(objective.count(batch) for batch in batches) if count is None else count
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if update == "inside" and (loss_scale != 1.0 or idle):
        raise FinefitError("an update inside backward takes neither a loss scale nor idle batches")
    if update == "inside" and len(batches) != 1:
        raise FinefitError(f"an update inside backward needs the step in one micro-batch, not in {len(batches)}")
    with _updated_inside(optimizer, parameters) if update == "inside" else nullcontext() as norms:
        parts = _accumulate(batches, idle, forward, objective, engine, whole=whole, loss_scale=loss_scale, mark=mark)
    mark("update")
    means = {name: engine.sum(part) for name, part in parts.items()}
    loss = means.pop(_LOSS)
    if norms is None:
        gradients = engine.gradients(parameters)
        if loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1 / loss_scale)
        grad_norm = engine.grad_norm(gradients)
        del gradients
    else:  # no norm at all where only vision towers are trained and no row has an image
        grad_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(loss)
    applied = decide(torch.isfinite(loss) & torch.isfinite(grad_norm))
    if norms is None and applied:
        if clip is not None:
            engine.clip(parameters, clip, grad_norm)
        engine.update(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(loss=loss, grad_norm=grad_norm, applied=applied, measures=means)


def _accumulate(
    batches: Sequence[Batch],
    idle: Sequence[Batch],
    forward: Forward,
    objective: Objective,
    engine: Engine,
    *,
    whole: int,
    loss_scale: float,
    mark: Mark,
) -> dict[str, Tensor]:
    """This rank's part of the means, by name."""
    parts: dict[str, Tensor] = {}
    for at, batch in enumerate((*batches, *idle)):
        mark("forward")
        found, is_idle = objective(forward, batch), at >= len(batches)
        part = found.total * 0.0 if is_idle else found.total / whole
        mark("backward")
        engine.backward(part if loss_scale == 1.0 else part * loss_scale, is_last=at == len(batches) + len(idle) - 1)
        measures = {name: value * 0.0 if is_idle else value / whole for name, value in found.measures.items()}
        for name, value in {_LOSS: part.detach(), **measures}.items():
            parts[name] = parts[name] + value if name in parts else value
    return parts


@contextmanager
def _updated_inside(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Updates each tensor as soon as its gradient is complete and frees the gradient before the next one is computed.
    Yields the list of the gradients' norms, one for each tensor.

    A gradient that is not finite leaves its own tensor unchanged without being read on the host, and `decide` only
    reports it; other tensors may have been updated by then."""
    if not isinstance(optimizer, torch.optim.AdamW):
        problem = "levers.update: inside needs optimizer.kind adamw, whose kernel skips gradients that are not finite"
        raise SpecError(problem, "--set levers.update=after")
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    norms: list[Tensor] = []

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        norms.append(norm)
        optimizer.found_inf = torch.isfinite(norm).logical_not().to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
        optimizer.found_inf = None  # type: ignore[attr-defined]


def learning_rate(
    step: int, *, peak: float, kind: Literal["cosine", "linear", "constant"], total_steps: int, warmup_steps: int
) -> float:
    """The rate of step `step`, counted from 0. It is a pure function, so nothing is saved. Cosine and linear fall
    towards 0."""
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    match kind:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2


# Loss scaling lifts small gradients out of what fp16 rounds to zero. A step whose gradients overflow is repeated at
# half the scale; after many good steps the scale is doubled.

_START = 2.0**16
_LARGEST = 2.0**24
"""Far above what any gradient allows. Without a limit, the scale would grow forever if gradients are exactly zero."""
_GOOD_STEPS = 2000


def initial_loss_scale(precision: str) -> LossScale | None:
    """None for bf16 and fp32, which have the same smallest exponent."""
    return LossScale(scale=_START, good_steps=0) if precision == "fp16" else None


def scale_after_good_step(scale: LossScale) -> LossScale:
    if scale.good_steps + 1 < _GOOD_STEPS:
        return LossScale(scale=scale.scale, good_steps=scale.good_steps + 1)
    return LossScale(scale=min(2 * scale.scale, _LARGEST), good_steps=0)


def scale_after_overflow(scale: LossScale) -> LossScale:
    return LossScale(scale=max(1.0, scale.scale / 2), good_steps=0)


def can_lower_scale(scale: LossScale) -> bool:
    """Whether the scale may have caused an overflow; at scale 1 the model did."""
    return scale.scale > 1
