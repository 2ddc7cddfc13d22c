"""Stand-ins, in the rehearsed model only, for what fake tensors cannot pass through: each allocates what the real one does.

| real | shadow | held by |
|---|---|---|
| CUDA's dropout (one-byte mask) | `FusedDropout` | tests/gpu/test_shadows.py |
| bitsandbytes' `Linear4bit` under peft | `Nf4Linear` | tests/gpu/test_shadows.py |
| bitsandbytes' `AdamW8bit` | `EightBitAdamW` | tests/gpu/test_shadows.py |
| attention kernels and their inner buffers | `finefit.rehearse.kernels` | tests/gpu/test_shadows.py |
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_BLOCK = 64  # weights that share a scale in NF4
_NESTED_BLOCK = 256  # scales that share a scale of their own
_STATE_BLOCK = 256  # moments that share a scale in 8-bit AdamW
_SMALLEST_8BIT = 4096  # smaller tensors keep their moments in fp32


class FusedDropout(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.p and self.training else x


class Nf4Linear(nn.Linear):
    """Packed weights with their scales; the dense weight exists during a product and again during its backward."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = dense.in_features, dense.out_features, dense.bias
        num_scales = -(-dense.weight.numel() // _BLOCK)
        self.weight = nn.Parameter(torch.empty(dense.weight.numel() // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("absmax", torch.empty(num_scales, dtype=torch.uint8, device="meta"), persistent=False)
        self.register_buffer("nested_absmax", torch.empty(-(-num_scales // _NESTED_BLOCK), device="meta"), persistent=False)
        for name, count in (("code", 16), ("nested_code", 256), ("offset", 1)):
            self.register_buffer(name, torch.empty(count, device="meta"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Nf4Product.apply(x, self.weight, self.absmax, self.bias, (self.out_features, self.in_features))  # type: ignore[no-untyped-call]
        return out.clone()  # peft copies what the quantised layer returns


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _packed: Tensor, absmax: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.num_scales = shape, absmax.numel()
        scales = [torch.zeros(absmax.numel(), dtype=torch.float32) for _ in range(2)]
        dense = torch.zeros(shape, dtype=x.dtype)
        out = linear(x, dense, None if bias is None else bias.to(x.dtype))
        del scales
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scales = [torch.zeros(ctx.num_scales, dtype=torch.float32) for _ in range(2)]
        dense = torch.zeros(ctx.shape, dtype=gradient.dtype)
        del scales
        return gradient @ dense, None, None, None, None


class EightBitAdamW(torch.optim.Optimizer):
    """State and no temporaries: the update is one kernel for each tensor."""

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[parameter]:
                self.state[parameter] = _eight_bit_state(parameter)
            parameter.add_(parameter.grad, alpha=0.0)


def _eight_bit_state(parameter: Tensor) -> dict[str, Tensor]:
    if parameter.numel() < _SMALLEST_8BIT:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    num_scales = -(-parameter.numel() // _STATE_BLOCK)
    scales = {name: torch.zeros(num_scales) for name in ("absmax1", "absmax2")}
    return moments | scales | {name: torch.zeros(256) for name in ("qmap1", "qmap2")}


def quantise(model: nn.Module, head: nn.Module | None) -> None:
    """Every linear layer but the head, as transformers does it."""
    _replace(model, lambda module: Nf4Linear(module) if type(module) is nn.Linear and module is not head else None)


def fuse_dropout(model: nn.Module) -> None:
    _replace(model, lambda module: FusedDropout(module.p) if type(module) is nn.Dropout else None)


def _replace(model: nn.Module, shadow_of: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            shadow = shadow_of(child)
            if shadow is not None:
                setattr(parent, name, shadow)
