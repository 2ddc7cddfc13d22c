"""The numbers of a run's journals as columns by step, read as they are appended, and thinned out for a plot: of each
stretch of steps the least and the greatest value remain, so that no spike is lost."""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from finefit.report.live import JournalTail, describe_event

Line = dict[str, Any]
_REWINDS = ("started", "resumed", "rolled_back")
_NOT_PLOTTED = ("step", "epoch", "rows", "time", "tokens", "supervised_tokens")
_MAX_COLUMNS = 40
_MAX_STEP = 2**31 - 1
_SLICE_LINES = 20_000
"""Lines per call: a journal that has grown for days is read in pieces, and the page shows what has been read."""
_NUM_EVENTS = 2000
_RECENT_STEPS = 50
_NUM_CACHED = 32


class Columns:
    """Rising steps, with a value for each name or nan."""

    def __init__(self) -> None:
        self.steps = array("i")
        self.values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.keep_until(step - 1)
        for name in values.keys() - self.values.keys():
            if len(self.values) < _MAX_COLUMNS:
                self.values[name] = array("f", [nan]) * len(self.steps)
        self.steps.append(step)
        for name, column in self.values.items():
            column.append(values.get(name, nan))

    def keep_until(self, step: int) -> None:
        """Drops the steps after this one, which another attempt has repeated or will."""
        if self.steps and self.steps[-1] > step:
            end = bisect_right(self.steps, step)
            del self.steps[end:]
            for column in self.values.values():
                del column[end:]

    def last(self, name: str) -> float | None:
        """The newest value; None for a gap, and for one that JSON cannot hold."""
        column = self.values.get(name)
        return column[-1] if column and isfinite(column[-1]) else None

    def thinned(self, first: int, last: int, num_points: int) -> tuple[list[int], dict[str, list[float]]]:
        """Steps `first` to `last`. A stretch of several steps gives two points, its least and its greatest value."""
        low, high = bisect_left(self.steps, first), bisect_right(self.steps, last)
        stride = max(1, ceil(2 * (high - low) / num_points))
        steps = np.array(self.steps[low:high])
        if stride <= 2:
            return steps.tolist(), {name: column[low:high].tolist() for name, column in self.values.items()}
        starts = np.arange(0, len(steps), stride)
        middles = np.minimum(starts + stride // 2, len(steps) - 1)
        shown: list[int] = np.stack((steps[starts], steps[middles])).T.ravel().tolist()
        values = {name: _extremes(np.array(column[low:high]), stride) for name, column in self.values.items()}
        return shown, values


def _extremes(values: "np.ndarray[Any, np.dtype[np.float32]]", stride: int) -> list[float]:
    starts = np.arange(0, len(values), stride)
    ends = (np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts))
    found: list[float] = np.stack(ends).T.ravel().tolist()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    step: int
    kind: str
    text: str
    time: float | None
    """Of the step before it, in seconds since 1970."""


class TrainingSeries:
    """One training: its steps, its validations, its memory and its events."""

    def __init__(self, metrics: Path, memory: Path, *, smooth_steps: int = 20) -> None:
        self._weight = 2 / (smooth_steps + 1)
        self._tails = (JournalTail(metrics), self._take), (JournalTail(memory), self._take_memory)
        self._path = metrics
        self.steps, self.validations, self.memory = Columns(), Columns(), Columns()
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self.recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        """Time and step of the latest steps of this attempt."""
        self.instants: dict[str, dict[str, int]] = {}
        """The greatest memory that was measured at each instant, by what was counted."""
        self.first_loss: float | None = None
        self.reference: tuple[int, int] | None = None
        self.num_lines, self.is_behind = 0, False
        self._time: float | None = None
        self._cached: dict[tuple[int, int, int], bytes] = {}

    def read(self) -> bool:
        """Takes in the next lines; True if more are waiting."""
        before, was_behind, self.is_behind = self.num_lines, self.is_behind, False
        for tail, take in self._tails:
            lines = tail.lines()
            num_taken = 0
            for line in islice(lines, _SLICE_LINES):
                num_taken += 1
                try:
                    take(line)
                except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    self._tell(0, "damaged", f"a line of {self._path.name} is damaged: {type(error).__name__} {error}")
            lines.close()
            self.num_lines += num_taken
            self.is_behind |= num_taken == _SLICE_LINES
        if self.num_lines > before or was_behind:
            self._cached.clear()
        return self.is_behind

    def _take(self, line: Line) -> None:
        event = line.get("event")
        if event is None and "loss" in line:
            return self._take_step(line)
        if event in _REWINDS:
            self._rewind(_step_of(line))
        if event == "validated":
            self.validations.add(_step_of(line), dict(_numbers(line)))
        if event == "reference":
            self.reference = int(line["done"]), int(line["total"])
        text = f"saved {line['checkpoint']}" if event == "saved" else describe_event(line)
        if text is not None or event == "started":
            step = _step_of(line) if "step" in line else self.step
            self._tell(step, str(event), text or "training begins")
        return None

    def _take_step(self, line: Line) -> None:
        step, values = _step_of(line), dict(_numbers(line))
        loss, before = values.get("loss", nan), self.steps.last("smoothed_loss")
        if loss == loss:
            values["smoothed_loss"] = loss if before is None else before + (loss - before) * self._weight
            self.first_loss = loss if self.first_loss is None or not len(self.steps) else self.first_loss
        elif before is not None:
            values["smoothed_loss"] = before
        if values.get("seconds"):
            values["waiting"] = values.get("wait_seconds", 0.0) / values["seconds"]
        if line.get("tokens"):
            values["supervised"] = float(line.get("supervised_tokens", 0)) / float(line["tokens"])
        self.steps.add(step, values)
        if "time" in line:
            self._time = float(line["time"])
            self.recent.append((self._time, step))

    def _take_memory(self, line: Line) -> None:
        step, values = _step_of(line), dict(_numbers(line))
        if self.memory and step < self.memory.steps[-1]:
            self.memory.keep_until(step)
        kept = self.instants.setdefault(str(line["instant"]), {}) if len(self.instants) < _MAX_COLUMNS else {}
        for name, value in values.items():
            kept[name] = max(kept.get(name, 0), int(value))
        self.memory.add(step, values)

    def _rewind(self, step: int) -> None:
        self.steps.keep_until(step)
        self.validations.keep_until(step)
        self.recent.clear()

    def _tell(self, step: int, kind: str, text: str) -> None:
        self.events.append(Event(step=step, kind=kind, text=text, time=self._time))

    @property
    def step(self) -> int:
        return self.steps.steps[-1] if self.steps else 0

    @property
    def step_seconds(self) -> float | None:
        """By the clock, so that saves and validations count."""
        if len(self.recent) < 2:
            return None
        (began, first), (ended, last) = self.recent[0], self.recent[-1]
        return (ended - began) / (last - first) if last > first else None

    def thinned(self, first: int, last: int, num_points: int) -> bytes:
        """As JSON; viewers who ask for the same get the same bytes."""
        key = first, last, num_points
        if key not in self._cached:
            if len(self._cached) >= _NUM_CACHED:
                self._cached.clear()
            parts = {name: getattr(self, name).thinned(*key) for name in ("steps", "validations", "memory")}
            marks = [[event.step, event.kind] for event in self.events if first <= event.step <= last]
            shown = (f'"{name}":{_columns_text(*found)}' for name, found in parts.items())
            more = f'"marks":{json.dumps(marks)},"is_behind":{json.dumps(self.is_behind)}'
            self._cached[key] = f"{{{','.join(shown)},{more}}}".encode()
        return self._cached[key]


def _columns_text(steps: list[int], columns: Mapping[str, list[float]]) -> str:
    """Five digits are more than a plot shows, and half of what JSON would write."""
    named = (f"{json.dumps(name)}:[{','.join(map(_number_text, values))}]" for name, values in columns.items())
    return f'{{"step":{json.dumps(steps)},"columns":{{{",".join(named)}}}}}'


def _number_text(value: float) -> str:
    return f"{value:.5g}" if abs(value) < float("inf") else "null"  # false for nan too


def _numbers(line: Line) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name not in _NOT_PLOTTED and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _step_of(line: Line) -> int:
    step = int(line["step"])
    if not 0 <= step <= _MAX_STEP:
        raise ValueError(f"step {step}")
    return step
