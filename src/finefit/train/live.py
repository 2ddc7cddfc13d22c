"""What a worker holds while it trains, and the model in it as the levers in force have it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finefit.artifacts.journal import Journal
from finefit.artifacts.records import Levers
from finefit.artifacts.trainings import Stage
from finefit.data.collate import Collator
from finefit.data.pairs import Trained
from finefit.data.workers import Workers
from finefit.facts.usage import Usage
from finefit.objective.batch import Batch, Forward, Objective
from finefit.step.custom import Compose
from finefit.step.engine import Engine
from finefit.step.proof import Sums
from finefit.train.audit import Audit
from finefit.train.corrections import Corrections
from finefit.train.ranks import Ranks
from finefit.train.saver import Saver
from finefit.train.spikes import Spikes
from finefit.train.stopping import StopRequest
from finefit.train.watchdog import Watchdog


class Rig:
    """A `Forward` that stays the same object when the levers change: whoever holds it need not be told."""

    def __init__(self, make: Callable[[Levers], Forward], levers: Levers, *, beat: Callable[[], None]) -> None:
        """`make` puts the model into the state that the levers ask for. `beat`: a micro-batch has begun, so the run is alive."""
        self._make, self._beat = make, beat
        self._forward = make(levers)

    def change(self, levers: Levers) -> None:
        self._forward = self._make(levers)

    def __call__(self, batch: Batch) -> Tensor:
        self._beat()
        return self._forward(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    stage: Stage
    model: nn.Module
    frozen: Sums
    """As they were when training began."""
    forward: Rig
    objective: Objective
    engine: Engine
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    examples: Sequence[Trained]
    validation: Sequence[Trained]
    collator: Collator
    workers: Workers
    """Make the batches that take long."""
    compose: Compose | None = None
    """Makes batches for a model of the user's own; None for any other."""
    saver: Saver
    metrics: Journal
    stop: StopRequest
    note_memory: Callable[[str, int], None]
    corrections: Corrections
    audit: Audit
    spikes: Spikes
    watchdog: Watchdog
    usage: Usage
