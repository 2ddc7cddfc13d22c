"""Requests to stop: the step in hand is finished, a checkpoint is written, the process exits with code 3.

SIGTERM, SIGINT, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (a scheduler's warning) ask; so does the end of the launcher. A second SIGINT stops
at once: a checkpoint in the making is simply never seen. Of several ranks one that is asked is enough, and all stop after the same step.
"""

import os
import signal
from types import FrameType

from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends, when_parent_ends
from finefit.errors import Interrupted
from finefit.train.ranks import Ranks


class StopRequest:
    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self, *, is_child_of_ours: bool = True) -> None:
        """`is_child_of_ours`: standard input is a pipe from our own launcher; else another program is the parent, and its end is watched for."""
        on_stop_signals(self._asked)
        (when_launcher_ends if is_child_of_ours else when_parent_ends)(self._launcher_ended)

    def agreed(self, ranks: Ranks) -> str | None:
        """The reason of the first rank that has one. Every rank has to ask, once in each step."""
        if not ranks.any(self.reason is not None):
            return None
        return next(str(reason) for reason in ranks.gather(self.reason) if reason is not None)

    def _asked(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == signal.SIGINT.name:
            os._exit(Interrupted.exit_code)
        self.reason = signal.Signals(number).name

    def _launcher_ended(self) -> None:
        self.reason = self.reason or "the end of the process that started it"
