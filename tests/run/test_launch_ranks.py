"""Ranks of a few lines instead of the real ones: how several are started, told, ended together and reported."""

import os
import shutil
import signal
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, Interrupted, ModelError, SpecError, WorkerDied
from finefit.run import launch as launching
from finefit.run.launch import launch_ranks, require_cards
from tests.conftest import make_project
from tests.run.conftest import prepared

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from dataclasses import replace
rank = int(os.environ["RANK"])
where = Path(sys.argv[1])
def fail(kind, problem, code):
    from finefit.artifacts.records import Failure, write_record
    from finefit.artifacts.stage_records import StageResult
    from finefit.artifacts.rundir import StageDir
    failure = Failure(kind=kind, problem=problem, remedy="fix it", exit_code=code)
    result = StageResult(
        step=0, total_steps=1, checkpoint=None, trainable_parameters=0, parameters=0, tokens=0, seconds=0.0, peak_bytes=0, failure=failure
    )
    write_record(StageDir(where).result_of(rank), result)
    sys.exit(code)
print("ready", os.getpid(), flush=True)
"""  # noqa: E501


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the module `fake_rank`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source: str) -> None:
        (tmp_path / "fake_rank.py").write_text(PREAMBLE + textwrap.dedent(source))

    return write


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return prepared(make_project(tmp_path_factory.mktemp("ranks") / "project"))


@pytest.fixture
def where(prepared_once: RunDir, tmp_path: Path) -> StageDir:
    """Of a run directory of its own; nothing in it is trained."""
    shutil.copytree(prepared_once.path, tmp_path / "run")
    return stage_of(RunDir(tmp_path / "run"))


def start(where: StageDir, *, devices: int = 2, tick: Callable[[], None] = lambda: None) -> int:
    descriptor = os.open(where.run / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        return launch_ranks("fake_rank", where, devices=devices, lock=descriptor, tick=tick)
    finally:
        os.close(descriptor)


def log(where: StageDir, rank: int) -> str:
    return RunDir(where.run).log_of(rank).read_text()


def pids(where: StageDir) -> list[int]:
    return [
        int(line.split()[1]) for rank in (0, 1) for line in log(where, rank).splitlines() if line.startswith("ready")
    ]


def have_said(where: StageDir, word: str, times: int = 1) -> bool:
    """Whether both ranks have, so many times."""
    logs = [RunDir(where.run).log_of(rank) for rank in (0, 1)]
    return all(path.exists() and path.read_text().count(word) == times for path in logs)


def send_once(where: StageDir, number: signal.Signals) -> Callable[[], None]:
    """A tick that sends a signal to this process once both ranks listen."""
    sent: list[int] = []

    def tick() -> None:
        if not sent and have_said(where, "listening"):
            sent.append(1)
            os.kill(os.getpid(), number)

    return tick


def test_every_rank_knows_its_place_and_has_its_share_of_threads_and_a_log(
    where: StageDir, worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    worker("""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
        print([os.environ[name] for name in (*names, "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")])
        print("port", os.environ["MASTER_PORT"])
    """)  # noqa: E501
    write_record(where.stage, replace(read_record(where.stage, Stage), threads=6))
    assert start(where) == 0
    for rank in (0, 1):
        assert str([str(rank), "2", str(rank), "2", "127.0.0.1", "false", "3", "mine", "3,5"]) in log(where, rank)
    assert log(where, 0).split("port")[1] == log(where, 1).split("port")[1]


def test_a_killed_rank_is_reported_by_name_and_takes_the_others_with_it(
    where: StageDir, worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GRACE_SECONDS", 1.0)
    worker("""
        if rank == 1:
            print("my last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(120)
    """)
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        start(where)
    assert time.monotonic() - began < 30
    assert "rank 1 of 2 was ended by SIGKILL; usually for lack of host memory" in caught.value.problem
    assert "The end of rank-1.log:" in caught.value.problem
    assert "my last words" in caught.value.problem
    assert caught.value.exit_code == 3
    assert not any(psutil.pid_exists(pid) for pid in pids(where))


def test_the_cause_is_told_and_not_what_the_others_saw_of_it(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("""
        if rank == 1:
            fail("ModelError", "a tensor is missing", 2)
        fail("WorkerDied", "rank 0 lost the others", 3)
    """)
    with pytest.raises(ModelError) as caught:
        start(where)
    assert (caught.value.problem, caught.value.remedy) == ("rank 1 of 2: a tensor is missing", "fix it")


def test_what_the_first_rank_says_is_left_to_its_result(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("""
        fail("WorkerDied", "lost", 3) if rank == 1 else fail("DiskFull", "no room", 3)
    """)
    assert start(where) == 3


def test_a_rank_that_ends_without_a_word_is_a_fault_of_ours_with_its_traceback(
    where: StageDir, worker: Callable[[str], None]
) -> None:
    worker("""
        if rank == 1:
            raise ZeroDivisionError("by rank 1")
        fail("WorkerDied", "lost", 3)
    """)
    with pytest.raises(FinefitError) as caught:
        start(where)
    assert caught.value.exit_code == 70
    assert "rank 1 of 2 ended with code 1" in caught.value.problem
    assert "ZeroDivisionError: by rank 1" in caught.value.problem


def test_a_rank_that_hangs_after_another_has_failed_is_ended_and_named(
    where: StageDir, worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GRACE_SECONDS", 1.0)
    worker("""
        if rank == 1:
            fail("WorkerDied", "rank 1 lost the others", 3)
        time.sleep(120)
    """)
    with pytest.raises(WorkerDied, match="rank 0 of 2 did not end within 1 s after another had failed"):
        start(where)
    assert not any(psutil.pid_exists(pid) for pid in pids(where))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_reaches_every_rank(where: StageDir, worker: Callable[[str], None], number: signal.Signals) -> None:
    worker(f"""
        def told(*_):
            print("told", flush=True)
            fail("Interrupted", "stopped", 3)
        signal.signal({number.value}, told)
        print("listening", flush=True)
        time.sleep(60)
    """)
    assert start(where, tick=send_once(where, number)) == 3
    assert ["told" in log(where, rank) for rank in (0, 1)] == [True, True]


def test_the_first_rank_is_given_its_time_to_save_when_another_has_stopped_as_asked(
    where: StageDir, worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GRACE_SECONDS", 0.5)
    worker("""
        if rank == 0:
            time.sleep(4)
            print("saved", flush=True)
        fail("Interrupted", "stopped", 3)
    """)
    assert start(where) == 3
    assert "saved" in log(where, 0)


def test_a_second_sigint_ends_every_rank_at_once(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("""
        told = []
        def asked(*_):
            told.append(1)
            print("told", flush=True)
            if len(told) == 2:
                os._exit(3)
        signal.signal(signal.SIGINT, asked)
        print("listening", flush=True)
        while True:
            time.sleep(0.1)
    """)
    sent: list[int] = []

    def tick() -> None:
        if len(sent) < 2 and have_said(where, "listening") and have_said(where, "told", len(sent)):
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    assert start(where, tick=tick) == 3
    assert len(sent) == 2


def test_a_signal_that_comes_too_late_stops_what_would_follow(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("listening", flush=True)
        time.sleep(60)
    """)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        start(where, tick=send_once(where, signal.SIGTERM))


def test_ranks_whose_launcher_fails_are_told_and_waited_for(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("""
        sys.stdin.read()
        print("ended in order", flush=True)
    """)

    def fail() -> None:
        if have_said(where, "ready"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(where, tick=fail)
    assert ["ended in order" in log(where, rank) for rank in (0, 1)] == [True, True]


def test_an_earlier_failure_of_a_rank_is_forgotten(where: StageDir, worker: Callable[[str], None]) -> None:
    worker("fail('ModelError', 'old', 2) if rank == 1 else None")
    with pytest.raises(ModelError):
        start(where)
    worker("")
    assert start(where) == 0


def test_fewer_cards_than_devices_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SpecError) as caught:
        require_cards("cuda", 4)
    assert caught.value.problem == "engine.devices is 4, but torch sees 2 cards here (CUDA_VISIBLE_DEVICES=0,1)"
    assert caught.value.remedy == "set engine.devices to 2 or fewer"
    require_cards("cuda", 2)
    require_cards("cpu", 64)
