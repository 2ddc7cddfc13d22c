"""Candidates are timed before the first step, on a CPU as on a card; the training that follows is as if they had not
been."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.cache import host_here
from finefit.artifacts.forecasts import LeverCandidate
from finefit.artifacts.records import Levers, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage, StageResult, TrainState
from finefit.train import candidates, worker
from finefit.train.batches import BatchLoader
from tests.faults import (
    TRAINING,
    Job,
    Outcome,
    at_step,
    change_model,
    events,
    finish,
    make_job,
    nothing,
    outcome,
    send_self,
    start,
    words,
)
from tests.train.test_oom_recovery import from_step, in_training, run_out

SHORT = re.sub(r"epochs: \d+", "epochs: 2", TRAINING)
LATE_SECONDS = 0.02
PLANNED, OTHER = Levers(micro_batch=1, recompute=2), Levers(micro_batch=4)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("candidates"), spec=SHORT)


def planned(job: Job, *levers: Levers, step_seconds: float = 1.0) -> StageDir:
    """A fresh run whose plan names these candidates, the chosen one first."""
    where = job.fresh()
    named = tuple(
        LeverCandidate(levers=one, predicted_bytes=at, step_seconds=step_seconds) for at, one in enumerate(levers)
    )
    stage = read_record(where.stage, Stage)
    write_record(where.stage, replace(stage, levers=levers[0], candidates=named if len(named) > 1 else ()))
    return where


def allow(slow: Levers | None = None) -> None:
    """From now on timing may take as long as the run, and levers may be made slow."""
    setattr(candidates, "MAX_SHARE", 100.0)  # noqa: B010
    really: Callable[..., float] = getattr(candidates, "_seconds")  # noqa: B009

    def seconds(ctx: Any, levers: Levers, rows: Any) -> float:
        found = really(ctx, levers, rows)
        return found + 100 if levers == slow else found

    setattr(candidates, "_seconds", seconds)  # noqa: B010


def run(where: StageDir, prepare: Callable[[], None] = allow) -> StageDir:
    assert finish(start(where, prepare)) == 0, words(where)
    return where


@pytest.fixture(scope="module")
def untimed(job: Job) -> dict[Levers, Outcome]:
    """How the run ends with each candidate if nothing is timed; dropout is on, so random numbers count."""
    return {levers: outcome(run(planned(job, levers))) for levers in (PLANNED, OTHER)}


@pytest.mark.parametrize(("slow", "taken"), [(PLANNED, OTHER), (OTHER, PLANNED)])
def test_the_fastest_is_taken_and_timing_leaves_no_trace(
    job: Job, untimed: dict[Levers, Outcome], slow: Levers, taken: Levers
) -> None:
    """Weights, losses and row order are those of a run that was given these levers, bit for bit."""
    where = run(planned(job, PLANNED, OTHER), partial(allow, slow))
    (told,) = events(where, "levers_timed")
    assert (told["before"], told["after"]) == (asdict(PLANNED), asdict(taken))
    assert [one["levers"] for one in told["candidates"]] == [asdict(PLANNED), asdict(OTHER)]
    assert all(0 < one["seconds"] <= told["seconds"] + 100 for one in told["candidates"])
    assert outcome(where) == untimed[taken]
    final = read_record(where.checkpoints / "final" / "finefit_state.json", TrainState)
    assert final.levers == taken
    assert read_record(where.result, StageResult).predicted_bytes == (0 if taken == PLANNED else 1)


@pytest.mark.parametrize("killed_at", [2, 5], ids=["before a checkpoint", "after a checkpoint"])
def test_a_run_that_goes_on_keeps_its_levers_and_is_not_timed_again(
    job: Job, untimed: dict[Levers, Outcome], killed_at: int
) -> None:
    """The other candidate would be the fastest the second time."""
    where = planned(job, PLANNED, OTHER)

    def prepare() -> None:
        allow(slow=PLANNED)
        at_step(killed_at, lambda: send_self(signal.SIGKILL))

    assert finish(start(where, prepare)) == -signal.SIGKILL
    run(where, partial(allow, OTHER))
    assert len(events(where, "levers_timed")) == 1
    assert outcome(where) == untimed[OTHER]


def test_what_would_take_more_than_its_share_of_the_run_is_not_timed(job: Job, untimed: dict[Levers, Outcome]) -> None:
    where = run(planned(job, PLANNED, OTHER), lambda: None)
    assert events(where, "levers_timed") == []
    assert outcome(where) == untimed[PLANNED]


def test_a_candidate_that_does_not_fit_is_not_taken(job: Job, untimed: dict[Levers, Outcome]) -> None:
    def prepare() -> None:
        setattr(candidates, "MAX_SHARE", 100.0)  # noqa: B010
        run_out(in_training(rows=2))

    where = run(planned(job, PLANNED, OTHER), prepare)
    (told,) = events(where, "levers_timed")
    assert [one["seconds"] is None for one in told["candidates"]] == [False, True]
    assert outcome(where) == untimed[PLANNED]


def count_passes(model: Any) -> None:
    """A buffer that every pass in training changes, as the running mean of a norm in a user's own model."""
    passes = torch.zeros((), dtype=torch.long)
    model.register_buffer("passes", passes, persistent=False)

    def count(model: Any, *_: Any) -> None:
        passes.add_(int(model.training))

    model.register_forward_pre_hook(count)


def test_passes_that_belong_to_no_step_leave_no_trace_in_buffers(job: Job) -> None:
    """Neither the timed ones nor, after the first step, that of the worst batch."""
    where = planned(job, PLANNED, OTHER)
    seen = where.run / "seen"

    def prepare() -> None:
        allow(slow=PLANNED)
        os.environ["XDG_CACHE_HOME"] = str(where.run / "cache")
        setattr(worker, "measured_card", lambda *_, **__: "a card of tests")  # noqa: B010
        models: list[Any] = []

        def changed(model: Any) -> None:
            models.append(model.get_input_embeddings())
            count_passes(models[0])

        def note() -> None:
            seen.write_text(f"{seen.read_text() if seen.exists() else ''}{int(models[0].passes)} ")

        change_model(changed)
        at_step(1, note)
        at_step(2, note)

    run(where, prepare)
    assert len(events(where, "levers_timed")) == len(events(where, "measured")) == 1
    assert seen.read_text().split() == ["0", "1"]


def test_a_deterministic_run_does_not_ask_the_clock(job: Job, untimed: dict[Levers, Outcome]) -> None:
    where = planned(job, PLANNED, OTHER)
    write_record(where.stage, replace(read_record(where.stage, Stage), deterministic=True))
    run(where, partial(allow, PLANNED))
    assert events(where, "levers_timed") == []
    assert outcome(where) == untimed[PLANNED]


def _on_a_card(where: StageDir, then: Callable[[], None] = nothing) -> Callable[[], None]:
    """The second candidate is taken on what counts as a card, and every step waits for its rows."""

    def prepare() -> None:
        allow(slow=read_record(where.stage, Stage).levers)
        os.environ["XDG_CACHE_HOME"] = str(where.run / "cache")
        setattr(worker, "measured_card", lambda *_, **__: "a card of tests")  # noqa: B010
        really: Callable[..., Any] = BatchLoader.take

        def late(loader: BatchLoader, step: int) -> tuple[Any, float]:
            batches, waited = really(loader, step)
            time.sleep(LATE_SECONDS)
            return batches, waited + LATE_SECONDS

        setattr(BatchLoader, "take", late)  # noqa: B010
        then()

    return prepare


def _kept(where: StageDir) -> list[dict[str, Any]]:
    lines = read_lines(where.run / "cache" / "finefit" / "measurements.jsonl")
    return [line for line in lines if "predicted_seconds" in line]


@pytest.mark.parametrize("changes_at", [None, 4], ids=["the same levers", "smaller levers from step 4 on"])
def test_what_steps_took_is_kept_for_later_plans(job: Job, changes_at: int | None) -> None:
    """Beside the prediction of the levers that were taken, in the run and in the user's cache, without waiting."""
    where = planned(job, Levers(micro_batch=2), OTHER, step_seconds=2.0)

    def fall_back() -> None:
        if changes_at is not None:
            run_out(from_step(changes_at, in_training(rows=2)))

    run(where, _on_a_card(where, fall_back))
    (told,) = events(where, "step_time")
    steps = [line for line in read_steps(where.metrics) if changes_at is None or line["step"] >= changes_at][2:]
    taken = median(line["seconds"] - line["wait_seconds"] for line in steps)
    seconds = {"predicted_seconds": 2.0, "measured_seconds": taken}
    assert seconds.items() <= told.items()
    assert taken <= median(line["seconds"] for line in steps) - LATE_SECONDS + 1e-3
    kept = _kept(where)
    assert [line | seconds | {"host": host_here()} for line in kept] == kept != []


def test_a_resumed_run_keeps_no_time_for_later_plans(job: Job) -> None:
    """It may have begun on another card, for which its times were predicted."""
    where = planned(job, PLANNED, OTHER)
    kill = partial(at_step, 5, partial(send_self, signal.SIGKILL))
    assert finish(start(where, _on_a_card(where, kill))) == -signal.SIGKILL
    run(where, _on_a_card(where))
    assert (events(where, "step_time"), _kept(where)) == ([], [])
