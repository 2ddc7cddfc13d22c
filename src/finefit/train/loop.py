"""The loop: one step after another, a line for each, a checkpoint when one is due. `TrainState` is all that moves from step to step."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from finefit.artifacts.journal import Journal
from finefit.artifacts.measurements import Measurement, keep_measurement
from finefit.artifacts.records import Best, Stage, TrainState
from finefit.data.collate import lengths_of, micro_batches, supervised_counts_of
from finefit.data.order import rows_of_rank, rows_of_step
from finefit.data.packing import Capacity, capacity_of
from finefit.data.render import Example
from finefit.errors import Diverged, FinefitError, Interrupted
from finefit.facts.cards import find_kind
from finefit.objective.batch import Batch, Forward, Objective
from finefit.spec.every import Interval
from finefit.spec.schema import NanRollBack, NanSkip, NanStop
from finefit.step.engine import Engine
from finefit.step.optimize import StepOutcome, optimizer_step
from finefit.step.schedule import learning_rate
from finefit.step.state import random_state, restore_random
from finefit.train.feed import Feeder
from finefit.train.ranks import Ranks
from finefit.train.saver import Saver, find_checkpoint
from finefit.train.stopping import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a worker holds while it trains."""

    stage: Stage
    model: nn.Module
    forward: Forward
    objective: Objective
    engine: Engine
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    examples: Sequence[Example]
    validation: Sequence[Example]
    pad: int
    saver: Saver
    metrics: Journal
    stop: StopRequest
    note_memory: Callable[[str, int], None]


def train(live: Live, state: TrainState) -> TrainState:
    micro_batch = state.levers.micro_batch
    with Feeder(partial(_batches, live, micro_batch, _capacity(live, micro_batch)), total_steps=live.stage.total_steps) as feeder:
        state = _steps(live, state, feeder)
    live.saver.save(state)  # a run that was killed after its last step has only its names to set
    return state


def _steps(live: Live, state: TrainState, feeder: Feeder) -> TrainState:
    saved = validated = time.monotonic()
    while state.step < live.stage.total_steps:
        if live.stop.reason is not None:
            _saved(live, state)
            raise Interrupted(f"stopped by {live.stop.reason} after step {state.step} of {live.stage.total_steps}; the checkpoint is written")
        state = _one_step(live, state, feeder)
        if state.step == 1 and live.stage.device == "cuda":
            _measure(live)
        save = state.step == live.stage.total_steps or _due(live.stage.save.every, state.step, live.stage, saved)
        every = live.stage.validate_every
        if live.validation and (save or (every is not None and _due(every, state.step, live.stage, validated))):
            state = _validated(live, state, saving=save)
            validated = time.monotonic()
        if save:
            _saved(live, state)
            saved = time.monotonic()
    return state


def _saved(live: Live, state: TrainState) -> None:
    live.note_memory("save", state.step)
    live.metrics.sync()  # first: a checkpoint never outlives the lines of its steps
    checkpoint = live.saver.save(state)
    live.metrics.write(event="saved", step=state.step, checkpoint=checkpoint.name)


def _one_step(live: Live, state: TrainState, feeder: Feeder) -> TrainState:
    if state.step in state.skipped_steps:
        live.metrics.write(event="left_out", step=state.step + 1)
        return replace(state, step=state.step + 1)
    began = time.perf_counter()
    num_rows = len(rows_of_step(state.step, num_rows=len(live.examples), global_batch=live.stage.global_batch, seed=live.stage.seed))
    fed = feeder.take(state.step)
    batches = fed.batches
    _require_all_rows(state.step, batches, num_rows)
    rate = _set_learning_rate(live, state.step)
    random_before = random_state()
    outcome = optimizer_step(
        [_on_device(batch, live.stage.device) for batch in batches],
        forward=live.forward,
        objective=live.objective,
        optimizer=live.optimizer,
        clip=live.stage.optimizer.clip,
        decide=bool,
        engine=live.engine,
    )
    if not outcome.applied:
        return _not_finite(live, state, outcome, random_before)
    tokens, supervised = sum(b.num_tokens for b in batches), sum(b.num_supervised for b in batches)
    seconds = time.perf_counter() - began
    live.metrics.write(
        step=state.step + 1,
        epoch=round((state.step + 1) / live.stage.steps_per_epoch, 4),
        loss=outcome.loss.item(),
        learning_rate=rate,
        grad_norm=outcome.grad_norm.item(),
        tokens=tokens,
        supervised_tokens=supervised,
        rows=num_rows,
        seconds=round(seconds, 4),
        wait_seconds=round(fed.wait_seconds, 4),
        time=round(time.time(), 3),
        batch=_digest(batches),
    )
    live.note_memory("step", state.step + 1)
    return replace(state, step=state.step + 1, tokens=state.tokens + tokens, supervised_tokens=state.supervised_tokens + supervised)


def _measure(live: Live) -> None:
    """The worst batch that there can be, once, when the optimizer's state is there: what the card must hold is then known, at step 1 and not in the
    night. Nothing is applied, and the random numbers go on as if it had not happened."""
    micro_batch = live.stage.levers.micro_batch
    rows = min(2 * micro_batch, live.stage.global_batch, len(live.examples))
    batches = micro_batches([_worst(live.examples)] * rows, micro_batch=micro_batch, pad=live.pad, capacity=_capacity(live, micro_batch))
    random_before = random_state()
    try:
        optimizer_step(
            [_on_device(batch, live.stage.device) for batch in batches],
            forward=live.forward,
            objective=live.objective,
            optimizer=live.optimizer,
            clip=None,
            decide=lambda _: False,
            engine=live.engine,
        )
    except torch.OutOfMemoryError:  # no row need be as long as the longest and as much supervised as any, so training may go on all the same
        live.metrics.write(event="worst_does_not_fit", step=1, foretold_bytes=live.stage.foretold_bytes)
        live.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return
    finally:
        restore_random(random_before)
    kind = find_kind(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    found = Measurement(
        card=kind.name if kind else torch.cuda.get_device_name(),
        foretold_bytes=live.stage.foretold_bytes,
        measured_bytes=torch.cuda.max_memory_reserved(),
    )
    keep_measurement(found)
    live.metrics.write(
        event="measured", step=1, foretold_bytes=found.foretold_bytes, measured_bytes=found.measured_bytes, error=round(found.error, 5)
    )


def _worst(examples: Sequence[Example]) -> Example:
    """As long as the longest, with as many supervised tokens as any: what the forecast is made for."""
    tokens = examples[int(lengths_of(examples).argmax())].tokens
    supervised = int(supervised_counts_of(examples).max())
    return Example(tokens=tokens, supervised=tuple(at >= len(tokens) - supervised for at in range(len(tokens))))


def _capacity(live: Live, micro_batch: int) -> Capacity | None:
    """Of a pack: what was rehearsed, and no more. None where rows are not packed."""
    if not live.stage.levers.packing:
        return None
    return capacity_of(
        micro_batch=micro_batch,
        longest=int(lengths_of(live.examples).max()),
        supervised=int(supervised_counts_of(live.examples).max()),
        rows_per_step=min(live.stage.global_batch, len(live.examples)),
    )


def _batches(live: Live, micro_batch: int, capacity: Capacity | None, step: int) -> list[Batch]:
    """Of this process, the only one yet, in memory that a card can copy from while it computes."""
    stage = live.stage
    rows = rows_of_rank(step, rank=0, num_ranks=1, num_rows=len(live.examples), global_batch=stage.global_batch, seed=stage.seed)
    batches = micro_batches([live.examples[row] for row in rows], micro_batch=micro_batch, pad=live.pad, capacity=capacity)
    return [batch.moved(Tensor.pin_memory) for batch in batches] if stage.device == "cuda" else batches


def _require_all_rows(step: int, batches: Sequence[Batch], num_rows: int) -> None:
    """What is trained on is counted: a row that is lost or seen twice between order and batch would show nowhere else."""
    if (found := sum(batch.num_rows for batch in batches)) != num_rows:
        raise FinefitError(f"step {step + 1} has {found} rows where its order has {num_rows}")


def _set_learning_rate(live: Live, step: int) -> float:
    stage = live.stage
    rate = learning_rate(step, peak=stage.optimizer.lr, kind=stage.schedule, total_steps=stage.total_steps, warmup_steps=stage.warmup_steps)
    for group in live.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _not_finite(live: Live, state: TrainState, outcome: StepOutcome, random_before: dict[str, Tensor]) -> TrainState:
    """The update was not applied, so the weights are as they were. The curve gets a gap, never a number."""
    step = state.step + 1
    found = f"loss {outcome.loss.item()}, gradient norm {outcome.grad_norm.item()}"
    live.metrics.write(event="not_finite", step=step, found=found)
    left_out = replace(state, skipped_steps=(*state.skipped_steps, state.step))
    match live.stage.on_nan:
        case NanSkip(at_most=limit) if len(state.skipped_steps) < limit:
            return replace(left_out, step=step)
        case NanRollBack(at_most=limit) if state.roll_backs < limit:
            return _rolled_back(live, state)
        case NanStop() | NanSkip() | NanRollBack():
            restore_random(random_before)  # what is saved is the state before this step, whole
            _saved(live, state)
            raise Diverged(
                f"step {step} was not applied: {found}. The weights are those of step {state.step}, and are saved",
                "look at the rows of this step or lower optimizer.lr; `--set on_nan.kind=skip` leaves such steps out, at most on_nan.at_most of them",
            )


def _rolled_back(live: Live, state: TrainState) -> TrainState:
    skipped = (*state.skipped_steps, state.step)  # those of earlier returns too, which the checkpoint may not know
    checkpoint, _ = find_checkpoint(live.saver.where, live.stage)
    if checkpoint is None:  # nothing to return to, and nothing was damaged: the step is left out
        return replace(state, step=state.step + 1, skipped_steps=skipped, roll_backs=state.roll_backs + 1)
    earlier = live.saver.restore(checkpoint)
    live.metrics.write(event="rolled_back", step=earlier.step)
    return replace(earlier, skipped_steps=skipped, roll_backs=state.roll_backs + 1)


def _validated(live: Live, state: TrainState, *, saving: bool) -> TrainState:
    """The best is chosen among the steps that are saved and whose loss is a number."""
    loss = validation_loss(live)
    if not math.isfinite(loss):
        live.metrics.write(event="validation_not_finite", step=state.step, found=str(loss))
        return replace(state, validation_loss=None)
    live.metrics.write(event="validated", step=state.step, validation_loss=loss)
    if saving and (state.best is None or loss < state.best.validation_loss):
        return replace(state, validation_loss=loss, best=Best(step=state.step, validation_loss=loss))
    return replace(state, validation_loss=loss)


def validation_loss(live: Live) -> float:
    """Mean over all supervised tokens of the validation rows, without dropout."""
    live.model.eval()
    with torch.no_grad():
        batches = micro_batches(live.validation, micro_batch=live.stage.levers.micro_batch, pad=live.pad)
        parts = [live.objective(live.forward, _on_device(batch, live.stage.device)) for batch in batches]
    live.model.train()
    return float(sum(part.total.item() for part in parts) / sum(part.count for part in parts))


def _due(every: Interval, step: int, stage: Stage, last: float) -> bool:
    match every.unit:
        case "steps":
            return step % every.count == 0
        case "epoch":
            return step % stage.steps_per_epoch == 0
        case "minutes":
            return time.monotonic() - last >= 60 * every.count


def _on_device(batch: Batch, device: str) -> Batch:
    return batch.moved(lambda tensor: tensor.to(device, non_blocking=True))


def _digest(batches: Sequence[Batch]) -> str:
    """Names what was trained on, so that two runs can be compared step by step."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.input_ids_BT.numpy().tobytes())
        digest.update(batch.positions_N.numpy().tobytes())
    return digest.hexdigest()[:16]
