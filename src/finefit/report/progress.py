"""Where a run stands, read from its records alone: the same for the process that started it and for anybody who watches."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.evaluations import EvalRequest
from finefit.artifacts.journal import whole
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.trainings import Stage
from finefit.errors import RunError
from finefit.report.events import event_words
from finefit.report.units import clock, gib

_RECENT_STEPS = 20
_IN_HAND = ("audited", "rescued", "loss_scale")
"""Events of a step that is not done yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
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
class Answering:
    task: str
    checkpoint: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"evaluating {self.checkpoint} on {self.task}: {self.done}/{self.total} answers"


class Follower:
    """Reads a run's journals as they grow."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._where = run.stages()[0]
        self._metrics, self._memory = Tail(self._where.metrics), Tail(self._where.memory)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._step, self._loss, self._bytes = 0, None, None
        self._checkpoint: str | None = None
        self._preparing = "loading the model"
        self.news()  # what happened before this look is known, not news

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
        return event_words(line)

    def training(self) -> Training | None:
        """None where nothing is trained."""
        if not self._where.stage.exists():
            return None
        total = read_record(self._where.stage, Stage).total_steps
        seconds = sum(s for s, _ in self._recent)
        return Training(
            step=self._step,
            total_steps=total,
            loss=self._loss,
            tokens_per_second=sum(t for _, t in self._recent) / seconds if seconds else None,
            memory_bytes=self._bytes,
            eta_seconds=(total - self._step) * seconds / len(self._recent) if self._recent else None,
            checkpoint=self._checkpoint,
            preparing=self._preparing,
        )

    def answering(self) -> Answering | None:
        """The evaluation in hand: asked for last, after the last step, and without a result yet."""
        asked = self._where.evaluations()
        if not asked or _written(asked[-1].request) < max(_written(self._where.metrics), _written(self._where.memory)):
            return None  # training goes on; an evaluation that was stopped before waits
        paths = asked[-1]
        if paths.result.exists():
            return None
        rows = _count(self._where.prepared(_items_of(paths.request)))
        total = min(rows, paths.limit or rows)
        done = min(total, sum(map(_count, paths.answered())))  # a sample can follow the answers to all
        return Answering(task=paths.folder.name, checkpoint=paths.checkpoint, done=done, total=total)


class Tail:
    """The whole lines that were added to a file since the last look."""

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
        return [value for line in ended.splitlines() if (value := whole(line)) is not None]


def _items_of(request: Path) -> str:
    """As it is asked now, or was by another version."""
    try:
        return read_record(request, EvalRequest).subject.items
    except RunError:
        return "test.jsonl"


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
