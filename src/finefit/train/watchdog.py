"""Notices that nothing goes on: says so once, with the stacks of all threads, and touches nothing."""

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from types import TracebackType
from typing import Any, TextIO

PATIENCE_SECONDS = 600.0
_TIMES_A_STEP = 20
_RECENT_STEPS = 50


class Watchdog:
    """Its thread lives as long as the `with` block. Whoever makes progress calls `beat`."""

    def __init__(
        self, tell: Callable[..., Any], *, patience: float = PATIENCE_SECONDS, log: TextIO | None = None
    ) -> None:
        """`tell` is given the event; the stacks go to `log`, by default the error output of the process."""
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
        """Long steps are no stall."""
        steps = list(self._step_seconds)
        return max(self._patience, _TIMES_A_STEP * median(steps)) if steps else self._patience

    def _report(self, idle: float, allowed: float) -> None:
        log = self._log or sys.stderr
        print(
            f"nothing has gone on for {idle:.0f} seconds since {self._what}; the stacks of all threads:",
            file=log,
            flush=True,
        )
        faulthandler.dump_traceback(file=log, all_threads=True)
        self._tell(event="stalled", seconds=round(idle, 1), allowed_seconds=round(allowed, 1), since=self._what)

    def __enter__(self) -> "Watchdog":
        self.beat("the start")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=5)
