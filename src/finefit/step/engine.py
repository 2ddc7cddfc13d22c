"""How one process takes part in a step: alone, with whole copies (DDP), or with shards of weights and state (FSDP2).

A worker makes its engine from its stage (`step.engine_choice.make_engine`), binds the model's forward `around` it, and
lets it `prepare` the model, which shards it in place and returns the optimizer. From then on all ranks run equally many
forwards and backwards, since each may exchange weights or gradients; a rank with fewer micro-batches runs idle ones, of
weight zero (`optimizer_step(idle=...)`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finefit.errors import ModelError
from finefit.objective.batch import Batch, Forward
from finefit.step.levers import layers_of

_BUCKET_BYTES = 25 << 20
Bind = Callable[[], Forward]
"""Applies the levers to the model and binds it."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Slots = dict[str, Any]
"""An optimizer's state of one parameter, by name: moments of its shape, a count of steps. Empty before an update."""


class Engine(Protocol):
    """Gradients after `backward` are sums over all ranks of d loss / d parameter, where the loss is already divided by
    the global count; `grad_norm` and `sum` are over all ranks too."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """`is_last` marks this rank's last micro-batch; what is exchanged once per step is exchanged then."""
        ...

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The existing gradients, or this rank's shards of them, to be read and scaled in place."""
        ...

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None: ...

    def update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def sum(self, value: Tensor) -> Tensor: ...


class Layout(Protocol):
    """Where weights and optimizer state are. Names are those of the bare model and tensors are whole, so a checkpoint
    fits any layout. All ranks gather sharded tensors together, so every rank must call these for the same parameters in
    the same order."""

    def around(self, bind: Bind) -> Forward:
        """The result of `bind`, called with gathered weights. Call it before `prepare`, and again when the levers
        change."""
        ...

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer: ...

    def weight(self, parameter: nn.Parameter) -> Tensor: ...

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None: ...

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots: ...

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None: ...


class Peers(Protocol):
    """What an engine needs of the other ranks; `train.ranks` has the rest."""

    rank: int
    size: int

    def gather(self, value: Any) -> Sequence[Any]: ...


class TrainEngine(Engine, Layout, Protocol):
    """What a worker trains with."""


class SingleProcessEngine:
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


SINGLE_PROCESS = SingleProcessEngine()


class Root(nn.Module):
    """A module whose forward is the given function, so that the hooks of a sharding engine run around that function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Forward, batch: Batch) -> Tensor:
        return function(batch)


def summed(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


class ShardedEngine(SingleProcessEngine):
    """The part that engines share if their ranks hold shards of the gradients."""

    def __init__(self, peers: Peers, device: str) -> None:
        self._peers, self._device = peers, device

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = get_total_norm(gradients, foreach=True) if gradients else torch.zeros((), device=self._device)
        return summed(own.to(torch.float32).square()).sqrt()

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        if gradients := self.gradients(parameters):
            # the same epsilon as in torch's clip_grads_with_norm_
            torch._foreach_mul_(gradients, torch.clamp(most / (grad_norm + 1e-6), max=1.0))

    def sum(self, value: Tensor) -> Tensor:
        return summed(value)


class DdpEngine(SingleProcessEngine):
    """A whole copy of the model on each rank. Gradients are accumulated locally and summed in one exchange after the
    last micro-batch, outside autograd: nothing depends on the order or number of hooks, so recomputation, tied weights
    and ranks with unequal rows need no care, and ranks can agree before it that none has run out of memory."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._trained: list[nn.Parameter] = []

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """All ranks start with the weights of the first."""
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._trained:
            dist.broadcast(parameter.detach(), src=0)
        return make_optimizer(model)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """A tensor that no rank reached stays without gradient; if only some ranks did not (an unused expert), they add
        0."""
        super().backward(loss, is_last=is_last)
        if not is_last:
            return
        missing = self._peers.gather([at for at, p in enumerate(self._trained) if p.grad is None])
        nowhere = set.intersection(*map(set, missing))
        reached = [p for at, p in enumerate(self._trained) if at not in nowhere]
        for parameter in reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in reached if p.grad is not None]):
            _sum_in_place(bucket)

    def sum(self, value: Tensor) -> Tensor:
        return summed(value)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups neighbouring tensors of one dtype until a message is worth its latency; a larger tensor is sent alone."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        is_full = sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES
        if bucket and (is_full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _sum_in_place(bucket: list[Tensor]) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


class FsdpEngine(ShardedEngine):
    """Weights, gradients and optimizer state sharded by torch's `fully_shard`: a decoder layer is whole only while it
    is used; what is outside the layers (embedding, last norm, head) stays whole for a micro-batch, since a chunked loss
    needs it again and again. Every micro-batch is summed into the shards at once: no whole gradient ever waits."""

    def __init__(self, peers: Peers, *, device: str, compute: torch.dtype | None = None) -> None:
        """`compute` is the dtype that weights are gathered in; None keeps their own. Gradients are summed in their own
        dtype."""
        super().__init__(peers, device)
        self._policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32 if compute else None, cast_forward_inputs=False
        )
        self._root: Any = None

    def around(self, bind: Bind) -> Forward:
        if self._root is not None:
            self._root.unshard()  # binding may probe the head
        forward = bind()
        if self._root is not None:
            self._root.reshard()

        def through(batch: Batch) -> Tensor:
            found: Tensor = self._root(forward, batch)
            if not torch.is_grad_enabled():  # no backward will free the gathered weights
                self._root.reshard()
            return found

        return through

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        mesh = init_device_mesh(self._device, (self._peers.size,))
        for layer in reversed(layers_of(model)):  # inner ones before those that hold them
            fully_shard(layer, mesh=mesh, mp_policy=self._policy)
        self._root = fully_shard(Root(model), mesh=mesh, mp_policy=self._policy)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # sums, not means
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if whole := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
            raise ModelError(f"fully_shard left {', '.join(sorted(whole)[:3])} whole", "train with engine.kind ddp")
        return make_optimizer(model)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [local_part(p.grad) for p in parameters if p.grad is not None]

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return _whole(parameter.detach()).cpu()

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        local_part(parameter.detach()).copy_(local_part(_divided(value, parameter)))

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        state = optimizer.state.get(parameter, {})
        return {name: _whole(torch.as_tensor(value)).cpu() for name, value in state.items()}

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None:
        def placed(value: Any) -> Any:
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
            return _divided(value, parameter) if is_moment else value

        optimizer.state[parameter] = {name: placed(value) for name, value in slots.items()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, as FSDP2 and ZeRO-3 divide; the tensor itself if it is whole."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
    return part


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _divided(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Divided as the parameter is. Every rank has the whole value and takes its own shard without communication."""
    assert isinstance(parameter, DTensor)
    moved = value.to(device=parameter.device, dtype=value.dtype)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
