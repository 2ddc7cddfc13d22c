"""Weights, gradients and optimizer state divided over the ranks by torch's `fully_shard`: each decoder layer is whole only while it is used, what
lies outside of the layers (embedding, last norm, head) for the length of a micro-batch, since the loss may need it chunk by chunk."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from finefit.errors import ModelError
from finefit.objective.batch import Batch, Forward
from finefit.step.engine import Bind, MakeOptimizer, Peers, Slots
from finefit.step.engines.parts import Root, clip_parts, norm_of_parts, summed
from finefit.step.levers import layers_of


class FullShards:
    def __init__(self, peers: Peers, *, device: str, compute: torch.dtype | None = None) -> None:
        """`compute`: what weights are gathered in; None: what they are kept in. Gradients are summed in what they are kept in."""
        self._peers, self._device = peers, device
        self._policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32 if compute else None, cast_forward_inputs=False
        )
        self._root: Any = None

    def around(self, bind: Bind) -> Forward:
        forward = self._bound(bind)

        def through(batch: Batch) -> Tensor:
            found: Tensor = self._root(forward, batch)
            if not torch.is_grad_enabled():  # no backward will divide again what forward has put together
                self._root.reshard()
            return found

        return through

    def _bound(self, bind: Bind) -> Forward:
        """With the head at hand, which binding may look at."""
        if self._root is None:
            return bind()
        self._root.unshard()
        forward = bind()
        self._root.reshard()
        return forward

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        mesh = init_device_mesh(self._device, (self._peers.size,))
        for layer in reversed(layers_of(model)):  # inner ones before those that hold them
            fully_shard(layer, mesh=mesh, mp_policy=self._policy)
        self._root = fully_shard(Root(model), mesh=mesh, mp_policy=self._policy)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):  # sums, not means
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        _require_divided(model)
        return make_optimizer(model)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:  # noqa: ARG002
        """Every micro-batch is summed into the shards at once: whole gradients never wait for the last one."""
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [_local(p.grad) for p in parameters if p.grad is not None]

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_of_parts(gradients, torch.device(self._device))

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        clip_parts(self.gradients(parameters), most, grad_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def sum(self, value: Tensor) -> Tensor:
        return summed(value)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return _whole(parameter.detach()).cpu()

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        _local(parameter.detach()).copy_(_local(_divided(value, parameter)))

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        return {
            name: _whole(torch.as_tensor(value)).cpu() for name, value in optimizer.state.get(parameter, {}).items()
        }

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None:
        optimizer.state[parameter] = {
            name: _divided(value, parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
            else value
            for name, value in slots.items()
        }


def _require_divided(model: nn.Module) -> None:
    if whole := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise ModelError(f"fully_shard left {', '.join(sorted(whole)[:3])} whole", "train with engine.kind ddp")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _divided(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """As the parameter is; every rank has the whole value and takes its own part without asking."""
    assert isinstance(parameter, DTensor)
    moved = value.to(device=parameter.device, dtype=value.dtype)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
