"""A model that is evaluated outside its training run: a model folder, an adapter, a checkpoint, a model of the hub, or
what a stage of a pipeline made. Here it is found, with its tokenizer and the settings that its prompts get."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.records import WiredModel, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run
from finefit.artifacts.stage_records import Stage
from finefit.data.image_check import ModelProcessor
from finefit.data.render import open_renderer
from finefit.errors import ModelError, RunError
from finefit.model import embedded
from finefit.model.resolve_model import ADAPTER_CONFIG, ResolvedModel, adapter_fingerprint, resolve_model
from finefit.spec.data import Data, ImageLimits, Source
from finefit.spec.load import spec_from_json
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, Full, HubModel, Lora, Model, ShapeModel, Tuning
from finefit.spec.schema import AdamW, Evaluation, Spec
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask

FORMS = "a run directory, a folder with a model or an adapter, hub:owner/name, or embedded:smollm2-135m"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_EMBEDDED: Literal["smollm2-135m"] = "smollm2-135m"
_MAX_NAME = 64
_SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """Paths are absolute."""

    name: str
    """Of the run directory of its evaluations."""
    label: str = "model"
    """Scores are filed under it, where those of a run have the name of a checkpoint."""
    model: Model
    resolved: ResolvedModel
    weights: Path | None = None
    """A folder with an adapter over the model."""
    tuning: Tuning
    tokenizer: Path
    prompts: Spec
    """The spec whose template, form and lengths the prompts get."""
    max_prompt_tokens: int | None = None

    @property
    def fingerprint(self) -> list[str]:
        return [self.resolved.fingerprint, *([] if self.weights is None else [adapter_fingerprint(self.weights)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingRun:
    """The run that a checkpoint lies in; it knows model, template and form."""

    run: Path
    stage: Stage
    spec: Spec


def find_external_model(target: str, *, base: str | None = None) -> ExternalModel:
    """`base`: the model below an adapter, where the adapter's config does not lead to it."""
    folder = Path(target).resolve()
    if (folder / ADAPTER_CONFIG).is_file():
        trained, config = _training_run_of(folder), _adapter_config(folder)
        model = _model_named(base) if base is not None else _base_of(config, folder, trained)
        return _with_adapter(folder, model, trained, config)
    if base is not None:
        raise ModelError(f"--base is for adapters, and {target} is not one", "leave it out")
    return _whole_model(_model_named(target), _run_name(target), _training_run_of(folder) if folder.is_dir() else None)


def stage_model(name: str, wired: WiredModel, prompts: Spec) -> ExternalModel:
    """A model of a pipeline. It is prompted as the stage that asks it says, not as it was trained."""
    if wired.adapter is None:
        found = _whole_model(wired.model, name, None)
    else:
        folder = Path(wired.adapter).resolve()
        found = _with_adapter(folder, wired.model, _training_run_of(folder), _adapter_config(folder))
    return replace(found, name=name, label=name, prompts=prompts, max_prompt_tokens=prompts.max_prompt_tokens())


def rows_spec(data: Data, *, seed: int, evaluations: tuple[Evaluation, ...] = ()) -> Spec:
    """A spec that holds only what the rendering of rows depends on."""
    model, tuning, optimizer = ShapeModel(kind="shape", config={}), Full(kind="full"), AdamW(lr=1.0)
    return Spec(
        name="rows", seed=seed, model=model, tuning=tuning, data=data, optimizer=optimizer, evaluate=evaluations
    )


def without_rows(data: Data, *, form_base: Path) -> Data:
    """The part of `data` that decides how a row is rendered. A user's own task file lies under `form_base`."""
    form = data.task
    if isinstance(form, CustomTask):
        form = form.model_copy(update={"path": str((form_base / form.path).resolve())})
    return data.model_copy(update={"train": (), "validation": None, "test": None, "task": form})


def _model_named(target: str) -> Model:
    kind, colon, name = target.partition(":")
    if colon and kind == "hub":
        owner, _, revision = name.partition("@")
        return HubModel(kind="hub", id=owner, revision=revision or "main")
    if colon and kind == "embedded":
        if name != _EMBEDDED:
            raise ModelError(f"there is no embedded model {name}", f"there is embedded:{_EMBEDDED}")
        return EmbeddedModel(kind="embedded", name=_EMBEDDED)
    if not Path(target).is_dir():
        raise RunError(f"{target} is not there", f"name {FORMS}")
    return FolderModel(kind="folder", path=str(Path(target).resolve()))


def _run_name(target: str) -> str:
    """The last part of a path or hub id; for a checkpoint with the name of its run in front."""
    path = Path(target.partition(":")[2] or target)
    path = path.resolve() if Path(target).is_dir() else path
    run = _enclosing_run(path)
    words = f"{run.name}-{path.name}" if run is not None else path.name
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in words).strip("-._")
    return f"eval-{kept or 'model'}"[:_MAX_NAME]


def _enclosing_run(path: Path) -> Path | None:
    return next((parent for parent in path.parents if is_run(parent)), None)


def _training_run_of(folder: Path) -> _TrainingRun | None:
    run, where = _enclosing_run(folder), StageDir(folder.parent.parent)
    if run is None or not where.stage.is_file():
        return None
    spec = spec_from_json(RunDir(run).spec_json.read_text(encoding="utf-8"))
    return _TrainingRun(run=run, stage=read_record(where.stage, Stage), spec=spec)


def _with_adapter(folder: Path, model: Model, trained: _TrainingRun | None, config: dict[str, Any]) -> ExternalModel:
    tuning = _tuning(config) if trained is None else trained.stage.tuning
    if isinstance(tuning, Lora):
        tuning = tuning.model_copy(
            update={"adapter": None}
        )  # the adapter that training went on from is part of this one
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZER_FILES) and not _has_vision(model)
    found = _whole_model(model, _run_name(str(folder)), trained, tokenizer=folder if has_tokenizer else None)
    return replace(found, weights=folder, tuning=tuning)


def _has_vision(model: Model) -> bool:
    """Rows of a vision-language model need the processor beside the model, which an adapter comes without."""
    if isinstance(model, CustomModel):
        return False
    folder = resolve_model(model, Path.cwd()).folder
    return ModelProcessor(folder, folder / "config.json", ImageLimits())() is not None


def _whole_model(
    model: Model, name: str, trained: _TrainingRun | None, *, tokenizer: Path | None = None
) -> ExternalModel:
    resolved = resolve_model(model, Path.cwd())
    if isinstance(model, HubModel):  # the snapshot's folder is named by its commit
        model = model.model_copy(update={"revision": resolved.folder.name})
    folder = tokenizer or resolved.folder
    if trained is None:
        prompts = rows_spec(Data(train=(Source(path=""),), template=_template(folder)), seed=_SEED)
    else:
        data = without_rows(trained.spec.data, form_base=trained.run)
        prompts = trained.spec.model_copy(update={"data": data})
    return ExternalModel(
        name=name,
        model=model,
        resolved=resolved,
        tuning=Full(kind="full"),
        tokenizer=folder,
        prompts=prompts,
        max_prompt_tokens=None if trained is None else trained.stage.max_prompt_tokens,
    )


def _adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", "name another adapter") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not an object", "name another adapter")
    return config


def _base_of(config: dict[str, Any], folder: Path, trained: _TrainingRun | None) -> Model:
    if trained is not None:
        return moved(trained.stage.model, lambda path: str((trained.run / path).resolve()))
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(f"the adapter in {folder} does not say what model it belongs to", "name it with --base")
    for place in (Path(named), folder / named):
        if place.is_dir():
            return FolderModel(kind="folder", path=str(place.resolve()))
    if named == embedded.hub_id_of(_EMBEDDED):
        return EmbeddedModel(kind="embedded", name=_EMBEDDED)
    if Path(named).is_absolute() or named.startswith("."):
        problem = f"the adapter in {folder} was made for {named}, which is not there"
        raise ModelError(problem, "name the model with --base FOLDER")
    return HubModel(kind="hub", id=named)


def _tuning(config: dict[str, Any]) -> Lora:
    """As large as the adapter is, which memory depends on; its weights are loaded as they are."""
    targets = config.get("target_modules")
    named: tuple[str, ...] | Literal["all-linear"] = (
        tuple(sorted(targets)) if isinstance(targets, list) and targets else "all-linear"
    )
    rank, alpha = int(config.get("r") or 16), float(config.get("lora_alpha") or 32)
    return Lora(kind="lora", rank=rank, alpha=alpha, targets=named, dora=bool(config.get("use_dora")))


def _template(folder: Path) -> Literal["chat", "plain"]:
    """The chat template of the tokenizer, or of the model's processor, where there is one."""
    image_processor = ModelProcessor(folder, folder / "config.json", ImageLimits())()
    tokenizer = open_renderer(folder, "plain", image_processor=image_processor).tokenizer
    return "chat" if tokenizer.chat_template else "plain"
