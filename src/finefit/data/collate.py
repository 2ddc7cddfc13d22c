"""Examples -> batches on the CPU. Counts, supervised positions and row lengths are host values: the step never reads a tensor."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finefit.data.packing import Capacity, best_fit
from finefit.data.render import Example
from finefit.objective.batch import Batch, Packed


@runtime_checkable
class Counted(Protocol):
    """Examples that know their lengths without being read."""

    lengths: NDArray[Any]
    supervised_counts: NDArray[Any]


def lengths_of(examples: Sequence[Example]) -> NDArray[Any]:
    return examples.lengths if isinstance(examples, Counted) else np.array([len(e.tokens) for e in examples], dtype=np.int64)


def supervised_counts_of(examples: Sequence[Example]) -> NDArray[Any]:
    """Without first tokens: nothing stands before one that could predict it."""
    return examples.supervised_counts if isinstance(examples, Counted) else np.array([sum(e.supervised[1:]) for e in examples], dtype=np.int64)


def collate(examples: Sequence[Example], *, pad: int) -> Batch:
    """Padded on the right to the longest."""
    lengths = [len(e.tokens) for e in examples]
    width = max(lengths)
    input_ids = np.full((len(examples), width), pad, dtype=np.int64)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = example.tokens
    return _batch(examples, input_ids, starts=[row * width for row in range(len(examples))])


def pack(examples: Sequence[Example]) -> Batch:
    """Behind one another, without padding."""
    lengths = [len(e.tokens) for e in examples]
    boundaries = np.cumsum([0, *lengths])
    packed = Packed(
        position_ids_BT=_tensor(np.concatenate([np.arange(length) for length in lengths])[None]),
        boundaries_R1=torch.from_numpy(boundaries.astype(np.int32)),
        lengths=tuple(lengths),
    )
    return _batch(examples, np.concatenate([e.tokens for e in examples])[None], starts=boundaries[:-1].tolist(), packed=packed)


def _batch(examples: Sequence[Example], input_ids: NDArray[Any], *, starts: Sequence[int], packed: Packed | None = None) -> Batch:
    places = [start + np.flatnonzero(e.supervised[1:]) for start, e in zip(starts, examples, strict=True)]
    positions = np.concatenate(places)
    return Batch(
        input_ids_BT=_tensor(input_ids),
        positions_N=_tensor(positions),
        targets_N=_tensor(input_ids.reshape(-1)[positions + 1]),
        num_supervised=len(positions),
        num_tokens=sum(len(e.tokens) for e in examples),
        packed=packed,
    )


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


def micro_batches(examples: Sequence[Example], *, micro_batch: int, pad: int, capacity: Capacity | None = None) -> list[Batch]:
    """Packed where a capacity is given; else cut by length, so that rows of like length share a micro-batch. The sum over the global batch is the
    same in any order."""
    lengths = lengths_of(examples)
    if capacity is None:
        order = np.argsort(-lengths, kind="stable").tolist()
        return [collate([examples[row] for row in order[at : at + micro_batch]], pad=pad) for at in range(0, len(order), micro_batch)]
    packs = best_fit(
        lengths,
        supervised_counts_of(examples),
        max_tokens=capacity.tokens,
        max_supervised=capacity.supervised,
        max_rows=capacity.rows,
    )
    return [pack([examples[row] for row in rows]) for rows in packs]
