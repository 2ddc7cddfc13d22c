"""What watches over a training: stalls, loss spikes, and requests to stop."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any, TextIO

from finefit.artifacts.processes import on_stop_signals, when_launcher_ends, when_parent_ends
from finefit.errors import Interrupted
from finefit.train.ranks import Ranks

STALL_SECONDS = 600.0
_TIMES_A_STEP = 20
_RECENT_STEPS = 50


class Watchdog:
    """Reports a stall once, with the stacks of all threads, and changes nothing. Its thread lives as long as the `with`
    block; progress calls `beat`."""

    def __init__(self, tell: Callable[..., Any], *, patience: float = STALL_SECONDS, log: TextIO | None = None) -> None:
        """`tell` gets the event; the stacks go to `log`, by default standard error."""
        self._tell, self._patience, self._log = tell, patience, log
        self._beaten, self._what, self._is_told = time.monotonic(), "the start", False
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, what: str = "a micro-batch", *, step_seconds: float | None = None) -> None:
        self._beaten, self._what, self._is_told = time.monotonic(), what, False
        if step_seconds is not None:
            self._step_seconds.append(step_seconds)

    def _watch(self) -> None:
        while not self._over.wait(min(self._patience / 10, 10.0)):
            idle, allowed = time.monotonic() - self._beaten, self._allowed()
            if idle > allowed and not self._is_told:
                self._is_told = True
                self._report(idle, allowed)

    def _allowed(self) -> float:
        """Long steps are not a stall."""
        steps = list(self._step_seconds)
        return max(self._patience, _TIMES_A_STEP * median(steps)) if steps else self._patience

    def _report(self, idle: float, allowed: float) -> None:
        log = self._log or sys.stderr
        stall = f"no progress for {idle:.0f} seconds since {self._what}"
        print(f"{stall}; the stacks of all threads:", file=log, flush=True)
        faulthandler.dump_traceback(file=log, all_threads=True)
        self._tell(event="stalled", seconds=round(idle, 1), allowed_seconds=round(allowed, 1), since=self._what)

    def __enter__(self) -> "Watchdog":
        self.beat("the start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)


_WINDOW, _ENOUGH = 50, 20
_DEVIATIONS, _RATIO = 8.0, 1.5
_NORMAL = 1.4826
"""Median distance from the median -> standard deviation, for a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    loss: float
    usual: float
    """Median of the steps before."""


class SpikeDetector:
    """Finds a loss that jumps out of its recent past; it is only reported."""

    def __init__(self, recent: Iterable[float] = ()) -> None:
        """`recent`: losses before this process began."""
        self._recent = deque(recent, maxlen=_WINDOW)

    def see(self, loss: float) -> LossSpike | None:
        """Far outside the scatter, and much higher than any step of the window: a smooth curve has almost no scatter, a
        skewed one high steps now and then. A lasting jump is reported once."""
        before = list(self._recent)
        self._recent.append(loss)
        if len(before) < _ENOUGH:
            return None
        usual, highest = median(before), max(before)
        scatter = _NORMAL * median(abs(value - usual) for value in before)
        is_spike = loss > usual + _DEVIATIONS * scatter and loss > highest + (_RATIO - 1) * abs(highest)
        return LossSpike(loss=loss, usual=usual) if is_spike else None


class StopRequest:
    """A request to stop: the current step is finished, a checkpoint is written, the process exits with code 3.

    SIGTERM, SIGINT, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (a scheduler's warning) request it; so does the end
    of the launcher. A second SIGINT stops at once, and a checkpoint being written never becomes visible. One of several
    ranks is enough, and all stop after the same step."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self, *, is_child_of_ours: bool = True) -> None:
        """`is_child_of_ours`: standard input is a pipe from our own launcher; else the end of the parent is watched."""
        on_stop_signals(self._asked)
        (when_launcher_ends if is_child_of_ours else when_parent_ends)(self._launcher_ended)

    def agreed(self, ranks: Ranks) -> str | None:
        """The reason of the first rank that has one. Every rank has to ask, once per step."""
        if not ranks.any(self.reason is not None):
            return None
        return next(str(reason) for reason in ranks.gather(self.reason) if reason is not None)

    def _asked(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == signal.SIGINT.name:
            os._exit(Interrupted.exit_code)
        self.reason = signal.Signals(number).name

    def _launcher_ended(self) -> None:
        self.reason = self.reason or "the end of the process that started it"
