"""Trackers, each fed by a process of its own (`train.tracker`) that reads the run's metrics as they grow: the file is the queue, so nothing in the
training waits for a tracker, and whatever one does, the metrics are complete here."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from finefit.artifacts.rundir import StageDir
from finefit.spec.schema import Tracker
from finefit.train.tracker import last_delivery, log_of, points

_LAST_SECONDS = 30.0
"""That a tracker has for what is left when training has ended well."""
_HURRIED_SECONDS = 5.0
"""When it has not: a scheduler may be waiting."""
_COMMAND = (sys.executable, "-m", "finefit.train.tracker")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fed:
    tracker: Tracker
    process: "subprocess.Popen[bytes]"
    offset: int
    """In the lines that it began at."""


class Tracking:
    """While the `with` block lasts, the trackers are fed. What was lost on the way is told once, at its end."""

    def __init__(
        self,
        where: StageDir,
        trackers: Sequence[Tracker],
        tell: Callable[..., Any],
        *,
        last_seconds: float | None = None,
        lines: Path | None = None,
        offset: int | None = None,
    ) -> None:
        """`lines`: what they are fed from, by default the metrics; from `offset` on, by default from its end."""
        self._where, self._trackers, self._tell, self._last_seconds = (
            where,
            trackers,
            tell,
            last_seconds or _LAST_SECONDS,
        )
        self._lines, self._offset = lines or where.metrics, offset
        self._fed: list[_Fed] = []

    def __enter__(self) -> "Tracking":
        for tracker in self._trackers:
            if importlib.util.find_spec(tracker.kind) is None:  # each package is called as its kind
                self._tell(
                    event="tracker_failed",
                    tracker=tracker.kind,
                    found=f"{tracker.kind} is not installed: pip install {tracker.kind}",
                )
            else:
                self._fed.append(self._started(tracker))
        return self

    def _started(self, tracker: Tracker) -> _Fed:
        end = self._lines.stat().st_size if self._lines.exists() else 0
        offset = end if self._offset is None else self._offset
        project = tracker.project or self._where.run.name.rpartition("-")[0] or self._where.run.name
        log = log_of(self._where, tracker.kind)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *_COMMAND,
                    tracker.kind,
                    str(self._where.path),
                    project,
                    str(self._lines),
                    str(offset),
                    str(self._last_seconds),
                ],
                stdin=subprocess.PIPE,  # its end tells the process that training has ended, however it did
                stdout=output,
                stderr=output,
                start_new_session=True,  # a keyboard's interrupt is for the worker
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the card is the training's
            )
        return _Fed(tracker=tracker, process=process, offset=offset)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fed in self._fed:
            assert fed.process.stdin is not None
            fed.process.stdin.close()
        seconds = self._last_seconds if kind is None else min(self._last_seconds, _HURRIED_SECONDS)
        deadline = time.monotonic() + seconds
        for fed in self._fed:
            problem = _ended(fed.process, deadline, seconds)
            self._account(fed, problem)

    def _account(self, fed: _Fed, problem: str | None) -> None:
        delivery = last_delivery(self._where, fed.tracker.kind, fed.process.pid)
        lost = sum(1 for _ in points(self._lines, fed.offset)) - delivery.sent
        if lost > 0 or problem:
            found = "; ".join(part for part in (problem, delivery.problem) if part)
            log = log_of(self._where, fed.tracker.kind).relative_to(self._where.run)
            self._tell(event="tracker_failed", tracker=fed.tracker.kind, lost_lines=lost, found=found, log=str(log))


def _ended(process: "subprocess.Popen[bytes]", deadline: float, seconds: float) -> str | None:
    """Why it had to be ended, or how it ended by itself if not well."""
    try:
        code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it had not taken all of them {seconds:g} seconds after the end of training"
    return None if code == 0 else f"its process ended with {code}"
