"""What a stage stands on, by content: its spec without paths, the files and models that it names, what other stages have made, and the version of
finefit. Equal keys make equal outputs, wherever files lie."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finefit import __version__
from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.evaluations import EvalResult
from finefit.artifacts.pipelines import Begun
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run
from finefit.data.files import find_files, pin_hub_path
from finefit.errors import SpecError
from finefit.facts.files import read_file
from finefit.facts.model import read_model_folder
from finefit.model.adapter_files import adapter_fingerprint
from finefit.model.locate import commit_of
from finefit.pipeline.foreseen import naming
from finefit.pipeline.stage_images import images_digest
from finefit.pipeline.stage_paths import models_of, moved, paths_of
from finefit.pipeline.wiring import At, output_of, with_files
from finefit.spec.models import CustomModel, FolderModel, HubModel, Lora
from finefit.spec.rows import Fields, Held, Source
from finefit.spec.schema import Common
from finefit.spec.stages import (
    STAGE_PATH,
    AnyStage,
    BuildMoe,
    CompareStage,
    EvaluateStage,
    Gate,
    MergeAdapter,
    Pipeline,
    StageModel,
    TrainStage,
    Verdicts,
)

DigestOf = Callable[[str], str]
"""The digest of what a stage has made, by its name."""
_OF_ALL = tuple(key for key in Common.model_fields if key not in ("name", "trackers"))
_OF_MAKING = ("seed", "device", "precision")
_UNSEEDED = ("python", "compare")
"""Kinds to which neither the seed nor the device means anything."""
_TOKENIZER = ".tokenizer.path"
"""Of a model of the user's own: a folder that need hold no weights."""
_ROWS, _IMAGES = ".path", ".images_root"
_HASHED_APART = "finefit_"
"""How the files of a checkpoint begin that are no part of the model."""


def grounds(pipeline: Pipeline, name: str, base: Path, at: At, digest_of: DigestOf) -> Begun:
    """Of a stage whose inputs are all there. `base`: where its relative paths start."""
    stage = pipeline.stages[name]
    document = _document(pipeline, name)
    with naming(name):
        inputs = dict(_inputs(stage, base, at, digest_of))
    return Begun(inputs={"spec": digest(document), **inputs, "finefit": __version__}, document=document)


def key_of(found: Begun) -> str:
    return digest(found.inputs)


def is_same_work(one: Begun, other: Begun) -> bool:
    """Begun on the same grounds: another version of finefit may go on with it."""
    return {**one.inputs, "finefit": ""} == {**other.inputs, "finefit": ""}


def differences(old: Begun, new: Begun) -> list[str]:
    """What has changed, in words."""
    found = []
    for name in dict.fromkeys((*old.inputs, *new.inputs)):
        before, now = old.inputs.get(name), new.inputs.get(name)
        if before == now:
            continue
        if name == "spec":
            found += _changed_keys(old.document, new.document)
        elif name == "finefit":
            found.append(f"finefit {before} -> {now}")
        else:
            found.append(
                f"{name} is new" if before is None else f"{name} is gone" if now is None else f"{name} has changed"
            )
    return found


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# all that a pipeline stands on from outside


def outside_inputs(pipeline: Pipeline, base: Path) -> dict[str, str]:
    """Digests of the files and models that no stage of it makes."""
    found: dict[str, str] = {}
    for name, stage in pipeline.stages.items():
        with naming(name):
            found |= {f"{name}.{key}": sha256 for key, sha256 in _inputs(stage, base, None, None)}
    return found


def pipeline_digest(pipeline: Pipeline, inputs: dict[str, str]) -> str:
    documents = {name: _document(pipeline, name) for name in pipeline.order()}
    return digest([pipeline.name, documents, inputs])


def pinned(pipeline: Pipeline) -> Pipeline:
    """Branches of the hub move; a run keeps the commits that it began with."""

    def pin(part: Any) -> Any:
        match part:
            case HubModel():
                return part.model_copy(update={"revision": commit_of(part)})
            case Source() | Held() if part.path is not None and part.path.startswith("hf://"):
                return part.model_copy(update={"path": pin_hub_path(part.path)})
            case BaseModel():
                return part.model_copy(update={name: pin(getattr(part, name)) for name in part.model_fields_set})
            case dict():
                return {key: pin(value) for key, value in part.items()}
            case tuple():
                return tuple(pin(value) for value in part)
        return part

    return pipeline.model_copy(update={"stages": {name: pin(stage) for name, stage in pipeline.stages.items()}})


# one stage


def _document(pipeline: Pipeline, name: str) -> dict[str, Any]:
    stage = pipeline.stages[name]
    plain = _without_revisions(moved(stage, lambda _: "", addresses=True).model_dump(mode="json", by_alias=True))
    common = () if stage.kind in _UNSEEDED else _OF_ALL if isinstance(stage, TrainStage) else _OF_MAKING
    return {**{key: getattr(pipeline, key) for key in common}, **plain}


def _without_revisions(part: Any) -> Any:
    match part:
        case {"kind": "hub", **rest}:
            return {"kind": "hub", **rest, "revision": ""}
        case dict():
            return {key: _without_revisions(value) for key, value in part.items()}
        case list():
            return [_without_revisions(value) for value in part]
    return part


def _inputs(stage: AnyStage, base: Path, at: At | None, digest_of: DigestOf | None) -> Iterator[tuple[str, str]]:
    """Without `at` only what lies outside of the pipeline."""
    read: dict[str, str] = {}
    for key, holder, path in paths_of(stage):
        if (
            not key.endswith(_IMAGES) and (place := _placed(path, at)) is not None
        ):  # images are told by the rows that show them
            read[key] = _content(holder, key, place, base, _split_of(stage, key))
    yield from read.items()
    for key, holder, _ in paths_of(stage):
        if isinstance(holder, Source | Held) and key in read and key.endswith(_ROWS):
            yield from _shown(holder, key, read, base, at, _split_of(stage, key))
    for key, model in models_of(stage):
        if isinstance(model, StageModel) and digest_of is not None:
            yield key, digest_of(model.name)
        elif isinstance(model, HubModel):
            yield key, commit_of(model)
        elif isinstance(model, CustomModel) and isinstance(model.tokenizer, HubModel):
            yield f"{key}.tokenizer", commit_of(model.tokenizer)
    if isinstance(stage, CompareStage) and digest_of is not None:
        yield from ((f"of.{part}", digest_of(part.partition(":")[0])) for part in stage.of)


def _placed(path: str, at: At | None) -> str | None:
    """None for what is not made yet."""
    if (made := STAGE_PATH.fullmatch(path)) is None:
        return path
    return None if at is None else str(at(made[1]) / (made[2] or ""))


def _split_of(stage: AnyStage, key: str) -> str:
    """Which files of a folder are meant, by where in the stage it is named. Experts have rows by names of their own, which tell of no split."""
    if isinstance(stage, Gate | BuildMoe):
        return "train"
    return next((part for part in key.split(".") if part in ("validation", "test")), "train")


def _shown(
    rows: Source | Held, key: str, read: dict[str, str], base: Path, at: At | None, split: str
) -> Iterator[tuple[str, str]]:
    """What the rows show that `key` names; nothing where they show nothing, or where some of it is not made yet."""
    if any(_placed(path, at) is None for _, _, path in paths_of(rows)):
        return
    there, above = with_files(rows, lambda path: _placed(path, at) or path), key.removesuffix(_ROWS)
    source = there if isinstance(there, Source) else there.source(there.path or "")
    content = digest([read[key], read.get(f"{above}.fields.join")])
    if (found := images_digest(source, base, split=split, content=content)) is not None:
        yield f"{above}.images", found


def _content(holder: BaseModel, key: str, path: str, base: Path, split: str) -> str:
    if key.endswith(_TOKENIZER):
        return tree_digest(base / path)
    match holder:
        case Source() | Held() | Fields() if path.startswith("hf://"):
            find_files(path, base, split=split)
            return pin_hub_path(path)
        case Source() | Held() | Fields():
            return digest([read_file(file.path, base).sha256 for file in find_files(path, base, split=split)])
        case FolderModel():
            return read_model_folder(base / path).fingerprint
        case Lora() | MergeAdapter():
            return adapter_fingerprint(base / path)
        case Verdicts() if is_run(base / path):
            return digest([tree_digest(journal) for journal in sorted((base / path / "reviews").glob("*.jsonl"))])
    return tree_digest(base / path)


def tree_digest(path: Path) -> str:
    """Of a file, or of all files in a folder with their names."""
    try:
        if path.is_dir():
            return digest(
                [(file.relative_to(path).as_posix(), read_file(file, path).sha256) for file in _files_in(path)]
            )
        return read_file(path, path.parent).sha256
    except OSError as error:
        raise SpecError(
            f"{error.filename} cannot be read: {error.strerror}", "paths are relative to the spec file"
        ) from None


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


# what a stage has made


def sizes_in(folder: Path) -> dict[str, int]:
    """Of the files in a folder, by name."""
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in _files_in(folder)}


def sizes_of(place: Path, stage: AnyStage) -> dict[str, int]:
    return {} if isinstance(stage, EvaluateStage) else sizes_in(output_of(place, stage))


def output_digest(place: Path, stage: AnyStage, key: str) -> str:
    match stage:
        case TrainStage():
            return digest([key, _weights(output_of(place, stage))])
        case EvaluateStage():
            return digest([key, list(_answers(place))])
    return tree_digest(StageDir(place).output)


def _weights(checkpoint: Path) -> list[tuple[str, str]]:
    """Named by the checkpoint's own manifest."""
    files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    return [
        (name, about["sha256"])
        for name, about in sorted(files.items())
        if name.endswith(".safetensors") and not name.startswith(_HASHED_APART)
    ]


def _answers(place: Path) -> Iterator[object]:
    """What was answered and how it was scored, without the time that it took."""
    for run in sorted(path for path in place.iterdir() if is_run(path) and not path.name.startswith(".")):
        for where in RunDir(run).stages():
            for paths in sorted(where.evaluations(), key=lambda paths: str(paths.result)):
                if paths.result.exists():
                    result = read_record(paths.result, EvalResult)
                    yield [
                        run.name,
                        result.task,
                        result.checkpoint,
                        [[item.key, item.answer, item.scores] for item in result.items],
                    ]


def _changed_keys(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in dict.fromkeys((*old, *new))
            for line in _changed_keys(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for at, (one, other) in enumerate(zip(old, new, strict=True))
            for line in _changed_keys(one, other, f"{key}.{at}")
        ]
    return [] if old == new else [f"{key}: {json.dumps(old)} -> {json.dumps(new)}"]
