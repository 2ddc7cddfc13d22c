"""What a worker holds while it trains: the model under the current levers, and everything around it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Stage, TrainState
from finefit.custom.inputs import CustomCollate
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator
from finefit.data.examples import TrainRow
from finefit.facts.nvml import CardUsage
from finefit.objective.batch import Batch, Forward, Objective
from finefit.step.engine import Engine
from finefit.step.state import FrozenSums
from finefit.train.audit import Audit
from finefit.train.monitors import SpikeDetector, StopRequest, Watchdog
from finefit.train.ranks import Ranks
from finefit.train.saver import Saver

LEVER_CHANGES_FILE = "lever_changes.jsonl"


class LeverChanges:
    """The levers that OOM recovery has set, and from which step on: a run that resumes from an earlier checkpoint
    changes them at the same step."""

    validation: Levers | None = None
    """Of validations, once one did not fit; training keeps its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEVER_CHANGES_FILE
        self._known = [(int(line["step"]), Levers(**line["levers"])) for line in read_lines(self._path)]

    def at(self, state: TrainState) -> Levers:
        """Those of the step after `state`."""
        found = [levers for step, levers in self._known if step <= state.step]
        return found[-1] if found else state.levers

    def add(self, step: int, levers: Levers, *, writes: bool = True) -> None:
        """Durable before it returns, so that the step is never tried again with the old levers. Of ranks that agree,
        one writes."""
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
    """At the start of training."""
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
    note_memory: Callable[[str, int], None]
    lever_changes: LeverChanges
    audit: Audit
    spikes: SpikeDetector
    watchdog: Watchdog
    usage: CardUsage
