"""The objective of custom models: the model computes its own loss, a sum over what it counts itself.

The model's own `inputs` makes the batch's `extra` from rows. A row's random numbers come from its seed, which depends
on the run's seed, the step and the row alone, so they are the same for any micro-batch, on any rank, and after a
restart.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from finefit.errors import FinefitError
from finefit.objective.batch import Batch, Forward, LossSum

COUNT = "count"
"""Key of `Extra.host`: what the model counts in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRow:
    """A row as a custom model gets it. Tokens are those of prompt and answer, as its tokenizer and template write
    them."""

    tokens: NDArray[np.int64]
    supervised: NDArray[np.bool_]
    """Which of the tokens are trained on; as long as `tokens`."""
    images: tuple[PIL.Image.Image, ...] = ()
    """In RGB, in the order of the row."""
    seed: int
    """For all random numbers of this row: 0 <= seed < 2**63."""
    is_prompt: bool = False
    """Whether the model is to answer: the tokens are a prompt alone, and none is supervised."""


def seed_of(run_seed: int, step: int | str, row: int) -> int:
    """`step`: a number in training, a word elsewhere."""
    return int.from_bytes(hashlib.sha256(f"{run_seed} {step} {row}".encode()).digest()[:8]) >> 1


class CustomLoss:
    """`forward` gives the sum alone: see `CustomFamily.own_forward`."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        return LossSum(forward(batch), self.count(batch))

    def count(self, batch: Batch) -> int:
        if batch.extra is None:
            raise FinefitError("a batch for a custom model lacks the inputs that the model makes")
        count: int = batch.extra.host[COUNT]
        return count


custom_loss = CustomLoss()
