"""The levers that a rescue has put in force, and from which step on: a run that goes on from an earlier checkpoint changes them at the same step."""

from dataclasses import asdict
from pathlib import Path

from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.records import Levers
from finefit.artifacts.trainings import TrainState

FILE = "corrections.jsonl"


class Corrections:
    validation: Levers | None = None
    """What a validation is made under since it did not fit under more; training keeps its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._known = [(int(line["step"]), Levers(**line["levers"])) for line in read_lines(self._path)]

    def at(self, state: TrainState) -> Levers:
        """Those in force for the step after `state`."""
        found = [levers for step, levers in self._known if step <= state.step]
        return found[-1] if found else state.levers

    def add(self, step: int, levers: Levers, *, writes: bool = True) -> None:
        """Durable before it returns: whatever happens next, the step is not tried again as it was. Of ranks that agree, one writes."""
        self._known.append((step, levers))
        if not writes:
            return
        with Journal(self._path) as journal:
            journal.write(step=step, levers=asdict(levers))
            journal.sync()
