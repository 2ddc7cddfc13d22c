"""F1, F2, F3: kill -9 at any time. The same call again resumes, and the end is the one of a run that nobody killed."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
from tqdm import tqdm

from finefit.artifacts.atomic import parse_line as whole_line
from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.checkpoint import list_checkpoints, problems, step_of
from finefit.artifacts.processes import holder_of
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.errors import RunError
from finefit.run.run_stages import train_run
from finefit.train import saver
from tests.faults import (
    KILLS,
    TRAINING,
    Operation,
    Reference,
    assert_only_whole_checkpoints,
    at_operation,
    at_step,
    die_at_operation,
    failure_of,
    finish,
    hidden,
    make_job,
    make_reference,
    outcome,
    record_operations,
    run_to_end,
    send_self,
    start,
    words,
)

STAGES_OF_A_SAVE = (
    "before the first file",
    "between files",
    "before the manifest",
    "before a file is durable",
    "before it is visible",
    "visible, not yet durable",
    "before it is called best",
    "before it is called final",
    "before an old one is hidden",
    "while an old one is removed",
)


def kill_at_random_times(reference: Reference, kills: int, seed: int) -> int:
    """How many runs it took: each is killed again and again until it comes through."""
    chance, done, runs = random.Random(seed), 0, 0
    while done < kills:
        where, runs = reference.job.fresh(), runs + 1
        while True:
            code = finish(start(where), kill_after=chance.uniform(0, reference.seconds) if done < kills else None)
            if code != -signal.SIGKILL:
                break
            done += 1
            assert_only_whole_checkpoints(where)
        assert code == 0, words(where)
        assert outcome(where) == reference.outcome
    return runs


def test_runs_killed_at_random_times_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    runs = kill_at_random_times(lora, KILLS, seed=1)
    count(f"F1  LoRA: {KILLS} kills at random times over {runs} runs, {KILLS} bit-identical")


@pytest.mark.slow
def test_whole_models_killed_at_random_times_end_bit_identical(full: Reference, count: Callable[[str], None]) -> None:
    kills = KILLS // 4
    runs = kill_at_random_times(full, kills, seed=2)
    count(f"F1  full: {kills} kills at random times over {runs} runs, {kills} bit-identical")


def stage_of(operation: Operation) -> str | None:
    """The stage of a save that a kill just before this operation strikes; None for mere reading."""
    match operation:
        case Operation("os.mkdir", path) if path.startswith(".staging-"):
            return "before the first file"
        case Operation("write", path) if path.endswith("finefit_manifest.json"):
            return "before the manifest"
        case Operation("write", path) if path.startswith(".staging-"):
            return "between files"
        case Operation("fsync", path) if path.startswith(".staging-"):
            return "before a file is durable"
        case Operation("os.rename", path) if path.startswith(".staging-") and "/" not in path:
            return "before it is visible"
        case Operation("fsync", "."):
            return "visible, not yet durable"
        case Operation("os.symlink" | "os.rename", path) if path.startswith(".best."):
            return "before it is called best"
        case Operation("os.symlink" | "os.rename", path) if path.startswith(".final."):
            return "before it is called final"
        case Operation("os.rename", path) if path.startswith("checkpoint-"):
            return "before an old one is hidden"
        case Operation("os.remove" | "os.rmdir", path) if not path.endswith(".tmp"):
            return "while an old one is removed"
    return None


def points_inside_saves(operations: list[Operation], wanted: int, seed: int) -> list[int]:
    """One for each stage of a save, and others drawn from all operations."""
    chance = random.Random(seed)
    inside = {
        stage: [at for at, operation in enumerate(operations) if stage_of(operation) == stage]
        for stage in STAGES_OF_A_SAVE
    }
    chosen = [chance.choice(inside[stage]) for stage in STAGES_OF_A_SAVE]
    others = sorted(set(chain.from_iterable(inside.values())) - set(chosen))
    return (chosen + chance.sample(others, max(0, wanted - len(chosen))))[:wanted]


def kill_at_operations(reference: Reference, points: Iterable[int]) -> None:
    for point in points:
        where = reference.job.fresh()
        place = f"before operation {point}: {reference.operations[point]}"
        assert finish(start(where, partial(die_at_operation, where.checkpoints, point))) == -signal.SIGKILL, place
        assert_only_whole_checkpoints(where)
        assert finish(start(where)) == 0, place + words(where)
        assert outcome(where) == reference.outcome, place


@pytest.mark.slow
def test_runs_killed_inside_a_save_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    points = points_inside_saves(lora.operations, KILLS, seed=3)
    kill_at_operations(lora, points)
    stages = {stage_of(lora.operations[point]) for point in points}
    assert stages == set(STAGES_OF_A_SAVE)
    count(
        f"F2  LoRA: {len(points)} kills inside a save, at all of its {len(stages)} stages, {len(points)} bit-identical"
    )


@pytest.mark.slow
def test_whole_models_killed_inside_a_save_end_bit_identical(full: Reference, count: Callable[[str], None]) -> None:
    points = random.Random(4).sample(points_inside_saves(full.operations, KILLS, seed=4), KILLS // 4)
    kill_at_operations(full, points)
    count(f"F2  full: {len(points)} kills inside a save, {len(points)} bit-identical")


@pytest.mark.parametrize("limit", [1, 11_000, 20_000])
def test_a_run_that_dies_within_a_file_ends_bit_identical(lora: Reference, limit: int) -> None:
    """The kernel ends the process at the first byte beyond the limit, which lies in the weights or, when they fit, in
    the optimizer."""

    def cut() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    where = lora.job.fresh()
    begun = start(where, lambda: at_operation(where.checkpoints, "os.mkdir", r"\.staging-checkpoint-6", cut))
    assert finish(begun) == -signal.SIGXFSZ
    assert max(path.stat().st_size for path in (where.checkpoints / ".staging-checkpoint-6").iterdir()) <= limit
    assert_only_whole_checkpoints(where)
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


@pytest.fixture(scope="module")
def half_removed(lora: Reference) -> StageDir:
    """Killed while an old checkpoint was being removed, with a half-written checkpoint and a half-made link lying about
    as well."""
    where = lora.job.fresh()
    begun = start(
        where,
        lambda: at_operation(
            where.checkpoints, "os.remove", r"finefit_rng\.safetensors", lambda: send_self(signal.SIGKILL)
        ),
    )
    assert finish(begun) == -signal.SIGKILL
    staging = where.checkpoints / ".staging-checkpoint-12"
    staging.mkdir()
    (staging / "adapter_model.safetensors").write_bytes(b"half")
    (where.checkpoints / ".best.4711.tmp").symlink_to("checkpoint-9")
    return where


def test_runs_killed_during_resume_end_bit_identical(
    lora: Reference, half_removed: StageDir, count: Callable[[str], None]
) -> None:
    """Also the resume of a killed resume."""
    trace = half_removed.run / "operations.txt"
    probe = lora.job.copy(half_removed.run)
    assert finish(start(probe, lambda: record_operations(probe.checkpoints, trace))) == 0
    operations = [Operation(*line.split("\t")) for line in trace.read_text().splitlines()]
    resuming = next(
        at for at, operation in enumerate(operations) if operation == Operation("os.mkdir", ".staging-checkpoint-12")
    )
    points = random.Random(5).sample(range(resuming), KILLS // 4 * 2)
    for first, second in zip(points[::2], points[1::2], strict=True):
        where = lora.job.copy(half_removed.run)
        for point in (first, second):
            assert finish(start(where, partial(die_at_operation, where.checkpoints, point))) == -signal.SIGKILL
            assert_only_whole_checkpoints(where)
        assert finish(start(where)) == 0
        assert outcome(where) == lora.outcome
        assert hidden(where) == []
    count(f"F3  {len(points)} kills during resume, {len(points)} bit-identical")


def test_a_run_killed_between_weights_and_optimizer_of_a_resume_ends_bit_identical(
    lora: Reference, half_removed: StageDir
) -> None:
    where = lora.job.copy(half_removed.run)

    def die(*_: object, **__: object) -> None:
        send_self(signal.SIGKILL)

    assert finish(start(where, lambda: setattr(saver, "restore_state", die))) == -signal.SIGKILL
    assert finish(start(where)) == 0
    assert outcome(where) == lora.outcome


def test_runs_killed_during_rotation_end_bit_identical(lora: Reference, count: Callable[[str], None]) -> None:
    rotation = [
        at
        for at, operation in enumerate(lora.operations)
        if stage_of(operation) in ("before an old one is hidden", "while an old one is removed")
    ]
    points = random.Random(6).sample(rotation, KILLS // 4)
    kill_at_operations(lora, points)
    count(f"F3  {len(points)} kills during rotation, {len(points)} bit-identical")


def test_a_worker_killed_with_the_lock_of_its_progress_bars_in_hand_blocks_no_other(lora: Reference) -> None:
    """That lock is shared by all forks of a process that has shown a bar."""

    def prepare() -> None:
        tqdm.get_lock().acquire()
        send_self(signal.SIGKILL)

    assert finish(start(lora.job.fresh(), prepare)) == -signal.SIGKILL
    run_to_end(lora.job)


# F7: a request to stop leaves one checkpoint and exit code 3; a second SIGINT stops at once. The same call goes on.

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
    failure = failure_of(where)
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
    where = run_to_end(lora.job, lambda: at_step(18, lambda: send_self(signal.SIGTERM)))
    assert outcome(where) == lora.outcome


@pytest.mark.slow
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


@pytest.mark.slow
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
        train_run(run)
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


# A long run, and the same run killed again and again: the end is the same bit for bit, and memory does not grow.
#
# `FINEFIT_SOAK_MINUTES` says how long: a fraction of a minute on every push, an hour in `make soak`.

MINUTES = float(os.environ.get("FINEFIT_SOAK_MINUTES", "0.3"))
_SETTLED = 0.3
"""Of the steps, after which allocators hold what they will hold."""
_NOISE_SHARE, _NOISE_BYTES = 0.005, 2 << 20


def growth(resident: Sequence[int]) -> float:
    """Bytes from the first to the last of the settled steps, by the straight line that fits them best."""
    settled = np.asarray(resident[int(len(resident) * _SETTLED) :], dtype=np.float64)
    slope = np.polynomial.polynomial.polyfit(np.arange(len(settled)), settled, 1)[1]
    return float(slope) * len(settled)


def noise(resident: Sequence[int]) -> float:
    return _NOISE_SHARE * float(np.mean(resident)) + _NOISE_BYTES


def seconds_per_step(where: StageDir) -> float:
    times = [line["time"] for line in read_lines(where.metrics) if "loss" in line]
    return float(times[-1] - times[0]) / (len(times) - 1)


def resident_bytes(where: StageDir) -> list[int]:
    return [line["resident_bytes"] for line in read_lines(where.memory) if line["instant"] == "step"]


@pytest.mark.timeout(MINUTES * 60 * 6 + 600)
@pytest.mark.slow
def test_a_long_run_killed_at_random_times_ends_bit_identical_and_its_memory_does_not_grow(
    lora: Reference, tmp_path: Path, count: Callable[[str], None]
) -> None:
    probe = lora.job.fresh()
    assert finish(start(probe)) == 0, words(probe)
    seconds = MINUTES * 60 / 2
    steps = max(200, int(seconds / seconds_per_step(probe)))
    every = max(20, steps // 50)
    spec = re.sub(r"epochs: 3", f"steps: {steps}", TRAINING).replace("every: 3 steps", f"every: {every} steps")
    job = make_job(tmp_path / "soak", spec=spec)

    unkilled = job.fresh()
    assert finish(start(unkilled), kill_after=10 * seconds + 300) == 0, words(unkilled)
    resident = resident_bytes(unkilled)
    assert len(resident) == steps
    assert abs(growth(resident)) < noise(resident)

    killed = job.fresh()
    kills = kill_again_and_again(killed, random.Random(9), steps=steps, every=every)
    assert kills > 1
    assert outcome(killed) == outcome(unkilled)
    count(
        f"soak  {MINUTES:g} minutes: {steps:,} steps, {kills} kills at random times, bit-identical; "
        f"memory {growth(resident) / steps:+.1f} bytes a step of {np.mean(resident) / 2**20:.0f} MiB"
    )


def kill_again_and_again(where: StageDir, chance: random.Random, *, steps: int, every: int) -> int:
    """How often, until it came through: at any instant after it has gone on by more than one save."""
    kills = 0
    while True:
        worker, target = start(where), last_step(where) + int(every * chance.uniform(1.2, steps / every / 5))
        while worker.process.is_alive() and last_step(where) < target:
            time.sleep(0.05)
        code = finish(worker, kill_after=chance.uniform(0, 0.5) if worker.process.is_alive() else 1)
        if code != -signal.SIGKILL:
            break
        kills += 1
    assert code == 0, words(where)
    return kills


def last_step(where: StageDir) -> int:
    """As its metrics end."""
    if not where.metrics.exists():
        return 0
    with where.metrics.open("rb") as file:
        file.seek(max(0, where.metrics.stat().st_size - 4096))
        found = [line["step"] for part in file if (line := whole_line(part)) is not None and "loss" in line]
    return max(found, default=0)


def test_a_leak_of_a_few_hundred_bytes_a_step_is_seen_in_an_hour() -> None:
    chance = random.Random(1)
    flat = [600 * 2**20 + chance.randrange(-(2**20), 2**20) for _ in range(50_000)]
    assert abs(growth(flat)) < noise(flat)
    leaking = [held + 300 * step for step, held in enumerate(flat)]
    assert growth(leaking) > noise(leaking)


def test_what_is_taken_at_the_start_is_no_leak() -> None:
    rising = [500 * 2**20 + min(step, 200) * 2**19 for step in range(1000)]
    assert abs(growth(rising)) < noise(rising)
