"""What a stage leaves to other stages, put in: their models, their files. `at` says where the output of a stage lies, or will lie."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from finefit.artifacts.pipelines import WiredModel
from finefit.artifacts.rundir import RunDir
from finefit.spec.models import CustomModel, FolderModel, Lora, Model
from finefit.spec.schema import Spec
from finefit.spec.stages import STAGE_PATH, AnyStage, Gate, Input, Pipeline, StageModel, TrainStage

At = Callable[[str], Path]
"""The output folder of a stage, by its name; absolute."""
P = TypeVar("P", bound=BaseModel)


def output_of(place: Path, stage: AnyStage) -> Path:
    """Where what a stage has made lies in its folder: of a training its last checkpoint."""
    if not isinstance(stage, TrainStage):
        return place / "output"
    return (RunDir(place).stage(1, stage.objective.kind).checkpoints / "final").resolve()


def wired_model(pipeline: Pipeline, asked: Input, at: At) -> WiredModel:
    """A model that was trained with an adapter is its base with the newest adapter, however many stages have trained it on."""
    if not isinstance(asked, StageModel):
        return WiredModel(model=with_files(asked, lambda path: str(file_at(path, at))))
    stage = pipeline.stages[asked.name]
    if isinstance(stage, Gate):
        return WiredModel(model=wired_model(pipeline, stage.base, at).model, gate=str(at(asked.name)))
    if isinstance(stage, TrainStage) and isinstance(stage.tuning, Lora):
        return WiredModel(model=wired_model(pipeline, stage.model, at).model, adapter=str(at(asked.name)))
    before = wired_model(pipeline, stage.model, at).model if isinstance(stage, TrainStage) else None
    if isinstance(before, CustomModel):  # the same code with what it has learnt
        return WiredModel(model=before.model_copy(update={"weights": str(at(asked.name))}))
    return WiredModel(model=FolderModel(kind="folder", path=str(at(asked.name))))


def wired_spec(pipeline: Pipeline, name: str, at: At, base: Path) -> Spec:
    """A training as a spec of its own. `base`: where its relative paths start."""
    stage = pipeline.stages[name]
    assert isinstance(stage, TrainStage)
    found = wired_model(pipeline, stage.model, at)
    tuning = stage.tuning
    if found.adapter is not None:
        assert isinstance(tuning, Lora)  # else the pipeline was refused
        tuning = tuning.model_copy(update={"adapter": os.path.relpath(found.adapter, base)})
    model: Model = found.model
    if isinstance(model, FolderModel) and model != stage.model:  # what a stage has made
        model = FolderModel(kind="folder", path=os.path.relpath(base / model.path, base))
    if isinstance(model, CustomModel) and model != stage.model and model.weights is not None:
        model = model.model_copy(update={"weights": os.path.relpath(base / model.weights, base)})
    spec = pipeline.spec_of(name, model=model, tuning=tuning)
    return with_files(spec, lambda path: os.path.relpath(file_at(path, at), base))


def with_files(part: P, place: Callable[[str], str]) -> P:
    """The same with every `stage://NAME/file` replaced."""
    found = {name: _replaced(getattr(part, name), place) for name in type(part).model_fields}
    changed = {name: value for name, value in found.items() if value is not getattr(part, name)}
    return part.model_copy(update=changed) if changed else part


def _replaced(value: Any, place: Callable[[str], str]) -> Any:
    match value:
        case BaseModel():
            return with_files(value, place)
        case dict():
            found = {key: _replaced(inner, place) for key, inner in value.items()}
            return found if any(found[key] is not inner for key, inner in value.items()) else value
        case tuple():
            entries = tuple(_replaced(inner, place) for inner in value)
            return entries if any(new is not old for new, old in zip(entries, value, strict=True)) else value
        case str() if STAGE_PATH.fullmatch(value):
            return place(value)
    return value


def file_at(path: str, at: At) -> Path:
    """What `stage://NAME/file` names."""
    found = STAGE_PATH.fullmatch(path)
    assert found is not None
    return at(found[1]) / (found[2] or "")
