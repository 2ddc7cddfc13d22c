"""Binds a model into the `Forward` that objectives call: log-probabilities of the supervised tokens.

The backbone runs once; of its output only the supervised positions meet the head. The model's own code after the backbone (head, scaling,
soft-capping) makes the logits, all at once or chunk by chunk: it is called with a stand-in that answers what the backbone would have.
N supervised positions of B x T, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from finefit.errors import ModelError
from finefit.model.attention import packed_inputs
from finefit.objective.batch import Batch, Forward


def bind(model: nn.Module, *, loss_chunk: int | None = None, autocast: AbstractContextManager[Any] | None = None) -> Forward:
    """`loss_chunk` supervised tokens have logits at a time, which are computed again in backward; None: all of them at once."""
    causal = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    _require_backbone(causal)
    context = autocast or nullcontext()

    def logprobs(hidden_NH: Tensor, targets_N: Tensor, answer: Callable[..., ModelOutput]) -> Tensor:
        with _answering(causal, answer(last_hidden_state=hidden_NH.unsqueeze(0))):
            logits_NV = causal(inputs_embeds=hidden_NH.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return -cross_entropy(logits_NV.to(torch.float32), targets_N, reduction="none")

    def forward(batch: Batch) -> Tensor:
        with context:
            output = causal.base_model(input_ids=batch.input_ids_BT, use_cache=False, **packed_inputs(batch.packed))  # type: ignore[operator]
            hidden_NH = output.last_hidden_state.flatten(0, 1).index_select(0, batch.positions_N)
            kind: Callable[..., ModelOutput] = type(output)
            answer = partial(kind, **{name: value for name, value in output.items() if name != "last_hidden_state"})
            del output
            if loss_chunk is None:
                return logprobs(hidden_NH, batch.targets_N, answer)
            chunks = zip(torch.split(hidden_NH, loss_chunk), torch.split(batch.targets_N, loss_chunk), strict=True)
            return torch.cat([checkpoint(logprobs, *chunk, answer, use_reentrant=False) for chunk in chunks])

    return forward


class _Answer(nn.Module):
    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.output


@contextmanager
def _answering(causal: nn.Module, output: ModelOutput) -> Iterator[None]:
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
        raise ModelError(f"{type(causal).__name__} has no backbone below its head", "finefit trains transformers' causal language models")


def autocast_for(device: str, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
