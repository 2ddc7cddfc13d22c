"""Direct preference optimisation: the preferred answer shall gain on its twin, measured from where the model started.

R sequences of P pairs, N supervised tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from finefit.objective.batch import Batch, Forward, LossSum, Paired

Reference = Callable[[Batch], Tensor]
"""Sums_R of the log-probabilities under the starting weights, without gradient and without dropout."""


class Dpo:
    def __init__(self, *, beta: float, reference: Reference) -> None:
        self.beta, self.reference = beta, reference

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        """Both halves go through one forward. The reference comes first, while nothing is kept for backward."""
        reference_R = self.reference(batch)
        rewards_R = self.beta * (sequence_sums(forward(batch), paired_of(batch)) - reference_R)
        chosen_P, rejected_P = rewards_R.chunk(2)
        margins_P = chosen_P - rejected_P
        with torch.no_grad():
            measures = {
                "rewards_chosen": chosen_P.sum(),
                "rewards_rejected": rejected_P.sum(),
                "accuracy": (margins_P > 0).to(margins_P.dtype).sum(),
                "margin": margins_P.sum(),
            }
        return LossSum(-logsigmoid(margins_P).sum(), self.count(batch), measures)

    def count(self, batch: Batch) -> int:
        return paired_of(batch).num_pairs


def from_batch(batch: Batch) -> Tensor:
    """The reference where it was computed before the first step."""
    reference_R = paired_of(batch).reference_R
    assert reference_R is not None, "a batch without its reference"
    return reference_R


def sequence_sums(logprobs_N: Tensor, paired: Paired) -> Tensor:
    """Of each sequence, in the same order on every device: the cut is known on the host."""
    return torch.stack([part.sum() for part in torch.split(logprobs_N, list(paired.supervised))])


def paired_of(batch: Batch) -> Paired:
    assert batch.paired is not None, "a batch of single rows where pairs are compared"
    return batch.paired
