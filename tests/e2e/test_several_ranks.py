"""Two ranks on a CPU as a user starts them: by `finefit run` itself, by torchrun, by accelerate. F13: one of them is
killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.processes import holder_of
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import Stage, StageResult
from tests.conftest import make_project
from tests.faults import TRAINING, Outcome, outcome

SPEC = re.sub(r"schedule: .*\n", "schedule: {steps: 40, warmup: 0.1}\n", TRAINING).replace(
    "every: 3 steps", "every: 5 steps"
)
TWO = SPEC + "engine: {kind: ddp, devices: 2}\n"
STOPPED = 3
FINEFIT = [sys.executable, "-m", "finefit"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "finefit"]
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "-m",
    "finefit",
]
"""On a machine without cards accelerate has to be told that the processes are its own."""


@contextmanager
def started(program: list[str], folder: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Never outlives the test, nor do its children."""
    process = subprocess.Popen(
        [*program, "run", "spec.yaml", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else []
        for child in children:
            child.kill()
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=200)[0]


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def done(where: StageDir) -> int:
    return max((line["step"] for line in read_steps(where.metrics)), default=0) if where.metrics.exists() else 0


def environment_of(where: StageDir) -> dict[str, Any]:
    """Of the last attempt."""
    return [line for line in read_lines(where.metrics) if line.get("event") == "environment"][-1]


def pids(where: StageDir) -> list[int]:
    return [rank["pid"] for rank in environment_of(where)["ranks"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run of two ranks is finished; not to be changed."""
    folder = make_project(tmp_path_factory.mktemp("two") / "project", spec=TWO).parent
    with started(FINEFIT, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """The same project without runs: preparations and forecasts are cached by content."""
    shutil.copytree(whole, tmp_path / "project", ignore=shutil.ignore_patterns("runs"))
    return tmp_path / "project"


@pytest.fixture
def reference(whole: Path) -> Outcome:
    return outcome(run_in(whole)[1])


def run_in(folder: Path) -> tuple[RunDir, StageDir]:
    run = RunDir(folder / "runs" / "tiny-1")
    return run, StageDir(run.path / "stages" / "1-sft")


def test_run_starts_its_own_ranks_and_records_how(whole: Path) -> None:
    run, where = run_in(whole)
    assert read_record(run.run, Run).status == "finished"
    found = environment_of(where)
    assert found["variables"]["WORLD_SIZE"] == "2"
    assert int(found["variables"]["MASTER_PORT"]) > 0
    assert found["variables"]["TOKENIZERS_PARALLELISM"] == "false"
    assert (
        found["variables"]["OMP_NUM_THREADS"] == str(found["threads"]) == str(read_record(where.stage, Stage).threads)
    )
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert len(set(pids(where))) == 2
    assert done(where) == 40


def test_the_first_rank_alone_writes_what_the_run_is_known_by(whole: Path) -> None:
    run, where = run_in(whole)
    steps = [line["step"] for line in read_lines(where.metrics) if "loss" in line]
    assert steps == list(range(1, 41))
    assert sorted(path.name for path in run.log.parent.iterdir()) == [
        "rank-1.log",
        "rank-1.memory.jsonl",
        "rank-1.metrics.jsonl",
        "run.log",
    ]
    peaks = [max(line["peak_bytes"] for line in read_lines(where.memory_of(rank))) for rank in (0, 1)]
    drift = 1 << 20  # the kernel adds up the pages of threads now and then, so a later reading may be a little lower
    assert read_record(where.result, StageResult).peak_bytes >= max(peaks) - drift


def test_one_of_two_ranks_killed_ends_all_at_once_and_the_same_command_goes_on(
    folder: Path, reference: Outcome
) -> None:
    """F13."""
    run, where = run_in(folder)
    with started(FINEFIT, folder) as process:
        wait_until(lambda: done(where) >= 12, process)
        first, second = pids(where)
        os.kill(second, signal.SIGKILL)
        killed_at = time.monotonic()
        text = finish(process)
        assert time.monotonic() - killed_at < 30
    assert process.returncode == STOPPED, text
    assert "rank 1 of 2 was ended by SIGKILL" in text
    assert "The end of rank-1.log" in text
    assert not psutil.pid_exists(first)
    assert holder_of(run.lock) is None
    record = read_record(run.run, Run)
    assert record.status == "stopped"
    with started(FINEFIT, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    assert "resumed from checkpoint-" in text
    assert outcome(where) == reference


def test_a_signal_stops_all_ranks_after_the_same_step(folder: Path, reference: Outcome) -> None:
    _, where = run_in(folder)
    with started(FINEFIT, folder) as process:
        wait_until(lambda: done(where) >= 7, process)
        process.send_signal(signal.SIGTERM)
        text = finish(process)
    assert process.returncode == STOPPED, text
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+) of 40", text)
    failure = json.loads((where.run / "logs" / "rank-1.failure.json").read_text())["failure"]
    assert f"stopped by SIGTERM after step {step} of 40" in failure["problem"]
    with started(FINEFIT, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    assert outcome(where) == reference


@pytest.mark.slow
def test_torchrun_makes_workers_of_its_processes_and_a_signal_to_any_one_stops_all(folder: Path) -> None:
    """The spec names no engine: two ranks of one process each are copies."""
    (folder / "spec.yaml").write_text(SPEC)
    run, where = run_in(folder)
    with started(TORCHRUN, folder) as process:
        wait_until(lambda: done(where) >= 7, process)
        assert read_record(where.stage, Stage).engine.kind == "ddp"
        os.kill(pids(where)[1], signal.SIGUSR1)
        text = finish(process)
    assert process.returncode != 0
    assert (
        "rank      : 0 (local_rank: 0)\n  exitcode  : 3" in text.split("Root Cause")[1]
    )  # the first leaves first, in order
    (step,) = re.findall(r"stopped by SIGUSR1 after step (\d+) of 40", text)
    assert read_record(run.run, Run).status == "stopped"
    assert (where.checkpoints / f"checkpoint-{step}").is_dir()
    with started(TORCHRUN, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    assert text.count("stage sft, decided") == 1  # one rank speaks
    assert read_record(run.run, Run).status == "finished"
    assert done(where) == 40
    with started(TORCHRUN, folder) as process:
        assert finish(process) is not None
    assert process.returncode == 0  # finished already: nobody waits for anybody


@pytest.mark.slow
def test_accelerate_launch_works_from_outside_too(folder: Path, reference: Outcome) -> None:
    run, where = run_in(folder)
    with started(ACCELERATE, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    assert read_record(run.run, Run).status == "finished"
    assert outcome(where).steps == reference.steps


def test_another_number_of_ranks_than_the_spec_names_is_refused_by_all_of_them(folder: Path) -> None:
    (folder / "spec.yaml").write_text(TWO.replace("devices: 2", "devices: 3"))
    with started(TORCHRUN, folder) as process:
        text = finish(process)
    assert process.returncode != 0
    assert "engine.devices is 3, but 2 ranks were started (WORLD_SIZE=2)" in text
    assert not (folder / "runs").exists()
