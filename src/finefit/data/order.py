"""Which rows belong to which step and rank: a pure function of seed and epoch, so the position of a run is its step and nothing else."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@lru_cache(maxsize=2)
def _epoch_array(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Kept for the epoch in hand and its neighbour: one that steps ahead and one that returns share it."""
    # RandomState's streams are frozen for ever by numpy's policy; Generator's are not
    order = np.random.RandomState([seed, epoch]).permutation(num_rows)
    order.setflags(write=False)
    return order


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    return list(map(int, _epoch_array(num_rows, seed, epoch)))


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """The last step of an epoch may hold fewer rows: none is left out."""
    return math.ceil(num_rows / global_batch)


def rows_of_step(step: int, *, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """Rows of optimizer step `step`, which counts from 0, over all ranks."""
    epoch, within = divmod(step, steps_per_epoch(num_rows, global_batch))
    return list(map(int, _epoch_array(num_rows, seed, epoch)[within * global_batch : (within + 1) * global_batch]))


def rows_of_rank(step: int, *, rank: int, num_ranks: int, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """This rank's part of a step's rows: every row has one rank, and no rank has two rows more than another."""
    return rows_of_step(step, num_rows=num_rows, global_batch=global_batch, seed=seed)[rank::num_ranks]


def part_of_rank(whole: Sequence[T], *, rank: int, num_ranks: int) -> list[tuple[T, bool]]:
    """What this rank does of work that all have cut alike, and whether it counts. All do equally many: weights that are divided are gathered by
    all at once. A rank that nothing is left for does the last piece again, which does not count."""
    rounds = math.ceil(len(whole) / num_ranks)
    return [(whole[min(at, len(whole) - 1)], at < len(whole)) for at in range(rank, rounds * num_ranks, num_ranks)]
