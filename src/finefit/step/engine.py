"""How one process takes its part in a step: alone, or with others that each have a part of the rows, of the state or of the weights.

A worker makes its engine from its stage (`step.engines.make_engine`), binds the model's forward `around` it, and lets it `prepare` the model: what
comes back is the optimizer. From then on all ranks run the same number of forwards and backwards, for each of them may exchange weights or gradients;
a rank with fewer micro-batches than another runs idle ones, of weight zero (`optimizer_step(idle=...)`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finefit.objective.batch import Forward

Bind = Callable[[], Forward]
"""Puts the model into the state that levers ask for, and binds it."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Slots = dict[str, Any]
"""What an optimizer keeps of one parameter, by name: moments of its shape, a count of steps."""


class Engine(Protocol):
    """Gradients that `backward` leaves are sums over all ranks of d loss / d parameter, the loss being divided by the global count already."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """`is_last`: of this rank's micro-batches; what is exchanged once is exchanged then."""
        ...

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Those that are there, or this rank's parts of them, to be read and scaled in place."""
        ...

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Over all ranks."""
        ...

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None: ...

    def update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks."""
        ...


class Layout(Protocol):
    """Where weights and optimizer state lie. Names are the bare model's, tensors come and go whole, so a checkpoint fits any layout. What is divided
    is put together by all ranks: every rank has to ask, for the same parameters in the same order."""

    def around(self, bind: Bind) -> Forward:
        """What `bind` makes, called so that weights are there when it needs them. To be made before `prepare`, and again when the levers change."""
        ...

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Divides what is to be divided. The model stays the object that it is."""
        ...

    def weight(self, parameter: nn.Parameter) -> Tensor: ...

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None: ...

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        """Empty before the first update."""
        ...

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None: ...


class Peers(Protocol):
    """As much of the other ranks as an engine asks for; `train.ranks` has the whole of it."""

    rank: int
    size: int

    def gather(self, value: Any) -> Sequence[Any]: ...


class LiveEngine(Engine, Layout, Protocol):
    """Both: what a worker trains with."""


class Alone:
    def around(self, bind: Bind) -> Forward:
        return bind()

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        return make_optimizer(model)

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

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.detach().copy_(value)

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        return dict(optimizer.state.get(parameter, {}))

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None:
        optimizer.state[parameter] = slots


ALONE = Alone()


def whole_shape(parameter: Tensor) -> torch.Size:
    """Of a parameter that may be divided: DeepSpeed leaves an empty one in its place."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
