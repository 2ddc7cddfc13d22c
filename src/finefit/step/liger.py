"""Liger's Triton kernels for a card, and our own for the loss, since Liger's waits for the device.

Both packages are optional (finefit[gpu]), so only `step.fused.kernels_here` imports this module.
"""

import torch
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm, rope, swiglu
from liger_kernel.ops.utils import calculate_settings
from torch import Tensor

_BLOCK = 32768
_WARPS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, targets, losses, stride, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    largest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(values - above))
        largest = above
    scale = largest + tl.log(total)
    tl.store(losses + row, scale - tl.load(logits + target).to(tl.float32))
    tl.debug_barrier()
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(values - scale) - tl.where(at == target, 1.0, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < num_columns)


class LigerKernels:
    def norm(self, x: Tensor, weight: Tensor, eps: float, *, is_gemma: bool) -> tuple[Tensor, Tensor]:
        mode, offset = ("gemma", 1.0) if is_gemma else ("llama", 0.0)
        out, _, rstd, *_ = rms_norm.rms_norm_forward(x.contiguous(), weight, eps, offset, mode, None)
        return out, rstd

    def norm_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, is_gemma: bool
    ) -> tuple[Tensor, Tensor | None]:
        flat, needs = x.contiguous().view(-1, x.shape[-1]), weight.requires_grad
        mode, offset = rms_norm._str_to_casting_mode["gemma" if is_gemma else "llama"], 1.0 if is_gemma else 0.0
        settings = (offset, mode, *calculate_settings(x.shape[-1]), False, None)
        found = rms_norm.rms_norm_backward(gradient, flat, weight, rstd, *settings, needs_dw=needs)
        return found[0], found[1]

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = swiglu.swiglu_forward(gate.contiguous(), up.contiguous())[2]
        return out

    def gate_backward(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        found = swiglu.swiglu_backward(gate, up, gradient)
        return found[0], found[1]

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = rope.rope_forward(query, key, cos, sin)
        return found[0], found[1]

    def rotate_backward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = rope.rope_backward(query, key, cos, sin)
        return found[0], found[1]

    def cross_entropy(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Takes two passes over the logits; nothing is read on the host."""
        num_rows, num_columns = logits_NV.shape
        losses_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
        block = min(_BLOCK, triton.next_power_of_2(num_columns))
        with torch.cuda.device(logits_NV.device):
            _kernel[(num_rows,)](
                logits_NV, targets_N, losses_N, logits_NV.stride(0), num_columns, BLOCK=block, num_warps=_WARPS
            )
        return losses_N
