"""Models how a device's kernels differ from what fake CPU tensors show. Sizes were measured on an H200
(bench/kernel_probe.py); tests/gpu/test_fake_kernels.py checks all of them, and those of `fake_layers`, there."""

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from finefit.model.attention import flash_packed, row_by_row
from finefit.objective.batch import Packed
from finefit.rehearse import known_results
from finefit.vision.attention import autocast, has_varlen, widest_head


class FakeFusedKernels:
    """`step.fused.FusedKernels` that allocate, read and write like Liger's kernels."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, is_gemma: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return x.clone(), torch.empty(x.numel() // x.shape[-1], dtype=torch.float32)

    def norm_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, is_gemma: bool
    ) -> tuple[Tensor, Tensor | None]:
        del rstd, is_gemma
        return gradient * x, torch.zeros_like(weight) if weight.requires_grad else None

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * up

    def gate_backward(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.mul_(gradient), up.mul_(gradient)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return query.mul_(1.0).view_as(query), key.mul_(1.0).view_as(key)

    def rotate_backward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return _laid_out(query).mul_(1.0), _laid_out(key).mul_(1.0)

    def cross_entropy(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:  # noqa: ARG002
        logits_NV.mul_(1.0)
        return torch.empty(logits_NV.shape[0], dtype=torch.float32)


def _laid_out(x_BHTW: Tensor) -> Tensor:
    """Lays the tensor out token by token, as the kernel requires."""
    return x_BHTW.transpose(1, 2).contiguous().transpose(1, 2)


_MIB, _ATEN = 1 << 20, torch.ops.aten
GROUPED_MM = _ATEN._grouped_mm.default
_TILE = 128  # flash attention pads rows to this
_WIDEST = 256  # head of flash and cuDNN attention
_WIDEST_IN_REGISTERS = 128  # head whose gradients of keys and values memory-efficient attention needs no workspace for
_KEYS, _SPLITS = 64, 200  # of its tile, and of all heads' keys together


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKernels:
    device: Literal["cpu", "cuda"]
    attention_kernel: Literal["cudnn", "flash", "efficient", "cpu"]
    workspace_bytes: int
    """cuBLAS workspace for each thread that computes a product."""
    widest_head: int = 256
    """Widest head that flash attention over rows of any length supports."""
    has_grouped: bool = True
    """Whether a grouped product is one kernel; otherwise torch waits for the group sizes and launches one per group."""
    asked_widths: set[int] = field(default_factory=set, compare=False, repr=False)
    """Widths of heads that were compared with `widest_head`."""

    def launches(self, func: Any, args: tuple[Any, ...]) -> int:
        """Host dispatches per rehearsed operation."""
        if func is not GROUPED_MM or self.has_grouped:
            return 1
        left, right = args[0], args[1]
        return int(min(right.shape[0], left.shape[0]) if right.ndim == 3 else args[2].numel())

    def hidden_bytes(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns the sizes of blocks that exist only inside the kernel."""
        return _HIDDEN[func](args) if self.device == "cuda" and func in _HIDDEN else ()

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        packed: Packed | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Calls what transformers' SDPA path calls on the device; plain SDPA would choose the CPU's kernel."""
        if packed is not None:
            if self.has_varlen(query, key, value):
                return flash_packed(query, key, value, packed, dropout=dropout, scaling=scaling), None
            attend = partial(self.attention, module, attention_mask=None, dropout=dropout, scaling=scaling)
            return row_by_row(attend, query, key, value, packed.lengths), None
        query, key, value = autocast(query, key, value)
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and (self.attention_kernel == "efficient" or not use_gqa_in_sdpa(attention_mask, key, value)):
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        bias = None if attention_mask is None else _as_bias(attention_mask, query)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and attention_mask is None and query.shape[2] > 1
        out = self._attend(query, key, value, bias, dropout, causal, scaling)
        return out.transpose(1, 2).contiguous(), None

    def has_varlen(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Returns whether one kernel handles rows of any length."""
        self.asked_widths.add(query.shape[-1])
        return self.attention_kernel != "efficient" and has_varlen(query, key, value, self.widest_head)

    def decode_attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        """Like `model.attention.for_answers`: with one token per row, heads that share a key become its queries."""
        rows, heads, tokens, _ = query.shape
        if attention_mask is None or tokens != 1 or heads == key.shape[1]:
            return self.attention(module, query, key, value, attention_mask, **more)
        query, key, value = autocast(query, key, value)
        side_by_side = query.reshape(rows, key.shape[1], -1, query.shape[3])
        out = self._attend(side_by_side, key, value, _as_bias(attention_mask, query), 0.0, False, more.get("scaling"))
        return out.reshape(rows, 1, heads, value.shape[3]), None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        rest = (dropout, is_causal)
        match self.chosen(q, v, is_masked=bias is not None):
            case "cudnn":
                found = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, bias, True, *rest, False, scale=scale)
            case "flash":
                found = _ATEN._scaled_dot_product_flash_attention(q, k, v, *rest, False, scale=scale)
            case _:
                found = _ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, *rest, scale=scale)
        out: Tensor = found[0]
        return out

    def chosen(self, query: Tensor, value: Tensor, *, is_masked: bool) -> str:
        """Follows torch's dispatcher: flash attention supports neither a mask nor values of another width than the
        keys, as in multi-head latent attention; cuDNN supports both; neither supports wide heads."""
        kernel, widths = self.attention_kernel, (query.shape[3], value.shape[3])
        if kernel == "cpu" or max(widths) > _WIDEST:
            return "efficient"
        return "efficient" if kernel == "flash" and (is_masked or widths[0] != widths[1]) else kernel


def rehearsed_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Returns transformers' SDPA mask for readable positions: no mask if attention is just causal."""
    window = local_size if local_size is not None and kv_length >= local_size else None
    if attention_mask is None and window is None and q_length in (1, kv_length):
        return None
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    given = kwargs | {"mask_function": function, "allow_is_causal_skip": False, "attention_mask": attention_mask}
    mask: Tensor | None = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **given)
    return mask


def device_kernels(device: Literal["cpu", "cuda"], capability: tuple[int, int], precision: str) -> DeviceKernels:
    if device == "cpu":
        return DeviceKernels(device="cpu", attention_kernel="cpu", workspace_bytes=0)
    is_hopper = (9, 0) <= capability < (12, 0)
    is_efficient = capability < (8, 0) or precision == "fp32"
    return DeviceKernels(
        device="cuda",
        attention_kernel="efficient" if is_efficient else "cudnn" if is_hopper else "flash",
        workspace_bytes=32 * _MIB if capability >= (9, 0) else 2 * 4 * _MIB + 8 * (16 << 10),
        widest_head=widest_head(capability),
        has_grouped=precision == "bf16" and is_hopper,
    )


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operation, except grouped products other than bf16, which torch does not support on fake tensors."""
    if func is not GROUPED_MM or args[0].dtype is torch.bfloat16 or not isinstance(args[0], FakeTensor):
        return known_results.run(func, args, kwargs)
    left, right = args[0], args[1]
    if right.ndim == 3:  # tokens by expert times the experts' weights
        return torch.empty(left.shape[0], right.shape[2], dtype=left.dtype)
    return torch.empty(args[2].numel(), left.shape[0], right.shape[1], dtype=left.dtype)  # the weights' gradients


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Torch turns a boolean mask into an additive one, and keeps it for backward."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _cudnn_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """One workspace: the query's gradient in fp32, keys' and values' for every head that shares them, a sum per row."""
    query, key, value = args[1], args[2], args[3]
    rows = prod(query.shape[:3])
    shared = rows * (key.shape[3] + value.shape[3]) * 2 if query.shape[1] != key.shape[1] else 0
    return (query.numel() * 4 + shared + rows * 4 + 512,)


def _flash_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    padded = -(-tokens // _TILE) * _TILE
    shared = (query.numel() * 2,) * 2 if heads != key.shape[1] else ()
    return (batch * heads * padded * 4, batch * heads * padded * width * 4, *shared)


def _varlen_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Every row takes one more tile; a head's width is rounded up to a multiple of 32, or of 64 if it is wide."""
    query, key, num_rows = args[1], args[2], args[6].numel() - 1
    tokens, heads, width = query.shape
    padded, step = tokens + _TILE * num_rows, 32 if width <= 128 else 64
    shared = (query.numel() * 2,) * 2 if heads != key.shape[1] else ()
    return (heads * padded * 4, heads * padded * -(-width // step) * step * 4, *shared)


def _efficient_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """A sum per row, and a workspace: the query's gradient in fp32 by tiles, each with a lock of 16 bytes, and in half
    precision those of keys and values for wide heads. In fp32 the sums come first, from a product of the output's size,
    which is freed before the workspace is allocated."""
    query, key, value = args[1], args[2], args[3]
    rows, heads, widths = prod(query.shape[:3]), prod(query.shape[:2]), (query.shape[3], value.shape[3])
    is_half, widest = query.element_size() < 4, max(widths)
    side, across = (64, 64) if widest <= 64 else (128, 128 if is_half and widest <= _WIDEST_IN_REGISTERS else _KEYS)
    workspace = heads * -(-query.shape[2] // side) * -(-widths[0] // across) * (side * across * 4 + 16)
    if not is_half:
        return (max(workspace, rows * (widths[1] + 1) * 4), rows * 4)
    if widest > _WIDEST_IN_REGISTERS:
        splits = max(1, min(-(-key.shape[2] // _KEYS), _SPLITS // heads))
        workspace += heads * splits * _KEYS * sum(-(-width // side) for width in widths) * side * 4
    return (workspace, rows * 4)


def _embedding_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Partial sums of the rows of one token, in groups of ten."""
    gradient, indices = args[0], args[1]
    num_ids, width = indices.numel(), gradient.shape[-1]
    return (num_ids * width * 4 + num_ids // 10 * width * 4, 8 * num_ids * 8)


_HIDDEN = {
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _ATEN._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _ATEN._flash_attention_backward.default: _varlen_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
}
