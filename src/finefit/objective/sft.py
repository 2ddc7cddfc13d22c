"""Supervised fine-tuning: cross entropy of the answer's tokens."""

import torch
from torch.nn.functional import cross_entropy

from finefit.objective.batch import Batch, Forward, LossSum


def sft(forward: Forward, batch: Batch) -> LossSum:
    logits_NV = forward(batch.input_ids_BT, batch.positions_N)
    return LossSum(cross_entropy(logits_NV.to(torch.float32), batch.targets_N, reduction="sum"), batch.num_supervised)
