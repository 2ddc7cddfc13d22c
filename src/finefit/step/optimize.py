"""The one function that performs an optimizer step. Training calls it with real tensors, a rehearsal with fake ones, so it never reads a
tensor on the host: counts come with the batch, and whether the update is applied comes from the injected `decide`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from finefit.errors import FinefitError
from finefit.objective.batch import Batch, Forward, Objective
from finefit.step.engine import ALONE, Engine
from finefit.step.inside import updated_inside

Decide = Callable[[Tensor], bool]
"""Given whether loss and gradient are finite, says whether the update is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    loss: Tensor
    """Mean over what the objective counts in the global batch."""
    grad_norm: Tensor
    """Before clipping."""
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
    engine: Engine = ALONE,
    loss_scale: float = 1.0,
    idle: Sequence[Batch] = (),
    update: Literal["after", "inside"] = "after",
) -> StepOutcome:
    """loss = sum over what the objective counts / their number in the *global* batch, so any cut into micro-batches gives the same gradient.

    `count`: that number over all ranks; None where these batches are all. `loss_scale`: for fp16, taken out again before anything is read.
    `idle`: run after the others with weight zero, so that every rank of a step runs as many micro-batches as the one with most.
    `update`: of all tensors after backward, or of each inside it, where nothing is clipped or accumulated."""
    whole = sum(objective.count(batch) for batch in batches) if count is None else count
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if update == "inside":
        if loss_scale != 1.0 or idle:
            raise FinefitError("an update inside backward takes neither a loss scale nor idle batches")
        return _updated_inside(batches, forward, objective, engine, optimizer, decide, whole=whole)
    parts = _accumulate(batches, idle, forward, objective, engine, whole=whole, loss_scale=loss_scale)
    means = {name: engine.sum(part) for name, part in parts.items()}
    loss = means.pop(_LOSS)
    gradients = engine.gradients(parameters)
    if loss_scale != 1.0:
        torch._foreach_mul_(gradients, 1 / loss_scale)
    grad_norm = engine.grad_norm(gradients)
    del gradients
    applied = decide(torch.isfinite(loss) & torch.isfinite(grad_norm))
    if applied:
        if clip is not None:
            engine.clip(parameters, clip, grad_norm)
        engine.update(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(loss=loss, grad_norm=grad_norm, applied=applied, measures=means)


_LOSS = "loss"


def _updated_inside(
    batches: Sequence[Batch],
    forward: Forward,
    objective: Objective,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    decide: Decide,
    *,
    whole: int,
) -> StepOutcome:
    """What is not finite has left its tensor alone; `decide` is told, and can only say so."""
    if len(batches) != 1:
        raise FinefitError(f"an update inside backward needs the step in one micro-batch, not in {len(batches)}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with updated_inside(optimizer, parameters) as norms:
        parts = _accumulate(batches, (), forward, objective, engine, whole=whole, loss_scale=1.0)
    loss = parts.pop(_LOSS)
    grad_norm = (
        torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(loss)
    )  # rows that show nothing, of towers that look
    return StepOutcome(
        loss=loss, grad_norm=grad_norm, applied=decide(torch.isfinite(loss) & torch.isfinite(grad_norm)), measures=parts
    )


def _accumulate(
    batches: Sequence[Batch],
    idle: Sequence[Batch],
    forward: Forward,
    objective: Objective,
    engine: Engine,
    *,
    whole: int,
    loss_scale: float,
) -> dict[str, Tensor]:
    """This rank's part of the means, by name."""
    parts: dict[str, Tensor] = {}
    for at, batch in enumerate((*batches, *idle)):
        found = objective(forward, batch)
        part = found.total / whole if at < len(batches) else found.total * 0.0
        engine.backward(part if loss_scale == 1.0 else part * loss_scale, is_last=at == len(batches) + len(idle) - 1)
        measures = {name: value / whole if at < len(batches) else value * 0.0 for name, value in found.measures.items()}
        for name, value in {_LOSS: part.detach(), **measures}.items():
            parts[name] = parts[name] + value if name in parts else value
    return parts
