"""Requests to stop: the step in hand is finished, a checkpoint is written, the process exits with code 3.

SIGTERM, SIGINT, SIGHUP (a closed terminal) and SIGUSR1 (a scheduler's warning) ask; so does the end of standard input when that is a pipe from
the launcher, which means that the launcher is gone. A second SIGINT stops at once: a checkpoint in the making is simply never seen.
"""

import os
import signal
from types import FrameType

from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.errors import Interrupted


class StopRequest:
    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self) -> None:
        on_stop_signals(self._asked)
        when_launcher_ends(self._launcher_ended)

    def _asked(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == signal.SIGINT.name:
            os._exit(Interrupted.exit_code)
        self.reason = signal.Signals(number).name

    def _launcher_ended(self) -> None:
        self.reason = self.reason or "the end of the process that started it"
