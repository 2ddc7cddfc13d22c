"""The loss on held-out rows and what belongs to it: perplexity, or how often and by how much the preferred answer wins. Nothing is generated."""

import math

import torch
from torch import Tensor

from finefit.data.collate import grouped, lengths_of
from finefit.data.order import part_of_rank
from finefit.objective.batch import LossSum
from finefit.spec.schema import Sft
from finefit.step.objective import still
from finefit.train.batches import call_for, made, on_device
from finefit.train.live import Live

LOSS = "validation_loss"


def validate(live: Live, micro_batch: int) -> dict[str, float]:
    """Means over all validation rows and ranks, without dropout. Rows are cut by length and never packed; the sums are the same for any cut."""
    names, sums = _sums(live, micro_batch)
    total, count, *measures = live.engine.sum(sums).tolist()
    means = {LOSS: total / count} | {name: value / count for name, value in zip(names, measures, strict=True)}
    return means | (_perplexity(means[LOSS]) if isinstance(live.stage.objective, Sft) and live.compose is None else {})


def _sums(live: Live, micro_batch: int) -> tuple[list[str], Tensor]:
    """Loss, count and measures of this rank's part, in fp64, and the names of the measures."""
    groups = grouped(lengths_of(live.validation), micro_batch)
    parts: list[Tensor] = []
    names: list[str] = []
    with still(live.model):
        own = list(part_of_rank(groups, rank=live.ranks.rank, num_ranks=live.ranks.size))
        batches = made(live.workers, (call_for(live, live.validation, rows, "validation") for rows, _ in own))
        for batch, (_, counts) in zip(batches, own, strict=True):
            found = live.objective(live.forward, on_device(batch, live.stage.device))
            names = list(found.measures)
            parts.append(_values(found) * counts)
    return names, torch.stack(parts).sum(dim=0)


def _values(found: LossSum) -> Tensor:
    count = torch.full_like(found.total, found.count, dtype=torch.float64)
    return torch.stack([found.total.double(), count, *(value.double() for value in found.measures.values())])


def _perplexity(loss: float) -> dict[str, float]:
    """None where the loss is so large that it has no number."""
    try:
        return {"perplexity": math.exp(loss)}
    except OverflowError:
        return {}
