"""Recovers when a step runs out of memory: its memory is freed, the random numbers are restored, and all ranks repeat
the same rows with fewer at once. The global batch, its count and its loss do not change. The run stops, resumable, only
when every exact lever is pulled."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from finefit.artifacts.cache import Measurement, keep_measurement
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Levers, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.stage_records import TrainState
from finefit.data.collate import largest_row
from finefit.errors import Resumable, first_line, is_out_of_memory
from finefit.objective.batch import Batch
from finefit.spec.schema import DeepSpeed
from finefit.step.engine import Engine
from finefit.step.levers import layers_of
from finefit.step.optimize import optimizer_step
from finefit.step.state import left_as_found
from finefit.train.batches import capacity_under, cut_batches, on_device
from finefit.train.context import TrainContext, peak_bytes
from finefit.train.ranks import ONE_RANK, Ranks
from finefit.train.saver import agreed_checkpoint
from finefit.train.validation import validate

T = TypeVar("T")
_CHUNKS, _TILES = (1024, 256), 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    message: str
    bytes_held: dict[str, int]
    partially_updated: bool
    """Whether weights may have changed already, because memory ran out within the update."""


def attempt(run: Callable[[Engine], T], ctx: TrainContext, levers: Levers) -> T | OutOfMemory:
    """The result of `run`, or how it ran out of memory on any rank; all ranks get the same one of the two. Ranks that
    hold whole models ask one another before they exchange gradients. A rank that runs out later, or whose engine
    exchanges weights all the time, cannot wait: it records the next levers and ends, and so do the other ranks."""
    can_agree = ctx.stage.engine.kind in ("single", "ddp")
    guarded = _GuardedEngine(ctx.engine, ctx.ranks if can_agree else ONE_RANK, updates_inside=levers.update == "inside")
    held: dict[str, int] = {}
    try:
        return run(guarded)
    except _OutOfMemoryElsewhere:
        message, is_here = "another rank is out of memory", False
    except (RuntimeError, MemoryError) as error:  # OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        message, is_here = first_line(error)[:300], True
        if ctx.stage.device == "cuda":
            held = {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
    # after the `except`: the frames of an error hold every tensor of the step
    ctx.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if ctx.stage.device == "cuda":
        torch.cuda.empty_cache()
    oom = OutOfMemory(message=message, bytes_held=held, partially_updated=guarded.partially_updated)
    if is_here and ctx.ranks.size > 1:
        if not can_agree or guarded.has_agreed:
            raise _out_of_memory_on_rank(ctx, levers, oom)
        ctx.ranks.any(True)
    return oom


def recover(ctx: TrainContext, state: TrainState, oom: OutOfMemory) -> TrainState:
    """The same state with the next levers, or the last checkpoint with them if weights may be partially updated."""
    step, levers, earlier = state.step + 1, next_levers(state.levers, ctx), state
    if levers is None:
        pulled = f"with every exact lever pulled, {state.levers.micro_batch} row(s) at a time"
        what = "in the update of its weights" if oom.partially_updated else pulled
        problem = f"step {step} is out of memory {what}: {oom.message}. The last checkpoint is intact"
        raise Resumable(problem, _suggestions(ctx))
    if oom.partially_updated:
        checkpoint, _ = agreed_checkpoint(ctx.saver.where, ctx.stage, ctx.ranks)
        if checkpoint is None:
            ctx.lever_changes.add(0, levers, writes=ctx.ranks.is_first)
            problem = f"out of memory in the update of step {step}, before the first checkpoint: {oom.message}"
            changes = _changes(state.levers, levers)
            raise Resumable(problem, f"give the same command again: it starts from step 0 with {changes}")
        earlier = ctx.saver.restore(checkpoint)
        ctx.metrics.write(event="rolled_back", step=earlier.step)
    ctx.lever_changes.add(earlier.step, levers, writes=ctx.ranks.is_first)
    changed = {"before": asdict(state.levers), "after": asdict(levers)}
    ctx.metrics.write(event="oom_recovered", step=step, **changed, found=oom.message, **oom.bytes_held)
    ctx.forward.change(levers)
    return replace(earlier, levers=levers)


def validate_with_recovery(ctx: TrainContext, state: TrainState) -> dict[str, float] | None:
    """Repeats a validation that does not fit with smaller batches, which later ones keep; training keeps its own
    levers. None if no lever is left; training then continues without validation."""
    levers = state.levers
    if (known := ctx.lever_changes.validation) is not None:  # no larger than what is known to fit a validation
        chunks = [chunk for chunk in (levers.loss_chunk, known.loss_chunk) if chunk is not None]
        at_once, tiles = min(levers.micro_batch, known.micro_batch), max(levers.mlp_tiles, known.mlp_tiles)
        levers = replace(levers, micro_batch=at_once, loss_chunk=min(chunks, default=None), mlp_tiles=tiles)
    while isinstance(found := _validated_under(ctx, levers, state), OutOfMemory):
        event = {"step": state.step, "found": found.message, **found.bytes_held}
        following = next_validation_levers(levers, ctx)
        if following is None:
            ctx.metrics.write(event="validation_left_out", **event)
            return None
        ctx.metrics.write(event="validation_oom_recovered", before=asdict(levers), after=asdict(following), **event)
        levers = ctx.lever_changes.validation = following
    return found


def _validated_under(ctx: TrainContext, levers: Levers, state: TrainState) -> dict[str, float] | OutOfMemory:
    """Validates with the model under these levers; training then gets its own back."""
    is_other_model = replace(levers, micro_batch=state.levers.micro_batch) != state.levers
    if is_other_model:
        ctx.forward.change(levers)
    found = attempt(lambda engine: validate(replace(ctx, engine=engine), levers.micro_batch), ctx, state.levers)
    if is_other_model:
        ctx.forward.change(state.levers)
    return found


def next_validation_levers(levers: Levers, ctx: TrainContext) -> Levers | None:
    """The next exact levers that save memory when nothing is kept for backward."""
    if (at_once := min(levers.micro_batch, len(ctx.validation))) > 1:
        return replace(levers, micro_batch=at_once // 2)
    without_backward = replace(levers, recompute=len(layers_of(ctx.model)), keep_attention=False, offload=True)
    pulled = _next_model_lever(without_backward, ctx)
    return pulled and replace(levers, loss_chunk=pulled.loss_chunk, mlp_tiles=pulled.mlp_tiles)


def next_levers(levers: Levers, ctx: TrainContext) -> Levers | None:
    """The next exact lever in order of cost; None when all are pulled."""
    rows = -(-min(ctx.stage.global_batch, len(ctx.examples)) // ctx.ranks.size)
    # an update inside backward needs all rows in one micro-batch
    if levers.update == "after" and (at_once := min(levers.micro_batch, rows)) > 1:
        return replace(levers, micro_batch=at_once // 2)
    return _next_model_lever(levers, ctx)


def _next_model_lever(levers: Levers, ctx: TrainContext) -> Levers | None:
    engine, num_layers = ctx.stage.engine, len(layers_of(ctx.model))
    if levers.recompute < num_layers:
        return replace(levers, recompute=num_layers)
    if ctx.compose is not None:  # nothing else is known to save memory in a custom model
        return None
    for chunk in _CHUNKS:
        if levers.loss_chunk is None or levers.loss_chunk > chunk:
            return replace(levers, loss_chunk=chunk)
    if levers.keep_attention:
        return replace(levers, keep_attention=False)
    if not levers.offload:
        return replace(levers, offload=True)
    if isinstance(engine, DeepSpeed) and engine.stage == 3:  # gathers weights per tile; short rows have fewer tiles
        return None
    return replace(levers, mlp_tiles=_TILES) if levers.mlp_tiles < _TILES else None


def _out_of_memory_on_rank(ctx: TrainContext, levers: Levers, oom: OutOfMemory) -> Resumable:
    step, rank = ctx.saver.last or 0, ctx.ranks.rank
    if (following := next_levers(levers, ctx)) is None:
        problem = f"rank {rank} is out of memory with every exact lever pulled: {oom.message}"
        return Resumable(problem, _suggestions(ctx))
    ctx.lever_changes.add(step, following)
    problem = f"rank {rank} is out of memory while others wait for it: {oom.message}"
    changes = _changes(levers, following)
    return Resumable(problem, f"give the same command again: it resumes from step {step} with {changes}")


def _suggestions(ctx: TrainContext) -> str:
    plan = RunDir(ctx.saver.where.run).plan
    forecast = read_record(plan, Plan).forecasts.get(ctx.stage.name) if is_there(plan) else None
    found = [
        f"--set {' --set '.join(s.changes)} saves {s.saves_bytes / 2**30:.2f} GiB ({s.price})"
        for s in (forecast.suggestions if forecast else ())
    ]
    return "; ".join(found) or (
        "close what else uses the card and give the same command again, or ask `finefit plan` for a smaller spec and "
        "start with --new"
    )


def _changes(before: Levers, after: Levers) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(after).items() if value != getattr(before, name))


class _OutOfMemoryElsewhere(Exception): ...


class _GuardedEngine:
    """The engine of one attempt: asks the other ranks before the first exchange, and knows whether weights may have
    changed."""

    def __init__(self, engine: Engine, ranks: Ranks, *, updates_inside: bool) -> None:
        self._engine, self._ranks, self._updates_inside = engine, ranks, updates_inside
        self.gradients, self.grad_norm, self.clip = engine.gradients, engine.grad_norm, engine.clip
        self.has_agreed = self.partially_updated = False

    def _agree(self) -> None:
        """Asks the other ranks once: a rank that runs out before the first exchange answers the same question in
        `attempt`."""
        if self._ranks.size > 1 and not self.has_agreed:
            self.has_agreed = True
            if self._ranks.any(False):
                raise _OutOfMemoryElsewhere

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.partially_updated = self._updates_inside
        if not is_last or self._ranks.size == 1:
            self._engine.backward(loss, is_last=is_last)
            return
        self._engine.backward(loss, is_last=False)
        self._agree()
        nothing = torch.zeros((), device=loss.device, requires_grad=True)
        self._engine.backward(nothing, is_last=True)  # only the exchange is left

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.partially_updated = True
        self._engine.update(optimizer)

    def sum(self, value: Tensor) -> Tensor:
        self._agree()
        return self._engine.sum(value)


def holds_worst_batch(ctx: TrainContext, levers: Levers, batches: Sequence[Batch]) -> bool:
    """Whether a step of these micro-batches needs as much memory as the worst batch, so that it can be measured
    instead."""
    return Counter(map(_size, _worst_batches(ctx, levers))) <= Counter(map(_size, batches))


def _worst_batches(ctx: TrainContext, levers: Levers) -> list[Batch]:
    """Two batches if gradients accumulate, because the second is computed beside the gradients of the first."""
    rows = min(2 * levers.micro_batch, ctx.stage.global_batch, len(ctx.examples))
    worst, capacity = [largest_row(ctx.examples)] * rows, capacity_under(ctx, levers)
    return cut_batches(ctx, worst, range(rows), "measure", micro_batch=levers.micro_batch, capacity=capacity)


def _size(batch: Batch) -> tuple[tuple[int, ...], int, int, int]:
    extra = 0 if batch.extra is None else sum(tensor.nbytes for tensor in batch.extra.tensors.values())
    return tuple(batch.input_ids_BT.shape), max(batch.lengths, default=0), batch.num_supervised, extra


def measure_worst_batch(ctx: TrainContext, levers: Levers) -> None:
    """Runs the largest possible batch once, when the optimizer's state exists, so that a card that is too small shows
    at step 1. Nothing is applied, and random numbers and buffers are restored. Skipped if backward itself updates."""
    if levers.update == "inside":
        return
    try:
        with left_as_found(ctx.model):
            optimizer_step(
                [on_device(batch, ctx.stage.device) for batch in _worst_batches(ctx, levers)],
                forward=ctx.forward,
                objective=ctx.objective,
                optimizer=ctx.optimizer,
                clip=None,
                decide=lambda _: False,
                engine=ctx.engine,
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # real rows need not be both the longest and the most supervised, so training continues
        ctx.metrics.write(event="worst_does_not_fit", step=1, predicted_bytes=ctx.stage.predicted_bytes_with(levers))
        ctx.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return
    record_measurement(ctx, levers, step=1)


def record_measurement(ctx: TrainContext, levers: Levers, *, step: int) -> None:
    """Called after the worst batch, in whichever step it came."""
    assert ctx.measured_card is not None
    memory = {"predicted_bytes": ctx.stage.predicted_bytes_with(levers), "measured_bytes": peak_bytes(ctx.stage.device)}
    found = Measurement(card=ctx.measured_card, **memory)
    keep_measurement(found)
    ctx.metrics.write(event="measured", step=step, **memory, error=round(found.error, 5))
