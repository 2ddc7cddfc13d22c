"""Conventions that the processes of a run share: the signals that request a stop, the end of the launcher, the
environment that torch needs at its start, the rank among the others, and the lock on the run directory.

`python -m finefit.artifacts.processes PARENT MODULE ARGUMENTS` runs another package's module, such as lm-eval. It ends
with PARENT, the process that started it, however that ends, and imports nothing slow before.
"""

import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from finefit.artifacts.atomic import report_disk_full
from finefit.artifacts.reading import is_there, open_file, read_document
from finefit.errors import RunError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals from a scheduler, a keyboard, a closed terminal, and a scheduler's warning (submitit's is the last)."""

_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STARTER_VARIABLES = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""Further variables of torchrun."""
MMAP_BYTES = 1 << 20
"""Blocks of the C library of at least this size return to the system when they are freed."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

Handler = Callable[[int, FrameType | None], None]


def on_stop_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Returns the previous handlers. A signal that is ignored, as under nohup, stays ignored. Outside the main thread,
    where the Python API may be called, Python sets no handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def when_launcher_ends(act: Callable[[], None]) -> None:
    """Runs an action when the launcher ends. Standard input is a pipe from the launcher, if there is one."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        act()

    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        threading.Thread(target=wait, daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Kills this process when its parent ends. Call it at the start of a process that has nothing to lose. `parent` is
    the parent's pid, which may have ended already. On Linux the end of the thread that started the process counts as
    the end of its parent."""

    def kill_self() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    is_killed_by_kernel = False
    if sys.platform == "linux":
        arguments = (ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)
        is_killed_by_kernel = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, *arguments) == 0
    if not is_killed_by_kernel:
        when_parent_ends(kill_self)
    if os.getppid() != parent:
        kill_self()


def when_parent_ends(act: Callable[[], None]) -> None:
    """Runs an action when the parent ends. It serves a rank that another program started, whose pipes finefit must not
    read."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        act()

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """The place of one process among the ranks of a run, as in torchrun's variables."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """The number of ranks on this node."""
    address: str
    port: int
    """Address and port at which the ranks find each other."""

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    def share(self, threads: int) -> int:
        """This rank's share of a stage's threads, which the ranks of a node divide."""
        return max(1, threads // self.local_size)

    def variables(self) -> dict[str, str]:
        values = (self.rank, self.size, self.local_rank, self.local_size, self.address, self.port)
        return dict(zip(_RANK_VARIABLES, map(str, values), strict=True))


def rank_env_of(environment: Mapping[str, str]) -> RankEnv | None:
    """The environment that finefit's launcher, torchrun, accelerate and submitit set; None for a process that is not a
    rank."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    if missing := [name for name in _RANK_VARIABLES if name not in environment]:
        problem = f"RANK={environment['RANK']} is set in the environment, but not {', '.join(missing)}"
        remedy = "start the ranks with torchrun, or unset RANK to let finefit start them"
        raise RunError(f"{problem}: this rank cannot find the others", remedy)
    rank, size, local_rank, local_size = (_number(environment, name) for name in _RANK_VARIABLES[:4])
    if not (0 <= rank < size and 0 <= local_rank < local_size and size % local_size == 0):
        values = f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size}"
        remedy = "every node needs the same number of ranks; torchrun sets all four"
        raise RunError(f"{values} contradict each other", remedy)
    return RankEnv(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        problem = f"{name}={environment[name]} in the environment is not a number"
        raise RunError(problem, "torchrun sets it; unset RANK to let finefit start its ranks")
    return int(environment[name])


def without_rank_env(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that is not a rank, such as an evaluation that a rank starts."""
    ours = (*_RANK_VARIABLES, *_STARTER_VARIABLES)
    kept = (name for name in environment if name not in ours and not name.startswith("TORCHELASTIC_"))
    return {name: environment[name] for name in kept}


def allocator_setting(environment: Mapping[str, str]) -> str | None:
    """The user's own setting, under either of its names; torch uses the first that is set."""
    return next((environment[name] for name in _ALLOCATOR if name in environment), None)


def chosen_variables(environment: Mapping[str, str], *, deterministic: bool) -> dict[str, str]:
    """Variables that torch must find at its start. The user's own values win; the allocator's, under either of its two
    names."""
    chosen = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # OpenMP threads wait for each other by spinning: a short spin saves much on shared cores (bench/busy_cores.py)
        "GOMP_SPINCOUNT": "2000",
        # glibc would keep up to a quarter more on a CPU
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
    }
    if allocator_setting(environment) is None:
        chosen[_ALLOCATOR[0]] = "expandable_segments:True"
    return chosen | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})


_RECORDED = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *_ALLOCATOR,
    *chosen_variables({}, deterministic=True),
)
_RECORDED_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "DS_")


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that decide how ranks find each other and how fast they communicate."""
    kept = (name for name in sorted(environment) if name in _RECORDED or name.startswith(_RECORDED_FAMILIES))
    return {name: environment[name] for name in kept}


_ORPHAN_SECONDS, _NAMING_SECONDS, _RETRY_SECONDS = 60.0, 2.0, 0.1


@contextmanager
def run_lock(path: Path) -> Iterator[int]:
    """Ensures that only one process at a time works in a run directory. The operating system holds the lock, so it ends
    with its holder; the file names the holder. Yields the descriptor; a child that inherits it keeps the lock alive."""
    with open_file(path, os.O_RDWR | os.O_CREAT) as descriptor:
        _take(descriptor, path)
        with report_disk_full(path):
            os.ftruncate(descriptor, 0)
            in_thread = threading.current_thread() is not threading.main_thread()
            holder = {"version": 1, "pid": os.getpid(), "host": socket.gethostname(), "in_thread": in_thread}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield descriptor
        os.ftruncate(descriptor, 0)


def _take(descriptor: int, path: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pid, host = _read_holder(path)
            timeout = 0.0
            if pid is None:  # just taken, and the holder has not written its name yet
                timeout = _NAMING_SECONDS
            elif host == socket.gethostname() and not psutil.pid_exists(pid):  # its worker saves its last checkpoint
                timeout = _ORPHAN_SECONDS
            if time.monotonic() - began > timeout:
                problem = f"{path.parent.name} is already being worked on by process {pid} on {host}"
                remedy = f"follow it with `finefit watch {path.parent}`, or stop it with `kill {pid}`: it saves first"
                raise RunError(problem, remedy) from None
            time.sleep(_RETRY_SECONDS)


def _read_holder(path: Path) -> tuple[int | None, str]:
    try:
        holder = read_document(path)
        return int(holder["pid"]), str(holder["host"])
    except (RunError, ValueError, KeyError, TypeError):
        return None, "an unknown host"


def holder_of(path: Path) -> int | None:
    """The pid that holds the lock now; None if the lock is free."""
    if not is_there(path):
        return None
    with open_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_holder(path)[0]
    return None


def stop_holder(path: Path) -> str | None:
    """Asks the process that holds the lock to save and stop. Returns why it was not asked, if it was not."""
    if holder_of(path) is None:
        return "it does not run now"
    pid, host = _read_holder(path)
    if pid is None or host != socket.gethostname():
        return f"it runs on {host}"
    if read_document(path).get("in_thread"):  # whose signals are those of a whole program, which they would end
        return f"it runs in a thread of process {pid}, a program that a signal would end"
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return "it has just ended"
    except PermissionError:
        return f"its process {pid} belongs to another user"
    return None


def main() -> None:
    _, parent, module, *arguments = sys.argv
    end_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
