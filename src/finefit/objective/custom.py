"""Training a model of the user's own: its loss is a sum that the model itself takes, over what it counts itself.

What such a model is given is in the batch's `extra`, made from rows by the model's own `inputs`. A row's random numbers come from its seed, which
depends on the run's seed, the step and the row alone: so what is drawn is the same under any micro-batch, on any rank, and after a restart.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from finefit.errors import FinefitError
from finefit.objective.batch import Batch, Forward, LossSum

COUNT = "count"
"""Where `Extra.host` has what the model counts in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRow:
    """What a model of the user's own is told of a row. Tokens are those of prompt and answer, as its tokenizer and template write them."""

    tokens: NDArray[np.int64]
    supervised: NDArray[np.bool_]
    """Which of the tokens are to be learnt; as long as `tokens`."""
    images: tuple[PIL.Image.Image, ...] = ()
    """In RGB, in the order of the row."""
    seed: int
    """For whatever is drawn at random for this row: 0 <= seed < 2**63."""
    is_prompt: bool = False
    """Whether an answer is wanted: the tokens are a prompt alone, and none is supervised."""


def seed_of(run_seed: int, step: int | str, row: int) -> int:
    """`step`: a number in training, a word where rows are looked at apart from any step."""
    return int.from_bytes(hashlib.sha256(f"{run_seed} {step} {row}".encode()).digest()[:8]) >> 1


class OwnLoss:
    """`forward` answers with the sum and nothing else: see `step.custom.bind_own`."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        return LossSum(forward(batch), self.count(batch))

    def count(self, batch: Batch) -> int:
        if batch.extra is None:
            raise FinefitError("a batch for a model of the user's own holds nothing that the model made")
        count: int = batch.extra.host[COUNT]
        return count


own_loss = OwnLoss()
