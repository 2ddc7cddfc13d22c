"""The numbers of a run's journals as columns by step, read as they are appended, and thinned out for a plot: of each
stretch of steps the least and the greatest value remain, so that no spike is lost. The same is done to what is kept of
a long run, so that memory does not grow with its length; the latest steps are kept one by one."""

import json
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import ceil, isfinite, nan
from operator import lt, truediv
from pathlib import Path
from typing import Any

import numpy as np

from finefit.report.live import JournalTail, describe_event

Line = dict[str, Any]
Numbers = dict[str, list[Any]]
"""Columns of numbers by name, of lines that are all alike."""
IsStep = Callable[[Line], bool]
Take = Callable[[Line], None]
TakeMany = Callable[[Sequence[Line], Numbers], bool]
_REWINDS = ("started", "resumed", "rolled_back")
_NOT_PLOTTED = ("step", "epoch", "rows", "time", "tokens", "supervised_tokens")
_MAX_COLUMNS = 40
_MAX_STEP = 2**31 - 1
_SLICE_LINES, _SLICE_SECONDS = 2000, 0.2
"""A journal that has grown for days is read in pieces, and the page shows what has been read."""
_KEPT_WHOLE = 2**16
"""The latest steps, at least, are kept one by one; of those before, at most four times as many points."""
_UNPLOTTED_MEMORY = ("allocated_bytes", "peak_bytes")
_NUM_EVENTS = 2000
_RECENT_STEPS = 50
_NUM_CACHED = 32


class Columns:
    """Rising steps, with a value for each name or nan."""

    def __init__(self) -> None:
        self.steps = array("i")
        self.values: dict[str, array[float]] = {}
        self._num_merged, self._stretch = 0, 4
        """The first points stand for stretches of so many steps: the least and the greatest value of each."""

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
        if len(self.steps) > self._num_merged + 2 * _KEPT_WHOLE:
            self._merge_oldest()

    def can_extend(self, steps: Sequence[int], values: Mapping[str, Sequence[float]]) -> bool:
        """Whether these steps come after all others and have no value that those lack."""
        return bool(self.steps) and steps[0] > self.steps[-1] and values.keys() <= self.values.keys()

    def extend(self, steps: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Adds many at once, which is several times as quick."""
        self.steps.extend(steps)
        for name, column in self.values.items():
            column.extend(values.get(name) or [nan] * len(steps))
        if len(self.steps) > self._num_merged + 2 * _KEPT_WHOLE:
            self._merge_oldest()

    def _merge_oldest(self) -> None:
        first, end = self._num_merged, self._num_merged + _KEPT_WHOLE
        self._merge(first, end, self._stretch)
        self._num_merged += 2 * _KEPT_WHOLE // self._stretch
        if self._num_merged >= 4 * _KEPT_WHOLE:
            whole = self._num_merged // 4 * 4  # after a rewind the last stretch may lack points
            self._merge(0, whole, 4)
            self._num_merged -= whole // 2
            self._stretch *= 2

    def _merge(self, first: int, end: int, num_points: int) -> None:
        """Each `num_points` points become two."""
        kept = np.array(self.steps[first:end]).reshape(-1, num_points)[:, [0, num_points // 2]]
        self.steps[first:end] = array("i", kept.ravel().tolist())
        for column in self.values.values():
            column[first:end] = array("f", _extremes(np.array(column[first:end]), num_points))

    def keep_until(self, step: int) -> None:
        """Drops the steps after this one, which another attempt has repeated or will."""
        if self.steps and self.steps[-1] > step:
            end = bisect_right(self.steps, step)
            self._num_merged = min(self._num_merged, end)
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
        self._tails: Sequence[tuple[JournalTail, IsStep, TakeMany, Take]] = (
            (JournalTail(metrics), _is_step, self._take_steps, self._take),
            (JournalTail(memory), _is_memory_of_step, self._take_memories, self._take_memory),
        )
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
        """Takes in the next lines, for as long as a viewer can wait; True if more are waiting."""
        before, was_behind, self.is_behind = self.num_lines, self.is_behind, False
        until = time.monotonic() + _SLICE_SECONDS
        for tail, is_step, take_many, take in self._tails:
            lines = tail.lines()
            while part := list(islice(lines, _SLICE_LINES)):
                self._take_slice(part, is_step, take_many, take)
                self.num_lines += len(part)
                if len(part) == _SLICE_LINES and time.monotonic() >= until:
                    self.is_behind = True
                    break
            lines.close()
        if self.num_lines > before or was_behind:
            self._cached.clear()
        return self.is_behind

    def _take_slice(self, lines: Sequence[Line], is_step: IsStep, take_many: TakeMany, take: Take) -> None:
        """Lines of steps that follow each other are taken together if they are all alike."""
        for are_steps, part in groupby(lines, key=is_step):
            alike = list(part)
            if are_steps and self._as_columns(alike, take_many):
                continue
            for line in alike:
                try:
                    take(line)
                except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    self._tell(0, "damaged", f"a line of {self._path.name} is damaged: {type(error).__name__} {error}")

    def _as_columns(self, lines: Sequence[Line], take_many: TakeMany) -> bool:
        """False if one line has other keys than the first, a number where that has none or the reverse, or no later
        step."""
        first = lines[0]
        if any(line.keys() != first.keys() for line in lines):
            return False
        columns = {name: [line[name] for line in lines] for name, value in first.items() if type(value) in (int, float)}
        if not all(type(value) in (int, float) for column in columns.values() for value in column):
            return False
        if not all(type(line[name]) is str for name in first.keys() - columns.keys() for line in lines):
            return False
        steps = columns.get("step", ())
        if not all(type(step) is int and 0 <= step <= _MAX_STEP for step in steps):
            return False
        return bool(steps) and all(map(lt, steps, steps[1:])) and take_many(lines, columns)

    def _take(self, line: Line) -> None:
        event = line.get("event")
        if _is_step(line):
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
        (smoothed,) = self._smoothed([values.get("loss", nan)])
        if smoothed == smoothed:
            values["smoothed_loss"] = smoothed
        if line.get("tokens"):
            values["supervised"] = float(line.get("supervised_tokens", 0)) / float(line["tokens"])
        self.steps.add(step, values)
        if "time" in line:
            self._time = float(line["time"])
            self.recent.append((self._time, step))

    def _take_steps(self, _: Sequence[Line], columns: Numbers) -> bool:
        steps, values = columns["step"], {name: column for name, column in columns.items() if name not in _NOT_PLOTTED}
        tokens, times = columns.get("tokens", ()), columns.get("time", ())
        if not ("loss" in values and times and tokens and all(tokens)) or not self.steps.can_extend(steps, values):
            return False
        values["supervised"] = list(map(truediv, columns.get("supervised_tokens", [0] * len(steps)), tokens))
        values["smoothed_loss"] = self._smoothed(values["loss"])
        self.steps.extend(steps, values)
        self._time = times[-1]
        self.recent.extend(islice(zip(times, steps, strict=True), max(0, len(steps) - _RECENT_STEPS), None))
        return True

    def _smoothed(self, losses: Sequence[float]) -> list[float]:
        """The mean of the losses so far, the latest weighing most; a gap leaves it as it was."""
        found, mean = [], self.steps.last("smoothed_loss")
        if self.first_loss is None or not len(self.steps):
            self.first_loss = next((loss for loss in losses if loss == loss), self.first_loss)
        for loss in losses:
            if loss == loss:
                mean = loss if mean is None else mean + (loss - mean) * self._weight
            found.append(nan if mean is None else mean)
        return found

    def _take_memory(self, line: Line) -> None:
        step, values = _step_of(line), dict(_numbers(line))
        if self.memory and step < self.memory.steps[-1]:
            self.memory.keep_until(step)
        self._note_instant(line, {name: [value] for name, value in values.items()})
        self.memory.add(step, {name: value for name, value in values.items() if name not in _UNPLOTTED_MEMORY})

    def _take_memories(self, lines: Sequence[Line], columns: Numbers) -> bool:
        sizes = {name: column for name, column in columns.items() if name not in _NOT_PLOTTED}
        plotted = {name: column for name, column in sizes.items() if name not in _UNPLOTTED_MEMORY}
        if not self.memory.can_extend(columns["step"], plotted):
            return False
        self._note_instant(lines[0], sizes)
        self.memory.extend(columns["step"], plotted)
        return True

    def _note_instant(self, line: Line, sizes: Numbers) -> None:
        kept = self.instants.setdefault(str(line["instant"]), {}) if len(self.instants) < _MAX_COLUMNS else {}
        for name, values in sizes.items():
            kept[name] = max(kept.get(name, 0), int(max(values)))

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


def _is_step(line: Line) -> bool:
    return "loss" in line and line.get("event") is None


def _is_memory_of_step(line: Line) -> bool:
    return line.get("instant") == "step"


def _numbers(line: Line) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name not in _NOT_PLOTTED and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _step_of(line: Line) -> int:
    step = int(line["step"])
    if not 0 <= step <= _MAX_STEP:
        raise ValueError(f"step {step}")
    return step
