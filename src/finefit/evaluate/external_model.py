"""A model that is evaluated outside its training run: a model folder, an adapter, a checkpoint, a model on the hub, or
the output of a pipeline stage. This module finds it, its tokenizer and the settings for its prompts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.reading import is_there
from finefit.artifacts.records import WiredModel, read_record, read_spec
from finefit.artifacts.rundir import RunDir, StageDir, is_run
from finefit.artifacts.stage_records import Stage
from finefit.data.image_check import ModelProcessor
from finefit.data.render import open_renderer
from finefit.errors import ModelError, RunError
from finefit.facts.files import read_object, read_weight_file, reading_model
from finefit.model import resolve_model as models
from finefit.spec.data import Data, ImageLimits, Source
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, Full, HubModel, Lora, Model, ShapeModel, Tuning
from finefit.spec.schema import AdamW, Evaluation, Spec
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask
from finefit.vision.family import ImageProcessor

FORMS = "a run directory, a folder with a model or an adapter, hub:owner/name, or embedded:smollm2-135m"
_OTHER_ADAPTER = "name another adapter"
_EMBEDDED: Literal["smollm2-135m"] = "smollm2-135m"
_MAX_NAME, _SEED = 64, 42


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalModel:
    """Paths are absolute."""

    name: str
    """The name of the run directory of its evaluations."""
    label: str = "model"
    """The label under which scores are filed, in place of the name of a checkpoint."""
    model: Model
    resolved: models.ResolvedModel
    weights: Path | None = None
    """A folder with an adapter for the model."""
    tuning: Tuning
    tokenizer: Path
    prompts: Spec
    """The spec whose template, form and lengths the prompts use."""
    max_prompt_tokens: int | None = None

    @property
    def fingerprint(self) -> list[str]:
        adapter = [] if self.weights is None else [models.adapter_fingerprint(self.weights)]
        return [self.resolved.fingerprint, *adapter]


def find_external_model(target: str, *, base: str | None = None) -> ExternalModel:
    """`base` is the model below an adapter, if the adapter's config does not lead to it."""
    folder = Path(target).resolve()
    if (folder / models.ADAPTER_CONFIG).is_file():
        return _with_adapter(folder, None if base is None else _model_named(base))
    if base is not None:
        raise ModelError(f"--base is for adapters, and {target} is not one", "leave it out")
    return _whole_model(_model_named(target), _run_name(target), _training_run_of(folder) if folder.is_dir() else None)


def stage_model(name: str, wired: WiredModel, prompts: Spec) -> ExternalModel:
    """A model of a pipeline. Its prompts follow the stage that evaluates it, not its training."""
    adapter = None if wired.adapter is None else Path(wired.adapter).resolve()
    found = _with_adapter(adapter, wired.model) if adapter else _whole_model(wired.model, name, None)
    return replace(found, name=name, label=name, prompts=prompts, max_prompt_tokens=prompts.max_prompt_tokens())


def rows_spec(data: Data, *, seed: int, evaluations: tuple[Evaluation, ...] = ()) -> Spec:
    """A spec that holds only what the rendering of rows depends on."""
    model, tuning, optimizer = ShapeModel(kind="shape", config={}), Full(kind="full"), AdamW(lr=1e-5)
    return Spec(
        name="rows", seed=seed, model=model, tuning=tuning, data=data, optimizer=optimizer, evaluate=evaluations
    )


def without_rows(data: Data, *, form_base: Path) -> Data:
    """The part of `data` that decides how a row is rendered. A user's own task file is below `form_base`."""
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
        raise RunError(f"{target} is not {'a folder' if is_there(Path(target)) else 'there'}", f"name {FORMS}")
    return FolderModel(kind="folder", path=str(Path(target).resolve()))


def _run_name(target: str) -> str:
    """The last part of a path or hub id; for a checkpoint, with the name of its run in front."""
    path = Path(target.partition(":")[2] or target)
    path = path.resolve() if Path(target).is_dir() else path
    run = _enclosing_run(path)
    words = f"{run.name}-{path.name}" if run is not None else path.name
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in words).strip("-._")
    return f"eval-{kept or 'model'}"[:_MAX_NAME]


def _enclosing_run(path: Path) -> Path | None:
    return next((parent for parent in path.parents if is_run(parent)), None)


def _training_run_of(folder: Path) -> tuple[Path, Stage, Spec] | None:
    """The training run that contains the checkpoint; it records model, template and form."""
    run, where = _enclosing_run(folder), StageDir(folder.parent.parent)
    if run is None or not where.stage.is_file():
        return None
    spec = read_spec(RunDir(run))
    return run, read_record(where.stage, Stage), spec


def _with_adapter(folder: Path, model: Model | None) -> ExternalModel:
    """`model` is the model below the adapter; None means the one that the adapter names."""
    path, trained = folder / models.ADAPTER_CONFIG, _training_run_of(folder)
    config = read_object(path)
    with reading_model(folder / models.ADAPTER_WEIGHTS, _OTHER_ADAPTER):
        read_weight_file(folder / models.ADAPTER_WEIGHTS)
    if model is None and trained is not None:
        run, stage, _ = trained
        model = moved(stage.model, lambda path: str((run / path).resolve()))
    elif model is None:
        with reading_model(path, "name the model with --base"):
            model = _base_of(config, folder)
    tuning: Tuning
    if trained is None:
        with reading_model(path, _OTHER_ADAPTER):
            tuning = _size_of(config)
    else:
        tuning = trained[1].tuning
    if isinstance(tuning, Lora):  # the adapter that training went on from is part of this one
        tuning = tuning.model_copy(update={"adapter": None})
    # rows of a vision-language model need the processor beside the model, which an adapter comes without
    has_vision = not isinstance(model, CustomModel) and _processor_in(models.resolve_model(model, Path.cwd()).folder)
    has_tokenizer = models.has_tokenizer(folder) and not has_vision
    found = _whole_model(model, _run_name(str(folder)), trained, tokenizer=folder if has_tokenizer else None)
    return replace(found, weights=folder, tuning=tuning)


def _size_of(config: dict[str, Any]) -> Lora:
    """As large as the adapter is, which memory depends on; its weights are loaded as they are."""
    targets = config.get("target_modules")
    named: tuple[str, ...] | Literal["all-linear"] = (
        tuple(sorted(targets)) if isinstance(targets, list) and targets else "all-linear"
    )
    rank, alpha = int(config.get("r") or 16), float(config.get("lora_alpha") or 32)
    return Lora(kind="lora", rank=rank, alpha=alpha, targets=named, dora=bool(config.get("use_dora")))


def _processor_in(folder: Path) -> ImageProcessor | None:
    return ModelProcessor(folder, folder / "config.json", ImageLimits())()


def _whole_model(
    model: Model, name: str, trained: tuple[Path, Stage, Spec] | None, *, tokenizer: Path | None = None
) -> ExternalModel:
    resolved = models.resolve_model(model, Path.cwd())
    if isinstance(model, HubModel):  # the snapshot's folder is named by its commit
        model = model.model_copy(update={"revision": resolved.folder.name})
    folder = tokenizer or resolved.folder
    if trained is None:
        # the chat template of the tokenizer, or of the model's processor, where there is one
        opened = open_renderer(folder, "plain", image_processor=_processor_in(folder)).tokenizer
        template: Literal["chat", "plain"] = "chat" if opened.chat_template else "plain"
        prompts, max_prompt_tokens = rows_spec(Data(train=(Source(path=""),), template=template), seed=_SEED), None
    else:
        run, stage, spec = trained
        prompts = spec.model_copy(update={"data": without_rows(spec.data, form_base=run)})
        max_prompt_tokens = stage.max_prompt_tokens
    return ExternalModel(
        name=name,
        model=model,
        resolved=resolved,
        tuning=Full(kind="full"),
        tokenizer=folder,
        prompts=prompts,
        max_prompt_tokens=max_prompt_tokens,
    )


def _base_of(config: dict[str, Any], folder: Path) -> Model:
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(f"the adapter in {folder} does not say what model it belongs to", "name it with --base")
    for place in (Path(named), folder / named):
        if place.is_dir():
            return FolderModel(kind="folder", path=str(place.resolve()))
    if named == models.EMBEDDED_HUB_IDS[_EMBEDDED]:
        return EmbeddedModel(kind="embedded", name=_EMBEDDED)
    if Path(named).is_absolute() or named.startswith("."):
        problem = f"the adapter in {folder} was made for {named}, which is not there"
        raise ModelError(problem, "name the model with --base FOLDER")
    return HubModel(kind="hub", id=named)
