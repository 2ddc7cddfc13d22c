"""How one process takes its part in a step: alone, or with others that each have a part of the rows, of the state or of the weights."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Engine(Protocol):
    """Gradients that `backward` leaves are sums over all ranks of d loss / d parameter, the loss being divided by the global count already."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """`is_last`: of this rank's micro-batches; what is exchanged is exchanged then."""
        ...

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Those that are there, to be read and scaled in place."""
        ...

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Over all ranks."""
        ...

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None: ...

    def update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks."""
        ...


class Alone:
    def backward(self, loss: Tensor, *, is_last: bool) -> None:  # noqa: ARG002
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return get_total_norm(gradients, foreach=True)

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, most, grad_norm, foreach=True)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def sum(self, value: Tensor) -> Tensor:
        return value


ALONE = Alone()
