"""A model that no run of ours stands behind: a folder, an adapter, a model of the hub. Its evaluation gets a run directory with the same layout."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

import torch

from finefit import __version__
from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.evaluations import EvalStage, Subject
from finefit.artifacts.pipelines import WiredModel
from finefit.artifacts.records import Facts, Inputs, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run, newest_with_digest
from finefit.artifacts.stages import stage_holding
from finefit.artifacts.trainings import Stage
from finefit.data.eyes.eye import Eye
from finefit.data.items import read_items
from finefit.data.looking import OwnEye, keep_processor
from finefit.data.pictures import KEPT
from finefit.data.render import open_renderer
from finefit.errors import ModelError, RunError
from finefit.facts.files import read_file
from finefit.facts.machine import read_machine
from finefit.model.adapter_files import CONFIG, adapter_fingerprint
from finefit.model.locate import Located, locate
from finefit.pipeline.create import put_in_place
from finefit.pipeline.data import PreparedData
from finefit.pipeline.inputs import moved_model
from finefit.pipeline.questions import file_facts, plain_spec, prepare_questions, without_rows
from finefit.pipeline.taskfiles import keep_form
from finefit.plan.resolve import precision_on
from finefit.spec.load import spec_from_json
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, Full, HubModel, Lora, Model, Tuning
from finefit.spec.rows import Data, ImageLimits, Source
from finefit.spec.schema import Spec
from finefit.spec.tasks import OwnTask
from finefit.step.custom_eye import see_of

FORMS = "a run directory, a folder with a model or an adapter, hub:owner/name, or embedded:smollm2-135m"
NAME = "model"
"""By which the scores of a bare model are filed."""
STAGING, EARLIER = ".staging-", ".earlier-"
"""How the names of run directories begin that are not whole yet, or are set aside."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_PLAIN = Data(train=(Source(path=""),), template="plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Paths are absolute, until a run directory is there that they can be relative to."""

    name: str
    """Of its run directory."""
    filed: str = NAME
    """By which its scores are filed, in the place of a checkpoint's name."""
    model: Model
    located: Located
    weights: Path | None = None
    """A folder with an adapter that is laid over the model."""
    tuning: Tuning
    tokenizer: Path
    asks: Spec
    """With the template, the form and the lengths that rows are asked with."""
    max_prompt_tokens: int | None = None

    @property
    def fingerprint(self) -> list[str]:
        return [self.located.fingerprint, *([] if self.weights is None else [adapter_fingerprint(self.weights)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """Of a checkpoint: the run that it lies in knows the model, the template and the form that it was trained with."""

    run: Path
    stage: Stage
    spec: Spec


def find_bare(target: str, *, base: str | None = None) -> Bare:
    """`base`: of an adapter, where its own config does not lead to it."""
    folder = Path(target)
    if folder.is_dir() and (folder / CONFIG).is_file():
        return _adapter(folder.resolve(), base)
    if base is not None:
        raise ModelError(f"--base is for adapters, and {target} is none", "leave it out")
    return _whole(_model_named(target), _last_name(target), _home_of(folder.resolve()) if folder.is_dir() else None)


def _model_named(target: str) -> Model:
    kind, colon, name = target.partition(":")
    if colon and kind == "hub":
        owner, _, revision = name.partition("@")
        return HubModel(kind="hub", id=owner, revision=revision or "main")
    if colon and kind == "embedded":
        if name != "smollm2-135m":
            raise ModelError(f"there is no embedded model {name}", "there is embedded:smollm2-135m")
        return EmbeddedModel(kind="embedded", name="smollm2-135m")
    if not Path(target).is_dir():
        raise RunError(f"{target} is not there", f"name {FORMS}")
    return FolderModel(kind="folder", path=str(Path(target).resolve()))


def _last_name(target: str) -> str:
    """Of a path or a hub id, as the name of a directory; a checkpoint is known by its run too."""
    path = (
        Path(target.partition(":")[2] or target).resolve()
        if Path(target).is_dir()
        else Path(target.partition(":")[2] or target)
    )
    run = _enclosing_run(path)
    words = f"{run.name}-{path.name}" if run is not None else path.name
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in words
    ).strip("-._")
    return f"eval-{kept or 'model'}"[:64]


def _enclosing_run(path: Path) -> Path | None:
    return next((parent for parent in path.parents if is_run(parent)), None)


def _home_of(folder: Path) -> _Home | None:
    run, where = _enclosing_run(folder), StageDir(folder.parent.parent)
    if run is None or not where.stage.is_file():
        return None
    return _Home(
        run=run,
        stage=read_record(where.stage, Stage),
        spec=spec_from_json(RunDir(run).spec_json.read_text(encoding="utf-8")),
    )


def wired_bare(name: str, wired: WiredModel, asks: Spec) -> Bare:
    """A model of a pipeline: asked as its stage says, and not as it was trained."""
    if wired.adapter is None:
        found = _whole(wired.model, name, None)
    else:
        folder = Path(wired.adapter).resolve()
        found = _laid_over(folder, wired.model, _home_of(folder), _adapter_config(folder))
    return replace(found, name=name, filed=name, asks=asks, max_prompt_tokens=asks.max_prompt_tokens())


def _adapter(folder: Path, base: str | None) -> Bare:
    home, config = _home_of(folder), _adapter_config(folder)
    model = _model_named(base) if base is not None else _base_of(config, folder, home)
    return _laid_over(folder, model, home, config)


def _laid_over(folder: Path, model: Model, home: _Home | None, config: dict[str, Any]) -> Bare:
    tuning = _tuning(config) if home is None else home.stage.tuning
    if isinstance(tuning, Lora):
        tuning = tuning.model_copy(update={"adapter": None})  # what it went on from is part of it
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZERS) and not _sees(model)
    found = _whole(model, _last_name(str(folder)), home, tokenizer=folder if has_tokenizer else None)
    return replace(found, weights=folder, tuning=tuning)


def _sees(model: Model) -> bool:
    """Then rows are read with what lies beside the model: an adapter comes without its config. One of the user's own needs neither."""
    if isinstance(model, CustomModel):
        return False
    folder = locate(model, Path.cwd()).folder
    return OwnEye(folder, folder / "config.json", ImageLimits())() is not None


def _whole(model: Model, name: str, home: _Home | None, *, tokenizer: Path | None = None) -> Bare:
    located = locate(model, Path.cwd())
    if isinstance(model, HubModel):
        model = model.model_copy(
            update={"revision": located.folder.name}
        )  # the snapshot's folder is named by its commit
    folder = tokenizer or located.folder
    return Bare(
        name=name,
        model=model,
        located=located,
        tuning=Full(kind="full"),
        tokenizer=folder,
        asks=plain_spec(_PLAIN.model_copy(update={"template": _template(folder)}), seed=42)
        if home is None
        else _asks_of(home),
        max_prompt_tokens=None if home is None else home.stage.max_prompt_tokens,
    )


def _asks_of(home: _Home) -> Spec:
    return home.spec.model_copy(update={"data": without_rows(home.spec.data, form_base=home.run)})


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG} is no JSON: {error}", "name another adapter") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder / CONFIG} holds a {type(config).__name__}, not an object", "name another adapter")
    return config


def _base_of(config: dict[str, Any], folder: Path, home: _Home | None) -> Model:
    if home is not None:
        return _absolute(home.stage.model, home.run)
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(f"the adapter in {folder} does not say what model it belongs to", "name it with --base")
    for place in (Path(named), folder / named):
        if place.is_dir():
            return FolderModel(kind="folder", path=str(place.resolve()))
    from finefit.model import embedded  # torch comes with it

    if named == embedded.hub_id_of("smollm2-135m"):
        return EmbeddedModel(kind="embedded", name="smollm2-135m")
    if Path(named).is_absolute() or named.startswith("."):
        raise ModelError(
            f"the adapter in {folder} was made for {named}, which is not there", "name the model with --base FOLDER"
        )
    return HubModel(kind="hub", id=named)


def _tuning(config: dict[str, Any]) -> Lora:
    """As large as the adapter is, which is what memory depends on; its weights are loaded as they are."""
    targets = config.get("target_modules")
    named: tuple[str, ...] | Literal["all-linear"] = (
        tuple(sorted(targets)) if isinstance(targets, list) and targets else "all-linear"
    )
    return Lora(
        kind="lora",
        rank=int(config.get("r") or 16),
        alpha=float(config.get("lora_alpha") or 32),
        targets=named,
        dora=bool(config.get("use_dora")),
    )


def _absolute(model: Model, run: Path) -> Model:
    return moved_model(model, lambda path: str((run / path).resolve()))


def _template(folder: Path) -> Literal["chat", "plain"]:
    """The tokenizer's own, or that of a model's processor, where there is one."""
    eye = OwnEye(folder, folder / "config.json", ImageLimits())()
    return "chat" if open_renderer(folder, "plain", eye=eye).tokenizer.chat_template else "plain"


# its run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model with the rows that it is to answer, as they are rendered for it."""

    bare: Bare
    prepared: PreparedData
    base: Path
    """Where the paths of the rows start."""
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]

    def digest(self) -> str:
        bare, prepared, data = self.bare, self.prepared, self.bare.asks.data
        settings = [self.device, self.precision, bare.asks.seed, bare.max_prompt_tokens, *_content(data)]
        shown = [] if prepared.record.pictures_sha256 is None else [prepared.record.pictures_sha256]
        content = [
            bare.fingerprint,
            [fact.sha256 for fact in file_facts(prepared)],
            prepared.record.template_sha256,
            settings,
            *shown,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(data: Data) -> list[Any]:
    """Of what decides how rows are asked; a file of the user's own counts by what it holds, not by where it lies."""
    if not isinstance(data.task, OwnTask):
        return [data.model_dump(mode="json")]
    form = data.task.model_copy(update={"path": ""})
    return [
        data.model_copy(update={"task": form}).model_dump(mode="json"),
        read_file(Path(data.task.path), Path.cwd()).sha256,
    ]


def open_bare(bare: Bare, data: str, *, device: Literal["cpu", "cuda"] | None, runs: Path) -> RunDir:
    """The newest run of the same model, rows and settings, by content; or a new one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    asks = bare.asks.model_copy(update={"model": bare.model})  # which says how it sees
    prepared = prepare_questions(Source(path=data), asks, bare.tokenizer, base=Path.cwd())
    asked = Asked(bare=bare, prepared=prepared, base=Path.cwd(), device=device, precision=precision_on(device))
    return newest_with_digest(runs, bare.name, asked.digest()) or create_bare(
        asked, runs, lambda staging: put_in_place(staging, runs, bare.name)
    )


def open_at(asked: Asked, place: Path) -> RunDir:
    """The run directory there, where it is of the same model, rows and settings by content; any other is put out of sight."""
    if digest_at(place) == asked.digest():
        return RunDir(place)
    return create_bare(asked, place.parent, lambda staging: put_at(staging, place))


def put_at(staging: Path, place: Path) -> Path:
    """Whatever lies there goes out of sight."""
    if place.exists():
        place.rename(place.with_name(f"{EARLIER}{place.name}-{time.time_ns()}"))
    return staging.rename(place)


def digest_at(place: Path) -> str | None:
    """None where there is no run, or one of another version, or a damaged one."""
    try:
        return read_record(RunDir(place).run, Run).digest
    except RunError:
        return None


def create_bare(asked: Asked, parent: Path, put: Callable[[Path], Path]) -> RunDir:
    """A run directory, filled under a hidden name in `parent`, which `put` then gives its own."""
    bare = asked.bare
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{STAGING}{bare.name}-", dir=parent))
    try:
        _fill(RunDir(staging), asked)
        staging.chmod(0o755)
        return RunDir(put(staging))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _fill(run: RunDir, asked: Asked) -> None:
    where, bare, prepared = run.stage(1, "eval"), asked.bare, asked.prepared
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    run.log.touch()
    for name in ("test.jsonl", KEPT):
        if name in prepared.record.files:
            shutil.copyfile(prepared.path(name), where.prepared(name))
    shutil.copyfile(prepared.path("ledger.jsonl"), where.ledger)
    _take_tokenizer(where, bare)
    subject = _subject(asked, where)
    num_items = len(read_items(where.prepared("test.jsonl")))
    tokens, grids = prepared.record.prompt_tokens or 1, prepared.record.prompt_grids
    write_record(
        where.eval_stage,
        EvalStage(name=bare.filed, subject=subject, prompt_tokens=tokens, prompt_grids=grids, num_items=num_items),
    )
    _record_facts(run, subject, asked)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_record(
        run.run,
        Run(name=bare.name, digest=asked.digest(), finefit=__version__, created=now, kind="eval", status="prepared"),
    )


def _record_facts(run: RunDir, subject: Subject, asked: Asked) -> None:
    files = tuple(
        replace(fact, path=_relative(asked.base / fact.path, run.path)) for fact in file_facts(asked.prepared)
    )
    inputs = Inputs(
        data={"test": (files,)},
        model=subject.model_name,
        model_fingerprint=subject.model_fingerprint,
        template_sha256=subject.template_sha256,
    )
    write_record(run.facts, Facts(machine=read_machine(), inputs=inputs))


def _take_tokenizer(where: StageDir, bare: Bare) -> None:
    data = bare.asks.data
    renderer = open_renderer(bare.tokenizer, data.template, template_options=data.template_options, eye=_eye(bare))
    renderer.tokenizer.save_pretrained(where.tokenizer)
    keep_processor(bare.located.folder, where.tokenizer)
    settings = bare.located.folder / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, where.tokenizer / settings.name)


def _eye(bare: Bare) -> Eye | None:
    return see_of(bare.model, Path.cwd(), bare.located.folder, bare.asks.data.images)()


def _subject(asked: Asked, where: StageDir) -> Subject:
    bare, data, model = asked.bare, asked.bare.asks.data, asked.bare.model
    model = moved_model(model, lambda path: _relative(Path(path), where.run))
    manifest = None if bare.weights is None else bare.weights / MANIFEST
    return Subject(
        model=model,
        model_name=_shown_name(bare),
        model_fingerprint=bare.located.fingerprint,
        weights=None if bare.weights is None else _relative(bare.weights, where.run),
        manifest_sha256=read_file(manifest, where.path).sha256 if manifest is not None and manifest.is_file() else None,
        tuning=bare.tuning,
        device=asked.device,
        precision=asked.precision,
        threads=torch.get_num_threads(),
        seed=bare.asks.seed,
        template=data.template,
        template_options=data.template_options,
        template_sha256=open_renderer(
            where.tokenizer, data.template, template_options=data.template_options, eye=_eye(bare)
        ).sha256(),
        images=data.images,
        max_prompt_tokens=bare.max_prompt_tokens,
        form=keep_form(data.task, Path.cwd(), where.run),
        items_sha256=asked.prepared.record.files["test.jsonl"],
    )


def _shown_name(bare: Bare) -> str:
    """What a stage of a pipeline has made is called as the stage."""
    name = _called(Path(bare.located.name)) if isinstance(bare.model, FolderModel) else bare.located.name
    return name if bare.weights is None else f"{name} + {_called(bare.weights)}"


def _called(folder: Path) -> str:
    return stage_holding(folder) or folder.name


def _relative(path: Path, run: Path) -> str:
    """Run directories are copied; what lies beside them often goes along."""
    return Path(relpath(path.resolve(), run.resolve())).as_posix()
