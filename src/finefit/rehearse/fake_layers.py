"""Layers that fake tensors cannot pass through, replaced in the rehearsed model only. Each replacement allocates what
the real one does: quantised layers, their optimizer, norms under autocast (measured by bench/memory.py), dropout."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from finefit.step.fused import dense_weight

_BLOCK = 64  # weights that share a scale in NF4
_NESTED_BLOCK = 256  # scales that share a scale of their own
_OUTLIER = 6.0  # activations as large as this are not quantised to 8 bits
_STATE_BLOCK = 256  # moments that share a scale in 8-bit AdamW
_SMALLEST_8BIT, _SMALLEST_PAGED = 4096, 100_000  # smaller tensors keep their moments in fp32, or on the card


class FusedDropout(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.p and self.training else x


class Nf4Linear(nn.Linear):
    """bitsandbytes' Linear4bit, with scales; the dense weight exists during a product and again during its backward."""

    absmax: Tensor
    made_from: tuple[torch.dtype, ...]
    """Dtypes of the dense copies made while loading; empty if its weights are stored packed."""

    def __init__(self, dense: nn.Linear, *, is_nested: bool = True) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = dense.in_features, dense.out_features, dense.bias
        self.product_dtype, self.made_from = dense.weight.dtype, (torch.bfloat16,)
        num_scales = -(-dense.weight.numel() // _BLOCK)
        self.num_unpacked = num_scales if is_nested else 0  # scales that are unpacked before each product
        packed = torch.empty(dense.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        dtype = torch.uint8 if is_nested else torch.float32
        self.register_buffer("absmax", torch.empty(num_scales, dtype=dtype, device="meta"), persistent=False)
        nested = {"nested_absmax": -(-num_scales // _NESTED_BLOCK), "nested_code": 256, "offset": 1}
        for name, count in {"code": 16, **(nested if is_nested else {})}.items():
            self.register_buffer(name, torch.empty(count, device="meta"), persistent=False)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """peft recognises a layer that dequantises itself by this name, which DoRA needs."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x).clone()  # peft copies the result

    def _product(self, x: Tensor) -> Tensor:
        """Computes in the weights' precision; a separate function, so that its tensors are freed before the copy is
        made."""
        narrow, shape = x.to(self.product_dtype), (self.out_features, self.in_features)
        out: Tensor = _Nf4Product.apply(narrow, self.weight, self.num_unpacked, self.bias, shape)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)

    def dequantize(self) -> Tensor:
        shape, device = (self.out_features, self.in_features), self.weight.device
        return _dequantised(self.num_unpacked, shape, self.product_dtype, device)


def _dequantised(num_scales: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    scales = [torch.zeros(num_scales, dtype=torch.float32, device=device) for _ in range(2)]
    dense = torch.zeros(shape, dtype=dtype, device=device)
    del scales
    return dense


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _packed: Tensor, num_unpacked: int, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        ctx.shape, ctx.num_scales = shape, num_unpacked
        scales = [torch.zeros(num_unpacked, dtype=torch.float32) for _ in range(2)]
        dense = torch.zeros(shape, dtype=x.dtype)
        out = linear(x, dense, None if bias is None else bias.to(x.dtype))
        del scales
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ _dequantised(ctx.num_scales, ctx.shape, gradient.dtype, None), None, None, None, None


class Int8Linear(nn.Linear):
    """bitsandbytes' Linear8bitLt: a scale for each row. Activations are quantised; the product has 32 bits."""

    scales: Tensor
    made_from: tuple[torch.dtype, ...]

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = dense.in_features, dense.out_features, dense.bias
        self.made_from = (torch.bfloat16, torch.float16)
        packed = torch.empty(dense.weight.shape, dtype=torch.int8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
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
    """Assumes no outliers: only values show how many columns have them; each takes about two columns of the input."""

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
        # an attribute, as in bitsandbytes: recomputation drops what is saved for backward, but not this
        ctx.kept = rows if ctx.needs_input_grad[0] else None
        return out.reshape(*x.shape[:-1], packed.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        dense = ctx.packed.to(gradient.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1 / 127))
        return (rows @ dense).view(ctx.shape), None, None, None


class BitsAndBytesAdamW(torch.optim.Optimizer):
    """Allocates no temporaries: the update is one kernel per tensor. Paged moments are outside allocator and trace."""

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
        # made from the parameter, so that the recorder assigns them to its layer
        scales = {
            name: parameter.new_zeros(-(-parameter.numel() // _STATE_BLOCK), dtype=torch.float32)
            for name in ("absmax1", "absmax2")
        }
        return made | scales | {name: parameter.new_zeros(256, dtype=torch.float32) for name in ("qmap1", "qmap2")}


def _moment_dtype(parameter: Tensor, *, is_eight_bit: bool) -> torch.dtype:
    return torch.uint8 if is_eight_bit and parameter.numel() >= _SMALLEST_8BIT else torch.float32


def paged_bytes(parameters: Iterable[Tensor], *, is_eight_bit: bool) -> int:
    """Returns the bytes of moments that the driver moves between card and host."""
    large = (p for p in parameters if p.numel() >= _SMALLEST_PAGED)
    return sum(2 * p.numel() * _moment_dtype(p, is_eight_bit=is_eight_bit).itemsize for p in large)


def quantise(model: nn.Module, bits: int, packed: set[int], *, is_nested: bool = True, is_stored: bool = False) -> None:
    """`packed`: ids of the linear layers to be replaced. `is_stored`: the files hold them packed."""

    def fake_of(module: nn.Module) -> nn.Module | None:
        # compare the type too: a replacement in the place of a freed layer may have the same id
        if type(module) is not nn.Linear or id(module) not in packed:
            return None
        fake = Nf4Linear(module, is_nested=is_nested) if bits == 4 else Int8Linear(module)
        fake.made_from = () if is_stored else fake.made_from
        return fake

    _replace(model, fake_of)


def leave_uncast(model: nn.Module) -> None:
    """Under autocast peft casts neither the input nor the output of an adapter on a quantised layer, whatever
    `adapter_inputs` says. DoRA's scale is fp32, so all hidden states after its first layer are too."""
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
    """Under autocast a card, unlike a CPU, computes norms in fp32: it keeps a copy of their input and returns fp32."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = partial(_widened, module)  # type: ignore[method-assign]


def _widened(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = (None if part is None else part.to(torch.float32) for part in (norm.weight, norm.bias))
    return layer_norm(x.to(torch.float32), norm.normalized_shape, weight, bias, norm.eps)


def fuse_dropout(model: nn.Module) -> None:
    _replace(model, lambda module: FusedDropout(module.p) if type(module) is nn.Dropout else None)


def _replace(model: nn.Module, fake_of: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (fake := fake_of(child)) is not None:
                setattr(parent, name, fake)


def fake_dense_weight(layer: nn.Module) -> Tensor:
    if not isinstance(layer, Nf4Linear):
        return dense_weight(layer)
    return _dequantised(layer.num_unpacked, (layer.out_features, layer.in_features), torch.bfloat16, None)
