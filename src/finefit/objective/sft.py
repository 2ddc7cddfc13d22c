"""Supervised fine-tuning: cross entropy of the answer's tokens."""

from finefit.objective.batch import Batch, Forward, LossSum


def sft(forward: Forward, batch: Batch) -> LossSum:
    logprobs_N = forward(batch)
    return LossSum(-logprobs_N.sum(), batch.num_supervised)
