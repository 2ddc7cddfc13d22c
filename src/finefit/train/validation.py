"""The loss of held-out rows, with perplexity or rewards, and at the end of training the experts to which a mixture
routes tokens."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import SourceLedger
from finefit.data.collate import grouped, lengths_of
from finefit.data.examples import Example, TrainRow
from finefit.data.order import part_of_rank
from finefit.moe.routing import measure_routing, num_shared, routing_map
from finefit.spec.schema import Router, Sft
from finefit.step.engine_choice import divides_weights
from finefit.step.forward import autocast_for, eval_without_grad
from finefit.train.batches import batch_call, on_device, prefetched
from finefit.train.context import TrainContext

LOSS = "validation_loss"
_ROUTED_ROWS = 32  # of each source
log = logging.getLogger("finefit")


def validate(ctx: TrainContext, micro_batch: int) -> dict[str, float]:
    """Means over all validation rows and ranks, without dropout or packing, whatever the micro-batch."""
    names, sums = _sums(ctx, micro_batch)
    total, count, *measures = ctx.engine.sum(sums).tolist()
    means = {LOSS: total / count} | {name: value / count for name, value in zip(names, measures, strict=True)}
    if isinstance(ctx.stage.objective, Sft) and ctx.compose is None:
        with suppress(OverflowError):  # a loss so large has no perplexity
            means["perplexity"] = math.exp(means[LOSS])
    return means


def _sums(ctx: TrainContext, micro_batch: int) -> tuple[list[str], Tensor]:
    """Loss, count and measures of this rank's part, in fp64, and the names of the measures."""
    groups = grouped(lengths_of(ctx.validation), micro_batch)
    parts: list[Tensor] = []
    names: list[str] = []
    with eval_without_grad(ctx.model):
        own = list(part_of_rank(groups, rank=ctx.ranks.rank, num_ranks=ctx.ranks.size))
        batches = prefetched(ctx.workers, (batch_call(ctx, ctx.validation, rows, "validation") for rows, _ in own))
        for batch, (_, counts) in zip(batches, own, strict=True):
            found = ctx.objective(ctx.forward, on_device(batch, ctx.stage.device))
            names = list(found.measures)
            count = torch.full_like(found.total, found.count, dtype=torch.float64)
            values = [found.total.double(), count, *(value.double() for value in found.measures.values())]
            parts.append(torch.stack(values) * counts)
    return names, torch.stack(parts).sum(dim=0)


def record_routing(ctx: TrainContext, where: StageDir, step: int) -> None:
    """Writes routing.json and routing.svg: the experts to which the tokens of each data set are routed, measured on
    held-out rows or, if there are none, on training rows. The tokens that every row starts with are skipped, because a
    template's words belong to no data set. Training is saved by then, so a failure is only logged."""
    if not isinstance(ctx.stage.objective, Router) or not ctx.ranks.is_first:
        return
    if ctx.ranks.size > 1 and divides_weights(ctx.stage.engine):
        log.info("routing is not measured: the model is divided over %s ranks", ctx.ranks.size)
        return
    held = bool(ctx.validation)
    try:
        rows = _by_source(where, ctx.validation, "validation") if held else _by_source(where, ctx.examples, "train")
        shared = num_shared([row for several in rows.values() for row in several])
        with autocast_for(ctx.stage.device, ctx.stage.precision):
            found = measure_routing(ctx.model, rows, skipped=shared)
        write_record(where.routing, found)
        where.routing_map.write_text(routing_map(found), encoding="utf-8")
        first = {
            name: [round(sum(column) / len(source.first), 4) for column in zip(*source.first, strict=True)]
            for name, source in found.sources.items()
        }
        ctx.metrics.write(event="routed", step=step, held_out=held, first=first, experts=found.experts)
    except Exception:  # a failed measurement must not fail the training
        log.exception("routing is not measured; the training and its last checkpoint are intact")


def _by_source(where: StageDir, examples: Sequence[TrainRow], split: str) -> Mapping[str, list[tuple[int, ...]]]:
    """The first rows of each source, in the order of the ledger; repeated rows count each time."""
    sources = read_lines(where.ledger, SourceLedger, lambda line: "read" in line)
    entries = [source for source in sources if source.split == split]
    ends = list(accumulate(entry.examples + entry.repeated for entry in entries))
    found: dict[str, list[tuple[int, ...]]] = {}
    for entry, begin, end in zip(entries, [0, *ends], ends, strict=False):
        rows = (examples[at] for at in range(begin, min(end, begin + _ROUTED_ROWS)))
        found.setdefault(entry.source, []).extend(row.tokens for row in rows if isinstance(row, Example))
    return found
