"""Which rows belong to which step: a pure function of seed and epoch, so the position of a run is its step and nothing else."""

import math

import numpy as np


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    # RandomState's streams are frozen for ever by numpy's policy; Generator's are not
    return [int(row) for row in np.random.RandomState([seed, epoch]).permutation(num_rows)]


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """The last step of an epoch may hold fewer rows: none is left out."""
    return math.ceil(num_rows / global_batch)


def rows_of_step(step: int, *, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """Rows of optimizer step `step`, which counts from 0."""
    epoch, within = divmod(step, steps_per_epoch(num_rows, global_batch))
    return epoch_order(num_rows, seed, epoch)[within * global_batch : (within + 1) * global_batch]
