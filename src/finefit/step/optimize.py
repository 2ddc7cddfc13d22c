"""The one function that performs an optimizer step. Training calls it with real tensors, a rehearsal with fake ones, so it never reads a
tensor on the host: counts come with the batch, and whether the update is applied comes from the injected `decide`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finefit.objective.batch import Batch, Forward, Objective

Decide = Callable[[Tensor], bool]
"""Given whether loss and gradient are finite, says whether the update is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    loss: Tensor
    """Mean over the supervised tokens of the global batch."""
    grad_norm: Tensor
    """Before clipping."""
    applied: bool


def optimizer_step(
    batches: Sequence[Batch],
    *,
    forward: Forward,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    decide: Decide,
) -> StepOutcome:
    """loss = sum over supervised tokens / their number in the *global* batch, so any cut into micro-batches gives the same gradient."""
    num_supervised = sum(batch.num_supervised for batch in batches)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loss = _accumulate(batches, forward, objective, num_supervised)
    gradients = [p.grad for p in parameters if p.grad is not None]
    grad_norm = get_total_norm(gradients, foreach=True)
    applied = decide(torch.isfinite(loss) & torch.isfinite(grad_norm))
    if applied:
        if clip is not None:
            clip_grads_with_norm_(parameters, clip, grad_norm, foreach=True)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(loss=loss, grad_norm=grad_norm, applied=applied)


def _accumulate(batches: Sequence[Batch], forward: Forward, objective: Objective, num_supervised: int) -> Tensor:
    total: Tensor | None = None
    for batch in batches:
        part = objective(forward, batch).total / num_supervised
        part.backward()  # type: ignore[no-untyped-call]
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total
