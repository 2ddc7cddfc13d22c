"""Examples -> batches on the CPU. Counts, supervised positions and row lengths are host values: the step never reads a tensor.

A preference pair is a row of two sequences, which always share a batch. What a model that sees is given beside the tokens is made by its lens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finefit.data.examples import Example
from finefit.data.eyes.eye import Lens, Shown
from finefit.data.looking import See, eye_of, show
from finefit.data.packing import Capacity, best_fit, both_sides, longest_sides
from finefit.data.pairs import Pair, Trained
from finefit.data.pictures import Picture
from finefit.objective.batch import Batch, Extra, Packed, Paired

Show = Callable[[Picture], Shown]


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


@runtime_checkable
class Weighed(Protocol):
    """Examples that know how much their images show without being read."""

    num_values: NDArray[Any]


def num_values_of(rows: Sequence[Trained]) -> NDArray[Any]:
    """Numbers that the pixels of each row's images are."""
    if isinstance(rows, Weighed):
        return rows.num_values
    return np.array([sum(picture.num_values for picture in pictures_of(row)) for row in rows], np.int64)


def pictures_of(row: Trained) -> tuple[Picture, ...]:
    return row.images if isinstance(row, Example) else row.chosen.images


def _counted(rows: Sequence[Trained], count: Callable[[Example], int]) -> NDArray[Any]:
    return np.array(
        [[count(r.chosen), count(r.rejected)] if isinstance(r, Pair) else count(r) for r in rows], dtype=np.int64
    )


def worst_of(rows: Sequence[Trained]) -> Trained:
    """A row whose sequences are as long as the longest, with as many supervised tokens as any, that shows as much as any: what the forecast is made
    for."""
    lengths, shown = longest_sides(lengths_of(rows)), num_values_of(rows)
    found = rows[int(np.lexsort((lengths, shown))[-1])]  # of those that show most, the longest
    longest, supervised = int(lengths.max()), int(supervised_counts_of(rows).max())
    if isinstance(found, Example):
        return _stretched(found, longest, supervised)
    longer = _stretched(max(found.chosen, found.rejected, key=lambda e: len(e.tokens)), longest, supervised)
    return Pair(longer, longer, found.reference)


def _stretched(example: Example, length: int, supervised: int) -> Example:
    """As long as asked for, by more of its last token; supervised at the end."""
    tokens = (*example.tokens, *example.tokens[-1:] * (length - len(example.tokens)))
    return Example(
        tokens=tokens, supervised=tuple(at >= length - supervised for at in range(length)), images=example.images
    )


def collate(rows: Sequence[Trained], *, pad: int, lens: Lens | None = None, show: Show | None = None) -> Batch:
    """Padded on the right to the longest. `lens`: of a model that sees; `show` makes pixels of what the rows show."""
    examples, paired = _sequences(rows)
    lengths = [len(e.tokens) for e in examples]
    width = max(lengths)
    input_ids = np.full((len(examples), width), pad, dtype=np.int64)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = example.tokens
    extra = None if lens is None else _extra(examples, input_ids, lens, show)
    return _batch(examples, input_ids, starts=[row * width for row in range(len(examples))], paired=paired, extra=extra)


def _extra(examples: Sequence[Example], input_ids: NDArray[np.int64], lens: Lens, show: Show | None) -> Extra:
    """An image that several rows show is decoded once."""
    distinct = dict.fromkeys(picture for example in examples for picture in example.images)
    assert show is not None or not distinct, "rows with images need somebody who shows them"
    shown = {} if show is None else {picture: show(picture) for picture in distinct}
    prompts = [_prompt_length(example) for example in examples]
    extra = lens.extra(
        input_ids,
        [len(e.tokens) for e in examples],
        [[shown[picture] for picture in example.images] for example in examples],
        prompts,
    )
    content = "\n".join(
        " ".join(f"{picture.sha256}{picture.grid}" for picture in example.images) for example in examples
    )
    return replace(extra, identity=hashlib.sha256(content.encode()).hexdigest() if distinct else "")


def _prompt_length(example: Example) -> int:
    """Tokens before the first supervised one; all where there is none."""
    return next((at for at, is_supervised in enumerate(example.supervised) if is_supervised), len(example.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Rows -> a batch, in whatever process: what `collate` is told beside the rows."""

    pad: int
    see: See | None = None
    """None for a model that sees nothing."""

    def __call__(self, rows: Sequence[Trained]) -> Batch:
        eye = None if self.see is None else eye_of(self.see)
        return (
            collate(rows, pad=self.pad)
            if eye is None
            else collate(rows, pad=self.pad, lens=eye.lens, show=partial(show, eye))
        )


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
    return _batch(
        examples,
        np.concatenate([e.tokens for e in examples])[None],
        starts=boundaries[:-1].tolist(),
        packed=packed,
        paired=paired,
    )


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
    examples: Sequence[Example],
    input_ids: NDArray[Any],
    *,
    starts: Sequence[int],
    packed: Packed | None = None,
    paired: Paired | None = None,
    extra: Extra | None = None,
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
        extra=extra,
    )


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


def micro_batches(
    rows: Sequence[Trained], *, micro_batch: int, pad: int, capacity: Capacity | None = None
) -> list[Batch]:
    """Of text. Packed where a capacity is given; else cut by length. The sum over the global batch is the same in any order."""
    if capacity is None:
        return [collate([rows[row] for row in group], pad=pad) for group in grouped(lengths_of(rows), micro_batch)]
    return [pack([rows[row] for row in group]) for group in packs_of(rows, capacity)]


def packs_of(rows: Sequence[Trained], capacity: Capacity) -> list[list[int]]:
    return best_fit(
        both_sides(lengths_of(rows)),
        both_sides(supervised_counts_of(rows)),
        max_tokens=capacity.tokens,
        max_supervised=capacity.supervised,
        max_rows=capacity.rows,
    )


def grouped(lengths: NDArray[Any], micro_batch: int) -> list[list[int]]:
    """Rows of like length share a micro-batch; the longest come first, so that what does not fit is known at once."""
    order = np.argsort(-longest_sides(lengths), kind="stable").tolist()
    return [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
