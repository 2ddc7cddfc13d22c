"""The job of a stage that does not train, with the outputs of other stages filled in and absolute paths; and the memory
that a stage uses, seen from outside."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import psutil

from finefit.artifacts.records import StageJob, StageMemory, WiredModel
from finefit.artifacts.wiring import file_at, wired_model, with_files
from finefit.facts.machine import read_machine
from finefit.facts.nvml import read_card_processes, used_bytes
from finefit.plan.client import visible_cards
from finefit.plan.resolve import device_of, precision_on
from finefit.run.staleness import Stages
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import CompareStage, EvaluateStage, Input, models_of, moved

_OF_TASKS = "evaluate."
"""Under this key are models that a task judges with; they are not inputs of the stage."""


def device_here(pipeline: Pipeline) -> Literal["cpu", "cuda"]:
    return "cuda" if device_of(pipeline, read_machine()) == "cuda" else "cpu"


def stage_job(stages: Stages, name: str) -> StageJob:
    """Of a stage whose inputs are all settled."""
    pipeline, stage = stages.pipeline, stages.pipeline.stages[name]
    device = device_here(pipeline)
    return StageJob(
        name=name,
        pipeline=pipeline.name,
        seed=pipeline.seed,
        device=device,
        precision=precision_on(device) if pipeline.precision == "auto" else pipeline.precision,
        base=str(stages.base),
        stage=with_files(stage, lambda path: str(file_at(path, stages.at))),
        models={key: _wired(stages, model) for key, model in models_of(stage) if not key.startswith(_OF_TASKS)},
        scores={part: tuple(_runs(stages, part)) for part in stage.of} if isinstance(stage, CompareStage) else {},
    )


def _wired(stages: Stages, asked: Input) -> WiredModel:
    found = wired_model(stages.pipeline, asked, stages.at)
    return replace(found, model=moved(found.model, lambda path: str((stages.base / path).resolve())))


def _runs(stages: Stages, part: str) -> Iterator[str]:
    """`scores` is all models of an evaluation, `scores:sft` one of them, `sft:base` a checkpoint of a training."""
    name, _, within = part.partition(":")
    place, stage = stages.settled[name][0].resolve(), stages.pipeline.stages[name]
    if isinstance(stage, EvaluateStage):
        yield from (str(place / model) for model in stage.models if within in ("", model))
    else:
        yield f"{place}:{within}" if within else str(place)


Device = Literal["cpu", "cuda"]
Say = Callable[[str], None]
_SLACK_BYTES = 64 << 20
"""What a display or a driver allocates and frees by itself."""
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.2


@dataclass(slots=True)
class MemoryMeter:
    """The memory of a stage: on a card all that is in use there, on a CPU the resident memory of the stage's processes.
    Call `tick()` while the stage works; then `settled` once."""

    device: Device
    say: Say
    before: int = 0
    peak: int = 0
    others: frozenset[int] = field(default_factory=frozenset)
    """Child processes from before, which do not belong to the stage."""

    @classmethod
    def begin(cls, device: Device, say: Say) -> "MemoryMeter":
        meter = cls(device, say, others=frozenset(child.pid for child in psutil.Process().children(recursive=True)))
        meter.before = meter.peak = meter.now()
        return meter

    def now(self) -> int:
        if self.device == "cuda":
            return used_bytes(visible_cards()) or 0
        return sum(map(_resident, self._children()))

    def _children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in self.others]

    def tick(self) -> None:
        self.peak = max(self.peak, self.now())

    def settled(self, *, loaded: int | None = None, peak: int | None = None) -> StageMemory:
        """Waits until the memory is released. `loaded` and `peak`: as the stage's own process has measured them."""
        after = self._released()
        shared = self.before if self.device == "cuda" else 0
        return StageMemory(
            device=self.device,
            before_bytes=self.before,
            loaded_bytes=None if loaded is None else shared + loaded,
            peak_bytes=max(self.peak, shared + (peak or 0)) or None,
            after_bytes=after,
        )

    def _released(self) -> int:
        began = time.monotonic()
        while (after := self.now()) > self.before + _SLACK_BYTES:
            if time.monotonic() - began > _PATIENCE_SECONDS:
                self.say(
                    f"warning: {after - self.before:,} bytes more than before are in use "
                    f"{_PATIENCE_SECONDS:.0f} s after the stage has ended; "
                    f"held by {self._holders() or 'no visible process'}"
                )
                break
            time.sleep(_RETRY_SECONDS)
        return after

    def _holders(self) -> str:
        if self.device == "cuda":
            return ", ".join(f"{one.name} (pid {one.pid})" for one in read_card_processes())
        return ", ".join(f"pid {child.pid}" for child in self._children())


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended since it was listed
        return 0
