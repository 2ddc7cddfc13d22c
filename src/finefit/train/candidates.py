"""Before the first step, times the best candidates of the plan on real rows and takes the fastest.

All of them are exact levers, so they give the same gradient. No update is applied, and random numbers and buffers are
restored, so the run that follows is the one that would have followed without timing. The choice is written as a change
of levers before step 1: a run that resumes, or starts again after a kill, keeps it."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from finefit.artifacts.atomic import read_steps
from finefit.artifacts.cache import StepTime, host_here, keep_step_time
from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import TrainState
from finefit.data.order import rows_of_step
from finefit.objective.batch import Batch
from finefit.step.engine import Engine
from finefit.step.optimize import optimizer_step
from finefit.step.state import left_as_found
from finefit.train.batches import capacity_under, cut_batches, on_device
from finefit.train.context import TrainContext
from finefit.train.oom_recovery import OutOfMemory, attempt

MAX_SHARE, MAX_SECONDS = 0.01, 60.0
"""Share of the planned run, and seconds, that timing may take."""
_PASSES = 3
"""Passes over the same rows: one warms up (kernels are compiled and tuned), the faster of the others counts."""
_WARM_UP_STEPS, _LEAST_STEPS = 2, 5
"""Steps that a run's median leaves out, and how many it needs beside them."""


def take_fastest(ctx: TrainContext, state: TrainState) -> None:
    """Does nothing in a run that has begun or has settled its levers before, where timing would take too long, and in a
    deterministic run, whose last bits no clock may decide."""
    if state.step or ctx.lever_changes.at_start or ctx.ranks.size > 1 or state.levers.update == "inside":
        return
    if ctx.stage.deterministic:
        return
    rows = _rows(ctx)
    allowed = _allowed_seconds(ctx, len(rows))
    if allowed is None:
        return
    began = time.perf_counter()
    with left_as_found(ctx.model):
        seconds = _timed(ctx, rows, allowed)
    ctx.forward.change(state.levers)
    if ctx.stage.device == "cuda":  # the peak of the run is that of its own levers
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    fastest = min(seconds, key=lambda levers: seconds[levers])
    if not math.isfinite(seconds[fastest]):  # none fits now, and the first step recovers
        fastest = state.levers
    took = round(time.perf_counter() - began, 3)
    before, after, told = asdict(state.levers), asdict(fastest), _described(ctx, seconds, len(rows))
    ctx.metrics.write(
        event="levers_timed", step=0, before=before, after=after, rows=len(rows), candidates=told, seconds=took
    )
    ctx.lever_changes.add(0, fastest)


def _timed(ctx: TrainContext, rows: Sequence[int], allowed: float) -> dict[Levers, float]:
    """Seconds by levers, of as many candidates as the time allows."""
    seconds: dict[Levers, float] = {}
    began = time.perf_counter()
    for one in ctx.stage.candidates:
        spent = time.perf_counter() - began
        if spent + spent / max(1, len(seconds)) <= allowed:
            seconds[one.levers] = _seconds(ctx, one.levers, rows)
    return seconds


def _described(ctx: TrainContext, seconds: dict[Levers, float], num_rows: int) -> list[dict[str, Any]]:
    """Prediction and measurement of the same rows; no measurement of a candidate that did not fit."""
    return [
        {
            "levers": asdict(one.levers),
            "predicted_seconds": round(one.step_seconds * _share(ctx, num_rows), 5),
            "seconds": round(seconds[one.levers], 5) if math.isfinite(seconds[one.levers]) else None,
        }
        for one in ctx.stage.candidates
        if one.levers in seconds
    ]


def record_step_time(ctx: TrainContext, state: TrainState) -> None:
    """Keeps what a step took beside its prediction, for later plans on this card and host: the steps under the last
    levers, without the time that they waited for rows. Not for a run with few of them, with levers that were never
    predicted, or one that was resumed: its plan and its first steps may be those of another machine."""
    predicted = [one.step_seconds for one in ctx.stage.candidates if one.levers == state.levers]
    if ctx.measured_card is None or ctx.saver.resumed_from is not None or not predicted:
        return
    lines = [line for line in read_steps(ctx.saver.where.metrics) if line["step"] > ctx.lever_changes.last_step]
    steps = [line["seconds"] - line["wait_seconds"] for line in lines[_WARM_UP_STEPS:]]
    if len(steps) < _LEAST_STEPS or median(steps) <= 0:
        return
    seconds = {"predicted_seconds": predicted[0], "measured_seconds": median(steps)}
    keep_step_time(StepTime(card=ctx.measured_card, host=host_here(), **seconds))
    ctx.metrics.write(event="step_time", step=state.step, **seconds)


def _rows(ctx: TrainContext) -> list[int]:
    """The first rows of the first step: as many as the largest micro-batch holds."""
    stage, examples = ctx.stage, ctx.examples
    order = rows_of_step(0, num_rows=len(examples), global_batch=stage.global_batch, seed=stage.seed)
    most = max((one.levers.micro_batch for one in stage.candidates), default=0)
    return order if stage.levers.packing else order[:most]


def _share(ctx: TrainContext, num_rows: int) -> float:
    return num_rows / min(ctx.stage.global_batch, len(ctx.examples))


def _allowed_seconds(ctx: TrainContext, num_rows: int) -> float | None:
    """The time that all passes together may take; None if two candidates are predicted to take longer."""
    found = ctx.stage.candidates
    if len(found) < 2 or any(one.levers.compile for one in found):  # compiling takes longer than it would save
        return None
    allowed = min(MAX_SECONDS, MAX_SHARE * found[0].step_seconds * ctx.stage.total_steps)
    needed = _PASSES * _share(ctx, num_rows) * (found[0].step_seconds + found[1].step_seconds)
    return allowed if needed <= allowed else None


def _seconds(ctx: TrainContext, levers: Levers, rows: Sequence[int]) -> float:
    """The time of forward and backward of these rows; infinite if they do not fit."""
    capacity = capacity_under(ctx, levers)
    batches = cut_batches(ctx, ctx.examples, rows, "candidates", micro_batch=levers.micro_batch, capacity=capacity)
    ctx.forward.change(levers)
    taken = [_pass_seconds(ctx, levers, batches) for _ in range(_PASSES)]
    return min(taken[1:]) if all(map(math.isfinite, taken)) else math.inf


def _pass_seconds(ctx: TrainContext, levers: Levers, batches: Sequence[Batch]) -> float:
    def run(engine: Engine) -> None:
        optimizer_step(
            [on_device(batch, ctx.stage.device) for batch in batches],
            forward=ctx.forward,
            objective=ctx.objective,
            optimizer=ctx.optimizer,
            clip=None,
            decide=lambda _: False,
            engine=engine,
        )
        if ctx.stage.device == "cuda":
            torch.cuda.synchronize()

    began = time.perf_counter()
    found = attempt(run, ctx, levers)
    return math.inf if isinstance(found, OutOfMemory) else time.perf_counter() - began
