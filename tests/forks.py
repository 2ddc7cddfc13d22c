"""Workers that launchers start in a test's own process, forked from a server that has loaded torch once and never used
it: all that such a start has (a session, pipe, log, lock and environment of its own) without the seconds of imports.
What a command starts as a process is started as by a user."""

import contextlib
import importlib
import io
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
import torch

from finefit.artifacts.reading import open_to_append
from finefit.run import launch

# A fork of the process that runs the tests would share the lock of its progress bars: whoever is killed with it in hand
# stops all others for good.
FORKS = multiprocessing.get_context("forkserver")
_WORKERS = ("finefit.train.worker", "finefit.evaluate.worker")
FORKS.set_forkserver_preload([__name__, "tests.faults", *_WORKERS])
_LOADED_BY = os.getpid()
_ROOT = Path(__file__).parents[1]
_really_start = launch._start


class Passed:
    """A descriptor on its way to a process that is being started; there, it is its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self._descriptor),)


def _arrived(passed: Any) -> int:
    return int(passed.detach())


def start_server() -> None:
    """Where a pipeline runs, before its first stage: what starts during a stage counts as memory of the stage."""
    with contextlib.chdir(_ROOT):  # the server imports tests from where it was started
        forkserver.ensure_running()


class Forked:
    """As much of `subprocess.Popen` as launchers use."""

    def __init__(self, module: str, argument: Path, *, log: Path, lock: int, environment: Mapping[str, str]) -> None:
        start_server()
        with open_to_append(log) as output:
            theirs, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
            there = (Passed(theirs), Passed(output.fileno()), Passed(lock), dict(environment), str(Path.cwd()))
            self._process = FORKS.Process(target=_be, args=(module, str(argument), *there))
            self._process.start()
        os.close(theirs)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.wait()


def _be(
    module: str, argument: str, given: int, log: int, _lock: int, environment: Mapping[str, str], folder: str
) -> None:
    assert os.getppid() == _LOADED_BY, (
        f"the server could not import {__name__}: start pytest in the root of the repository"
    )
    os.setsid()
    for mine, usual in ((given, 0), (log, 1), (log, 2)):
        os.dup2(mine, usual)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 for the rest of this process
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environment:  # torch reads it when it is loaded
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [module, argument]
    importlib.import_module(module).main()


def _start(module: str, argument: Path, *, log: Path, lock: int, environment: Mapping[str, str]) -> Any:
    start = Forked if module in _WORKERS else _really_start
    return start(module, argument, log=log, lock=lock, environment=environment)


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "_start", _start)
