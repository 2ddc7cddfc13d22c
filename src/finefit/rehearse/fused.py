"""Shadows of the fused kernels: each allocates what the kernel does, and reads and writes as many bytes. Held by tests/gpu/test_shadows.py."""

import torch
from torch import Tensor, nn

from finefit.rehearse.shadows import Nf4Linear
from finefit.step.liger import dense_weight


class FusedShadows:
    def norm(self, x: Tensor, weight: Tensor, eps: float, *, is_gemma: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return x.clone(), torch.empty(x.numel() // x.shape[-1], dtype=torch.float32)

    def norm_backward(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,  # noqa: ARG002
        *,
        is_gemma: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:
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
    """As the kernel wants it: token by token."""
    return x_BHTW.transpose(1, 2).contiguous().transpose(1, 2)


def dense_shadow(layer: nn.Module) -> Tensor:
    if not isinstance(layer, Nf4Linear):
        return dense_weight(layer)
    scales = [torch.zeros(layer.absmax.numel(), dtype=torch.float32) for _ in range(2)]
    dense = torch.zeros(layer.out_features, layer.in_features, dtype=torch.bfloat16)
    del scales
    return dense
