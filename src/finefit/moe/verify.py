"""A built mixture, loaded as transformers loads any model, is compared with its parts: with every token sent to one
expert it must answer as that expert does, and with its shared expert alone as the base. Once for each, on a few tokens,
in fp32 on the CPU."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finefit.errors import FinefitError
from finefit.model.experts import forward_hooks, routers_of
from finefit.model.load import load_base
from finefit.moe.dense import DenseWeights, is_rounded

_TOKENS = 16
_WINDOW = 6
"""Replaces the sliding window of layers that have one, so that a few tokens suffice to test them."""
_TOLERANCE = 1e-4
"""Of the largest logit: fp32 rounding under another order of products."""
_SHUT = -1e4
"""Of a shared expert's gate, before its sigmoid."""


def prove_experts(moe: Path, experts: Mapping[str, Path], *, shared: Path | None = None) -> dict[str, float]:
    """The largest difference of logits by expert. `shared`: the base, where its own MLP is the shared expert and the
    experts' down_proj are halved."""
    mixture = load_base(moe, device="cpu", dtype=torch.float32).eval()
    vocabulary = mixture.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    differences = {}
    for at, (name, folder) in enumerate(experts.items()):
        with (
            _sent_to(mixture, at, weight=1.0 if shared is None else 2.0),
            _shared_shut(mixture) if shared else nullcontext(),
        ):
            differences[name] = _difference(
                mixture, folder, tokens, f"with every token sent to {name} does not answer as {name} does"
            )
    if shared is not None:
        with _sent_to(mixture, 0, weight=0.0), _shared_doubled(mixture):
            _difference(mixture, shared, tokens, "by its shared expert alone does not answer as the base does")
    return differences


def _difference(mixture: PreTrainedModel, folder: Path, tokens: Tensor, fault: str) -> float:
    dense = load_base(folder, device="cpu", dtype=torch.float32).eval()
    _unround(dense, folder, mixture)
    window = getattr(dense.config, "sliding_window", None)
    with _narrowed(dense, window), _narrowed(mixture, window):
        wanted, found = _logits(dense, tokens), _logits(mixture, tokens)
    difference = float((found - wanted).abs().max())
    if not difference <= _TOLERANCE * float(wanted.abs().max()):
        raise FinefitError(
            f"the mixture {fault}: logits differ by {difference:.2g}",
            "this is a fault of finefit; please report it with the base's config.json",
        )
    return difference


def _unround(dense: nn.Module, folder: Path, mixture: nn.Module) -> None:
    """Outside of its MLPs an expert may have fewer bits than the base, from which the mixture has those weights."""
    exact = dict(mixture.named_parameters())
    with ExitStack() as stack:
        stored = DenseWeights(folder, stack)
        for name, parameter in dense.named_parameters():
            if name in exact and name in stored.names and is_rounded(stored[name], exact[name]):
                parameter.detach().copy_(exact[name])


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


@contextmanager
def _narrowed(model: PreTrainedModel, window: int | None) -> Iterator[None]:
    """Sets the model's sliding window to `_WINDOW` if it is `window` now; any other stays, and makes a difference."""
    config: Any = model.config
    if not window or getattr(config, "sliding_window", None) != window:
        yield
        return
    config.sliding_window = _WINDOW  # what masks are made from
    try:
        yield
    finally:
        config.sliding_window = window


def _sent_to(mixture: nn.Module, expert: int, *, weight: float) -> AbstractContextManager[None]:
    def answer(_: nn.Module, __: Any, said: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, device = said[0].shape[0], said[0].device
        weights = torch.full((tokens, 1), weight, dtype=said[1].dtype, device=device)
        return said[0], weights, torch.full((tokens, 1), expert, dtype=said[2].dtype, device=device)

    return forward_hooks(routers_of(mixture).values(), answer)


def _shared_shut(mixture: nn.Module) -> AbstractContextManager[None]:
    return forward_hooks(_called(mixture, "shared_expert_gate"), lambda _, __, said: torch.full_like(said, _SHUT))


def _shared_doubled(mixture: nn.Module) -> AbstractContextManager[None]:
    """Its gate stays half open: that is part of the proof."""
    return forward_hooks(_called(mixture, "shared_expert"), lambda _, __, said: 2 * said)


def _called(model: nn.Module, name: str) -> list[nn.Module]:
    return [module for path, module in model.named_modules() if path.endswith(f".{name}")]
