"""Stand-ins, in the rehearsed model only, for what fake tensors cannot pass through: each allocates what the real one does.

| real | shadow | held by |
|---|---|---|
| CUDA's dropout (one-byte mask) | `FusedDropout` | tests/gpu/test_shadows.py |
| bitsandbytes' `Linear4bit` under peft | `Nf4Linear` | tests/gpu/test_shadows.py |
| bitsandbytes' `Linear8bitLt` under peft | `Int8Linear` | tests/gpu/test_shadows.py |
| bitsandbytes' `AdamW8bit`, `PagedAdamW` | `BitsAndBytesAdamW` | tests/gpu/test_shadows.py |
| layer norms under CUDA's autocast | `widen_norms` | bench/memory.py (models that see) |
| attention kernels and their inner buffers | `finefit.rehearse.kernels` | tests/gpu/test_shadows.py |
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

_BLOCK = 64  # weights that share a scale in NF4
_NESTED_BLOCK = 256  # scales that share a scale of their own
_OUTLIER = 6.0  # activations as large as this are not quantised to 8 bits
_STATE_BLOCK = 256  # moments that share a scale in 8-bit AdamW
_SMALLEST_8BIT = 4096  # smaller tensors keep their moments in fp32
_SMALLEST_PAGED = 100_000  # smaller tensors keep their moments on the card


class FusedDropout(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.p and self.training else x


class Nf4Linear(nn.Linear):
    """Packed weights with their scales; the dense weight exists during a product and again during its backward."""

    absmax: Tensor

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = dense.in_features, dense.out_features, dense.bias
        self.product_dtype = dense.weight.dtype
        num_scales = -(-dense.weight.numel() // _BLOCK)
        self.weight = nn.Parameter(
            torch.empty(dense.weight.numel() // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        self.register_buffer("absmax", torch.empty(num_scales, dtype=torch.uint8, device="meta"), persistent=False)
        self.register_buffer(
            "nested_absmax", torch.empty(-(-num_scales // _NESTED_BLOCK), device="meta"), persistent=False
        )
        for name, count in (("code", 16), ("nested_code", 256), ("offset", 1)):
            self.register_buffer(name, torch.empty(count, device="meta"), persistent=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """By this name peft knows a layer that gives its dense weight itself, as DoRA asks for it."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x).clone()  # peft copies what the quantised layer returns

    def _product(self, x: Tensor) -> Tensor:
        """In the weights' own precision, whatever the input's; answered in the input's."""
        narrow = x.to(self.product_dtype)
        out: Tensor = _Nf4Product.apply(
            narrow, self.weight, self.absmax, self.bias, (self.out_features, self.in_features)
        )  # type: ignore[no-untyped-call]
        return out.to(x.dtype)

    def dequantize(self) -> Tensor:
        scales = [torch.zeros(self.absmax.numel(), dtype=torch.float32, device=self.weight.device) for _ in range(2)]
        dense = torch.zeros(self.out_features, self.in_features, dtype=self.product_dtype, device=self.weight.device)
        del scales
        return dense


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _packed: Tensor, absmax: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
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


class Int8Linear(nn.Linear):
    """Weights in bytes with a scale for each row of them. Activations are quantised for the product, which comes out in 32 bits."""

    scales: Tensor

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = dense.in_features, dense.out_features, dense.bias
        self.weight = nn.Parameter(
            torch.empty(dense.weight.shape, dtype=torch.int8, device="meta"), requires_grad=False
        )
        self.register_buffer("scales", torch.empty(dense.out_features, device="meta"), persistent=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Int8Product.apply(x, self.weight, self.scales, self.bias)  # type: ignore[no-untyped-call]
        return out

    def dequantize(self) -> Tensor:
        scaled = self.weight * self.scales.view(-1, 1)
        return scaled * (1 / 127)


class _Int8Product(torch.autograd.Function):
    """No outliers: how many columns have them is known only from values, and each takes about as much as two columns of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        row_scales = torch.zeros(rows.shape[0], dtype=torch.float32)
        quantised = torch.zeros_like(half, dtype=torch.int8)
        outliers = half.abs() >= _OUTLIER
        del half, outliers
        whole = torch._int_mm(quantised, packed.t())
        out = torch.zeros_like(whole, dtype=torch.float16)
        if bias is not None:
            out.add_(bias)
        out = out.to(x.dtype)
        del whole, quantised, row_scales
        ctx.shape, ctx.packed, ctx.scales = x.shape, packed, scales
        # an attribute, as bitsandbytes keeps it: recomputation drops what is saved for backward, but not this
        ctx.kept = rows if ctx.needs_input_grad[0] else None
        return out.reshape(*x.shape[:-1], packed.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        dense = ctx.packed.to(gradient.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1 / 127))
        return (rows @ dense).view(ctx.shape), None, None, None


class BitsAndBytesAdamW(torch.optim.Optimizer):
    """State and no temporaries: the update is one kernel for each tensor. Paged moments lie outside of the allocator, and so outside of a trace."""

    def __init__(self, groups: Iterable[Any], *, is_eight_bit: bool, is_paged: bool) -> None:
        super().__init__(groups, {})
        self.is_eight_bit, self.is_paged = is_eight_bit, is_paged

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[parameter]:
                self.state[parameter] = self._made(parameter)
            parameter.add_(parameter.grad, alpha=0.0)

    def _made(self, parameter: Tensor) -> dict[str, Any]:
        dtype = _moment_dtype(parameter, is_eight_bit=self.is_eight_bit)
        names = () if self.is_paged and parameter.numel() >= _SMALLEST_PAGED else ("state1", "state2")
        made = {"step": 0} | {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
        if dtype is torch.float32:
            return made
        # made from the parameter, so that they belong to its layer
        scales = {
            name: parameter.new_zeros(-(-parameter.numel() // _STATE_BLOCK), dtype=torch.float32)
            for name in ("absmax1", "absmax2")
        }
        return made | scales | {name: parameter.new_zeros(256, dtype=torch.float32) for name in ("qmap1", "qmap2")}


def _moment_dtype(parameter: Tensor, *, is_eight_bit: bool) -> torch.dtype:
    return torch.uint8 if is_eight_bit and parameter.numel() >= _SMALLEST_8BIT else torch.float32


def paged_bytes(parameters: Iterable[Tensor], *, is_eight_bit: bool) -> int:
    """Of moments that a paged optimizer keeps where the driver moves them between card and host."""
    large = (p for p in parameters if p.numel() >= _SMALLEST_PAGED)
    return sum(2 * p.numel() * _moment_dtype(p, is_eight_bit=is_eight_bit).itemsize for p in large)


_QUANTISED: dict[int, type[Nf4Linear] | type[Int8Linear]] = {4: Nf4Linear, 8: Int8Linear}


def quantise(model: nn.Module, bits: int, is_packed: Callable[[str, nn.Module], bool]) -> None:
    """`is_packed` is asked of every linear layer by its name."""
    packed = {
        id(module) for name, module in model.named_modules() if type(module) is nn.Linear and is_packed(name, module)
    }
    _replace(
        model, lambda module: _QUANTISED[bits](module) if type(module) is nn.Linear and id(module) in packed else None
    )


def leave_uncast(model: nn.Module) -> None:
    """Under autocast peft casts neither the input nor the output of an adapter on a quantised layer, whatever `adapter_inputs` says. DoRA's scale is
    in fp32, so after its first layer all hidden states are."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), Nf4Linear | Int8Linear):
            module.cast_input_dtype_enabled = False
            if module.lora_variant:
                module.forward = partial(_varied, module)


def _varied(layer: LoraLayer, x: Tensor) -> Tensor:
    result: Tensor = layer.base_layer(x)
    for name in () if layer.disable_adapters else layer.active_adapters:
        result = layer.lora_variant[name].forward(layer, active_adapter=name, x=x, result=result)
    return result


def widen_norms(model: nn.Module) -> None:
    """Under autocast a card takes layer norms in fp32: it keeps their input once more, and what follows gets fp32. A CPU does not."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = partial(_widened, module)  # type: ignore[method-assign]


def _widened(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = (None if part is None else part.to(torch.float32) for part in (norm.weight, norm.bias))
    return layer_norm(x.to(torch.float32), norm.normalized_shape, weight, bias, norm.eps)


def fuse_dropout(model: nn.Module) -> None:
    _replace(model, lambda module: FusedDropout(module.p) if type(module) is nn.Dropout else None)


def _replace(model: nn.Module, shadow_of: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            shadow = shadow_of(child)
            if shadow is not None:
                setattr(parent, name, shadow)
