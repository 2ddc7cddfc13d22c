"""What a worker holds while it trains, and what watches it: stalls, loss spikes and requests to stop."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.processes import on_stop_signals, when_launcher_ends, when_parent_ends
from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Stage, TrainState
from finefit.custom.inputs import CustomCollate
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator
from finefit.data.examples import TrainRow
from finefit.errors import Interrupted
from finefit.facts.machine import read_peak_resident_bytes
from finefit.facts.nvml import CardUsage
from finefit.objective.batch import Batch, Forward, Objective
from finefit.step.engine import Engine
from finefit.step.state import FrozenSums
from finefit.train.audit import Audit
from finefit.train.ranks import Ranks
from finefit.train.saver import Saver
from finefit.train.step_clock import StepClock

_STALL_SECONDS, _TIMES_A_STEP, _RECENT_STEPS = 600.0, 20, 50


class Watchdog:
    """Reports a stall once, with the stacks of all threads. Its thread lives as long as the `with` block."""

    def __init__(self, tell: Callable[..., Any], *, timeout: float = _STALL_SECONDS, log: TextIO | None = None) -> None:
        """`tell` receives the event; the stacks go to `log`, by default standard error. `timeout` is in seconds."""
        self._tell, self._timeout, self._log = tell, timeout, log
        self._beaten, self._what, self._is_told = time.monotonic(), "the start", False
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, what: str = "a micro-batch", *, step_seconds: float | None = None) -> None:
        self._beaten, self._what, self._is_told = time.monotonic(), what, False
        if step_seconds is not None:
            self._step_seconds.append(step_seconds)

    def _watch(self) -> None:
        while not self._over.wait(min(self._timeout / 10, 10.0)):
            idle, steps = time.monotonic() - self._beaten, list(self._step_seconds)
            # long steps are not a stall
            allowed = max(self._timeout, _TIMES_A_STEP * median(steps)) if steps else self._timeout
            if idle > allowed and not self._is_told:
                self._is_told = True
                log = self._log or sys.stderr
                stall = f"no progress for {idle:.0f} seconds since {self._what}"
                print(f"{stall}; the stacks of all threads:", file=log, flush=True)
                faulthandler.dump_traceback(file=log, all_threads=True)
                self._tell(event="stalled", seconds=round(idle, 1), allowed_seconds=round(allowed, 1), since=self._what)

    def __enter__(self) -> "Watchdog":
        self.beat("the start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)


_WINDOW, _ENOUGH = 50, 20
_DEVIATIONS, _RATIO = 8.0, 1.5
_NORMAL = 1.4826  # median distance from the median -> standard deviation, for a normal distribution


class SpikeDetector:
    """Finds losses far above their recent past. A spike is only reported."""

    def __init__(self, recent: Iterable[float] = ()) -> None:
        self._recent = deque(recent, maxlen=_WINDOW)

    def see(self, loss: float) -> float | None:
        """The median of the recent losses if this loss is a spike: far outside their scatter (a smooth curve has almost
        none) and far above each of them (a skewed curve has high steps). A lasting jump is reported once."""
        before = list(self._recent)
        self._recent.append(loss)
        if len(before) < _ENOUGH:
            return None
        usual, highest = median(before), max(before)
        scatter = _NORMAL * median(abs(value - usual) for value in before)
        is_spike = loss > usual + _DEVIATIONS * scatter and loss > highest + (_RATIO - 1) * abs(highest)
        return usual if is_spike else None


class StopRequest:
    """A stop lets the current step finish and write a checkpoint; the process then exits with code 3.

    SIGTERM, SIGINT, SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (a scheduler's warning) request a stop; so does the
    end of the launcher. A second SIGINT stops at once. If one of several ranks gets a request, all stop after the same
    step."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self, *, is_child_of_ours: bool = True) -> None:
        """With `is_child_of_ours`, standard input is a pipe from our own launcher; otherwise the end of the parent is
        watched."""

        def asked(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT and self.reason == signal.SIGINT.name:
                os._exit(Interrupted.exit_code)
            self.reason = signal.Signals(number).name

        def launcher_ended() -> None:
            self.reason = self.reason or "the end of the process that started it"

        on_stop_signals(asked)
        (when_launcher_ends if is_child_of_ours else when_parent_ends)(launcher_ended)

    def agreed(self, ranks: Ranks) -> str | None:
        """The reason of the first rank that has one. Every rank must call it once per step."""
        if not ranks.any(self.reason is not None):
            return None
        return next(str(reason) for reason in ranks.gather(self.reason) if reason is not None)


class LiveRequests:
    """What people ask of a training from its page: a checkpoint or a validation after the current step. Each request is
    a file, which is removed when it is taken."""

    def __init__(self, folder: Path, tell: Callable[..., Any]) -> None:
        """`tell` receives the event."""
        self._folder, self._tell = folder, tell

    def taken(self, ranks: Ranks, *, step: int) -> frozenset[str]:
        """Every rank must call it once per step; the first one looks."""
        found = [name for name in ("save", "validate") if ranks.is_first and (self._folder / name).is_file()]
        if not ranks.any(bool(found)):
            return frozenset()
        for name in found:
            (self._folder / name).unlink(missing_ok=True)  # who asked may have taken it back
            self._tell(event="requested", step=step, what=name)
        return frozenset(ranks.gather(found)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeverChange:
    step: int
    levers: Levers


class LeverChanges:
    """The levers that the timing of candidates and OOM recovery have set, by step: a run that resumes from an earlier
    step changes them at the same step."""

    validation: Levers | None = None
    """The levers of validations, if one did not fit; training keeps its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lever_changes.jsonl"
        self._known = [(line.step, line.levers) for line in read_lines(self._path, _LeverChange)]

    @property
    def at_start(self) -> bool:
        """Whether the levers of the first step were settled before."""
        return any(step == 0 for step, _ in self._known)

    @property
    def last_step(self) -> int:
        """The step after which the levers changed for the last time; 0 if they never did."""
        return max((step for step, _ in self._known), default=0)

    def at(self, state: TrainState) -> Levers:
        """The levers of the step after `state`."""
        found = [levers for step, levers in self._known if step <= state.step]
        return found[-1] if found else state.levers

    def add(self, step: int, levers: Levers, *, writes: bool = True) -> None:
        """Writes the levers durably before it returns, so that the step is never tried again with the old ones. One
        rank writes."""
        self._known.append((step, levers))
        if writes:
            with Journal(self._path) as journal:
                journal.write(step=step, levers=asdict(levers))
                journal.sync()


class SwitchableForward:
    """A `Forward` that stays the same object when the levers change."""

    def __init__(self, make: Callable[[Levers], Forward], levers: Levers, *, beat: Callable[[], None]) -> None:
        """`make` applies the levers to the model. `beat` reports that a micro-batch has begun."""
        self._make, self._beat = make, beat
        self._forward = make(levers)

    def change(self, levers: Levers) -> None:
        self._forward = self._make(levers)

    def __call__(self, batch: Batch) -> Tensor:
        self._beat()
        return self._forward(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    stage: Stage
    model: nn.Module
    frozen: FrozenSums
    """Checksums of the frozen weights at the start of training."""
    forward: SwitchableForward
    objective: Objective
    engine: Engine
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    examples: Sequence[TrainRow]
    validation: Sequence[TrainRow]
    collator: Collator
    workers: BatchWorkers
    """Processes for batches that take long to make."""
    compose: CustomCollate | None = None
    """Makes batches for a custom model; None for any other."""
    saver: Saver
    metrics: Journal
    stop: StopRequest
    requests: LiveRequests
    note_memory: Callable[[str, int], None]
    lever_changes: LeverChanges
    audit: Audit
    spikes: SpikeDetector
    watchdog: Watchdog
    usage: CardUsage
    clock: StepClock
    measured_card: str | None = None
    """The card whose worst batch is run and compared with the prediction. None for several ranks, because one that ran
    out of memory would leave the others waiting, and on a CPU, where the system would kill the process. On a CPU the
    result compares what the run itself held."""


def peak_bytes(device: str) -> int:
    """The peak of this process so far: reserved on its card, resident on a CPU."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else read_peak_resident_bytes()
