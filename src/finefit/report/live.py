"""The progress of a run, read from its records alone: the same for the process that started it and for any other. One
line renews itself on a terminal; elsewhere there are plain lines, and always lines in logs/run.log."""

import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from finefit.artifacts.atomic import parse_line
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.stage_records import EvalRequest, Stage
from finefit.errors import RunError
from finefit.report.events import describe_event
from finefit.report.layout import clock, gib

_RECENT_STEPS = 20
_IN_HAND = ("audited", "oom_recovered", "loss_scale")
"""Events of a step that is not done yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    step: int
    total_steps: int
    loss: float | None
    """None after a step that was not applied."""
    tokens_per_second: float | None
    memory_bytes: int | None
    eta_seconds: float | None
    checkpoint: str | None
    """The newest verified one."""
    preparing: str = "loading the model"
    """What is done before the first step."""

    def __str__(self) -> str:
        parts = [f"step {self.step}/{self.total_steps}"]
        if self.tokens_per_second is None:
            return f"{parts[0]}  {self.preparing}"
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else ["loss -"]
        parts += [f"{self.tokens_per_second:.0f} tok/s"]
        parts += [gib(self.memory_bytes)] if self.memory_bytes is not None else []
        parts += [f"ETA {clock(self.eta_seconds)}"] if self.eta_seconds else []
        parts += [f"saved {self.checkpoint}"] if self.checkpoint else ["nothing saved yet"]
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalStatus:
    task: str
    checkpoint: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"evaluating {self.checkpoint} on {self.task}: {self.done}/{self.total} answers"


class RunFollower:
    """Reads a run's journals as they grow."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._where = run.stages()[0]
        self._metrics, self._memory = JournalTail(self._where.metrics), JournalTail(self._where.memory)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._step, self._loss, self._bytes = 0, None, None
        self._checkpoint: str | None = None
        self._preparing = "loading the model"
        self.news()  # what happened before is not news

    _loss: float | None
    _bytes: int | None

    def status(self) -> Run:
        return read_record(self.run.run, Run)

    def news(self) -> list[str]:
        """Events since the last call, in words."""
        told = [words for line in self._metrics.lines() if (words := self._take(line))]
        for line in self._memory.lines():
            self._bytes = line.get("reserved_bytes", line["resident_bytes"])
        return told

    def _take(self, line: dict[str, Any]) -> str | None:
        event = line.get("event")
        if event not in _IN_HAND:
            self._step = line.get("step", self._step)
        match event:
            case None:
                self._loss = line["loss"]
                self._recent.append((line["seconds"], line["tokens"]))
            case "saved" | "resumed":
                self._checkpoint = line["checkpoint"]
            case "started":
                self._loss, self._checkpoint = None, None
            case "not_finite":
                self._loss = None
            case "reference":
                self._preparing = f"reference of {line['done']:,}/{line['total']:,} pairs"
        return describe_event(line)

    def training(self) -> TrainingStatus | None:
        """None where nothing is trained."""
        if not self._where.stage.exists():
            return None
        total = read_record(self._where.stage, Stage).total_steps
        seconds = sum(s for s, _ in self._recent)
        return TrainingStatus(
            step=self._step,
            total_steps=total,
            loss=self._loss,
            tokens_per_second=sum(t for _, t in self._recent) / seconds if seconds else None,
            memory_bytes=self._bytes,
            eta_seconds=(total - self._step) * seconds / len(self._recent) if self._recent else None,
            checkpoint=self._checkpoint,
            preparing=self._preparing,
        )

    def answering(self) -> EvalStatus | None:
        """The evaluation in progress: requested last, after the last step, and without a result yet."""
        asked = self._where.evaluations()
        if not asked or _written(asked[-1].request) < max(_written(self._where.metrics), _written(self._where.memory)):
            return None  # training goes on, and an evaluation that was stopped waits
        paths = asked[-1]
        if paths.result.exists():
            return None
        rows = _count(self._where.prepared(_items_of(paths.request)))
        total = min(rows, paths.limit or rows)
        done = min(total, sum(map(_count, paths.answered())))  # a sample can follow the answers to all
        return EvalStatus(task=paths.folder.name, checkpoint=paths.checkpoint, done=done, total=total)


class JournalTail:
    """The whole lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            block = file.read()
        ended = block[: block.rfind(b"\n") + 1]
        self._at += len(ended)
        return [value for line in ended.splitlines() if (value := parse_line(line)) is not None]


def _items_of(request: Path) -> str:
    """The name of the file with the items; a request of another version cannot be read."""
    try:
        return read_record(request, EvalRequest).subject.items
    except RunError:
        return "test.jsonl"


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


_PLAIN_SECONDS = 10.0


class RunView:
    """`tick()` as often as you like; it reads the run's records and shows what is new.

    `evaluates`: for a verb that only evaluates, the progress of an earlier training is not shown.
    """

    def __init__(self, run: RunDir, console: Console, *, log: Path | None = None, evaluates: bool = False) -> None:
        self.follower = RunFollower(run)
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

    def _plain_lines(self, *, at_end: bool = False) -> TrainingStatus | EvalStatus | None:
        """A line for what begins, one for a training that has ended, and one from time to time in between."""
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


def _bar(now: TrainingStatus | EvalStatus) -> Table:
    done, total = (now.step, now.total_steps) if isinstance(now, TrainingStatus) else (now.done, now.total)
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=24), str(now))
    return row
