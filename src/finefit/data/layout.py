"""How much of what is computed is padding, for each way to lay out the rows of a step."""

import numpy as np
from numpy.typing import NDArray

from finefit.artifacts.records import Levers
from finefit.artifacts.trainings import Efficiency
from finefit.data.order import rows_of_step, steps_per_epoch
from finefit.data.packing import best_fit, both_sides, capacity_of, longest_sides, num_sides

_STEPS = 50
"""Of the first epoch: enough to know, however many there are."""


def efficiency(
    lengths: NDArray[np.int32], supervised: NDArray[np.int32], levers: Levers, *, global_batch: int, seed: int
) -> Efficiency:
    """Lengths and counts of pairs have a column for each side."""
    steps = range(min(_STEPS, steps_per_epoch(len(lengths), global_batch)))
    rows = [rows_of_step(step, num_rows=len(lengths), global_batch=global_batch, seed=seed) for step in steps]
    own = sum(int(lengths[step].sum()) for step in rows)
    in_order = [_cut(lengths[step], levers.micro_batch) for step in rows]
    by_length = [_cut(lengths[step][np.argsort(-longest_sides(lengths[step]))], levers.micro_batch) for step in rows]
    computed, batches = _padded(by_length), sum(map(len, by_length))
    grouped = own / computed
    if levers.packing:
        capacity = capacity_of(
            micro_batch=levers.micro_batch,
            longest=int(lengths.max()),
            supervised=int(supervised.max()),
            rows_per_step=min(global_batch, len(lengths)),
            sides=num_sides(lengths),
        )
        limits = {"max_tokens": capacity.tokens, "max_supervised": capacity.supervised, "max_rows": capacity.rows}
        packs = [best_fit(both_sides(lengths[step]), both_sides(supervised[step]), **limits) for step in rows]
        computed, batches = own, sum(map(len, packs))
    return Efficiency(
        own=own / computed, batches_per_step=batches / len(rows), grouped=grouped, in_order=own / _padded(in_order)
    )


def _cut(lengths: NDArray[np.int32], micro_batch: int) -> list[NDArray[np.int32]]:
    return [lengths[at : at + micro_batch] for at in range(0, len(lengths), micro_batch)]


def _padded(steps: list[list[NDArray[np.int32]]]) -> int:
    return sum(batch.size * int(batch.max()) for step in steps for batch in step)
