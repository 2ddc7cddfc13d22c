"""Identifies the inputs of a stage by content: its spec without paths, the files, images and models that it names, the
outputs of other stages, and the version of finefit. Equal keys give equal outputs, wherever files are stored."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from finefit import __version__, bounded
from finefit.artifacts.atomic import write_text
from finefit.artifacts.cache import content_key, forget_old, source_digest
from finefit.artifacts.checkpoint import listed_files
from finefit.artifacts.reading import is_there, lines_of
from finefit.artifacts.records import At, CacheInputs, output_of, read_record, with_files
from finefit.artifacts.rundir import RunDir, StageDir, is_run
from finefit.artifacts.stage_records import EvalResult
from finefit.data.columns import RecordError
from finefit.data.files import find_files, pin_hub_path
from finefit.data.images import FileState, content_at, file_state, find_image
from finefit.data.rows import Image, Row
from finefit.data.sources import open_source
from finefit.errors import DataError, DiskFull, SpecError
from finefit.facts.files import finefit_cache, read_model_folder, sha256_of
from finefit.model.resolve_model import adapter_fingerprint, commit_of
from finefit.plan.stage_forecasts import stage_in_errors
from finefit.spec import stages as kinds
from finefit.spec.data import Fields, HeldOut, Source
from finefit.spec.models import CustomModel, FolderModel, HubModel, Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Common
from finefit.spec.stages import STAGE_PATH, AnyStage, TrainStage, models_of, moved, paths_of

DigestOf = Callable[[str], str]
"""Returns the digest of a stage's output by its name."""
_OF_TRAINING = tuple(key for key in Common.model_fields if key not in ("name", "trackers"))
_ROWS, _IMAGES = ".path", ".images_root"
_COPIED = (Source, HeldOut, Fields)
"""Parts that a training has copied once it has begun: their files may be gone then."""


def stage_inputs(pipeline: Pipeline, name: str, base: Path, at: At, digest_of: DigestOf) -> CacheInputs:
    """All inputs of the stage must exist. `base`: the folder that its relative paths start from."""
    document = _document(pipeline, name)
    with stage_in_errors(pipeline, name):
        inputs = dict(_inputs(pipeline.stages[name], base, at, digest_of))
    return CacheInputs(inputs={"spec": content_key(document), **inputs, "finefit": __version__}, document=document)


def key_of(found: CacheInputs) -> str:
    return content_key(found.inputs)


def differences(old: CacheInputs, new: CacheInputs) -> list[str]:
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
            found.append(f"{name} {'is new' if before is None else 'is gone' if now is None else 'has changed'}")
    return found


def outside_inputs(pipeline: Pipeline, base: Path, *, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the digests of files and models that no stage makes. For rows that a training has copied and that no
    longer exist, the digest in `known` is used."""
    found: dict[str, str] = {}
    for name, stage in pipeline.stages.items():
        prefix = "" if pipeline.is_flat else f"{name}."
        own = {key.removeprefix(prefix): sha256 for key, sha256 in (known or {}).items() if key.startswith(prefix)}
        with stage_in_errors(pipeline, name):
            found |= {f"{prefix}{key}": sha256 for key, sha256 in _inputs(stage, base, known=own)}
    return found


def run_digest(pipeline: Pipeline, inputs: Mapping[str, str], nodes: int = 1) -> str:
    """Returns the digest of the request and of the content it refers to. File locations, the user and the tracker do
    not matter; the number of nodes does, since their ranks divide the rows of a step."""
    documents = {name: _document(pipeline, name) for name in pipeline.order()}
    return content_key([pipeline.name, documents, inputs, *([nodes] if nodes > 1 else [])])


def pinned(pipeline: Pipeline) -> Pipeline:
    """Replaces branches of the hub, which move, by the commits with which the run began."""

    def pin(part: Any) -> Any:
        match part:
            case HubModel():
                return part.model_copy(update={"revision": commit_of(part)})
            case Source() | HeldOut() if part.path is not None and part.path.startswith("hf://"):
                return part.model_copy(update={"path": pin_hub_path(part.path)})
            case BaseModel():
                return part.model_copy(update={name: pin(getattr(part, name)) for name in part.model_fields_set})
            case dict():
                return {key: pin(value) for key, value in part.items()}
            case tuple():
                return tuple(pin(value) for value in part)
        return part

    return pipeline.model_copy(update={"stages": {name: pin(stage) for name, stage in pipeline.stages.items()}})


def _document(pipeline: Pipeline, name: str) -> dict[str, Any]:
    stage = pipeline.stages[name]
    plain = _without_revisions(moved(stage, lambda _: "", addresses=True).model_dump(mode="json", by_alias=True))
    common = _OF_TRAINING if isinstance(stage, TrainStage) else ("seed", "device", "precision")
    if stage.kind in ("python", "compare"):  # which depend on none of these
        common = ()
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


def _inputs(
    stage: AnyStage,
    base: Path,
    at: At | None = None,
    digest_of: DigestOf | None = None,
    known: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, str]]:
    """Without `at`, yields only inputs from outside the pipeline. A missing file counts with its digest in `known`."""
    read: dict[str, str] = {}
    known = known or {}
    for key, holder, path in paths_of(stage):
        if key.endswith(_IMAGES) or (place := _placed(path, at)) is None:  # images are found through their rows
            continue
        try:
            read[key] = _content(holder, key, place, base, _split_of(stage, key))
        except DataError:
            if not isinstance(holder, _COPIED) or key not in known:
                raise
            images = f"{key.removesuffix(_ROWS)}.images"
            yield from ((name, sha256) for name, sha256 in known.items() if name in (key, images))
    yield from read.items()
    for key, holder, _ in paths_of(stage):
        if isinstance(holder, Source | HeldOut) and key in read and key.endswith(_ROWS):
            if any(_placed(path, at) is None for _, _, path in paths_of(holder)):
                continue  # some rows are not made yet
            there, above = with_files(holder, lambda path: _placed(path, at) or path), key.removesuffix(_ROWS)
            source = there if isinstance(there, Source) else there.source(there.path or "")
            content = content_key([read[key], read.get(f"{above}.fields.join")])
            images_sha256 = images_digest(source, base, split=_split_of(stage, key), content=content)
            if images_sha256 is not None:
                yield f"{above}.images", images_sha256
    for key, model in models_of(stage):
        if isinstance(model, kinds.StageModel) and digest_of is not None:
            yield key, digest_of(model.name)
        elif isinstance(model, HubModel):
            yield key, commit_of(model)
        elif isinstance(model, CustomModel) and isinstance(model.tokenizer, HubModel):
            yield f"{key}.tokenizer", commit_of(model.tokenizer)
    if isinstance(stage, kinds.CompareStage) and digest_of is not None:
        yield from ((f"of.{part}", digest_of(part.partition(":")[0])) for part in stage.of)


def _placed(path: str, at: At | None) -> str | None:
    """Returns None for a path that is not made yet."""
    if (made := STAGE_PATH.fullmatch(path)) is None:
        return path
    return None if at is None else str(at(made[1]) / (made[2] or ""))


def _split_of(stage: AnyStage, key: str) -> str:
    """Returns which files of a folder are read. Names of experts, which are the keys of their rows, do not indicate a
    split."""
    if isinstance(stage, kinds.Gate | kinds.BuildMoe):
        return "train"
    return next((part for part in key.split(".") if part in ("validation", "test")), "train")


def _content(holder: BaseModel, key: str, path: str, base: Path, split: str) -> str:
    if key.endswith(".tokenizer.path"):  # that of a custom model: a folder that need not hold weights
        return tree_digest(base / path)
    match holder:
        case Source() | HeldOut() | Fields() if path.startswith("hf://"):
            find_files(path, base, split=split)
            return pin_hub_path(path)
        case Source() | HeldOut() | Fields():
            return content_key([sha256_of(file.path) for file in find_files(path, base, split=split)])
        case FolderModel():
            return read_model_folder(base / path).fingerprint
        case Lora() | kinds.MergeAdapter():
            return adapter_fingerprint(base / path)
        case kinds.Verdicts() if is_run(base / path):
            return content_key([tree_digest(journal) for journal in sorted((base / path / "reviews").glob("*.jsonl"))])
    return tree_digest(base / path)


def tree_digest(path: Path) -> str:
    """Returns the digest of a file, or of all files in a folder with their names."""
    try:
        if path.is_dir():
            return content_key([(file.relative_to(path).as_posix(), sha256_of(file)) for file in _files_in(path)])
        return sha256_of(path)
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
        raise SpecError(problem, "paths are relative to the spec file") from None


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def sizes_in(folder: Path) -> dict[str, int]:
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in _files_in(folder)}


def output_digest(place: Path, stage: AnyStage, key: str) -> str:
    """Covers a training's weights, as listed in its manifest, and an evaluation's answers and scores, without times."""
    match stage:
        case TrainStage():
            weights = [
                (name, sha256)
                for name, (_, sha256) in sorted(listed_files(output_of(place, stage)).items())
                if name.endswith(".safetensors") and not name.startswith("finefit_")  # these are not part of the model
            ]
            return content_key([key, weights])
        case kinds.EvaluateStage():
            answers = []
            for run in sorted(path for path in place.iterdir() if is_run(path) and not path.name.startswith(".")):
                evaluations = [paths for where in RunDir(run).stages() for paths in where.evaluations()]
                for path in sorted((one.result for one in evaluations if is_there(one.result)), key=str):
                    result = read_record(path, EvalResult)
                    items = [[item.key, item.answer, item.scores] for item in result.items]
                    answers.append([run.name, result.task, result.checkpoint, items])
            return content_key([key, answers])
    return tree_digest(StageDir(place).output)


def _changed_keys(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in dict.fromkeys((*old, *new))
            for line in _changed_keys(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [f"{key}: {json.dumps(old)} -> {json.dumps(new)}"]


class _HashedImage(NamedTuple):
    root: str
    path: str
    state: FileState | None = None
    """State of the file or zip that holds the image; None if it is missing or cannot be read."""
    sha256: str = ""


def images_digest(source: Source, base: Path, *, split: str, content: str) -> str | None:
    """Returns a digest that is the same wherever the rows and their images are stored; None if the rows name no image
    by a path. `content`: digest of the rows' files. It is the cache key for the list of images; the digest of an image
    is cached by the size and time of its file, so a second call reads only what has changed."""
    if source.path.startswith("hf://") and source.images_root is None:
        return None  # the images belong to the same commit
    try:
        # everything that decides which images are named, and where they are searched
        files = [str(file.path.absolute()) for file in find_files(source.path, base, split=split)]
        root = None if source.images_root is None else str((base / source.images_root).absolute())
        asked = source.model_dump(mode="json", include={"fields", "where"})
        key = content_key([files, root, asked, split, content, source_digest("data", "vision")])
        place = finefit_cache() / "images" / f"{key}.jsonl"
        try:
            before = _read_cache(place, place.stat().st_mtime_ns)
        except (OSError, ValueError, TypeError):  # missing or unreadable
            before = None
        now = [_hashed(one) for one in (_named_images(source, base, split) if before is None else before)]
    except DataError:  # reported when the rows are checked
        return None
    if now != before:
        with suppress(OSError, DiskFull):  # a cache that cannot be written only costs time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, "".join(json.dumps(one) + "\n" for one in now))
            forget_old(place.parent, max_entries=100)
    return hashlib.sha256(json.dumps([(one.path, one.sha256) for one in now]).encode()).hexdigest() if now else None


def _named_images(source: Source, base: Path, split: str) -> Iterator[_HashedImage]:
    """Yields each image once, in the order of the rows. Images inside a row are part of its file."""
    rows = (row for row in open_source(source, base, split=split).rows() if isinstance(row, Row))
    yield from dict.fromkeys(
        _HashedImage(str(Path(image.root).absolute()), image.path) for row in rows for image in row.images if image.path
    )


def _hashed(before: _HashedImage) -> _HashedImage:
    """A file of the same size and time is assumed to be unchanged."""
    if before.state is not None and file_state(before.state[0]) == before.state:
        return before
    try:
        found = find_image(Image(path=before.path, root=before.root))
        state = file_state(found.path)  # taken before reading, so that a file that changes meanwhile is read again
        return before._replace(state=state, sha256=hashlib.sha256(content_at(found, before.path)).hexdigest())
    except RecordError:
        return before._replace(state=None, sha256="")


@lru_cache(16)
def _read_cache(place: Path, changed: int) -> list[_HashedImage]:  # noqa: ARG001 a rewritten file is read again
    with bounded.open_binary(place) as file:
        lines = (bounded.parse_json(line) for line in lines_of(file, place))
        return [
            _HashedImage(root, path, None if state is None else tuple(state), sha256)
            for root, path, state, sha256 in lines
        ]
