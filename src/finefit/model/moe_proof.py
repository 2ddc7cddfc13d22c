"""A built mixture, loaded as transformers loads any model, is held against what it was built from: with every token sent to one expert it must answer
as that expert does. Once for each, on a few tokens, in fp32 on the CPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finefit.errors import FinefitError
from finefit.model.load import load_base
from finefit.model.routers import hooked, routers_of

_TOKENS = 16
_TOLERANCE = 1e-4
"""Of the largest logit: what rounding in fp32 makes of another order of products."""
_SHUT = -1e4
"""Of a shared expert's gate, before its sigmoid."""


def prove_experts(moe: Path, experts: Mapping[str, Path], *, is_shared: bool) -> dict[str, float]:
    """The largest difference of logits by expert. `is_shared`: their down_proj are halved, and the base's own MLP stands beside them."""
    mixture = load_base(moe, device="cpu", dtype=torch.float32).eval()
    vocabulary = mixture.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    differences = {}
    for at, (name, folder) in enumerate(experts.items()):
        with _sent_to(mixture, at, weight=2.0 if is_shared else 1.0, without_shared=is_shared):
            found = _logits(mixture, tokens)
        wanted = _logits(load_base(folder, device="cpu", dtype=torch.float32).eval(), tokens)
        differences[name] = float((found - wanted).abs().max())
        if not differences[name] <= _TOLERANCE * float(wanted.abs().max()):
            raise FinefitError(
                f"the mixture with every token sent to {name} does not answer as {name} does: logits differ by {differences[name]:.2g}",
                "this is a fault of finefit; please report it with the base's config.json",
            )
    return differences


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


@contextmanager
def _sent_to(mixture: nn.Module, expert: int, *, weight: float, without_shared: bool) -> Iterator[None]:
    def answer(_: nn.Module, __: Any, said: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, device = said[0].shape[0], said[0].device
        weights = torch.full((tokens, 1), weight, dtype=said[1].dtype, device=device)
        return said[0], weights, torch.full((tokens, 1), expert, dtype=said[2].dtype, device=device)

    def shut(_: nn.Module, __: Any, said: Tensor) -> Tensor:
        return torch.full_like(said, _SHUT)

    gates = [module for name, module in mixture.named_modules() if without_shared and name.endswith(".shared_expert_gate")]
    handles = [gate.register_forward_hook(shut) for gate in gates]
    try:
        with hooked(routers_of(mixture).values(), answer):
            yield
    finally:
        for handle in handles:
            handle.remove()
