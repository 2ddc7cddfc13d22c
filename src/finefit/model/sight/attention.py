"""Attention of towers that take all images of a batch behind one another: pieces of one sequence, images or windows of them, none of which sees
another. One flash kernel where a card has it, else pieces of one length side by side as the rows of a batch.

Boundaries come with the batch, lengths too, on the host: nothing is asked of the device. H heads, P patches, W width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finefit.model.attention import Attention, has_varlen, varlen_between, widest_head

PIECES: Final = "_flash_by_piece"
"""Follows the name of an attention. Transformers gives boundaries to one that is called flash; for any other it reads them on the host."""
HasKernel = Callable[[Tensor, Tensor, Tensor], bool]
"""Whether the flash kernel takes this query, key and value."""


def attend_by_piece(tower: PreTrainedModel) -> None:
    """From now on, with what it has as the attention of each piece. Again and again is the same as once."""
    name = str(tower.config._attn_implementation)
    if name.endswith(PIECES):
        return
    if name + PIECES not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name + PIECES, partial(by_piece, partial(_attend_as, name), _on_card))
    tower.config._attn_implementation = name + PIECES


def _attend_as(name: str, *given: Any, **settings: Any) -> tuple[Tensor, None]:
    """Looked up when it is called: what a name stands for may be registered anew."""
    attend: Attention = ALL_ATTENTION_FUNCTIONS["sdpa" if name == "eager" else name]
    return attend(*given, **settings)


def _on_card(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Not where every run has to give the same bits: what the kernel takes then was not measured."""
    if not query.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    capability = torch.cuda.get_device_capability(query.device)
    return capability >= (8, 0) and has_varlen(query, key, value, widest_head(capability))


def by_piece(
    attend: Attention,
    has_kernel: HasKernel,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    cu_seq_lens_q: Tensor,
    pieces: Sequence[Sequence[int]] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention of this kind; `pieces` is what the lens has put beside it: the lengths for each way that the tower cuts. The
    model's own forward has none, and waits for the device."""
    lengths = _cut_by(cu_seq_lens_q, pieces)
    if has_kernel(query, key, value):
        return varlen_between(
            query, key, value, cu_seq_lens_q, max(lengths), dropout=dropout, scaling=scaling, is_causal=False
        ), None
    one = partial(attend, module, attention_mask=None, dropout=dropout, scaling=scaling, is_causal=False)
    return in_runs(one, query, key, value, lengths), None


def _cut_by(boundaries: Tensor, pieces: Sequence[Sequence[int]]) -> Sequence[int]:
    """Known by their number alone: windows lie within images, so there are as many of both only where they are the same."""
    known = next((lengths for lengths in pieces if len(lengths) + 1 == boundaries.numel()), None)
    return boundaries.diff().tolist() if known is None else known


def in_runs(attend: Attention, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Neighbours of one length share a call. Query, key and value in 1 x H x P x W, the answer in 1 x P x H x W."""
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    sizes = [length * count for length, count in runs]
    answers = []
    for (length, count), *run in zip(
        runs, *(torch.split(tensor, sizes, dim=2) for tensor in (query, key, value)), strict=True
    ):
        q, k, v = (tensor.unflatten(2, (count, length)).squeeze(0).transpose(0, 1) for tensor in run)
        answers.append(attend(query=q, key=k, value=v)[0].flatten(0, 1))
    return torch.cat(answers).unsqueeze(0)
