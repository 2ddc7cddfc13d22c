"""The items of one evaluation shared over cards: a process for each, every one with a whole model and every n-th item.

The first is the evaluation itself. The others are its children: they end when it ends, and it fails when one of them does.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finefit import errors
from finefit.artifacts.evaluations import EvalFailure
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import EvalPaths
from finefit.errors import FinefitError, WorkerDied

MODULE = "finefit.evaluate.worker"
_GRACE_SECONDS = 30.0
"""That a child has to end after it was asked to."""
_SAME_COMMAND = "give the same command again: the answers so far are kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of the processes that share the items this is."""

    number: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def mine(self, items: list[int]) -> list[int]:
        """By place among all that are to be answered in the end, so that all processes divide alike whatever is answered already."""
        return items[self.number :: self.of]


ALONE = Part()


def read_part(text: str) -> Part:
    number, of = map(int, text.split("/"))
    return Part(number=number, of=of)


@contextmanager
def companions(request: Path, paths: EvalPaths, num_parts: int) -> Iterator[Callable[[], None]]:
    """Starts the other processes, and waits for them in the end. Yields a look at them that raises what one of them failed with."""
    children = {number: _start(request, Part(number=number, of=num_parts)) for number in range(1, num_parts)}

    def look() -> None:
        for number, child in children.items():
            if child.poll() not in (None, 0):
                raise _failure(paths, number, num_parts, child.returncode)

    try:
        yield look
        for child in children.values():
            child.wait()
        look()
    finally:
        _end(list(children.values()))


def _start(request: Path, part: Part) -> "subprocess.Popen[bytes]":
    """Its standard input is a pipe whose end tells it that this process is gone. It inherits the run's lock as this process did."""
    command = [sys.executable, "-P", "-m", MODULE, str(request), "--part", str(part)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)


def _end(children: "list[subprocess.Popen[bytes]]") -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _failure(paths: EvalPaths, number: int, num_parts: int, code: int) -> FinefitError:
    who = f"process {number + 1} of {num_parts} that share the items"
    if paths.failure_of(number).exists():
        failure = read_record(paths.failure_of(number), EvalFailure).failure
        kind: type[FinefitError] = getattr(errors, failure.kind, FinefitError)
        return kind(f"{who}: {failure.problem}", failure.remedy)
    if code < 0:
        return WorkerDied(f"{who} was ended by {signal.Signals(-code).name}", _SAME_COMMAND)
    return FinefitError(
        f"{who} ended with code {code}, which is a fault of finefit; its words are in the run's log",
        "please report it with these lines",
    )
