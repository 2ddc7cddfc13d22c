"""Cross entropy of every row and its gradient in one Triton kernel, in place: two passes over the logits, and nothing is read on the host."""

import torch
import triton
import triton.language as tl
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


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor, losses_N: Tensor) -> None:
    """Fills the losses; each logit becomes the derivative of its row's loss."""
    num_rows, num_columns = logits_NV.shape
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    with torch.cuda.device(logits_NV.device):
        _kernel[(num_rows,)](
            logits_NV, targets_N, losses_N, logits_NV.stride(0), num_columns, BLOCK=block, num_warps=_WARPS
        )
