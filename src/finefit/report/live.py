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
    """`tick()` as often as you like; it reads the run's records and shows what is new.

    `evaluates` for a verb that only evaluates: the training of long ago is no progress of it.
    """

    def __init__(self, run: RunDir, console: Console, *, log: Path | None = None, evaluates: bool = False) -> None:
        self.follower = Follower(run)
        self._console, self._log, self._evaluates = console, log, evaluates
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last_plain, self._shown = 0.0, dict[str, str]()

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plain_lines(at_end=True)
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        for line in self.follower.news():
            self.say(line)
        now = self._plain_lines()
        if self._live and now is not None:
            self._live.update(_bar(now), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
        self._write(line)

    def _plain_lines(self, *, at_end: bool = False) -> Training | Answering | None:
        """A line for what begins, the last one of a training that has ended, and one from time to time in between."""
        answering, training = self.follower.answering(), None if self._evaluates else self.follower.training()
        if training is not None:
            self._plain_line("training", str(training), force=at_end or answering is not None)
        if answering is not None:
            self._plain_line(f"{answering.task} {answering.checkpoint}", str(answering), force=at_end)
        return answering or training

    def _plain_line(self, subject: str, line: str, *, force: bool) -> None:
        is_due = force or subject not in self._shown or time.monotonic() - self._last_plain >= _PLAIN_SECONDS
        if not is_due or self._shown.get(subject) == line:
            return
        self._last_plain, self._shown[subject] = time.monotonic(), line
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        self._write(line)

    def _write(self, line: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")
        except OSError as error:  # a full disk stops the run where it saves, not here
            self._console.print(f"{self._log} is not written any more: {error.strerror}")
            self._log = None


def _bar(now: Training | Answering) -> Table:
    done, total = (now.step, now.total_steps) if isinstance(now, Training) else (now.done, now.total)
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=24), str(now))
    return row
