"""A worker is a child process in a session of its own. Signals are passed on; its standard input is a pipe whose end tells it that the launcher is
gone; it inherits the run's lock, so the run stays locked while any of the two lives."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from finefit.artifacts.launcher import on_stop_signals
from finefit.errors import Interrupted, WorkerDied

_TICK_SECONDS = 0.2
_TAIL_LINES = 15


def launch(module: str, argument: Path, *, log: Path, lock: int, tick: Callable[[], None], deterministic: bool = False) -> int:
    """Runs `python -m module argument` to its end; its output goes to the log."""
    with log.open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(argument)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            env=_environment(deterministic),
        )
    with worker, _signals_passed_on(worker) as received:
        while worker.poll() is None:
            tick()
            time.sleep(_TICK_SECONDS)
    tick()
    if worker.returncode < 0:
        raise _died(signal.Signals(-worker.returncode), log)
    if received and worker.returncode == 0:  # it came too late to stop this work, but not to stop what would follow
        raise Interrupted(f"stopped by {received[0].name}; what was in hand is done", "give the same command again")
    return worker.returncode


def _environment(deterministic: bool) -> dict[str, str]:
    """What must stand before torch starts. A user's own setting is kept."""
    chosen = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # OpenMP threads wait for each other by spinning; a short spin costs little and saves much on cores that others use too (bench/busy_cores.py)
        "GOMP_SPINCOUNT": "2000",
    }
    if deterministic:
        chosen["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return chosen | dict(os.environ)


@contextmanager
def _signals_passed_on(worker: "subprocess.Popen[bytes]") -> Iterator[list[signal.Signals]]:
    """Yields the list of those that came."""
    received: list[signal.Signals] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        worker.send_signal(number)

    before = on_stop_signals(pass_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _died(number: signal.Signals, log: Path) -> WorkerDied:
    likely = "; out of host memory is the usual reason when nobody sent it" if number == signal.SIGKILL else ""
    return WorkerDied(
        f"the worker was ended by {number.name}{likely}. {last_words(log)}",
        "give the same command again: it goes on from the last checkpoint",
    )


def last_words(log: Path) -> str:
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    return f"The end of {log.name}:\n{tail}"
