"""Batches of examples, on the CPU. Counts, supervised positions and row lengths are host values: the step never reads a
tensor. A preference pair is a row of two sequences, which always share a batch."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finefit.data.examples import Example, Pair, TrainRow
from finefit.data.image_check import ProcessorFactory, image_input, image_processor_of
from finefit.data.order import Capacity, best_fit, both_sides, longest_sides
from finefit.data.rows import ImageRef
from finefit.objective.batch import Batch, Extra, Packed, Paired
from finefit.vision.family import ImageGeometry, ImageInput

LoadImage = Callable[[ImageRef], ImageInput]


def lengths_of(rows: Sequence[TrainRow]) -> NDArray[Any]:
    """For pairs the array has a column for each side."""
    return _counted(rows, "lengths", lambda e: len(e.tokens))


def supervised_counts_of(rows: Sequence[TrainRow]) -> NDArray[Any]:
    """The first token of a sequence is not counted, because nothing predicts it. For pairs the array has a column for
    each side."""
    return _counted(rows, "supervised_counts", lambda e: sum(e.supervised[1:]))


def images_of(row: TrainRow) -> tuple[ImageRef, ...]:
    return row.images if isinstance(row, Example) else row.chosen.images


def _counted(rows: Sequence[TrainRow], name: str, count: Callable[[Example], int]) -> NDArray[Any]:
    """`name`: the attribute under which stored rows keep the count, so that they need not be read."""
    if hasattr(rows, name):
        return np.asarray(getattr(rows, name))
    counts = [[count(r.chosen), count(r.rejected)] if isinstance(r, Pair) else count(r) for r in rows]
    return np.array(counts, dtype=np.int64)


def largest_row(rows: Sequence[TrainRow]) -> TrainRow:
    """A row with the maximum length, supervised tokens and pixels of all rows; the plan predicts memory for it."""
    lengths = longest_sides(lengths_of(rows))
    num_values = getattr(rows, "num_values", None)
    if num_values is None:
        num_values = np.array([sum(ref.num_values for ref in images_of(row)) for row in rows], np.int64)
    found = rows[int(np.lexsort((lengths, num_values))[-1])]  # the longest of the rows with the most pixels
    longest, supervised = int(lengths.max()), int(supervised_counts_of(rows).max())
    if isinstance(found, Example):
        return _stretched(found, longest, supervised)
    longer = _stretched(max(found.chosen, found.rejected, key=lambda e: len(e.tokens)), longest, supervised)
    return Pair(longer, longer, found.reference)


def _stretched(example: Example, length: int, supervised: int) -> Example:
    """Lengthens the example by repeating its last token, and supervises its last `supervised` tokens."""
    tokens = (*example.tokens, *example.tokens[-1:] * (length - len(example.tokens)))
    return Example(tokens, tuple(at >= length - supervised for at in range(length)), example.images)


def collate(
    rows: Sequence[TrainRow], *, pad: int, geometry: ImageGeometry | None = None, load: LoadImage | None = None
) -> Batch:
    """Rows are padded on the right. `geometry`: that of a vision-language model; `load` gives the pixels of an
    image."""
    examples, paired = _sequences(rows)
    lengths = [len(e.tokens) for e in examples]
    width = max(lengths)
    input_ids = np.full((len(examples), width), pad, dtype=np.int64)
    for row, example in enumerate(examples):
        input_ids[row, : lengths[row]] = example.tokens
    extra = None if geometry is None else _extra(examples, input_ids, geometry, load)
    return _batch(examples, input_ids, starts=[row * width for row in range(len(examples))], paired=paired, extra=extra)


def _extra(
    examples: Sequence[Example], input_ids: NDArray[np.int64], geometry: ImageGeometry, load: LoadImage | None
) -> Extra:
    """An image that several rows share is decoded once."""
    distinct = dict.fromkeys(ref for example in examples for ref in example.images)
    assert load is not None or not distinct, "rows with images need a loader"
    loaded = {} if load is None else {ref: load(ref) for ref in distinct}
    images = [[loaded[ref] for ref in example.images] for example in examples]
    lengths = [len(example.tokens) for example in examples]
    prompt_lengths = [(*example.supervised, True).index(True) for example in examples]
    extra = geometry.extra(input_ids, lengths, images, prompt_lengths)
    content = "\n".join(" ".join(f"{ref.sha256}{ref.grid}" for ref in example.images) for example in examples)
    return replace(extra, identity=hashlib.sha256(content.encode()).hexdigest() if distinct else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Collates rows in any process; it can be pickled."""

    pad: int
    processor_factory: ProcessorFactory | None = None

    def __call__(self, rows: Sequence[TrainRow]) -> Batch:
        processor = None if self.processor_factory is None else image_processor_of(self.processor_factory)
        if processor is None:
            return collate(rows, pad=self.pad)
        return collate(rows, pad=self.pad, geometry=processor.geometry, load=partial(image_input, processor))


def pack(rows: Sequence[TrainRow]) -> Batch:
    """Concatenates the rows without padding."""
    examples, paired = _sequences(rows)
    lengths = [len(e.tokens) for e in examples]
    boundaries = np.cumsum([0, *lengths])
    packed = Packed(
        position_ids_BT=_tensor(np.concatenate([np.arange(length) for length in lengths])[None]),
        boundaries_R1=torch.from_numpy(boundaries.astype(np.int32)),
        lengths=tuple(lengths),
    )
    tokens, starts = np.concatenate([e.tokens for e in examples])[None], boundaries[:-1].tolist()
    return _batch(examples, tokens, starts=starts, packed=packed, paired=paired)


def _sequences(rows: Sequence[TrainRow]) -> tuple[list[Example], Paired | None]:
    """For pairs, all preferred sides come first, then the rejected ones."""
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


def packs_of(rows: Sequence[TrainRow], capacity: Capacity) -> list[list[int]]:
    return best_fit(
        both_sides(lengths_of(rows)),
        both_sides(supervised_counts_of(rows)),
        max_tokens=capacity.tokens,
        max_supervised=capacity.supervised,
        max_rows=capacity.rows,
    )


def grouped(lengths: NDArray[Any], micro_batch: int) -> list[list[int]]:
    """Groups rows of similar length. The longest come first, so that running out of memory shows at once."""
    order = np.argsort(-longest_sides(lengths), kind="stable").tolist()
    return [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
