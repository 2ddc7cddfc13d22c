"""Examples -> batches on the CPU. Counts and supervised positions are host values: the step never reads a tensor."""

from collections.abc import Sequence

import torch

from finefit.data.render import Example
from finefit.objective.batch import Batch


def collate(examples: Sequence[Example], *, pad: int) -> Batch:
    width = max(len(e.tokens) for e in examples)
    rows = [[*e.tokens, *[pad] * (width - len(e.tokens))] for e in examples]
    places = [(row, at) for row, e in enumerate(examples) for at, flag in enumerate(e.supervised) if flag and at > 0]
    return Batch(
        input_ids_BT=torch.tensor(rows, dtype=torch.long),
        positions_N=torch.tensor([row * width + at - 1 for row, at in places], dtype=torch.long),
        targets_N=torch.tensor([examples[row].tokens[at] for row, at in places], dtype=torch.long),
        num_supervised=len(places),
        num_tokens=sum(len(e.tokens) for e in examples),
    )


def micro_batches(examples: Sequence[Example], *, micro_batch: int, pad: int) -> list[Batch]:
    """Cut by length, so that rows of like length share a micro-batch; the sum over the global batch is the same in any order."""
    ordered = sorted(examples, key=lambda e: -len(e.tokens))
    return [collate(ordered[at : at + micro_batch], pad=pad) for at in range(0, len(ordered), micro_batch)]
