"""F10: a loss or a gradient that is not finite is never applied. The curve shows a gap, never 0.0."""

import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_steps
from finefit.artifacts.checkpoint import list_checkpoints, problems
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import LossScale, StageResult, TrainState
from finefit.objective.batch import Batch, Forward, LossSum
from finefit.objective.losses import sft_loss
from finefit.train import worker
from tests.conftest import Bent
from tests.faults import (
    TRAINING,
    Job,
    Outcome,
    Reference,
    at_step,
    digests,
    events,
    failure_of,
    finish,
    make_job,
    outcome,
    run_to_end,
    send_self,
    start,
    words,
)

DIVERGED = 1
POISONS = ("nan loss", "inf loss", "inf gradient")


def poison(steps: dict[int, str], *, times: int = 1) -> None:
    """The first backwards of these steps, counted from 1, are not finite whenever this process makes them."""
    at: list[str] = []
    for step, kind in steps.items():
        at_step(step, partial(at.extend, [kind] * times))

    def poisoned(forward: Forward, batch: Batch) -> LossSum:
        clean = sft_loss(forward, batch)
        if not at or not torch.is_grad_enabled():
            return clean
        match at.pop():
            case "nan loss":
                return LossSum(clean.total * math.nan, clean.count)
            case "inf loss":
                return LossSum(clean.total + math.inf, clean.count)
            case _:
                clean.total.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
                return clean

    bend(poisoned)


def bend(compute: Callable[[Forward, Batch], LossSum]) -> None:
    setattr(worker, "make_objective", lambda *_: Bent(compute))  # noqa: B010 a name that the worker imports


def steps_of(where: StageDir, kind: str) -> list[int]:
    return [line["step"] for line in events(where, kind)]


def policy(folder: Path, on_nan: str) -> Job:
    return make_job(folder, spec=TRAINING + f"on_nan: {on_nan}\n")


def run(job: Job, steps: dict[int, str]) -> StageDir:
    return run_to_end(job, lambda: poison(steps))


@pytest.mark.parametrize("kind", POISONS)
def test_stop_saves_exactly_the_state_before_the_step(lora: Reference, kind: str) -> None:
    """Weights, moments and random numbers are those that a signal at this place would have saved."""
    signalled, where = lora.job.fresh(), lora.job.fresh()
    finish(start(signalled, lambda: at_step(7, lambda: send_self(signal.SIGTERM))))
    assert finish(start(where, lambda: poison({8: kind}))) == DIVERGED
    assert digests(where.checkpoints / "checkpoint-7") == digests(signalled.checkpoints / "checkpoint-7")
    failure = failure_of(where)
    assert failure.kind == "Diverged"
    assert failure.problem.startswith("step 8 was not applied: loss ")
    assert "on_nan.kind=skip" in failure.remedy
    assert [line["step"] for line in read_steps(where.metrics)] == list(range(1, 8))
    assert steps_of(where, "not_finite") == [8]


def test_a_passing_fault_that_stopped_a_run_leaves_no_trace_in_its_end(lora: Reference) -> None:
    where = lora.job.fresh()
    assert finish(start(where, lambda: poison({8: "nan loss"}))) == DIVERGED
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_lasting_fault_stops_the_run_again_without_another_checkpoint(lora: Reference) -> None:
    where = lora.job.fresh()
    for _ in range(2):
        assert finish(start(where, lambda: poison({8: "nan loss"}))) == DIVERGED
        assert [c.name for c in list_checkpoints(where.checkpoints)] == ["checkpoint-6", "checkpoint-7"]
        assert problems(where.checkpoints / "checkpoint-7") == []


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return policy(tmp_path_factory.mktemp("skipping"), "{kind: skip, at_most: 2}")


@pytest.mark.parametrize("kind", POISONS)
def test_skip_leaves_a_gap_in_the_curve_and_finishes(skipping: Job, lora: Reference, kind: str) -> None:
    where = run(skipping, {5: kind, 10: kind})
    end = outcome(where)
    assert [step for step, *_ in end.steps] == [s for s in range(1, 19) if s not in (5, 10)]
    assert end.steps[:4] == lora.outcome.steps[:4]
    assert all(loss != 0.0 and math.isfinite(loss) for _, loss, *_ in end.steps)
    assert end.tensors != lora.outcome.tensors
    assert read_record(where.checkpoints / "final" / "finefit_state.json", TrainState).skipped_steps == (4, 9)


def test_skip_leaves_out_so_many_steps_and_no_more(skipping: Job) -> None:
    where = skipping.fresh()
    assert finish(start(where, lambda: poison({5: "nan loss", 10: "inf loss", 14: "nan loss"}))) == DIVERGED
    assert steps_of(where, "not_finite") == [5, 10, 14]
    assert list_checkpoints(where.checkpoints)[-1].name == "checkpoint-13"


def ends_alike_when_killed(job: Job, bad: dict[int, str], killed_at: int) -> None:
    unkilled = outcome(run(job, bad))
    where = job.fresh()

    def prepare() -> None:
        poison(bad)
        at_step(killed_at, lambda: send_self(signal.SIGKILL))

    assert finish(start(where, prepare)) == -signal.SIGKILL
    assert finish(start(where, lambda: poison(bad))) == 0
    assert outcome(where) == unkilled


@pytest.mark.parametrize("killed_at", [4, 6, 9, 12])
def test_a_killed_run_skips_the_same_steps_and_ends_bit_identical(skipping: Job, killed_at: int) -> None:
    bad = {5: "nan loss", 11: "inf gradient"}
    ends_alike_when_killed(skipping, bad, killed_at)


@pytest.fixture(scope="module")
def returning(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return policy(tmp_path_factory.mktemp("returning"), "{kind: roll_back, at_most: 2}")


def test_roll_back_returns_to_the_last_checkpoint_and_leaves_the_step_out(returning: Job, lora: Reference) -> None:
    where = run(returning, {8: "nan loss"})
    end = outcome(where)
    assert (steps_of(where, "rolled_back"), steps_of(where, "left_out")) == ([6], [8])
    assert [step for step, *_ in end.steps] == [s for s in range(1, 19) if s != 8]
    assert end.steps[:7] == lora.outcome.steps[:7]


def test_roll_back_remembers_every_step_that_it_left_out(returning: Job) -> None:
    """Two such steps after one checkpoint: the second return must not take the first one up again."""
    where = run(returning, {8: "nan loss", 9: "inf gradient"})
    assert (steps_of(where, "rolled_back"), steps_of(where, "left_out")) == ([6, 6], [8, 8, 9])
    assert [step for step, *_ in outcome(where).steps] == [s for s in range(1, 19) if s not in (8, 9)]


def test_roll_back_before_the_first_checkpoint_leaves_the_step_out(returning: Job) -> None:
    end = outcome(run(returning, {2: "nan loss"}))
    assert [step for step, *_ in end.steps] == [1, *range(3, 19)]


def test_roll_back_returns_so_often_and_no_more(returning: Job) -> None:
    where = returning.fresh()
    assert finish(start(where, lambda: poison({4: "nan loss", 8: "nan loss", 12: "nan loss"}))) == DIVERGED
    assert steps_of(where, "rolled_back") == [3, 6]
    assert list_checkpoints(where.checkpoints)[-1].name == "checkpoint-11"


@pytest.mark.parametrize("killed_at", [6, 7, 12])
def test_a_killed_run_rolls_back_alike_and_ends_bit_identical(returning: Job, killed_at: int) -> None:
    bad = {8: "nan loss"}
    ends_alike_when_killed(returning, bad, killed_at)


def test_a_validation_loss_that_is_no_number_is_never_the_best(lora: Reference) -> None:
    where = lora.job.fresh()

    def prepare() -> None:
        left = [2]  # micro-batches of the first validation

        def poisoned(forward: Forward, batch: Batch) -> LossSum:
            clean = sft_loss(forward, batch)
            if torch.is_grad_enabled() or left[0] == 0:
                return clean
            left[0] -= 1
            return LossSum(clean.total * math.nan, clean.count)

        bend(poisoned)

    assert finish(start(where, prepare)) == 0
    end: Outcome = outcome(where)
    assert end == lora.outcome
    assert steps_of(where, "validation_not_finite") == [3]


# fp16 on a CPU, with gradients that really overflow: the scale falls, the same step is made again, and a run that was
# killed ends alike.

LARGE = 1000.0
"""Times the usual loss: 65536 times that is more than fp16 holds."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("fp16"), spec=TRAINING + "precision: fp16\n")


def enlarge() -> None:
    def large(forward: Forward, batch: Batch) -> LossSum:
        found = sft_loss(forward, batch)
        return LossSum(found.total * LARGE, found.count)

    bend(large)


def last_scale(where: StageDir) -> LossScale | None:
    return read_record(where.checkpoints / "final" / "finefit_state.json", TrainState).loss_scale


@pytest.fixture(scope="module")
def calm(job: Job) -> StageDir:
    return run_to_end(job)


def test_steps_that_do_not_overflow_leave_the_scale_as_it_is(calm: StageDir) -> None:
    assert last_scale(calm) == LossScale(scale=2.0**16, good_steps=18)
    assert events(calm, "loss_scale") == []
    assert read_record(calm.result, StageResult).frozen_unchanged is True
    losses = [line["loss"] for line in read_steps(calm.metrics)]
    assert len(losses) == 18
    assert losses[-1] < losses[0]


def test_a_gradient_that_overflows_halves_the_scale_and_is_no_nan_event(job: Job) -> None:
    where = run_to_end(job, enlarge)
    fallen = [line["scale"] for line in events(where, "loss_scale")]
    assert fallen
    assert fallen == [2.0**16 / 2**n for n in range(1, len(fallen) + 1)]
    assert events(where, "not_finite") == []
    assert [line["step"] for line in read_steps(where.metrics)] == list(range(1, 19))
    assert last_scale(where) == LossScale(
        scale=fallen[-1], good_steps=18 - int(events(where, "loss_scale")[-1]["step"]) + 1
    )


@pytest.mark.parametrize("killed_at", [2, 6, 13])
def test_a_killed_run_whose_scale_fell_ends_bit_identical(job: Job, killed_at: int) -> None:
    whole = run_to_end(job, enlarge)
    where = job.fresh()

    def prepare() -> None:
        enlarge()
        at_step(killed_at, lambda: send_self(signal.SIGKILL))

    assert finish(start(where, prepare)) == -signal.SIGKILL
    assert finish(start(where, enlarge)) == 0, words(where)
    assert outcome(where) == outcome(whole)
    assert last_scale(where) == last_scale(whole)


def test_the_step_that_is_made_again_has_the_same_rows_and_the_same_random_numbers(job: Job, calm: StageDir) -> None:
    """Its dropout is that of the step which did not overflow, so its loss is the same number."""
    where = run_to_end(job, lambda: poison({5: "inf gradient"}, times=2))
    assert [(line["step"], line["scale"]) for line in events(where, "loss_scale")] == [(5, 2.0**15)]
    assert outcome(where).steps[:5] == outcome(calm).steps[:5]
    assert last_scale(where) == LossScale(scale=2.0**15, good_steps=14)


def test_a_loss_that_is_no_number_is_a_nan_event_at_any_scale(job: Job) -> None:
    where = job.fresh()
    assert finish(start(where, lambda: poison({5: "nan loss"}, times=2))) == DIVERGED
    assert events(where, "loss_scale") == []
    assert steps_of(where, "not_finite") == [5]


def test_a_gradient_that_is_not_finite_at_scale_1_is_a_nan_event(job: Job) -> None:
    where = job.fresh()
    assert finish(start(where, lambda: poison({5: "inf gradient"}, times=1000))) == DIVERGED
    assert [line["scale"] for line in events(where, "loss_scale")] == [2.0**16 / 2**n for n in range(1, 17)]
    assert steps_of(where, "not_finite") == [5]


def test_the_fp16_checkpoint_holds_an_adapter_in_fp32(calm: StageDir) -> None:
    adapter: Path = calm.checkpoints / "final" / "adapter_model.safetensors"
    assert {str(tensor.dtype) for tensor in load_file(adapter).values()} == {"torch.float32"}


def test_what_is_asked_for_on_the_page_is_done_after_the_step_and_changes_no_other(lora: Reference) -> None:
    where = lora.job.fresh()

    def ask() -> None:
        where.requests.mkdir()
        for name in ("save", "validate", "something-else"):
            (where.requests / name).touch()

    assert finish(start(where, lambda: at_step(4, ask))) == 0, words(where)
    assert [(line["step"], line["what"]) for line in events(where, "requested")] == [(4, "save"), (4, "validate")]
    assert steps_of(where, "saved")[:3] == [3, 4, 6]
    assert [path.name for path in where.requests.iterdir()] == ["something-else"]
    after = outcome(where)
    assert (after.tensors, after.steps) == (lora.outcome.tensors, lora.outcome.steps)
