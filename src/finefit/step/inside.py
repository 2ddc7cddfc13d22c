"""The update inside backward: each tensor is updated as soon as its gradient is whole, and the gradient is given back before the next one comes.

A gradient that is not finite leaves its own tensor alone, without anybody reading it on the host; others may have been updated by then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from finefit.errors import SpecError


@contextmanager
def updated_inside(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields the list that the gradients' norms go to, one for each tensor."""
    if not isinstance(optimizer, torch.optim.AdamW):
        raise SpecError(
            "levers.update: inside needs optimizer.kind adamw, whose kernel leaves out what is not finite",
            "--set levers.update=after",
        )
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
