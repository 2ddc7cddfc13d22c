"""What a worker and its launcher agree on: the signals that ask for a stop, and the pipe whose end says that the launcher is gone."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Asked by a scheduler, a keyboard, a closed terminal, a scheduler's warning."""

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
