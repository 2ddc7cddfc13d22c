"""F15: one process at a time in a run directory; a lock whose holder is dead is no lock."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finefit.artifacts.lock import holder_of, run_lock
from finefit.errors import DiskFull, RunError
from tests.faults import fill_disk, small_disk

HOLD = """
import sys, time
from pathlib import Path
from finefit.artifacts.lock import run_lock
with run_lock(Path(sys.argv[1])) as descriptor:
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_WITH_CHILD = HOLD.replace(
    "    sys.stdin.read()",
    """    import subprocess
    child = subprocess.Popen(["sleep", "1.5"], pass_fds=(descriptor,), stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()""",
)


@contextmanager
def holder(path: Path, program: str = HOLD) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_process_is_refused_with_pid_and_host_of_the_first(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    with holder(lock) as first:
        assert holder_of(lock) == first.pid
        began = time.monotonic()
        with pytest.raises(RunError) as caught, run_lock(lock):
            pass
        assert time.monotonic() - began < 1
        assert f"is already being worked on by process {first.pid} on {socket.gethostname()}" in caught.value.problem
        assert f"kill {first.pid}" in caught.value.remedy


def test_the_same_process_cannot_take_a_lock_twice(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path / "run.lock"),
        pytest.raises(RunError, match=str(os.getpid())),
        run_lock(tmp_path / "run.lock"),
    ):
        pass


def test_a_lock_is_free_again_after_its_holder(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path / "run.lock"):
            assert holder_of(tmp_path / "run.lock") == os.getpid()
    assert holder_of(tmp_path / "run.lock") is None


def test_the_lock_of_a_killed_process_is_taken_at_once(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    with holder(lock) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert json.loads(lock.read_text())["pid"] == first.pid
        assert holder_of(lock) is None
        with run_lock(lock):
            assert holder_of(lock) == os.getpid()


@pytest.mark.parametrize(
    "left",
    [
        "",
        "{",
        "[]",
        json.dumps({"version": 1, "pid": dead_pid(), "host": socket.gethostname()}),
        json.dumps({"version": 1, "pid": 1, "host": "elsewhere"}),
    ],
    ids=["nothing", "torn", "a list", "a dead process", "another machine"],
)
def test_a_stale_lock_file_is_recognised_whatever_it_says(tmp_path: Path, left: str) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text(left)
    assert holder_of(lock) is None
    with run_lock(lock):
        assert holder_of(lock) == os.getpid()


def test_the_lock_of_a_dead_launcher_is_awaited_while_its_worker_saves(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    with holder(lock, HOLD_WITH_CHILD) as launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert holder_of(lock) == launcher.pid  # the worker inherited it
        with run_lock(lock):
            assert not Path(f"/proc/{worker}/cmdline").exists() or Path(f"/proc/{worker}/cmdline").read_bytes() == b""
            assert holder_of(lock) == os.getpid()


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    with holder(lock) as first:
        named = lock.read_text()
        lock.write_text("")
        naming = threading.Timer(0.5, lock.write_text, [named])
        naming.start()
        with pytest.raises(RunError, match=f"by process {first.pid} on {socket.gethostname()}"), run_lock(lock):
            pass
        naming.join()


def test_a_lock_without_room_for_its_holder_is_told_by_its_place(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        lock = disk / "run.lock"
        lock.touch()
        fill_disk(disk, leave_pages=0)
        with (
            pytest.raises(DiskFull, match=f"the disk is full: {lock} found no room, 0 bytes are free now"),
            run_lock(lock),
        ):
            pass
        assert holder_of(lock) is None
        (disk / "filler").unlink()
        with run_lock(lock):
            assert holder_of(lock) == os.getpid()
