"""Takes one step after another, writes a line of metrics for each, and a checkpoint when due. `TrainState` is all that
changes."""

import math
import time
from dataclasses import replace
from functools import partial

from torch import Tensor

from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Best, LossScale, TrainState
from finefit.data.order import rows_of_step
from finefit.errors import Diverged, FinefitError, Interrupted
from finefit.spec import Period
from finefit.spec.schema import NanRollBack, NanSkip, NanStop
from finefit.step import optimize
from finefit.step.engine import Engine
from finefit.step.optimize import StepOutcome, learning_rate, optimizer_step
from finefit.step.state import random_state, restore_random
from finefit.train.batches import BatchLoader, StepBatches, StepShare, batch_maker, on_device, share_step
from finefit.train.candidates import take_fastest
from finefit.train.context import TrainContext
from finefit.train.oom_recovery import (
    OutOfMemory,
    attempt,
    holds_worst_batch,
    measure_worst_batch,
    record_measurement,
    recover,
    validate_with_recovery,
)
from finefit.train.reference import require_dpo_start
from finefit.train.saver import agreed_checkpoint
from finefit.train.validation import LOSS


def train(ctx: TrainContext, state: TrainState) -> TrainState:
    stage = ctx.stage
    if state.step == 0:
        require_dpo_start(ctx)
        take_fastest(ctx, state)
    with BatchLoader(batch_maker(ctx, state.levers), total_steps=stage.total_steps) as loader:
        saved = validated = time.monotonic()
        awaited: Levers | None = None
        while state.step < stage.total_steps:
            if (reason := ctx.stop.agreed(ctx.ranks)) is not None:
                _save(ctx, state)
                steps = f"step {state.step} of {stage.total_steps}"
                raise Interrupted(f"stopped by {reason} after {steps}; the checkpoint is written")
            done, state = state.step, _one_step(ctx, state, loader)
            if state.step <= done:  # the same rows again, or an earlier step: nothing is due
                continue
            if ctx.measured_card is not None:
                awaited = _measured(ctx, state, loader, awaited)
            asked = ctx.requests.taken(ctx.ranks, step=state.step)
            is_last = state.step == stage.total_steps
            save = is_last or "save" in asked or _due(ctx, stage.save.every, state.step, saved)
            every = stage.validate_every
            validate = "validate" in asked or (every is not None and _due(ctx, every, state.step, validated))
            if ctx.validation and (save or validate):
                state = _validated(ctx, state, saving=save)
                validated = time.monotonic()
            if save:
                _save(ctx, state)
                saved = time.monotonic()
    ctx.saver.save(state)  # after a kill behind the last step only the names of checkpoints are missing
    return state


def _measured(ctx: TrainContext, state: TrainState, loader: BatchLoader, awaited: Levers | None) -> Levers | None:
    """Measures the worst batch once, and returns the levers under which a later step will be that measurement: the
    first step had no optimizer state yet. If it was as large as any and another follows, all else is known to fit, so
    the worst batch is not computed for the measurement alone."""
    if state.step == 1:
        has_next = state.step < ctx.stage.total_steps
        if has_next and any(holds_worst_batch(ctx, state.levers, found) for found in (loader.taken, loader.ahead())):
            return state.levers
        measure_worst_batch(ctx, state.levers)
    elif state.levers == awaited:
        if not holds_worst_batch(ctx, awaited, loader.taken):
            return awaited
        record_measurement(ctx, awaited, step=state.step)
    return None


def _save(ctx: TrainContext, state: TrainState) -> None:
    ctx.note_memory("save", state.step)
    ctx.metrics.sync()  # first: a checkpoint never outlives the lines of its steps
    checkpoint = ctx.saver.save(state)
    ctx.metrics.write(event="saved", step=state.step, checkpoint=checkpoint.name)
    ctx.watchdog.beat(f"the save of step {state.step}")


def _one_step(ctx: TrainContext, state: TrainState, loader: BatchLoader) -> TrainState:
    stage = ctx.stage
    if state.step in state.skipped_steps:
        ctx.metrics.write(event="left_out", step=state.step + 1)
        return replace(state, step=state.step + 1)
    if (levers := ctx.lever_changes.at(state)) != state.levers:
        # what an earlier process changed is changed again, at the same step
        ctx.forward.change(levers)
        loader.change(batch_maker(ctx, levers))
        state = replace(state, levers=levers)
    began = time.perf_counter()
    order = rows_of_step(state.step, num_rows=len(ctx.examples), global_batch=stage.global_batch, seed=stage.seed)
    peak, total, warmup = stage.optimizer.lr, stage.total_steps, stage.warmup_steps
    rate = learning_rate(state.step, peak=peak, kind=stage.schedule, total_steps=total, warmup_steps=warmup)
    for group in ctx.optimizer.param_groups:
        group["lr"] = rate
    random_before = random_state()
    loaded, wait_seconds = loader.take(state.step)
    batches = share_step(ctx, loaded)
    if batches.whole.rows != len(order):  # a row that is lost or repeated on its way would show nowhere else
        raise FinefitError(f"step {state.step + 1} has {batches.whole.rows} rows where its order has {len(order)}")
    outcome, loss_scale = _scaled_step(ctx, state, batches)
    if isinstance(outcome, OutOfMemory):  # the same rows again, with the next levers
        restore_random(random_before)
        state = recover(ctx, state, outcome)
        loader.change(batch_maker(ctx, state.levers))
        return state
    state = replace(state, loss_scale=loss_scale)
    if not outcome.applied:
        return _not_finite(ctx, state, outcome, random_before)
    seconds = time.perf_counter() - began
    return _applied(ctx, state, batches.whole, outcome, wait_seconds=wait_seconds, rate=rate, seconds=seconds)


def _scaled_step(
    ctx: TrainContext, state: TrainState, batches: StepBatches
) -> tuple[StepOutcome | OutOfMemory, LossScale | None]:
    """Repeats the step at half the loss scale, with the same random numbers, as long as the gradient overflows, the
    loss is finite and the scale can be lowered."""
    scale = state.loss_scale

    def step(engine: Engine) -> StepOutcome:
        own, idle = ([on_device(batch, ctx.stage.device) for batch in part] for part in (batches.own, batches.idle))
        if state.levers.update == "inside":
            ctx.audit.hear()
        ctx.clock.begin()
        outcome = optimizer_step(
            own,
            forward=ctx.forward,
            objective=ctx.audit.watched(ctx.objective),
            optimizer=ctx.optimizer,
            clip=ctx.stage.optimizer.clip,
            decide=partial(ctx.audit.decide, state.step + 1, lambda: ctx.objective(ctx.forward, (own or idle)[0])),
            count=batches.whole.count,
            engine=engine,
            loss_scale=1.0 if scale is None else scale.scale,
            idle=idle,
            update=state.levers.update,
            mark=ctx.clock.mark,
        )
        ctx.clock.mark("end")
        return outcome

    while True:
        random_before = random_state()
        outcome = attempt(step, ctx, state.levers)
        if isinstance(outcome, OutOfMemory):
            return outcome, scale
        if scale is None or outcome.applied:
            return outcome, scale and optimize.scale_after_good_step(scale)
        if not (optimize.can_lower_scale(scale) and math.isfinite(outcome.loss.item())):
            return outcome, state.loss_scale  # caused by the rows: the scale stays
        scale = optimize.scale_after_overflow(scale)
        ctx.metrics.write(event="loss_scale", step=state.step + 1, scale=scale.scale)
        restore_random(random_before)


def _applied(
    ctx: TrainContext,
    state: TrainState,
    whole: StepShare,
    outcome: StepOutcome,
    *,
    wait_seconds: float,
    rate: float,
    seconds: float,
) -> TrainState:
    step, loss = state.step + 1, outcome.loss.item()
    ctx.metrics.write(
        step=step,
        epoch=round(step / ctx.stage.steps_per_epoch, 4),
        loss=loss,
        learning_rate=rate,
        grad_norm=outcome.grad_norm.item(),
        **{name: value.item() for name, value in outcome.measures.items()},
        tokens=whole.tokens,
        supervised_tokens=whole.supervised,
        rows=whole.rows,
        seconds=round(seconds, 4),
        wait_seconds=round(wait_seconds, 4),
        **ctx.clock.taken(),
        tokens_per_second=round(whole.tokens / seconds, 1),
        **ctx.usage.taken(),
        time=round(time.time(), 3),
        batch=whole.digest,
    )
    if (usual := ctx.spikes.see(loss)) is not None:
        ctx.metrics.write(event="spike", step=step, found=loss, usual=usual)
    ctx.note_memory("step", step)
    ctx.watchdog.beat(f"step {step}", step_seconds=seconds)
    tokens, supervised_tokens = state.tokens + whole.tokens, state.supervised_tokens + whole.supervised
    return replace(state, step=step, tokens=tokens, supervised_tokens=supervised_tokens)


def _not_finite(
    ctx: TrainContext, state: TrainState, outcome: StepOutcome, random_before: dict[str, Tensor]
) -> TrainState:
    """The update was not applied, so the weights are unchanged. The curve gets a gap instead of a number."""
    step, skipped = state.step + 1, (*state.skipped_steps, state.step)
    found = f"loss {outcome.loss.item()}, gradient norm {outcome.grad_norm.item()}"
    ctx.metrics.write(event="not_finite", step=step, found=found)
    if state.levers.update == "inside":
        why = "Tensors may have been updated inside backward before that was known, so nothing is saved"
        remedy = "start again with --new --set levers.update=after, or with a lower optimizer.lr"
        raise Diverged(f"step {step} is not finite: {found}. {why}", remedy)
    match ctx.stage.on_nan:
        case NanSkip(at_most=limit) if len(state.skipped_steps) < limit:
            return replace(state, step=step, skipped_steps=skipped)
        case NanRollBack(at_most=limit) if state.roll_backs < limit:
            roll_backs = state.roll_backs + 1
            checkpoint, _ = agreed_checkpoint(ctx.saver.where, ctx.stage, ctx.ranks)
            if checkpoint is None:  # nothing to return to, and the weights are whole: the step is left out
                return replace(state, step=step, skipped_steps=skipped, roll_backs=roll_backs)
            earlier = ctx.saver.restore(checkpoint)
            ctx.metrics.write(event="rolled_back", step=earlier.step)
            if earlier.levers != state.levers:  # changes by OOM recovery since then are kept
                ctx.lever_changes.add(earlier.step, state.levers, writes=ctx.ranks.is_first)
            # of all skipped steps the checkpoint may not know the latest
            return replace(earlier, levers=state.levers, skipped_steps=skipped, roll_backs=roll_backs)
        case NanStop() | NanSkip() | NanRollBack():
            restore_random(random_before)  # the state before this step is saved
            _save(ctx, state)
            skip = "`--set on_nan.kind=skip` leaves such steps out, at most on_nan.at_most of them"
            problem = f"step {step} was not applied: {found}. The weights are those of step {state.step}, and are saved"
            raise Diverged(problem, f"look at the rows of this step or lower optimizer.lr; {skip}")


def _validated(ctx: TrainContext, state: TrainState, *, saving: bool) -> TrainState:
    """The best checkpoint is chosen among the saved steps whose validation loss is a number."""
    found = validate_with_recovery(ctx, state)
    ctx.watchdog.beat(f"the validation of step {state.step}")
    if found is None:
        return replace(state, validation_loss=None)
    loss = found[LOSS]
    if not math.isfinite(loss):
        ctx.metrics.write(event="validation_not_finite", step=state.step, found=str(loss))
        return replace(state, validation_loss=None)
    ctx.metrics.write(event="validated", step=state.step, **found)
    is_best = saving and (state.best is None or loss < state.best.validation_loss)
    best = Best(step=state.step, validation_loss=loss) if is_best else state.best
    return replace(state, validation_loss=loss, best=best)


def _due(ctx: TrainContext, every: Period, step: int, last: float) -> bool:
    match every.unit:
        case "steps":
            return step % every.count == 0
        case "epoch":
            return step % ctx.stage.steps_per_epoch == 0
        case "minutes":
            return ctx.ranks.any(time.monotonic() - last >= 60 * every.count)  # every rank has a clock of its own
