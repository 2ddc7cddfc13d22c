"""Micro-batches of text rows, cut as training cuts them."""

from collections.abc import Sequence

from finefit.data.collate import collate, grouped, lengths_of, pack, packs_of
from finefit.data.examples import TrainRow
from finefit.data.order import Capacity
from finefit.objective.batch import Batch


def micro_batches(
    rows: Sequence[TrainRow], *, micro_batch: int, pad: int, capacity: Capacity | None = None
) -> list[Batch]:
    """Rows are packed if a capacity is given, else grouped by length."""
    if capacity is None:
        return [collate([rows[row] for row in group], pad=pad) for group in grouped(lengths_of(rows), micro_batch)]
    return [pack([rows[row] for row in group]) for group in packs_of(rows, capacity)]
