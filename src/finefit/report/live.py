"""The progress of a run and its events, read from its records alone, so it is the same for the process that started the
run and for any other. On a terminal, one line redraws itself; elsewhere there are plain lines. logs/run.log always gets
lines."""

import os
import time
from collections import deque
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from finefit.artifacts.atomic import parse_line
from finefit.artifacts.cache import WORTH_A_WARNING
from finefit.artifacts.reading import is_there, lines_of, num_lines, open_file
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalRequest, Stage
from finefit.errors import RunError
from finefit.progress import Progress
from finefit.report.layout import clock, gib

Line = dict[str, Any]
_PLAIN_SECONDS = 10.0
_RECENT_STEPS = 20
_IN_HAND = ("audited", "oom_recovered", "loss_scale")
"""Events of a step that is not done yet."""
_EVENTS = {
    "resumed": "resumed from {checkpoint}",
    "rejected": "{note}",
    "requested": "step {step}: a {what} was requested from the run's page",
    "rolled_back": "rolled back to step {step}",
    "stalled": "no progress for {seconds:.0f} s since {since}; the stacks of all threads are in the log",
    "not_finite": "step {step} was not applied: {found}",
    "left_out": "step {step} is skipped: its loss or gradient was not finite before",
    "loss_scale": "step {step} overflowed in fp16 and is repeated with loss scale {scale:g}",
    "spike": "step {step}: loss {found:.4f} is a spike; the median of the steps before it is {usual:.4f}",
    "worst_does_not_fit": (
        "the longest rows with the most supervised tokens do not fit: a later step may run out of memory"
    ),
    "oom_recovered": "step {step} ran out of memory; the same rows are repeated with {levers}",
    "validation_oom_recovered": (
        "step {step}: validation ran out of memory; it now runs with {levers}, and training is unchanged"
    ),
    "validation_not_finite": "step {step}: validation loss {found}, so this step cannot be the best",
    "validation_left_out": (
        "step {step}: validation does not fit even row by row with every exact lever; it is skipped, and training "
        "continues"
    ),
}
_DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors from a line that lacks a key or has a value of another type."""
_MAX_NAMES = 3
_QUIET_GRADIENTS = {
    "zero": "exactly zero for",
    "faint": "rounding for",
    "idle": "missing, because no token was routed to these experts, for",
    "no_image": "missing, because no row of this step has an image, for",
}
"""Gradients that an audit reports, by kind."""
_VALIDATED = {
    "validation_loss": "validation loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "accuracy": "accuracy {:.1%}",
    "margin": "margin {:.4f}",
}


def describe_validation(line: Line) -> str:
    """The loss of a validation and the metrics of its objective."""
    return ", ".join(words.format(line[name]) for name, words in _VALIDATED.items() if name in line)


def describe_event(line: Line) -> str | None:
    """One line for an event in `metrics.jsonl` that a user should know of; None if there is nothing to report."""
    step, event = f"step {line.get('step')}", line.get("event")
    if event in _EVENTS:
        return _EVENTS[event].format(**{"step": None} | line | {"levers": _changed_levers(line)})
    match event:
        case "levers_timed" if levers := _changed_levers(line):
            count = len(line["candidates"])
            return f"of {count} plans timed on the first {line['rows']} rows, another is faster: {levers}"
        case "amended":
            return f"after {step}: {line['note'] or ', '.join(line['changes'])}"
        case "tracker_failed":
            lost = f"did not get {line['lost_lines']:,} lines" if line.get("lost_lines") else "failed"
            log = f"see {line['log']}" if "log" in line else ""
            parts = (f"{line['tracker']} {lost}", line["found"], log, "the run's own metrics are complete")
            return "; ".join(filter(None, parts))
        case "measured" if abs(line["error"]) > WORTH_A_WARNING:
            measured, predicted = gib(line["measured_bytes"]), gib(line["predicted_bytes"])
            found = f"{measured} reserved with the longest rows, {predicted} predicted ({line['error']:+.1%})"
            return f"memory is not as planned: {found}; please report it"
        case "validated":
            return f"{step}: {describe_validation(line)}"
        case "audited":
            kinds = [f"{words} {_few(line[name])}" for name, words in _QUIET_GRADIENTS.items() if line.get(name)]
            return f"{step}: the gradient is {'; it is '.join(kinds)}" if kinds else None
        case "dpo_start":
            loss = line["found"] if isinstance(line["found"], str) else f"{line['found']:.6f}"
            return f"before the first step the DPO loss is {loss} (ln 2, 0.693147, is expected)"
        case "routed":
            shown = []
            for source, shares in line["first"].items():
                most = sorted(range(len(shares)), key=lambda at: -shares[at])[:_MAX_NAMES]
                experts = " / ".join(f"{line['experts'][at]} {shares[at]:.0%}" for at in most)
                shown.append(f"{source} to {experts}")
            held_out = "held-out" if line["held_out"] else "trained"
            return f"{step}: first choices of {held_out} tokens: {'; '.join(shown)}"
    return None


def _changed_levers(line: Line) -> str:
    before, after = line.get("before", {}), line.get("after", {})
    changed = (name for name in after if after[name] != before.get(name))
    return ", ".join(f"{name} {before.get(name)} -> {after[name]}" for name in changed)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


class RunFollower:
    def __init__(self, run: RunDir) -> None:
        self.where = run.stages()[0]
        self._metrics, self._memory = JournalTail(self.where.metrics), JournalTail(self.where.memory)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._step = 0
        self._loss: float | None = None
        self._bytes: int | None = None
        self._checkpoint: str | None = None
        self._preparing = "loading the model"
        self.news()  # what happened before is not news

    def news(self) -> list[str]:
        """Texts of the events since the last call."""
        told = []
        for line in self._metrics.lines():
            try:
                words = self._take(line)
            except _DAMAGED as error:  # a damaged line stops no run
                words = f"a line of {self.where.metrics} is damaged and not shown: {type(error).__name__} {error}"
            if words:
                told.append(words)
        for line in self._memory.lines():
            held = line.get("reserved_bytes", line.get("resident_bytes"))
            self._bytes = held if isinstance(held, int) else self._bytes
        return told

    def _take(self, line: Line) -> str | None:
        """The event's text, if it should be reported."""
        if line.get("event") not in _IN_HAND:
            self._step = int(line.get("step", self._step))
        match line.get("event"):
            case None:
                self._recent.append((float(line["seconds"]), int(line["tokens"])))
                self._loss = float(line["loss"])
            case "saved" | "resumed":
                self._checkpoint = str(line["checkpoint"])
            case "started":
                self._loss, self._checkpoint = None, None
            case "not_finite":
                self._loss = None
            case "reference":
                self._preparing = f"reference of {line['done']:,}/{line['total']:,} pairs"
        return describe_event(line)

    def training(self) -> Progress | None:
        """None if nothing is trained."""
        if not is_there(self.where.stage):
            return None
        total = read_record(self.where.stage, Stage).total_steps
        parts, seconds = [f"step {self._step}/{total}"], sum(seconds for seconds, _ in self._recent)
        if not seconds:
            parts.append(self._preparing)
        else:
            parts.append("loss -" if self._loss is None else f"loss {self._loss:.4f}")
            parts.append(f"{sum(tokens for _, tokens in self._recent) / seconds:.0f} tok/s")
            parts += [] if self._bytes is None else [gib(self._bytes)]
            eta_seconds = (total - self._step) * seconds / len(self._recent)
            parts += [f"ETA {clock(eta_seconds)}"] if eta_seconds else []
            parts.append(f"saved {self._checkpoint}" if self._checkpoint else "nothing saved yet")
        return Progress(subject="training", done=self._step, total=total, words="  ".join(parts))


def describe_evaluating(where: StageDir) -> Progress | None:
    """The evaluation in progress: the latest requested, after the last step, and without a result yet."""
    asked = where.evaluations()
    if not asked or asked[-1].result.exists():
        return None
    paths = asked[-1]
    if _written(paths.request) < max(_written(where.metrics), _written(where.memory)):
        return None  # training goes on, and an evaluation that was stopped waits
    try:
        items = read_record(paths.request, EvalRequest).subject.items
    except RunError:  # of another version
        items = "test.jsonl"
    rows = num_lines(where.prepared(items))
    total = min(rows, paths.limit or rows)
    done = min(total, sum(map(num_lines, paths.answered())))  # a sample can follow the answers to all
    task, checkpoint = paths.folder.name, paths.checkpoint
    words = f"evaluating {checkpoint} on {task}: {done}/{total} answers"
    return Progress(subject=f"{task} {checkpoint}", done=done, total=total, words=words)


class JournalTail:
    """The whole lines that were added to a file since the last call, one in memory at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> Generator[Line, None, None]:
        if not is_there(self._path):
            return
        with open_file(self._path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(self._at)
            for line in lines_of(file, self._path):
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                if (value := parse_line(line)) is not None:
                    yield value


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


class RunView:
    """Call `tick()` as often as you like; it reads the run's records and shows what is new. With `evaluates`, for a
    command that only evaluates, the progress of an earlier training is not shown."""

    def __init__(self, run: RunDir, console: Console, *, log: Path | None = None, evaluates: bool = False) -> None:
        self.follower = RunFollower(run)
        self._console, self._log, self._evaluates = console, log, evaluates
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last_plain, self._shown = 0.0, dict[str, str]()

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._plain_lines(at_end=True)
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        for line in self.follower.news():
            self.say(line)
        now = self._plain_lines()
        if self._live and now is not None:
            row = Table.grid(padding=(0, 2))
            row.add_row(ProgressBar(total=max(now.total or 0, 1), completed=now.done or 0, width=24), now.words)
            self._live.update(row, refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
        self._write(line)

    def _plain_lines(self, *, at_end: bool = False) -> Progress | None:
        """A line for each beginning, one for a training that has ended, and one from time to time in between."""
        evaluating = describe_evaluating(self.follower.where)
        training = None if self._evaluates else self.follower.training()
        for now in filter(None, (training, evaluating)):
            has_ended = at_end or (now is training and evaluating is not None)
            is_late = time.monotonic() - self._last_plain >= _PLAIN_SECONDS
            is_due = has_ended or is_late or now.subject not in self._shown
            if is_due and self._shown.get(now.subject) != now.words:
                self._last_plain, self._shown[now.subject] = time.monotonic(), now.words
                if self._live is None:
                    self._console.print(now.words, highlight=False, soft_wrap=True)
                self._write(now.words)
        return evaluating or training

    def _write(self, line: str) -> None:
        if self._log is not None and (reason := append_line(self._log, line)) is not None:
            self._console.print(reason)
            self._log = None


def append_line(log: Path, line: str) -> str | None:
    """Returns why it cannot be written: a full disk stops the run where it saves, not here."""
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")
    except OSError as error:
        return f"{log} can no longer be written: {error.strerror}"
    return None
