"""F7: a request to stop leaves one checkpoint and exit code 3; a second SIGINT stops at once. The same call goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from finefit.artifacts.checkpoint import list_checkpoints, problems, step_of
from finefit.artifacts.journal import read_lines, read_steps
from finefit.artifacts.lock import holder_of
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import StageResult
from finefit.errors import RunError
from finefit.pipeline.execute import execute
from finefit.train import saver
from tests.faults import (
    TRAINING,
    Reference,
    assert_only_whole_checkpoints,
    at_operation,
    at_step,
    finish,
    hidden,
    make_job,
    make_reference,
    nothing,
    outcome,
    send_self,
    start,
    words,
)

STOPPED = 3
LONG = TRAINING.replace("epochs: 3", "steps: 120").replace("every: 3 steps", "every: 20 steps")
"""Long enough to be met at work from outside."""


def steps_saved(where: StageDir) -> list[int]:
    return [step_of(checkpoint) for checkpoint in list_checkpoints(where.checkpoints)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_leaves_one_checkpoint_and_the_same_call_goes_on(lora: Reference, number: signal.Signals) -> None:
    where = lora.job.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(number)))) == STOPPED
    assert steps_saved(where) == [3, 5]
    assert problems(where.checkpoints / "checkpoint-5") == []
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
    assert f"stopped by {number.name} after step 5 of 18" in failure.problem
    assert hidden(where) == []
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_signal_between_step_and_save_writes_no_second_checkpoint(lora: Reference) -> None:
    where = lora.job.fresh()
    begun = start(
        where,
        lambda: at_operation(
            where.checkpoints, "fsync", r"\.staging-checkpoint-6/.*", lambda: send_self(signal.SIGTERM)
        ),
    )
    assert finish(begun) == STOPPED
    assert steps_saved(where) == [3, 6]
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_signal_while_the_model_is_loaded_stops_before_the_first_step(lora: Reference) -> None:
    where = lora.job.fresh()
    assert (
        finish(
            start(
                where,
                lambda: at_operation(
                    where.path / "data", "open", r"train\.safetensors", lambda: send_self(signal.SIGTERM)
                ),
            )
        )
        == STOPPED
    )
    assert read_steps(where.metrics) == []
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


@pytest.mark.parametrize("stage", ["in the step", "in the save"])
def test_a_second_sigint_stops_at_once_without_damage(lora: Reference, stage: str) -> None:
    where = lora.job.fresh()

    def twice() -> None:
        send_self(signal.SIGINT)
        if stage == "in the step":
            send_self(signal.SIGINT)

    def prepare() -> None:
        at_step(5, twice)
        at_operation(
            where.checkpoints,
            "write",
            r"\.staging-checkpoint-5/finefit_manifest.json",
            lambda: send_self(signal.SIGINT),
        )

    assert finish(start(where, prepare)) == STOPPED
    assert steps_saved(where) == [3]
    assert_only_whole_checkpoints(where)
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_a_signal_in_the_last_step_lets_the_run_finish(lora: Reference) -> None:
    where = lora.job.fresh()
    assert finish(start(where, lambda: at_step(18, lambda: send_self(signal.SIGTERM)))) == 0
    assert outcome(where) == lora.outcome


def test_every_stop_of_a_run_that_is_stopped_again_and_again_is_bit_identical(
    lora: Reference, count: Callable[[str], None]
) -> None:
    where = lora.job.fresh()
    for step in range(1, 18):
        assert finish(start(where, partial(at_step, step, partial(send_self, signal.SIGUSR1)))) == STOPPED
        assert steps_saved(where)[-1] == step
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome
    count("F7  17 stops in one run, one after each step, bit-identical")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(make_job(tmp_path_factory.mktemp("long"), spec=LONG))


def command(project: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "finefit", "run", "spec.yaml", "--runs", "command"],
        cwd=project,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_command_line_survives_signals_a_rival_and_the_death_of_its_launcher(long: Reference) -> None:
    project = long.job.pristine.parent.parent
    run = RunDir(project / "command" / "tiny-1")
    where = StageDir(run.path / "stages" / "1-sft")

    def done() -> int:
        return max((line["step"] for line in read_steps(where.metrics)), default=0)

    first = command(project)
    wait_until(lambda: done() >= 5, first)
    first.send_signal(signal.SIGINT)
    text, _ = first.communicate(timeout=60)
    assert first.returncode == STOPPED, text
    assert "stopped by SIGINT" in text
    (stopped,) = steps_saved(where) if done() < 20 else steps_saved(where)[-1:]
    assert stopped == done()
    assert read_record(run.run, Run).status == "stopped"

    second = command(project)
    wait_until(lambda: done() >= stopped + 5, second)
    worker = psutil.Process(second.pid).children()[0]
    with pytest.raises(RunError, match=f"already being worked on by process {second.pid} on "):
        execute(run, tick=nothing, warn=lambda _: None)
    second.kill()
    second.communicate()
    worker.wait(timeout=60)
    assert steps_saved(where)[-1] == done() > stopped
    assert "stopped by the end of the process that started it" in words(where)
    assert holder_of(run.lock) is None

    third = command(project)
    text, _ = third.communicate(timeout=120)
    assert third.returncode == 0, text
    assert read_record(run.run, Run).status == "finished"
    assert outcome(where) == long.outcome
    assert next(line["step"] for line in read_lines(where.metrics) if line.get("event") == "resumed") == stopped


def test_a_worker_that_cannot_know_its_end_leaves_a_run_that_goes_on(lora: Reference) -> None:
    """An error of ours, in mid-save, ends the process; nothing half is visible."""
    where = lora.job.fresh()

    def prepare() -> None:
        def fails(*_: object) -> None:
            raise ZeroDivisionError

        at_step(5, lambda: setattr(saver, "save_state", fails))

    assert finish(start(where, prepare)) == 70
    assert_only_whole_checkpoints(where)
    assert hidden(where) == []
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome
