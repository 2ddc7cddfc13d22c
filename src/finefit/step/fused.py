"""Adapters, norms, rotary embedding and gated MLPs as single autograd nodes: fewer kernels, less memory, same numbers.

A module is recognised by its code: one whose `forward` is instruction for instruction that of transformers' Llama can
use a kernel written for Llama. N tokens, I in, O out, r rank, H heads, W width of a head.
"""

import importlib.util
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama

from finefit.errors import SpecError
from finefit.model.experts import product_dtype

_DENSE = ("Linear", "Linear4bit", "Nf4Linear")
"""Layers whose output is the product with their weight: torch's own, and 4-bit ones."""
Dense = Callable[[nn.Module], Tensor]
"""Returns a frozen layer's weight as a matrix, quantised or not."""
Weight = Callable[[], Tensor]
"""The same for one layer."""


class LeverForward(partial[Any]):
    """A module's forward while a lever is pulled; its type identifies it when the lever is released."""


class FusedKernels(Protocol):
    """Kernels that replace torch's own operations on a card. The backward kernels may overwrite their inputs."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, is_gemma: bool) -> tuple[Tensor, Tensor]:
        """The output and, in fp32, the reciprocal root mean square of each token."""
        ...

    def norm_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, is_gemma: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Includes the weight's gradient only if it is required."""
        ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def gate_backward(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]: ...

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates in place."""
        ...

    def rotate_backward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...

    def cross_entropy(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Losses_N in fp32; the logits become the gradients of their own losses."""
        ...


def kernels_here(device: str) -> FusedKernels | None:
    """None without a card."""
    if device != "cuda":
        return None
    if importlib.util.find_spec("liger_kernel") is None:
        problem = "levers.kernels fused needs liger-kernel on a card, which is not installed"
        raise SpecError(problem, "pip install 'finefit[gpu]', or set it to torch")
    from finefit.step.liger import LigerKernels

    return LigerKernels()


def dense_weight(layer: nn.Module) -> Tensor:
    weight: Any = layer.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit  # an extra: finefit[gpu]

        weight = dequantize_4bit(weight.data, weight.quant_state)
    assert isinstance(weight, Tensor)
    return weight


def fuse(model: nn.Module, kernels: FusedKernels | None, dense: Dense, again: Collection[nn.Module] = ()) -> None:
    """`kernels` is None if only torch's own operations exist; adapters are single nodes there too. `again` holds the
    modules that are recomputed in backward."""
    recomputed = {id(module) for layer in again for module in layer.modules()}
    for module in model.modules():
        if isinstance(module, LoraLayer) and type(module).__name__ in _DENSE:
            module.forward = LeverForward(_lora, module, dense, id(module) in recomputed)
        elif kernels is not None and (forward := _known(module, kernels)) is not None:
            module.forward = forward


def release(model: nn.Module) -> None:
    """Gives every module the forward of its class back."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), LeverForward):
            del module.forward


def _known(module: nn.Module, kernels: FusedKernels) -> LeverForward | None:
    code = getattr(type(module).forward, "__code__", None)
    if code is None:
        return None
    if _same(code, modeling_llama.LlamaRMSNorm.forward.__code__):
        return LeverForward(_norm, kernels, module, "variance_epsilon", False)
    if _same(code, GemmaRMSNorm.forward.__code__) and _same(type(module)._norm.__code__, GemmaRMSNorm._norm.__code__):  # type: ignore[attr-defined]
        return LeverForward(_norm, kernels, module, "eps", True)
    if _same(code, modeling_llama.LlamaMLP.forward.__code__) and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        return LeverForward(_gated, kernels, module)
    name = "apply_rotary_pos_emb"
    rotate = type(module).forward.__globals__.get(name) if name in code.co_names else None
    if rotate is not None and _same(rotate.__code__, modeling_llama.apply_rotary_pos_emb.__code__):
        return LeverForward(_with_rotation(type(module).forward, kernels), module)  # type: ignore[arg-type]
    return None


def _same(code: CodeType, other: CodeType) -> bool:
    """Whether two functions are the same, instruction for instruction; docstrings do not matter."""

    def read(code: CodeType) -> tuple[Any, ...]:
        constants = tuple(value for value in code.co_consts if not isinstance(value, str))
        return code.co_code, code.co_names, code.co_varnames, constants

    return read(code) == read(other)


def _lora(layer: Any, dense: Dense, is_apart: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes what peft computes; anything but a single plain adapter is left to peft."""
    name = _plain_adapter(layer)
    if name is None or args or kwargs:
        found: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return found
    down, up = layer.lora_A[name], layer.lora_B[name]
    share = float(getattr(layer.lora_dropout[name], "p", 0.0)) if layer.training else 0.0
    base, flat_NI = layer.base_layer, x.reshape(-1, x.shape[-1])
    weight, scaling = partial(dense, base), layer.scaling[name]
    if not is_apart:
        out: Tensor = _Whole.apply(flat_NI, down.weight, up.weight, base.bias, weight, scaling, share)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)
    token_NO, xa_Nr = _Adapter.apply(flat_NI, down.weight, up.weight, weight, scaling, share, base.out_features)  # type: ignore[no-untyped-call]
    out = _Product.apply(token_NO, flat_NI.detach(), xa_Nr, up.weight.detach(), base.bias, weight)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


def _plain_adapter(layer: Any) -> str | None:
    """The one active adapter, if it is two products and nothing else."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    is_off = layer.disable_adapters or layer.merged or layer.lora_variant
    if len(names) != 1 or is_off or type(layer.base_layer).__name__ not in _DENSE:
        return None
    has_bias = any(part[names[0]].bias is not None for part in (layer.lora_A, layer.lora_B))
    return None if has_bias else str(names[0])


def _halfway(x_NI: Tensor, down_rI: Tensor, scaling: float, share: float) -> tuple[Tensor, Tensor | None]:
    """The adapter's inner product, scaled, and the dropout mask."""
    dtype = product_dtype(x_NI)
    given_NI = x_NI.to(dtype)
    dropped_NI, mask_NI = torch.native_dropout(given_NI, share, True) if share else (given_NI, None)
    return _scaled(dropped_NI, down_rI.to(dtype).t(), scaling), mask_NI


def _scaled(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """A product and its scale in one kernel."""
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scaling)


def _through(x_NI: Tensor, xa_Nr: Tensor, up_Or: Tensor, bias: Tensor | None, weight: Weight) -> Tensor:
    dtype = xa_Nr.dtype
    given, matrix = x_NI.to(dtype), weight().to(dtype).t()
    out = given @ matrix if bias is None else torch.addmm(bias.to(dtype), given, matrix)
    return out.addmm_(xa_Nr, up_Or.to(dtype).t())


def _back(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input and of both matrices."""
    x_NI, xa_Nr, down_rI, up_Or, mask_NI = ctx.saved_tensors
    dtype, needs = gradient_NO.dtype, ctx.needs_input_grad
    back_Nr = _scaled(gradient_NO, up_Or.to(dtype), ctx.scaling)
    d_up = (gradient_NO.t() @ xa_Nr).to(up_Or.dtype) if needs[2] else None
    d_down = (back_Nr.t() @ _dropped(x_NI.to(dtype), mask_NI, ctx.share)).to(down_rI.dtype) if needs[1] else None
    if not needs[0]:
        return None, d_down, d_up
    d_x = gradient_NO @ ctx.weight().to(dtype)
    if mask_NI is None:
        d_x.addmm_(back_Nr, down_rI.to(dtype))
    else:
        d_x.addcmul_(back_Nr @ down_rI.to(dtype), mask_NI.to(dtype), value=1 / (1 - ctx.share))
    return d_x.to(x_NI.dtype), d_down, d_up


def _dropped(x_NI: Tensor, mask_NI: Tensor | None, share: float) -> Tensor:
    return x_NI if mask_NI is None else x_NI * mask_NI * (1 / (1 - share))


class _Whole(torch.autograd.Function):
    """A layer and its adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        down_rI: Tensor,
        up_Or: Tensor,
        bias: Tensor | None,
        weight: Weight,
        scaling: float,
        share: float,
    ) -> Tensor:
        xa_Nr, mask_NI = _halfway(x_NI, down_rI, scaling, share)
        ctx.save_for_backward(x_NI, xa_Nr, down_rI, up_Or, mask_NI)
        ctx.weight, ctx.scaling, ctx.share = weight, scaling, share
        return _through(x_NI, xa_Nr, up_Or, bias, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> Any:
        return *_back(ctx, gradient_NO), None, None, None, None


class _Adapter(torch.autograd.Function):
    """Saves everything that backward needs and returns an empty output. The product is a separate node after this one:
    torch stops recomputing a layer once all saved tensors are there, so the layer's last product is never computed
    again. The empty output takes no memory; its gradient is that of the real one."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        down_rI: Tensor,
        up_Or: Tensor,
        weight: Weight,
        scaling: float,
        share: float,
        num_out: int,
    ) -> tuple[Tensor, Tensor]:
        xa_Nr, mask_NI = _halfway(x_NI, down_rI, scaling, share)
        ctx.save_for_backward(x_NI, xa_Nr, down_rI, up_Or, mask_NI)
        ctx.weight, ctx.scaling, ctx.share = weight, scaling, share
        ctx.mark_non_differentiable(xa_Nr)
        ctx.set_materialize_grads(False)  # else autograd would make zeros for it
        return x_NI.new_empty((), dtype=xa_Nr.dtype).expand(x_NI.shape[0], num_out), xa_Nr

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor, _: Tensor) -> Any:
        return *_back(ctx, gradient_NO), None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        _: Any, _token_NO: Tensor, x_NI: Tensor, xa_Nr: Tensor, up_Or: Tensor, bias: Tensor | None, weight: Weight
    ) -> Tensor:
        return _through(x_NI, xa_Nr, up_Or, bias, weight)

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient_NO: Tensor) -> Any:
        return gradient_NO, None, None, None, None, None


def _norm(kernels: FusedKernels, module: Any, eps: str, is_gemma: bool, x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:  # the module's output would have the wider of the two
        found: Tensor = type(module).forward(module, x)
        return found
    out: Tensor = _Norm.apply(x, module.weight, getattr(module, eps), kernels, is_gemma)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: FusedKernels, is_gemma: bool) -> Tensor:
        out, rstd = kernels.norm(x, weight, eps, is_gemma=is_gemma)
        ctx.save_for_backward(x, weight, rstd)
        ctx.kernels, ctx.is_gemma = kernels, is_gemma
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        d_x, d_weight = ctx.kernels.norm_backward(gradient.contiguous(), x, weight, rstd, is_gemma=ctx.is_gemma)
        return d_x, d_weight if ctx.needs_input_grad[1] else None, None, None, None


def _gated(kernels: FusedKernels, mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(_Gate.apply(mlp.gate_proj(x), mlp.up_proj(x), kernels))  # type: ignore[no-untyped-call]
    return out


class _Gate(torch.autograd.Function):
    """silu(gate) * up. Nothing else refers to the two inputs, so their gradients overwrite them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: FusedKernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return *ctx.kernels.gate_backward(gradient.contiguous(), gate, up), None


def _with_rotation(forward: FunctionType, kernels: FusedKernels) -> FunctionType:
    """The same code with the kernel as its global `apply_rotary_pos_emb`."""

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cos, sin, kernels)  # type: ignore[no-untyped-call]
        return found

    scope = {**forward.__globals__, "apply_rotary_pos_emb": rotate}
    found = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


class _Rotation(torch.autograd.Function):
    """Rotates queries and keys as they come from their projections; nothing else refers to them."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTW: Tensor, key_BHTW: Tensor, cos_BTW: Tensor, sin_BTW: Tensor, kernels: FusedKernels
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BTW, sin_BTW)
        ctx.kernels = kernels
        return kernels.rotate(query_BHTW, key_BHTW, cos_BTW, sin_BTW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_BHTW: Tensor, key_BHTW: Tensor) -> Any:
        return *ctx.kernels.rotate_backward(query_BHTW, key_BHTW, *ctx.saved_tensors), None, None, None
