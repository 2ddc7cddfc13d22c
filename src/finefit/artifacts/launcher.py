"""What a worker and whoever starts it agree on: the signals that ask for a stop, what says that the launcher is gone, the environment that torch must
find at its start, and the place of a rank among the others."""

import ctypes
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from finefit.errors import RunError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Asked by a scheduler, a keyboard, a closed terminal, a scheduler's warning (submitit's is the last)."""

_PARENT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STARTER_VARIABLES = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""What torchrun says beside them."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

Handler = Callable[[int, FrameType | None], None]


def on_stop_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Returns what stood there before. A signal that is ignored, as under nohup, stays ignored."""
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def when_launcher_ends(act: Callable[[], None]) -> None:
    """Standard input is a pipe from the launcher; where it is anything else, there is none."""
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        threading.Thread(target=_wait, args=(act,), daemon=True).start()


def _wait(act: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    act()


def end_with_parent(parent: int) -> None:
    """For a process that holds nothing that could be lost, at its start: it is killed when the one that started it ends, however that ends, and
    whatever code it is in then. `parent`: the number of that one, which may have ended already. On Linux the end of the thread that started it
    counts as that of its parent."""
    if not _is_killed_by_kernel():
        when_parent_ends(_kill_self)
    if os.getppid() != parent:
        _kill_self()


def _is_killed_by_kernel() -> bool:
    """Linux does so where it is asked; others do not know the call."""
    if sys.platform != "linux":
        return False
    return bool(
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3) == 0
    )


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def when_parent_ends(act: Callable[[], None]) -> None:
    """For a rank that was started by another program, whose pipes are not ours to read."""
    threading.Thread(target=_wait_for_parent, args=(act, os.getppid()), daemon=True).start()


def _wait_for_parent(act: Callable[[], None], parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    act()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of one process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this node."""
    address: str
    port: int
    """Where the ranks find each other."""

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    def share(self, threads: int) -> int:
        """Of a stage's threads, which are those of a node: its ranks divide them."""
        return max(1, threads // self.local_size)

    def variables(self) -> dict[str, str]:
        values = (self.rank, self.size, self.local_rank, self.local_size, self.address, self.port)
        return dict(zip(_RANK_VARIABLES, map(str, values), strict=True))


def find_place(environment: Mapping[str, str]) -> Place | None:
    """As our own launcher, torchrun, accelerate and submitit tell it; None for a process that is nobody's rank."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in _RANK_VARIABLES if name not in environment]
    if missing:
        raise RunError(
            f"RANK={environment['RANK']} is set in the environment, but not {', '.join(missing)}: this rank cannot find the others",
            "start the ranks with torchrun, or unset RANK to let finefit start them",
        )
    rank, size, local_rank, local_size = (_number(environment, name) for name in _RANK_VARIABLES[:4])
    if not (0 <= rank < size and 0 <= local_rank < local_size and size % local_size == 0):
        raise RunError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size} contradict each other",
            "every node needs the same number of ranks; torchrun sets all four",
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        raise RunError(
            f"{name}={environment[name]} in the environment is no number",
            "torchrun sets it; unset RANK to let finefit start its ranks",
        )
    return int(environment[name])


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child that is no rank, such as an evaluation that a rank starts."""
    foreign = (*_RANK_VARIABLES, *_STARTER_VARIABLES)
    return {
        name: value
        for name, value in environment.items()
        if name not in foreign and not name.startswith("TORCHELASTIC_")
    }


def allocator_setting(environment: Mapping[str, str]) -> str | None:
    """The user's own, under either of its names; torch takes the first that is set."""
    return next((environment[name] for name in _ALLOCATOR if name in environment), None)


def chosen_variables(environment: Mapping[str, str], *, deterministic: bool) -> dict[str, str]:
    """What must stand in the environment before torch starts. The allocator's setting has two names, so one that the user has set is left out; of the
    others the user's own goes first."""
    chosen = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # OpenMP threads wait for each other by spinning; a short spin costs little and saves much on cores that others use too (bench/busy_cores.py)
        "GOMP_SPINCOUNT": "2000",
    }
    if allocator_setting(environment) is None:
        chosen[_ALLOCATOR[0]] = "expandable_segments:True"
    return chosen | ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})


_RECORDED = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    *_ALLOCATOR,
    *chosen_variables({}, deterministic=True),
)
_RECORDED_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "DS_")


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that decide how ranks meet and how fast they are."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _RECORDED or name.startswith(_RECORDED_FAMILIES)
    }
