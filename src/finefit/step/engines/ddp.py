"""A whole copy of the model on each rank. Gradients are accumulated locally and summed in one exchange after the last micro-batch, outside of
autograd: nothing hangs on the order or number of hooks, so recomputation, tied weights and ranks with unequal rows need no care; and ranks can agree
that none has run out of memory before they meet."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finefit.objective.batch import Forward
from finefit.step.engine import Bind, MakeOptimizer, Peers, Slots
from finefit.step.engines.parts import summed

_BUCKET_BYTES = 25 << 20


class Copies:
    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._trained: list[nn.Parameter] = []

    def around(self, bind: Bind) -> Forward:
        return bind()

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """What the first rank has, all have."""
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._trained:
            dist.broadcast(parameter.detach(), src=0)
        return make_optimizer(model)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if is_last:
            self._exchange()

    def _exchange(self) -> None:
        """A tensor that no rank reached stays without gradient; one that some did not (an expert without rows) counts as zero there."""
        missing = self._peers.gather([at for at, p in enumerate(self._trained) if p.grad is None])
        nowhere = set.intersection(*map(set, missing))
        reached = [p for at, p in enumerate(self._trained) if at not in nowhere]
        for parameter in reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in reached if p.grad is not None]):
            _sum_in_place(bucket)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return get_total_norm(gradients, foreach=True)

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, most, grad_norm, foreach=True)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def sum(self, value: Tensor) -> Tensor:
        return summed(value)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.detach().copy_(value)

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        return dict(optimizer.state.get(parameter, {}))

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None:
        optimizer.state[parameter] = slots


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, so many that a message is worth its latency; a tensor that is larger goes alone."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (
            gradient.dtype != bucket[0].dtype or sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES
        ):
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
