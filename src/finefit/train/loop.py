"""The loop: one step after another, a line for each, a checkpoint when one is due. `TrainState` is all that moves from step to step."""

import math
import time
from dataclasses import replace
from functools import partial

from torch import Tensor

from finefit.artifacts.records import Levers
from finefit.artifacts.trainings import Best, LossScale, TrainState
from finefit.data.order import rows_of_step
from finefit.errors import Diverged, Interrupted
from finefit.spec.every import Interval
from finefit.spec.schema import NanRollBack, NanSkip, NanStop
from finefit.step import scaling
from finefit.step.engine import Engine
from finefit.step.optimize import StepOutcome, optimizer_step
from finefit.step.schedule import learning_rate
from finefit.step.state import random_state, restore_random
from finefit.train.batches import Dealt, Share, dealt, maker, on_device, require_all_rows
from finefit.train.feed import Feeder
from finefit.train.live import Live
from finefit.train.measure import measure
from finefit.train.rescue import Shortage, attempt, corrected, validate_rescued
from finefit.train.saver import agreed_checkpoint
from finefit.train.start import require_start
from finefit.train.validation import LOSS


def train(live: Live, state: TrainState) -> TrainState:
    if state.step == 0:
        require_start(live)
    with Feeder(maker(live, state.levers), total_steps=live.stage.total_steps) as feeder:
        state = _steps(live, state, feeder)
    live.saver.save(state)  # a run that was killed after its last step has only its names to set
    return state


def _steps(live: Live, state: TrainState, feeder: Feeder) -> TrainState:
    saved = validated = time.monotonic()
    while state.step < live.stage.total_steps:
        if (reason := live.stop.agreed(live.ranks)) is not None:
            _saved(live, state)
            raise Interrupted(
                f"stopped by {reason} after step {state.step} of {live.stage.total_steps}; the checkpoint is written"
            )
        done, state = state.step, _one_step(live, state, feeder)
        if state.step <= done:  # the same rows again, or a return to an earlier step: nothing is due
            continue
        if state.step == 1 and live.stage.device == "cuda":
            measure(live, state.levers)
        save = state.step == live.stage.total_steps or _due(live, live.stage.save.every, state.step, saved)
        every = live.stage.validate_every
        if live.validation and (save or (every is not None and _due(live, every, state.step, validated))):
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
    live.watchdog.beat(f"the save of step {state.step}")


def _one_step(live: Live, state: TrainState, feeder: Feeder) -> TrainState:
    if state.step in state.skipped_steps:
        live.metrics.write(event="left_out", step=state.step + 1)
        return replace(state, step=state.step + 1)
    state = _under(live, state, live.corrections.at(state), feeder)
    began = time.perf_counter()
    num_rows = len(
        rows_of_step(
            state.step, num_rows=len(live.examples), global_batch=live.stage.global_batch, seed=live.stage.seed
        )
    )
    rate = _set_learning_rate(live, state.step)
    random_before = random_state()
    fed = feeder.take(state.step)
    hand = dealt(live, fed.batches)
    require_all_rows(state.step, hand.whole, num_rows)
    outcome, loss_scale = _scaled_step(live, state, hand)
    if isinstance(outcome, Shortage):
        restore_random(random_before)
        return _rescued(live, state, outcome, feeder)
    state = replace(state, loss_scale=loss_scale)
    if not outcome.applied:
        return _not_finite(live, state, outcome, random_before)
    return _applied(
        live, state, hand.whole, outcome, wait_seconds=fed.wait_seconds, rate=rate, seconds=time.perf_counter() - began
    )


def _scaled_step(live: Live, state: TrainState, hand: Dealt) -> tuple[StepOutcome | Shortage, LossScale | None]:
    """In fp16 a gradient that overflows is the scale's doing as long as the loss itself is finite and the scale can fall: the same step is made again
    at half of it, with the same random numbers."""
    scale = state.loss_scale
    while True:
        random_before = random_state()
        outcome = attempt(partial(_step, live, state, hand, 1.0 if scale is None else scale.scale), live, state.levers)
        if isinstance(outcome, Shortage):
            return outcome, scale
        if scale is None or outcome.applied:
            return outcome, scale and scaling.after_good_step(scale)
        if not (scaling.can_fall(scale) and math.isfinite(outcome.loss.item())):
            return outcome, state.loss_scale  # the rows' doing: the scale stays as it was
        scale = scaling.after_overflow(scale)
        live.metrics.write(event="loss_scale", step=state.step + 1, scale=scale.scale)
        restore_random(random_before)


def _step(live: Live, state: TrainState, hand: Dealt, loss_scale: float, engine: Engine) -> StepOutcome:
    there, idle = ([on_device(batch, live.stage.device) for batch in batches] for batches in (hand.own, hand.idle))
    if state.levers.update == "inside":
        live.audit.hear()
    return optimizer_step(
        there,
        forward=live.forward,
        objective=live.audit.watched(live.objective),
        optimizer=live.optimizer,
        clip=live.stage.optimizer.clip,
        decide=partial(live.audit.decide, state.step + 1, lambda: live.objective(live.forward, (there or idle)[0])),
        count=hand.whole.count,
        engine=engine,
        loss_scale=loss_scale,
        idle=idle,
        update=state.levers.update,
    )


def _applied(
    live: Live,
    state: TrainState,
    whole: Share,
    outcome: StepOutcome,
    *,
    wait_seconds: float,
    rate: float,
    seconds: float,
) -> TrainState:
    step, loss = state.step + 1, outcome.loss.item()
    live.metrics.write(
        step=step,
        epoch=round(step / live.stage.steps_per_epoch, 4),
        loss=loss,
        learning_rate=rate,
        grad_norm=outcome.grad_norm.item(),
        **{name: value.item() for name, value in outcome.measures.items()},
        tokens=whole.tokens,
        supervised_tokens=whole.supervised,
        rows=whole.rows,
        seconds=round(seconds, 4),
        wait_seconds=round(wait_seconds, 4),
        tokens_per_second=round(whole.tokens / seconds, 1),
        **live.usage.taken(),
        time=round(time.time(), 3),
        batch=whole.digest,
    )
    if spike := live.spikes.see(loss):
        live.metrics.write(event="spike", step=step, found=spike.loss, usual=spike.usual)
    live.note_memory("step", step)
    live.watchdog.beat(f"step {step}", step_seconds=seconds)
    return replace(
        state,
        step=step,
        tokens=state.tokens + whole.tokens,
        supervised_tokens=state.supervised_tokens + whole.supervised,
    )


def _under(live: Live, state: TrainState, levers: Levers, feeder: Feeder) -> TrainState:
    """What an earlier process has corrected is corrected again, at the same step."""
    if levers == state.levers:
        return state
    live.forward.change(levers)
    feeder.change(maker(live, levers))
    return replace(state, levers=levers)


def _rescued(live: Live, state: TrainState, shortage: Shortage, feeder: Feeder) -> TrainState:
    """The same rows are taken again, from the next levers."""
    state = corrected(live, state, shortage)
    feeder.change(maker(live, state.levers))
    return state


def _set_learning_rate(live: Live, step: int) -> float:
    stage = live.stage
    rate = learning_rate(
        step,
        peak=stage.optimizer.lr,
        kind=stage.schedule,
        total_steps=stage.total_steps,
        warmup_steps=stage.warmup_steps,
    )
    for group in live.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _not_finite(live: Live, state: TrainState, outcome: StepOutcome, random_before: dict[str, Tensor]) -> TrainState:
    """The update was not applied, so the weights are as they were. The curve gets a gap, never a number."""
    step = state.step + 1
    found = f"loss {outcome.loss.item()}, gradient norm {outcome.grad_norm.item()}"
    live.metrics.write(event="not_finite", step=step, found=found)
    if state.levers.update == "inside":
        raise Diverged(
            f"step {step} is not finite: {found}. Inside backward tensors may have been updated before that was seen, so nothing is saved of it",
            "start again with --new --set levers.update=after, or with a lower optimizer.lr",
        )
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
    checkpoint, _ = agreed_checkpoint(live.saver.where, live.stage, live.ranks)
    if checkpoint is None:  # nothing to return to, and nothing was damaged: the step is left out
        return replace(state, step=state.step + 1, skipped_steps=skipped, roll_backs=state.roll_backs + 1)
    earlier = live.saver.restore(checkpoint)
    live.metrics.write(event="rolled_back", step=earlier.step)
    if earlier.levers != state.levers:  # what a rescue corrected since then stays corrected
        live.corrections.add(earlier.step, state.levers, writes=live.ranks.is_first)
    return replace(earlier, levers=state.levers, skipped_steps=skipped, roll_backs=state.roll_backs + 1)


def _validated(live: Live, state: TrainState, *, saving: bool) -> TrainState:
    """The best is chosen among the steps that are saved and whose loss is a number."""
    found = validate_rescued(live, state)
    live.watchdog.beat(f"the validation of step {state.step}")
    if found is None:
        return replace(state, validation_loss=None)
    loss = found[LOSS]
    if not math.isfinite(loss):
        live.metrics.write(event="validation_not_finite", step=state.step, found=str(loss))
        return replace(state, validation_loss=None)
    live.metrics.write(event="validated", step=state.step, **found)
    if saving and (state.best is None or loss < state.best.validation_loss):
        return replace(state, validation_loss=loss, best=Best(step=state.step, validation_loss=loss))
    return replace(state, validation_loss=loss)


def _due(live: Live, every: Interval, step: int, last: float) -> bool:
    match every.unit:
        case "steps":
            return step % every.count == 0
        case "epoch":
            return step % live.stage.steps_per_epoch == 0
        case "minutes":
            return live.ranks.any(time.monotonic() - last >= 60 * every.count)  # every rank has a clock of its own
