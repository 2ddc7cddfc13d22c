"""Examples -> batches on the CPU. Counts, supervised positions and row lengths are host values: the step never reads a tensor.

A preference pair is a row of two sequences, which always share a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finefit.data.packing import Capacity, best_fit, both_sides, longest_sides
from finefit.data.pairs import Pair, Trained
from finefit.data.render import Example
from finefit.objective.batch import Batch, Packed, Paired


@runtime_checkable
class Counted(Protocol):
    """Examples that know their lengths without being read."""

    lengths: NDArray[Any]
    supervised_counts: NDArray[Any]


def lengths_of(rows: Sequence[Trained]) -> NDArray[Any]:
    """Of pairs with a column for each side."""
    return rows.lengths if isinstance(rows, Counted) else _counted(rows, lambda e: len(e.tokens))


def supervised_counts_of(rows: Sequence[Trained]) -> NDArray[Any]:
    """Without first tokens: nothing stands before one that could predict it. Of pairs with a column for each side."""
    return rows.supervised_counts if isinstance(rows, Counted) else _counted(rows, lambda e: sum(e.supervised[1:]))


def _counted(rows: Sequence[Trained], count: Callable[[Example], int]) -> NDArray[Any]:
    return np.array([[count(r.chosen), count(r.rejected)] if isinstance(r, Pair) else count(r) for r in rows], dtype=np.int64)


def worst_of(rows: Sequence[Trained]) -> Trained:
    """A row whose sequences are as long as the longest, with as many supervised tokens as any: what the forecast is made for."""
    lengths = lengths_of(rows)
    found = rows[int(longest_sides(lengths).argmax())]
    supervised = int(supervised_counts_of(rows).max())
    if isinstance(found, Example):
        return _supervised_at_the_end(found, supervised)
    longer = _supervised_at_the_end(max(found.chosen, found.rejected, key=lambda e: len(e.tokens)), supervised)
    return Pair(longer, longer, found.reference)


def _supervised_at_the_end(example: Example, supervised: int) -> Example:
    length = len(example.tokens)
    return Example(tokens=example.tokens, supervised=tuple(at >= length - supervised for at in range(length)))


def collate(rows: Sequence[Trained], *, pad: int) -> Batch:
    """Padded on the right to the longest."""
    examples, paired = _sequences(rows)
    lengths = [len(e.tokens) for e in examples]
    width = max(lengths)
    input_ids = np.full((len(examples), width), pad, dtype=np.int64)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = example.tokens
    return _batch(examples, input_ids, starts=[row * width for row in range(len(examples))], paired=paired)


def pack(rows: Sequence[Trained]) -> Batch:
    """Behind one another, without padding."""
    examples, paired = _sequences(rows)
    lengths = [len(e.tokens) for e in examples]
    boundaries = np.cumsum([0, *lengths])
    packed = Packed(
        position_ids_BT=_tensor(np.concatenate([np.arange(length) for length in lengths])[None]),
        boundaries_R1=torch.from_numpy(boundaries.astype(np.int32)),
        lengths=tuple(lengths),
    )
    return _batch(examples, np.concatenate([e.tokens for e in examples])[None], starts=boundaries[:-1].tolist(), packed=packed, paired=paired)


def _sequences(rows: Sequence[Trained]) -> tuple[list[Example], Paired | None]:
    """Of pairs first all that are preferred, then their twins."""
    pairs = [row for row in rows if isinstance(row, Pair)]
    if not pairs:
        return [row for row in rows if isinstance(row, Example)], None
    examples = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    known = [pair.reference for pair in pairs if pair.reference is not None]
    reference = torch.tensor(known, dtype=torch.float32).T.flatten() if len(known) == len(pairs) else None
    return examples, Paired(supervised=tuple(sum(e.supervised[1:]) for e in examples), reference_R=reference)


def _batch(
    examples: Sequence[Example], input_ids: NDArray[Any], *, starts: Sequence[int], packed: Packed | None = None, paired: Paired | None = None
) -> Batch:
    places = [start + np.flatnonzero(e.supervised[1:]) for start, e in zip(starts, examples, strict=True)]
    positions = np.concatenate(places)
    return Batch(
        input_ids_BT=_tensor(input_ids),
        positions_N=_tensor(positions),
        targets_N=_tensor(input_ids.reshape(-1)[positions + 1]),
        num_supervised=len(positions),
        num_tokens=sum(len(e.tokens) for e in examples),
        packed=packed,
        paired=paired,
        lengths=tuple(len(e.tokens) for e in examples),
        supervised=tuple(map(len, places)),
    )


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


def micro_batches(rows: Sequence[Trained], *, micro_batch: int, pad: int, capacity: Capacity | None = None) -> list[Batch]:
    """Packed where a capacity is given; else cut by length. The sum over the global batch is the same in any order."""
    lengths = lengths_of(rows)
    if capacity is None:
        return [collate([rows[row] for row in group], pad=pad) for group in grouped(lengths, micro_batch)]
    packs = best_fit(
        both_sides(lengths),
        both_sides(supervised_counts_of(rows)),
        max_tokens=capacity.tokens,
        max_supervised=capacity.supervised,
        max_rows=capacity.rows,
    )
    return [pack([rows[row] for row in group]) for group in packs]


def grouped(lengths: NDArray[Any], micro_batch: int) -> list[list[int]]:
    """Rows of like length share a micro-batch; the longest come first, so that what does not fit is known at once."""
    order = np.argsort(-longest_sides(lengths), kind="stable").tolist()
    return [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
