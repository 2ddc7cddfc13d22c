"""What the process of a stage is told that trains nothing: what its spec leaves to other stages is put in, and every folder is absolute."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from finefit.artifacts.pipelines import Order, WiredModel
from finefit.facts.machine import read_machine
from finefit.pipeline.inputs import moved_model
from finefit.pipeline.stage_choice import Stages
from finefit.pipeline.stage_paths import models_of
from finefit.pipeline.wiring import wired_model, with_files
from finefit.plan.resolve import device_of, precision_on
from finefit.spec.stages import STAGE_PATH, CompareStage, EvaluateStage, Input, Pipeline

_OF_TASKS = "evaluate."
"""Where models stand that a task judges with, and that are none of the stage's own."""


def device_here(pipeline: Pipeline) -> Literal["cpu", "cuda"]:
    return "cuda" if device_of(pipeline, read_machine()) == "cuda" else "cpu"


def order_for(stages: Stages, name: str) -> Order:
    """All that it stands on is settled."""
    pipeline, stage = stages.pipeline, stages.pipeline.stages[name]
    device = device_here(pipeline)
    return Order(
        name=name,
        pipeline=pipeline.name,
        seed=pipeline.seed,
        device=device,
        precision=precision_on(device) if pipeline.precision == "auto" else pipeline.precision,
        base=str(stages.base),
        stage=with_files(stage, lambda path: _file(stages, path)),
        models={key: _wired(stages, model) for key, model in models_of(stage) if not key.startswith(_OF_TASKS)},
        scores={part: tuple(_runs(stages, part)) for part in stage.of} if isinstance(stage, CompareStage) else {},
    )


def _file(stages: Stages, path: str) -> str:
    found = STAGE_PATH.fullmatch(path)
    assert found is not None
    return str(stages.at(found[1]) / (found[2] or ""))


def _wired(stages: Stages, asked: Input) -> WiredModel:
    found = wired_model(stages.pipeline, asked, stages.at)
    return replace(found, model=moved_model(found.model, lambda path: str((stages.base / path).resolve())))


def _runs(stages: Stages, part: str) -> Iterator[str]:
    """`scores` is all models of an evaluation, `scores:sft` one of them, `sft:base` a checkpoint of a training."""
    name, _, within = part.partition(":")
    place, stage = stages.settled[name][0].resolve(), stages.pipeline.stages[name]
    if isinstance(stage, EvaluateStage):
        yield from (str(place / model) for model in stage.models if within in ("", model))
    else:
        yield f"{place}:{within}" if within else str(place)
