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
from typing import Any

import psutil
import pytest

from finefit.artifacts.processes import (
    RankEnv,
    allocator_setting,
    chosen_variables,
    holder_of,
    rank_env_of,
    recorded_variables,
    run_lock,
    without_rank_env,
)
from finefit.errors import DiskFull, RunError
from tests.faults import fill_disk, small_disk

HOLD = """
import sys, time
from pathlib import Path
from finefit.artifacts.processes import run_lock
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
            pytest.raises(DiskFull, match=f"the disk is full: {lock} could not be written, 0 bytes are free now"),
            run_lock(lock),
        ):
            pass
        assert holder_of(lock) is None
        (disk / "filler").unlink()
        with run_lock(lock):
            assert holder_of(lock) == os.getpid()


# The place of a rank, as its environment tells it; and processes that end with the one that started them.

PLACE = RankEnv(rank=3, size=4, local_rank=1, local_size=2, address="node-0", port=29500)


def test_a_place_is_found_where_it_was_told_and_nowhere_else() -> None:
    assert rank_env_of({"HOME": "/"} | PLACE.variables()) == PLACE
    assert PLACE.num_nodes == 2
    assert rank_env_of({}) is None
    assert rank_env_of({"LOCAL_RANK": "0", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"LOCAL_RANK": None, "MASTER_ADDR": None}, "RANK=3 is set .* but not LOCAL_RANK, MASTER_ADDR"),
        ({"RANK": "4"}, "contradict each other"),
        ({"LOCAL_RANK": "2"}, "contradict each other"),
        ({"LOCAL_WORLD_SIZE": "3"}, "contradict each other"),
        ({"MASTER_PORT": "tcp:1"}, "MASTER_PORT=tcp:1 in the environment is not a number"),
    ],
)
def test_half_a_place_and_one_that_contradicts_itself_are_refused(changes: dict[str, Any], problem: str) -> None:
    environment = PLACE.variables() | changes
    with pytest.raises(RunError, match=problem):
        rank_env_of({name: value for name, value in environment.items() if value is not None})


def test_a_child_that_is_no_rank_hears_nothing_of_places() -> None:
    environment = PLACE.variables() | {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "HOME": "/"}
    assert without_rank_env(environment) == {"HOME": "/"}


def test_the_ranks_of_a_node_divide_its_threads() -> None:
    assert (PLACE.share(8), PLACE.share(3), PLACE.share(1)) == (4, 1, 1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_own_setting_of_the_allocator_is_kept_and_recorded_under_either_name(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    assert allocator_setting(environment) == "max_split_size_mb:128"
    assert not any("ALLOC_CONF" in chosen for chosen in chosen_variables(environment, deterministic=False))
    assert recorded_variables(environment) == environment


def test_where_the_user_says_nothing_segments_grow_and_of_two_names_torchs_first_counts() -> None:
    assert allocator_setting({}) is None
    assert chosen_variables({}, deterministic=False)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert allocator_setting({"PYTORCH_ALLOC_CONF": "new", "PYTORCH_CUDA_ALLOC_CONF": "old"}) == "old"


def test_what_decides_how_ranks_meet_is_recorded_and_nothing_private() -> None:
    environment = PLACE.variables() | chosen_variables({}, deterministic=True)
    recorded = recorded_variables(environment | {"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "1"})
    assert recorded["MASTER_PORT"] == "29500"
    assert recorded["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert {"CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE"} <= recorded.keys()
    assert "HF_TOKEN" not in recorded


CHILD = """
import sys
from finefit.artifacts.processes import end_with_parent
sys.platform = sys.argv[2]
end_with_parent(int(sys.argv[1]))
print("begun", flush=True)
while True:
    pass
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline(), flush=True)
input()
"""


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])  # where the kernel does it, and where it does not
def test_a_process_in_an_endless_loop_ends_with_the_one_that_started_it(platform: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, platform], stdin=pipe, stdout=pipe, text=True
    ) as parent:
        assert parent.stdout is not None
        number, begun = parent.stdout.readline().split()
        child = psutil.Process(int(number))
        parent.kill()
    try:
        assert "begun" in begun
        child.wait(30)
    finally:
        if child.is_running():
            child.kill()


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_process_whose_parent_has_ended_already_does_not_begin(platform: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(gone.pid), platform], capture_output=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout) == (-signal.SIGKILL, b"")
