"""Binds a model into the `Forward` that objectives call: log-probabilities of the supervised tokens.

The backbone runs once; of its output only the supervised positions meet the head. The model's own code after the backbone (head, scaling,
soft-capping) makes the logits, all at once or chunk by chunk: it is called with a stand-in that answers what the backbone would have.
N supervised positions of B x T, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.model.custom import own_of
from finefit.model.sight import bare, read, sight_in
from finefit.objective.batch import Batch, Forward
from finefit.spec.models import Lora, Tuning
from finefit.step.custom import bind_own
from finefit.step.fused import Kernels
from finefit.step.head import head_logprobs

Reading = Callable[[nn.Module, Batch], ModelOutput]
"""A batch through all of a model but its head."""


def bind(
    model: nn.Module,
    *,
    loss_chunk: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    is_fused: bool = False,
    kernels: Kernels | None = None,
    reading: Reading = read,
) -> Forward:
    """`loss_chunk` supervised tokens have logits at a time; None: all of them at once. They are computed again in backward, or, where it is fused
    and the head is frozen, their gradients are taken at once."""
    if (own := own_of(model)) is not None:
        return bind_own(own, autocast=autocast)
    causal = bare(model)
    _require_backbone(causal)
    sees = sight_in(causal) is not None
    context = autocast or nullcontext()
    heads: list[nn.Linear | None] = [] if is_fused else [None]

    def logits(hidden_NH: Tensor, answer: Callable[..., Any]) -> Tensor:
        with _answering(causal, answer(last_hidden_state=hidden_NH.unsqueeze(0))):
            found: Tensor = causal(inputs_embeds=hidden_NH.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return found

    def logprobs(hidden_NH: Tensor, targets_N: Tensor, answer: Callable[..., Any]) -> Tensor:
        return -cross_entropy(logits(hidden_NH, answer).to(torch.float32), targets_N, reduction="none")

    def answered(batch: Batch) -> Tensor:
        with context:
            output = reading(causal, batch)
            hidden_NH = output.last_hidden_state.flatten(0, 1).index_select(0, batch.positions_N)
            kind: Callable[..., Any] = _Heard if sees else type(output)
            answer = partial(kind, **{name: value for name, value in output.items() if name != "last_hidden_state"})
            del output
            if not heads:
                heads.append(_plain_head(causal, lambda hidden: logits(hidden, answer)))
            if (head := heads[0]) is not None:
                return head_logprobs(
                    hidden_NH, head, batch.targets_N, chunk=loss_chunk or batch.num_supervised, kernels=kernels
                )
            if loss_chunk is None:
                return logprobs(hidden_NH, batch.targets_N, answer)
            chunks = zip(torch.split(hidden_NH, loss_chunk), torch.split(batch.targets_N, loss_chunk), strict=True)
            return torch.cat([checkpoint(logprobs, *chunk, answer, use_reentrant=False) for chunk in chunks])

    def forward(batch: Batch) -> Tensor:
        found = answered(batch)
        if (
            sees and torch.is_grad_enabled() and not found.requires_grad
        ):  # rows that show nothing, where only what looks is trained
            return found + torch.zeros((), device=found.device, requires_grad=True)
        return found

    return forward


def _plain_head(causal: nn.Module, logits: Callable[[Tensor], Tensor]) -> nn.Linear | None:
    """The head, if it is frozen and logits are its product and nothing else: no scaling, no capping, no bias."""
    head = causal.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None or head.weight.requires_grad:
        return None
    probe_1H = torch.zeros(1, head.in_features, dtype=head.weight.dtype, device=head.weight.device, requires_grad=True)
    with torch.enable_grad():
        nodes = _nodes(logits(probe_1H).grad_fn)
    return head if nodes & _PRODUCTS and nodes <= _PRODUCTS | _VIEWS else None


_PRODUCTS = {"MmBackward0", "LinearBackward0"}
_VIEWS = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "TBackward0",
    "SliceBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "AliasBackward0",
    "AccumulateGrad",
}
"""What stands between hidden states and logits that changes no number."""


def _nodes(last: Any) -> set[str]:
    """Names of all autograd nodes that a tensor was made by."""
    seen: dict[Any, None] = {}
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [before for before, _ in node.next_functions]
    return {node.name().rsplit("::", 1)[-1] for node in seen}


class _Heard:
    """What a language tower has answered, in place of the whole backbone: the code after that asks for what only the backbone would add, and makes
    nothing of it."""

    def __init__(self, **answered: Any) -> None:
        self._answered: Mapping[str, Any] = answered

    def __getattr__(self, name: str) -> Any:
        return self._answered.get(name)

    def __getitem__(self, _: int) -> Any:
        return self._answered["last_hidden_state"]


class _Answer(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


@contextmanager
def _answering(causal: nn.Module, output: Any) -> Iterator[None]:
    name = str(causal.base_model_prefix)
    backbone = getattr(causal, name)
    setattr(causal, name, _Answer(output))
    try:
        yield
    finally:
        setattr(causal, name, backbone)


def _require_backbone(causal: nn.Module) -> None:
    backbone = getattr(causal, str(getattr(causal, "base_model_prefix", "")), None)
    if not isinstance(backbone, nn.Module) or backbone is causal:
        raise ModelError(
            f"{type(causal).__name__} has no backbone below its head",
            "finefit trains transformers' causal language models",
        )


def autocast_for(device: str, precision: str, *, with_cache: bool = True) -> AbstractContextManager[Any]:
    """fp16 needs a loss scale beside it; fp32 needs no autocast. `with_cache`: a trained weight is cast once in a forward, and the cast is kept to
    its end."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return (
        torch.autocast(device, dtype=halves[precision], cache_enabled=with_cache)
        if precision in halves
        else nullcontext()
    )


def keeps_casts(tuning: Tuning, levers: Levers) -> bool:
    """Not where whole weights are trained and their layers computed again: it would be a second copy of them all, which nothing else needs."""
    return isinstance(tuning, Lora) or levers.recompute == 0


def logits_after(causal: nn.Module, hidden_BTH: Tensor) -> Tensor:
    """What the code behind the backbone of a model that sees makes of these, outside of training."""
    with _answering(causal, _Heard(last_hidden_state=hidden_BTH)):
        found: Tensor = causal(inputs_embeds=hidden_BTH, use_cache=False).logits
    return found
