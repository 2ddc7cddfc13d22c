"""What ranks that hold parts of the gradients have in common: sums over ranks, the norm of the whole, clipping of the parts."""

from collections.abc import Sequence

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from finefit.objective.batch import Batch, Forward
from finefit.step.levers import layers_of

_EPSILON = 1e-6
"""As in torch's clip_grads_with_norm_."""


class Root(nn.Module):
    """The model below a module whose forward is whatever function it is given: the hooks of a sharding engine run around that function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Forward, batch: Batch) -> Tensor:
        return function(batch)


def outside_layers(model: nn.Module) -> list[nn.Parameter]:
    """Embedding, last norm, head."""
    inside = {id(p) for layer in layers_of(model) for p in layer.parameters()}
    return [p for p in model.parameters() if id(p) not in inside]


def around_backbone(model: nn.Module) -> list[nn.Module]:
    """The causal model and what it has beside its backbone: what a loss in chunks calls once a chunk."""
    causal = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    backbone = getattr(causal, str(causal.base_model_prefix))
    inside = {id(module) for module in backbone.modules()}
    return [module for module in causal.modules() if id(module) not in inside]


def summed(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def norm_of_parts(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    own = get_total_norm(gradients, foreach=True) if gradients else torch.zeros((), device=device)
    return summed(own.to(torch.float32).square()).sqrt()


def clip_parts(gradients: Sequence[Tensor], most: float, grad_norm: Tensor) -> None:
    if gradients:
        torch._foreach_mul_(list(gradients), torch.clamp(most / (grad_norm + _EPSILON), max=1.0))
