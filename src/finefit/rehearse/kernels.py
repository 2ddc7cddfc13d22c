"""How a device's kernels differ from what fake CPU tensors show: which attention is taken, what a kernel allocates inside itself, the workspaces.

Sizes were measured on an H200 (bench/kernel_probe.py) and are held there by tests/gpu/test_shadows.py.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from finefit.model.attention import autocast, has_varlen, row_by_row, varlen, widest_head
from finefit.objective.batch import Packed

_MIB = 1 << 20
_ATEN = torch.ops.aten
GROUPED = _ATEN._grouped_mm.default
_TILE = 128  # flash attention pads rows to this


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    device: Literal["cpu", "cuda"]
    attention_kernel: Literal["cudnn", "flash", "efficient", "cpu"]
    workspace_bytes: int
    """Of cuBLAS, for each thread that takes a product."""
    widest_head: int = 256
    """That flash attention over rows of any length takes."""
    has_grouped: bool = True
    """Whether a product by groups is one kernel; else torch takes one for each group, and waits for the card to learn how large they are."""

    def launches(self, func: Any, args: tuple[Any, ...]) -> int:
        """Operations that the host dispatches for one that a rehearsal sees."""
        if func is not GROUPED or self.has_grouped:
            return 1
        left, right = args[0], args[1]
        return int(min(right.shape[0], left.shape[0]) if right.ndim == 3 else args[2].numel())

    def hidden_bytes(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Blocks that live only inside the kernel."""
        if self.device == "cpu":
            return ()
        hidden = _HIDDEN.get(func)
        return hidden(args) if hidden is not None else ()

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
        """What transformers' SDPA path comes to on the device; plain SDPA would take the CPU's kernel on these tensors."""
        if packed is not None:
            return self._by_row(module, query, key, value, packed, dropout, scaling), None
        query, key, value = autocast(query, key, value)
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and (attention_mask is not None or self.attention_kernel == "efficient"):
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        bias = None if attention_mask is None else _as_bias(attention_mask, query)
        one_way = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = self._attend(
            query, key, value, bias, dropout, one_way and attention_mask is None and query.shape[2] > 1, scaling
        )
        return out.transpose(1, 2).contiguous(), None

    def has_varlen(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether rows of any length are one kernel."""
        return self.attention_kernel != "efficient" and has_varlen(query, key, value, self.widest_head)

    def answering(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        """What `model.attention.for_answers` comes to: of one token a row, heads that share a key stand behind one another; no key is repeated."""
        rows, heads, tokens, _ = query.shape
        if attention_mask is None or tokens != 1 or heads == key.shape[1]:
            return self.attention(module, query, key, value, attention_mask, **more)
        query, key, value = autocast(query, key, value)
        side_by_side = query.reshape(rows, key.shape[1], -1, query.shape[3])
        out = self._attend(side_by_side, key, value, _as_bias(attention_mask, query), 0.0, False, more.get("scaling"))
        return out.reshape(rows, 1, heads, value.shape[3]), None

    def _by_row(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, packed: Packed, dropout: float, scale: float | None
    ) -> Tensor:
        if self.has_varlen(q, k, v):
            return varlen(q, k, v, packed, dropout=dropout, scaling=scale)
        return row_by_row(
            partial(self.attention, module, attention_mask=None, dropout=dropout, scaling=scale),
            q,
            k,
            v,
            packed.lengths,
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        kernel = self.attention_kernel
        if kernel == "flash" and bias is not None:
            kernel = "efficient"  # flash attention takes no mask
        match kernel:
            case "cudnn":
                out: Tensor = _ATEN._scaled_dot_product_cudnn_attention(
                    q, k, v, bias, True, dropout, is_causal, False, scale=scale
                )[0]
            case "flash":
                out = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, False, scale=scale)[0]
            case _:
                out = _ATEN._scaled_dot_product_efficient_attention(
                    q, k, v, bias, True, dropout, is_causal, scale=scale
                )[0]
        return out


def rehearsed_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers makes for SDPA when it can read the positions: nothing where causality says it all, else a mask."""
    is_local = local_size is not None and kv_length >= local_size
    if attention_mask is None and not is_local and q_length in (1, kv_length):
        return None
    function = (
        sliding_window_causal_mask_function(local_size) if is_local and local_size is not None else causal_mask_function
    )
    given = kwargs | {"mask_function": function, "allow_is_causal_skip": False}
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **given
    )
    return mask


def kernels_for(device: Literal["cpu", "cuda"], capability: tuple[int, int], precision: str) -> Kernels:
    if device == "cpu":
        return Kernels(device="cpu", attention_kernel="cpu", workspace_bytes=0)
    return Kernels(
        device="cuda",
        attention_kernel="efficient"
        if capability < (8, 0) or precision == "fp32"
        else "cudnn"
        if (9, 0) <= capability < (12, 0)
        else "flash",
        workspace_bytes=32 * _MIB if capability >= (9, 0) else 2 * 4 * _MIB + 8 * (16 << 10),
        widest_head=widest_head(capability),
        has_grouped=precision == "bf16" and (9, 0) <= capability < (12, 0),
    )


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As it is, but for products by groups: on fake tensors torch knows those of bf16 only."""
    if func is not GROUPED or args[0].dtype is torch.bfloat16 or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    left, right = args[0], args[1]
    if right.ndim == 3:  # tokens by expert times the experts' weights
        return torch.empty(left.shape[0], right.shape[2], dtype=left.dtype)
    return torch.empty(args[2].numel(), left.shape[0], right.shape[1], dtype=left.dtype)  # the weights' gradients


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Torch turns a mask of booleans into one of numbers, and keeps it for backward."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _cudnn_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """One workspace: the query's gradient in fp32, keys' and values' for every query head where heads share them, a sum for each row."""
    query, key = args[1], args[2]
    shared = query.numel() * 4 if query.shape[1] != key.shape[1] else 0
    return (query.numel() * 4 + shared + prod(query.shape[:3]) * 4 + 512,)


def _flash_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    padded = -(-tokens // _TILE) * _TILE
    shared = (query.numel() * 2,) * 2 if heads != key.shape[1] else ()
    return (batch * heads * padded * 4, batch * heads * padded * width * 4, *shared)


def _varlen_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Every row is paid for with a tile more; heads are as wide as the next multiple of 32, wide ones of 64."""
    query, key, num_rows = args[1], args[2], args[6].numel() - 1
    tokens, heads, width = query.shape
    padded, step = tokens + _TILE * num_rows, 32 if width <= 128 else 64
    shared = (query.numel() * 2,) * 2 if heads != key.shape[1] else ()
    return (heads * padded * 4, heads * padded * -(-width // step) * step * 4, *shared)


def _efficient_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    query = args[1]
    rows = prod(query.shape[:3]) * 4
    return (query.numel() * 4 + rows + (rows if query.element_size() == 4 else 32 << 10),)


def _embedding_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Partial sums of the rows of one token, by groups of ten."""
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
