"""A run as it goes on: one line that renews itself on a terminal, plain lines elsewhere, and always lines in logs/run.log."""

import time
from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from finefit.artifacts.rundir import RunDir
from finefit.report.progress import Answering, Follower, Training

_PLAIN_SECONDS = 10.0


class RunView:
    """`tick()` as often as you like; it reads the run's records and shows what is new."""

    def __init__(self, run: RunDir, console: Console, *, log: Path | None = None) -> None:
        self.follower = Follower(run)
        self._console, self._log = console, log
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last_plain, self._last_shown = 0.0, ""

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._plain_line(self._now(), force=True)
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        for line in self.follower.news():
            self.say(line)
        now = self._now()
        self._plain_line(now, force=False)
        if self._live:
            self._live.update(_bar(now), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
        self._write(line)

    def _now(self) -> Training | Answering:
        return self.follower.answering() or self.follower.training()

    def _plain_line(self, now: Training | Answering, *, force: bool) -> None:
        line = str(now)
        if line == self._last_shown or not (force or time.monotonic() - self._last_plain >= _PLAIN_SECONDS):
            return
        self._last_plain, self._last_shown = time.monotonic(), line
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        self._write(line)

    def _write(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")


def _bar(now: Training | Answering) -> Table:
    done, total = (now.step, now.total_steps) if isinstance(now, Training) else (now.done, now.total)
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=24), str(now))
    return row
