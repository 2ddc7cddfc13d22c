"""Liger's Triton kernels for a card, and one of our own for the loss, whose counterpart there waits for the device."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from finefit.errors import SpecError
from finefit.step.fused import Kernels


def kernels_here(device: str) -> Kernels | None:
    """None where there is no card."""
    if device != "cuda":
        return None
    if importlib.util.find_spec("liger_kernel") is None:
        raise SpecError(
            "levers.kernels fused needs liger-kernel on a card, which is not installed",
            "pip install 'finefit[gpu]', or set it to torch",
        )
    return Liger()


def dense_weight(layer: nn.Module) -> Tensor:
    """As a matrix, whatever it is kept in."""
    weight: Any = layer.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit  # an extra: finefit[gpu]

        weight = dequantize_4bit(weight.data, weight.quant_state)
    assert isinstance(weight, Tensor)
    return weight


class Liger:
    def __init__(self) -> None:
        from liger_kernel.ops import rms_norm, rope, swiglu  # an extra: finefit[gpu]

        from finefit.step.loss_kernel import cross_entropy_

        self._norm, self._rope, self._swiglu, self._cross_entropy = rms_norm, rope, swiglu, cross_entropy_

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, is_gemma: bool) -> tuple[Tensor, Tensor]:
        mode, offset = ("gemma", 1.0) if is_gemma else ("llama", 0.0)
        out, _, rstd, *_ = self._norm.rms_norm_forward(x.contiguous(), weight, eps, offset, mode, None)
        return out, rstd

    def norm_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, is_gemma: bool
    ) -> tuple[Tensor, Tensor | None]:
        from liger_kernel.ops.utils import calculate_settings

        width = x.shape[-1]
        block, warps = calculate_settings(width)
        mode, offset = self._norm._str_to_casting_mode["gemma" if is_gemma else "llama"], 1.0 if is_gemma else 0.0
        found = self._norm.rms_norm_backward(
            gradient,
            x.contiguous().view(-1, width),
            weight,
            rstd,
            offset,
            mode,
            block,
            warps,
            False,
            None,
            needs_dw=weight.requires_grad,
        )
        return found[0], found[1]

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = self._swiglu.swiglu_forward(gate.contiguous(), up.contiguous())[2]
        return out

    def gate_backward(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        found = self._swiglu.swiglu_backward(gate, up, gradient)
        return found[0], found[1]

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = self._rope.rope_forward(query, key, cos, sin)
        return found[0], found[1]

    def rotate_backward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = self._rope.rope_backward(query, key, cos, sin)
        return found[0], found[1]

    def cross_entropy(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        losses_N = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
        self._cross_entropy(logits_NV, targets_N, losses_N)
        return losses_N
