"""Fills in the models and files that a stage takes from other stages. `at` says where the output of a stage lies, or
will lie."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from finefit.artifacts.records import WiredModel
from finefit.artifacts.rundir import RunDir
from finefit.spec.models import CustomModel, FolderModel, Lora, Model
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Spec
from finefit.spec.stages import STAGE_PATH, AnyStage, Gate, Input, StageModel, TrainStage, moved

At = Callable[[str], Path]
"""The output folder of a stage, by its name; absolute."""
P = TypeVar("P", bound=BaseModel)


def output_of(place: Path, stage: AnyStage) -> Path:
    """The output of a stage within its folder; of a training its last checkpoint."""
    if not isinstance(stage, TrainStage):
        return place / "output"
    return (RunDir(place).stage(1, stage.objective.kind).checkpoints / "final").resolve()


def wired_model(pipeline: Pipeline, asked: Input, at: At) -> WiredModel:
    """A model that was trained with an adapter is its base with the newest adapter, however many stages trained it."""
    if not isinstance(asked, StageModel):
        return WiredModel(model=with_files(asked, lambda path: str(file_at(path, at))))
    stage = pipeline.stages[asked.name]
    if isinstance(stage, Gate):
        return WiredModel(model=wired_model(pipeline, stage.base, at).model, gate=str(at(asked.name)))
    if isinstance(stage, TrainStage) and isinstance(stage.tuning, Lora):
        return WiredModel(model=wired_model(pipeline, stage.model, at).model, adapter=str(at(asked.name)))
    before = wired_model(pipeline, stage.model, at).model if isinstance(stage, TrainStage) else None
    if isinstance(before, CustomModel):  # the same code with its trained weights
        return WiredModel(model=before.model_copy(update={"weights": str(at(asked.name))}))
    return WiredModel(model=FolderModel(kind="folder", path=str(at(asked.name))))


def wired_spec(pipeline: Pipeline, name: str, at: At, base: Path) -> Spec:
    """A training as a spec of its own. `base`: the folder that its relative paths start from."""
    stage = pipeline.stages[name]
    assert isinstance(stage, TrainStage)
    found = wired_model(pipeline, stage.model, at)
    tuning = stage.tuning
    if found.adapter is not None:
        assert isinstance(tuning, Lora)  # else the pipeline was refused
        tuning = tuning.model_copy(update={"adapter": os.path.relpath(found.adapter, base)})
    model: Model = found.model
    if isinstance(model, FolderModel) and model != stage.model:  # made by a stage
        model = FolderModel(kind="folder", path=os.path.relpath(base / model.path, base))
    if isinstance(model, CustomModel) and model != stage.model and model.weights is not None:
        model = model.model_copy(update={"weights": os.path.relpath(base / model.weights, base)})
    spec = pipeline.spec_of(name, model=model, tuning=tuning)
    return with_files(spec, lambda path: os.path.relpath(file_at(path, at), base))


def with_files(part: P, place: Callable[[str], str]) -> P:
    """The same with every `stage://NAME/file` replaced."""
    return moved(part, lambda path: place(path) if STAGE_PATH.fullmatch(path) else path, addresses=True)


def file_at(path: str, at: At) -> Path:
    """What `stage://NAME/file` names."""
    found = STAGE_PATH.fullmatch(path)
    assert found is not None
    return at(found[1]) / (found[2] or "")
