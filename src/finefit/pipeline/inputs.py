"""What a spec points at, read and named by content. Equal digests are the same run, wherever its files lie."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.records import Inputs
from finefit.data.files import pin_hub_path
from finefit.errors import SpecError
from finefit.facts.files import read_file
from finefit.model.custom_files import written
from finefit.model.locate import Located, locate_start
from finefit.pipeline.data import PreparedData, find_sources, prepare_data
from finefit.pipeline.taskfiles import moved_task, task_sha256
from finefit.plan.engine import nodes_of
from finefit.spec.load import spec_to_json
from finefit.spec.models import CustomModel, FolderModel, HubModel, Lora, Model, Tuning
from finefit.spec.rows import Data, Fields, Held, Source
from finefit.spec.schema import DeepSpeed, Engine, Evaluation, LocalLauncher, Spec
from finefit.spec.tasks import OwnTask

MovePath = Callable[[str], str]
UNDIGESTED = ("launcher", "trackers")
"""Keys of a spec that say where a run is started and who is told of it, not what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A spec with everything that it names."""

    spec: Spec
    located: Located
    prepared: PreparedData
    inputs: Inputs
    nodes: int
    """That its ranks are on."""

    @property
    def digest(self) -> str:
        """Of what is asked and of the content it is asked of; where files lie and who starts the run does not matter, on how many nodes does."""
        told = self.spec.model_copy(update={"launcher": LocalLauncher(kind="local"), "trackers": ()})
        document = json.loads(spec_to_json(relocate(told, lambda _: "")))
        data = {
            split: [[fact.sha256 for fact in files] for files in sources] for split, sources in self.inputs.data.items()
        }
        content = [self.inputs.model_fingerprint, self.inputs.template_sha256, data, self.inputs.engine_sha256]
        several = [self.nodes] if self.nodes > 1 else []
        tasks = [self.inputs.tasks_sha256] if self.inputs.tasks_sha256 else []
        pictures = [self.inputs.pictures_sha256] if self.inputs.pictures_sha256 else []
        return hashlib.sha256(
            json.dumps([document, content, *several, *tasks, *pictures], sort_keys=True).encode()
        ).hexdigest()


def open_inputs(spec: Spec, base: Path, run: Path, *, nodes: int | None = None) -> Opened:
    """`base` is where the spec's relative paths start; facts are recorded relative to `run`. `nodes`: that ranks were started on already, else those
    of the launcher."""
    find_sources(spec.data, base)  # before the model: what is missing is told at once
    located = locate_start(spec.model, spec.tuning, base)
    prepared = prepare_data(spec, base, located.folder)
    move = between(base, run)
    inputs = Inputs(
        data={
            split: tuple(tuple(replace(fact, path=move(fact.path)) for fact in files) for files in sources)
            for split, sources in prepared.sources.items()
        },
        model=located.name,
        model_fingerprint=located.fingerprint,
        template_sha256=prepared.record.template_sha256,
        engine_sha256=engine_sha256(spec.engine, base),
        tasks_sha256=tasks_sha256(spec, base),
        code_sha256=written(spec.model, base).sha256 if isinstance(spec.model, CustomModel) else None,
        pictures_sha256=prepared.record.pictures_sha256,
    )
    return Opened(spec=spec, located=located, prepared=prepared, inputs=inputs, nodes=nodes or nodes_of(spec.launcher))


def relocate(spec: Spec, move: MovePath) -> Spec:
    """The same spec with every path replaced."""
    data = _with_paths(spec.data, lambda path: path if "://" in path else move(path))
    evaluate = tuple(moved_task(evaluation, move) for evaluation in spec.evaluate)
    return spec.model_copy(
        update={
            "data": data,
            "model": moved_model(spec.model, move),
            "tuning": _with_adapter(spec.tuning, move),
            "engine": _with_config(spec.engine, move),
            "evaluate": evaluate,
        }
    )


def moved_model(model: Model, move: MovePath) -> Model:
    match model:
        case FolderModel():
            return FolderModel(kind="folder", path=move(model.path))
        case CustomModel(tokenizer=tokenizer, weights=weights):
            if isinstance(tokenizer, FolderModel):
                tokenizer = FolderModel(kind="folder", path=move(tokenizer.path))
            moved = {
                "file": move(model.file),
                "weights": None if weights is None else move(weights),
                "tokenizer": tokenizer,
            }
            return model.model_copy(update=moved)
    return model


def _with_adapter(tuning: Tuning, move: MovePath) -> Tuning:
    if not isinstance(tuning, Lora) or tuning.adapter is None:
        return tuning
    return tuning.model_copy(update={"adapter": move(tuning.adapter)})


def _with_config(engine: Engine, move: MovePath) -> Engine:
    if not isinstance(engine, DeepSpeed) or engine.config is None:
        return engine
    return engine.model_copy(update={"config": move(engine.config)})


def engine_sha256(engine: Engine, base: Path) -> str | None:
    """Of a DeepSpeed JSON of the user's own."""
    if not isinstance(engine, DeepSpeed) or engine.config is None:
        return None
    try:
        return read_file(base / engine.config, base).sha256
    except OSError as error:
        raise SpecError(
            f"engine.config: {engine.config} cannot be read: {error.strerror}", "its path is relative to the spec file"
        ) from None


def tasks_sha256(spec: Spec, base: Path) -> tuple[str | None, ...]:
    """Of what the user's own tasks are, and of the one that rows are built with; empty where none is."""
    form = [Evaluation(task=spec.data.task, name="form")] if isinstance(spec.data.task, OwnTask) else []
    found = tuple(task_sha256(evaluation, base) for evaluation in (*form, *spec.evaluate))
    return found if any(found) else ()


def _with_paths(data: Data, moved: MovePath) -> Data:
    def fields(old: Fields) -> Fields:
        return old if old.join is None else old.model_copy(update={"join": moved(old.join)})

    def beside(source: Source | Held) -> dict[str, Any]:
        return {
            "fields": fields(source.fields),
            "images_root": None if source.images_root is None else moved(source.images_root),
        }

    train = tuple(s.model_copy(update={"path": moved(s.path), **beside(s)}) for s in data.train)
    held = data.validation
    if held is not None and held.path is not None:
        held = held.model_copy(update={"path": moved(held.path), **beside(held)})
    tests = tuple(s.model_copy(update={"path": moved(s.path), **beside(s)}) for s in data.test_sources())
    test = tests[0] if isinstance(data.test, Source) else tests or None
    form = data.task.model_copy(update={"path": moved(data.task.path)}) if isinstance(data.task, OwnTask) else data.task
    return data.model_copy(update={"train": train, "validation": held, "test": test, "task": form})


def pinned(spec: Spec, located: Located) -> Spec:
    """A branch of the hub moves; the run keeps the commits that it began with."""
    model, commit = spec.model, located.folder.name  # the snapshot's folder is named by its commit
    if isinstance(model, HubModel):
        model = HubModel(kind="hub", id=model.id, revision=commit)
    if isinstance(model, CustomModel) and isinstance(model.tokenizer, HubModel):
        model = model.model_copy(update={"tokenizer": HubModel(kind="hub", id=model.tokenizer.id, revision=commit)})
    return spec.model_copy(update={"model": model, "data": _with_paths(spec.data, pin_hub_path)})


def between(old: Path, new: Path) -> MovePath:
    """Rewrites a path that is relative to `old` into one that is relative to `new`."""
    return lambda path: Path(os.path.relpath(old / path, new)).as_posix()
