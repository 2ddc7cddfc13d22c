"""A model that no run of ours stands behind: a folder, an adapter, a model of the hub. Its evaluation gets a run directory with the same layout."""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

import torch

from finefit import __version__
from finefit.artifacts.checkpoint import MANIFEST
from finefit.artifacts.records import EvalStage, Facts, Inputs, Run, Stage, Subject, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run, newest_with_digest
from finefit.data.items import read_items
from finefit.data.render import open_renderer
from finefit.errors import ModelError, RunError
from finefit.facts.files import read_file
from finefit.facts.machine import read_machine
from finefit.model.adapter_files import CONFIG, adapter_fingerprint
from finefit.model.locate import Located, locate
from finefit.pipeline.create import put_in_place
from finefit.pipeline.data import PreparedData
from finefit.pipeline.questions import file_facts, plain_spec, prepare_questions, without_rows
from finefit.plan.resolve import precision_on
from finefit.spec.load import spec_from_json
from finefit.spec.schema import Data, EmbeddedModel, FolderModel, Full, HubModel, Lora, Model, Source, Spec, Tuning

FORMS = "a run directory, a folder with a model or an adapter, hub:owner/name, or embedded:smollm2-135m"
NAME = "model"
"""By which the scores of a bare model are filed."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_PLAIN = Data(train=(Source(path=""),), template="plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Paths are absolute, until a run directory is there that they can be relative to."""

    name: str
    """Of its run directory."""
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
    path = Path(target.partition(":")[2] or target).resolve() if Path(target).is_dir() else Path(target.partition(":")[2] or target)
    run = _enclosing_run(path)
    words = f"{run.name}-{path.name}" if run is not None else path.name
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in words).strip("-._")
    return f"eval-{kept or 'model'}"[:64]


def _enclosing_run(path: Path) -> Path | None:
    return next((parent for parent in path.parents if is_run(parent)), None)


def _home_of(folder: Path) -> _Home | None:
    run, where = _enclosing_run(folder), StageDir(folder.parent.parent)
    if run is None or not where.stage.is_file():
        return None
    return _Home(run=run, stage=read_record(where.stage, Stage), spec=spec_from_json(RunDir(run).spec_json.read_text(encoding="utf-8")))


def _adapter(folder: Path, base: str | None) -> Bare:
    home, config = _home_of(folder), _adapter_config(folder)
    model = _model_named(base) if base is not None else _base_of(config, folder, home)
    tuning = _tuning(config) if home is None else home.stage.tuning
    if isinstance(tuning, Lora):
        tuning = tuning.model_copy(update={"adapter": None})  # what it went on from is part of it
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZERS)
    found = _whole(model, _last_name(str(folder)), home, tokenizer=folder if has_tokenizer else None)
    return replace(found, weights=folder, tuning=tuning)


def _whole(model: Model, name: str, home: _Home | None, *, tokenizer: Path | None = None) -> Bare:
    located = locate(model, Path.cwd())
    if isinstance(model, HubModel):
        model = model.model_copy(update={"revision": located.folder.name})  # the snapshot's folder is named by its commit
    folder = tokenizer or located.folder
    return Bare(
        name=name,
        model=model,
        located=located,
        tuning=Full(kind="full"),
        tokenizer=folder,
        asks=plain_spec(_PLAIN.model_copy(update={"template": _template(folder)}), seed=42) if home is None else _asks_of(home),
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
        raise ModelError(f"the adapter in {folder} was made for {named}, which is not there", "name the model with --base FOLDER")
    return HubModel(kind="hub", id=named)


def _tuning(config: dict[str, Any]) -> Lora:
    """As large as the adapter is, which is what memory depends on; its weights are loaded as they are."""
    targets = config.get("target_modules")
    named: tuple[str, ...] | Literal["all-linear"] = tuple(sorted(targets)) if isinstance(targets, list) and targets else "all-linear"
    return Lora(
        kind="lora", rank=int(config.get("r") or 16), alpha=float(config.get("lora_alpha") or 32), targets=named, dora=bool(config.get("use_dora"))
    )


def _absolute(model: Model, run: Path) -> Model:
    return FolderModel(kind="folder", path=str((run / model.path).resolve())) if isinstance(model, FolderModel) else model


def _template(folder: Path) -> Literal["chat", "plain"]:
    """The tokenizer's own, where it has one."""
    return "chat" if open_renderer(folder, "plain").tokenizer.chat_template else "plain"


# its run directory


def open_bare(bare: Bare, data: str, *, device: Literal["cpu", "cuda"] | None, runs: Path) -> RunDir:
    """The newest run of the same model, rows and settings, by content; or a new one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    prepared = prepare_questions(Source(path=data), bare.asks, bare.tokenizer, base=Path.cwd())
    settings = [device, precision_on(device), bare.asks.seed, bare.max_prompt_tokens, bare.asks.data.model_dump(mode="json")]
    content = [bare.fingerprint, [fact.sha256 for fact in file_facts(prepared)], prepared.record.template_sha256, settings]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return newest_with_digest(runs, bare.name, digest) or _created(bare, prepared, device, runs, digest)


def _created(bare: Bare, prepared: PreparedData, device: Literal["cpu", "cuda"], runs: Path, digest: str) -> RunDir:
    runs.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".staging-{bare.name}-", dir=runs))
    try:
        run = RunDir(staging)
        where = run.stage(1, "eval")
        for folder in (where.path / "data", where.tokenizer, run.log.parent):
            folder.mkdir(parents=True)
        run.log.touch()
        shutil.copyfile(prepared.path("test.jsonl"), where.prepared("test.jsonl"))
        shutil.copyfile(prepared.path("ledger.jsonl"), where.ledger)
        _take_tokenizer(where, bare)
        subject = _subject(bare, prepared, where, device)
        num_items = len(read_items(where.prepared("test.jsonl")))
        write_record(where.eval_stage, EvalStage(name=NAME, subject=subject, prompt_tokens=prepared.record.prompt_tokens or 1, num_items=num_items))
        _record_facts(run, subject, prepared)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_record(run.run, Run(name=bare.name, digest=digest, finefit=__version__, created=now, kind="eval", status="prepared"))
        staging.chmod(0o755)
        return RunDir(put_in_place(staging, runs, bare.name))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _record_facts(run: RunDir, subject: Subject, prepared: PreparedData) -> None:
    files = tuple(replace(fact, path=_relative(Path.cwd() / fact.path, run.path)) for fact in file_facts(prepared))
    inputs = Inputs(
        data={"test": (files,)}, model=subject.model_name, model_fingerprint=subject.model_fingerprint, template_sha256=subject.template_sha256
    )
    write_record(run.facts, Facts(machine=read_machine(), inputs=inputs))


def _take_tokenizer(where: StageDir, bare: Bare) -> None:
    data = bare.asks.data
    open_renderer(bare.tokenizer, data.template, template_options=data.template_options).tokenizer.save_pretrained(where.tokenizer)
    settings = bare.located.folder / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, where.tokenizer / settings.name)


def _subject(bare: Bare, prepared: PreparedData, where: StageDir, device: Literal["cpu", "cuda"]) -> Subject:
    data, model = bare.asks.data, bare.model
    if isinstance(model, FolderModel):
        model = FolderModel(kind="folder", path=_relative(Path(model.path), where.run))
    manifest = None if bare.weights is None else bare.weights / MANIFEST
    return Subject(
        model=model,
        model_name=_shown_name(bare),
        model_fingerprint=bare.located.fingerprint,
        weights=None if bare.weights is None else _relative(bare.weights, where.run),
        manifest_sha256=read_file(manifest, where.path).sha256 if manifest is not None and manifest.is_file() else None,
        tuning=bare.tuning,
        device=device,
        precision=precision_on(device),
        threads=torch.get_num_threads(),
        seed=bare.asks.seed,
        template=data.template,
        template_options=data.template_options,
        template_sha256=open_renderer(where.tokenizer, data.template, template_options=data.template_options).sha256(),
        max_prompt_tokens=bare.max_prompt_tokens,
        form=data.task,
        items_sha256=prepared.record.files["test.jsonl"],
    )


def _shown_name(bare: Bare) -> str:
    name = Path(bare.located.name).name if isinstance(bare.model, FolderModel) else bare.located.name
    return name if bare.weights is None else f"{name} + {bare.weights.name}"


def _relative(path: Path, run: Path) -> str:
    """Run directories are copied; what lies beside them often goes along."""
    return Path(relpath(path.resolve(), run.resolve())).as_posix()
