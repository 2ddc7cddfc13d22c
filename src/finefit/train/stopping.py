"""Requests to stop: the step in hand is finished, a checkpoint is written, the process exits with code 3.

SIGTERM, SIGINT, SIGHUP (a closed terminal) and SIGUSR1 (a scheduler's warning) ask; so does the end of standard input when that is a pipe from
the launcher, which means that the launcher is gone. A second SIGINT stops at once: a checkpoint in the making is simply never seen.
"""

import os
import signal
import stat
import sys
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
EXIT_CODE = 3


class StopRequest:
    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._asked)
        if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            threading.Thread(target=self._wait_for_launcher, daemon=True).start()

    def _asked(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == signal.SIGINT.name:
            os._exit(EXIT_CODE)
        self.reason = signal.Signals(number).name

    def _wait_for_launcher(self) -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        self.reason = self.reason or "the end of the process that started it"
