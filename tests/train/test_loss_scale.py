"""fp16 on a CPU, with gradients that really overflow: the scale falls, the same step is made again, and a run that was killed ends alike."""

import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from finefit.artifacts.journal import read_lines, read_steps
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import LossScale, StageResult, TrainState
from finefit.objective.batch import Batch, Forward, LossSum
from finefit.objective.sft import sft
from finefit.train import worker
from tests.conftest import Bent
from tests.faults import TRAINING, Job, at_step, finish, make_job, outcome, send_self, start, words

DIVERGED = 1
LARGE = 1000.0
"""Times the usual loss: 65536 times that is more than fp16 holds."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("fp16"), spec=TRAINING + "precision: fp16\n")


def bend(compute: Callable[[Forward, Batch], LossSum]) -> None:
    setattr(worker, "make_objective", lambda *_: Bent(compute))  # noqa: B010 a name that the worker imports


def enlarge() -> None:
    def large(forward: Forward, batch: Batch) -> LossSum:
        found = sft(forward, batch)
        return LossSum(found.total * LARGE, found.count)

    bend(large)


def poison(step: int, kind: str, *, times: int) -> None:
    """The first backwards of this step, counted from 1, are not finite."""
    left: list[str] = []
    at_step(step, partial(left.extend, [kind] * times))

    def poisoned(forward: Forward, batch: Batch) -> LossSum:
        clean = sft(forward, batch)
        if clean.total.requires_grad and left:
            if left.pop() == "nan loss":
                return LossSum(clean.total * math.nan, clean.count)
            clean.total.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return clean

    bend(poisoned)


def events(where: StageDir, kind: str) -> list[dict[str, float]]:
    return [line for line in read_lines(where.metrics) if line.get("event") == kind]


def last_scale(where: StageDir) -> LossScale | None:
    return read_record(where.checkpoints / "final" / "finefit_state.json", TrainState).loss_scale


def run(job: Job, prepare: Callable[[], None] = lambda: None) -> StageDir:
    where = job.fresh()
    assert finish(start(where, prepare)) == 0, words(where)
    return where


@pytest.fixture(scope="module")
def calm(job: Job) -> StageDir:
    return run(job)


def test_steps_that_do_not_overflow_leave_the_scale_as_it_is(calm: StageDir) -> None:
    assert last_scale(calm) == LossScale(scale=2.0**16, good_steps=18)
    assert events(calm, "loss_scale") == []
    assert read_record(calm.result, StageResult).frozen_unchanged is True
    losses = [line["loss"] for line in read_steps(calm.metrics)]
    assert len(losses) == 18
    assert losses[-1] < losses[0]


def test_a_gradient_that_overflows_halves_the_scale_and_is_no_nan_event(job: Job) -> None:
    where = run(job, enlarge)
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
    whole = run(job, enlarge)
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
    where = run(job, lambda: poison(5, "inf gradient", times=2))
    assert [(line["step"], line["scale"]) for line in events(where, "loss_scale")] == [(5, 2.0**15)]
    assert outcome(where).steps[:5] == outcome(calm).steps[:5]
    assert last_scale(where) == LossScale(scale=2.0**15, good_steps=14)


def test_a_loss_that_is_no_number_is_a_nan_event_at_any_scale(job: Job) -> None:
    where = job.fresh()
    assert finish(start(where, lambda: poison(5, "nan loss", times=2))) == DIVERGED
    assert events(where, "loss_scale") == []
    assert [line["step"] for line in events(where, "not_finite")] == [5]


def test_a_gradient_that_is_not_finite_at_scale_1_is_a_nan_event(job: Job) -> None:
    where = job.fresh()
    assert finish(start(where, lambda: poison(5, "inf gradient", times=1000))) == DIVERGED
    assert [line["scale"] for line in events(where, "loss_scale")] == [2.0**16 / 2**n for n in range(1, 17)]
    assert [line["step"] for line in events(where, "not_finite")] == [5]


def test_the_fp16_checkpoint_holds_an_adapter_in_fp32(calm: StageDir) -> None:
    from safetensors.torch import load_file

    adapter: Path = calm.checkpoints / "final" / "adapter_model.safetensors"
    assert {str(tensor.dtype) for tensor in load_file(adapter).values()} == {"torch.float32"}
