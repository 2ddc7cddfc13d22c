"""Supervised fine-tuning: cross entropy of the answer's tokens."""

from finefit.objective.batch import Batch, Forward, LossSum


class Sft:
    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        logprobs_N = forward(batch)
        return LossSum(-logprobs_N.sum(), batch.num_supervised)

    def count(self, batch: Batch) -> int:
        return batch.num_supervised


sft = Sft()
