"""Log-probabilities through a frozen head, with the gradient taken in the same pass: each chunk's logits exist once and are never made again.

A token's log-probability depends on its own hidden state alone, so its derivative can be kept instead of the logits and multiplied, in backward, by
whatever weight the objective gives the token. N supervised tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finefit.step.fused import Kernels, product_dtype


def head_logprobs(
    hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor, *, chunk: int, kernels: Kernels | None
) -> Tensor:
    """Without gradients the same numbers, bit for bit: a reference is computed as the policy is."""
    if torch.is_grad_enabled() and hidden_NH.requires_grad:
        found: Tensor = _Head.apply(hidden_NH, head.weight, targets_N, chunk, kernels)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        return _losses(hidden_NH, head.weight, targets_N, chunk, kernels, None).neg_()


def _losses(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    chunk: int,
    kernels: Kernels | None,
    derivatives_NH: Tensor | None,
) -> Tensor:
    """Chunk by chunk; fills the derivatives where they are asked for."""
    dtype = product_dtype(hidden_NH)
    weight = weight_VH.to(dtype)
    losses = []
    for at in range(0, len(targets_N), chunk):
        part = slice(at, at + chunk)
        logits_CV = hidden_NH[part].to(dtype) @ weight.t()
        losses.append(
            _cross_entropy_(logits_CV, targets_N[part])
            if kernels is None
            else kernels.cross_entropy(logits_CV, targets_N[part])
        )
        if derivatives_NH is not None and derivatives_NH.dtype == dtype:
            torch.mm(logits_CV, weight, out=derivatives_NH[part])
        elif derivatives_NH is not None:
            derivatives_NH[part] = logits_CV @ weight
        del logits_CV
    return torch.cat(losses)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk: int, kernels: Kernels | None
    ) -> Tensor:
        derivatives_NH = torch.empty_like(hidden_NH)
        losses_N = _losses(hidden_NH, weight_VH, targets_N, chunk, kernels, derivatives_NH)
        ctx.save_for_backward(derivatives_NH)
        return losses_N.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> Any:
        (derivatives_NH,) = ctx.saved_tensors
        return derivatives_NH.mul_(-gradient_N.unsqueeze(1)), None, None, None, None


def _cross_entropy_(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Losses in fp32; the logits become their derivatives."""
    scores_CV = logits_CV.to(torch.float32)
    scale_C1 = scores_CV.logsumexp(-1, keepdim=True)
    at_C1 = targets_C.unsqueeze(1)
    losses_C = (scale_C1 - scores_CV.gather(1, at_C1)).squeeze(1)
    scores_CV.sub_(scale_C1).exp_().scatter_add_(1, at_C1, torch.full_like(scale_C1, -1.0))
    if scores_CV is not logits_CV:
        logits_CV.copy_(scores_CV)
    return losses_C
