"""The base of all records, with reading and writing; the records of a run and its stages; and how a stage is wired to
others."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from finefit.artifacts.atomic import write_text
from finefit.artifacts.reading import MAX_RECORD_BYTES, RESTORE, adapter_of, is_there, read_bytes, read_text
from finefit.artifacts.rundir import RunDir
from finefit.errors import FinefitError, OtherVersion, RunError, SpecError
from finefit.facts.files import FileFact
from finefit.facts.machine import Machine
from finefit.spec.load import pipeline_from_json, spec_from_json
from finefit.spec.models import CustomModel, FolderModel, Lora, Model
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Spec
from finefit.spec.stages import STAGE_PATH, AnyStage, Gate, Input, StageModel, TrainStage, moved
from finefit.stats.intervals import Interval

R = TypeVar("R", bound="Record")
P = TypeVar("P", bound=BaseModel)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Record:
    """The base of everything that is stored as JSON: each subclass is a frozen dataclass with keyword arguments, and an
    unknown key in a file is an error. A record with a file of its own has a `version`, one writer and one reader."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES
    """Of its file; more where it grows with the rows of an evaluation."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


def write_record(path: Path, record: Record) -> None:
    write_text(path, adapter_of(type(record)).dump_json(record, indent=1, by_alias=True).decode() + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    text = read_bytes(path, kind.MAX_BYTES)
    try:
        return adapter_of(kind).validate_json(text)
    except ValidationError as error:
        first, document = error.errors()[0], None
        with suppress(ValueError):
            document = from_json(text)
        found = document.get("version") if isinstance(document, dict) else None
        known = next(iter(get_args(get_type_hints(kind).get("version"))), None)
        if found is not None and known is not None and found != known:
            problem = f"{path} is a {kind.__name__} record of version {found}, and this finefit reads version {known}"
            remedy = "another version of finefit wrote it; use that version, or start again with --new"
            raise OtherVersion(problem, remedy) from None
        place = ".".join(str(part) for part in first["loc"])
        problem = f"{path} is not a {kind.__name__} record: {place}: {first['msg']}"
        raise RunError(problem, RESTORE) from None


def read_if_there(path: Path, kind: type[R]) -> R | None:
    """None if the file is missing; a damaged one is an error."""
    return read_record(path, kind) if is_there(path) else None


def read_or_none(path: Path, kind: type[R], say: Callable[[str], None] = lambda _: None) -> R | None:
    """None where it is missing, damaged or of another version. `say` hears of one that is there: for callers that make
    what it records again."""
    try:
        return read_if_there(path, kind)
    except RunError as error:
        say(f"{error.problem}; what it records is made again")
        return None


def read_spec(run: RunDir) -> Spec:
    """The spec of one training."""
    return _parsed(run, spec_from_json)


def read_pipeline(run: RunDir) -> Pipeline:
    return _parsed(run, pipeline_from_json)


def _parsed(run: RunDir, parse: Callable[[str], P]) -> P:
    text = read_text(run.spec_json)
    try:
        return parse(text)
    except SpecError as error:
        first = error.problem.partition("\n")[0].removeprefix("spec.json:")
        raise RunError(f"{run.spec_json} is not the spec of this run: {first}", RESTORE) from None


class Inputs(Record):
    """What a run depends on, by content. A run with equal inputs and an equal spec is the same run."""

    data: dict[str, tuple[tuple[FileFact, ...], ...]]
    """Files by split and source; paths are relative to the run directory."""
    model: str
    """The model's name as the user knows it."""
    model_fingerprint: str
    template_sha256: str
    """The hash of chat template, special tokens and kind of template; equal hashes render equal prompts."""
    engine_sha256: str | None = None
    """The hash of the user's own DeepSpeed JSON."""
    tasks_sha256: tuple[str | None, ...] = ()
    """The hashes of the user's own task files, one entry per evaluation; empty if there are none."""
    code_sha256: str | None = None
    """The hash of the file that builds a custom model."""
    images_sha256: str | None = None
    """The hash of all images in the rows; None if there are none."""


class Facts(Record):
    version: Literal[2] = 2
    machine: Machine
    inputs: Inputs


class Finding(Record):
    level: Literal["error", "warning", "note"]
    """Only an error stops the run."""
    problem: str
    remedy: str


class Check(Record):
    """The findings before a run, errors first."""

    version: Literal[1] = 1
    findings: tuple[Finding, ...]


class Levers(Record):
    """The exact levers in force, shared by plan and step. None of them changes the gradient."""

    micro_batch: int
    recompute: int = 0
    """Layers recomputed in backward, counted from the first: backward reaches those last, when the kept ones are
    freed."""
    keep_attention: bool = False
    loss_chunk: int | None = None
    offload: bool = False
    mlp_tiles: int = 1
    adapter_inputs: Literal["bf16", "fp32"] = "fp32"
    packing: bool = False
    """Rows of a step are concatenated without padding; each attends only to itself."""
    kernels: Literal["torch", "fused"] = "torch"
    update: Literal["after", "inside"] = "after"
    """`inside`: each tensor is updated as soon as its gradient exists, which is then freed. `after`: all tensors after
    backward."""
    compile: bool = False


class Failure(Record):
    kind: str
    problem: str
    remedy: str
    exit_code: int

    @classmethod
    def of(cls, error: FinefitError) -> "Failure":
        return cls(kind=type(error).__name__, problem=error.problem, remedy=error.remedy, exit_code=error.exit_code)


class Amendment(Record):
    """A change with which a run was resumed."""

    after_step: int
    changes: tuple[str, ...]
    note: str


class Run(Record):
    version: Literal[2] = 2
    name: str
    digest: str
    finefit: str
    created: str
    kind: Literal["train", "eval", "pipeline"] = "train"
    """`eval` trains nothing and scores a given model or given answers. The stages of a `pipeline` are runs, or folders
    with an output."""
    status: Literal["prepared", "running", "finished", "stopped", "failed"]
    overrides: tuple[str, ...] = ()
    amendments: tuple[Amendment, ...] = ()
    failure: Failure | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of all external files and models when the run began, by their key in the spec."""


class WiredModel(Record):
    """A model whose references to other stages are resolved. All paths are absolute."""

    model: Model
    adapter: str | None = None
    """The folder of an adapter on top of the model."""
    gate: str | None = None
    """The folder of a gate, if the model stands for the choice among its experts."""


At = Callable[[str], Path]
"""The absolute path at which a stage's output folder is, or will be, by the stage's name."""


def output_of(place: Path, stage: AnyStage) -> Path:
    """The output of a stage within its folder; for a training, its last checkpoint."""
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
    """A training as a spec of its own. `base` is the folder that its relative paths start from."""
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
    """The same settings with every path `stage://NAME/file` replaced."""
    return moved(part, lambda path: place(path) if STAGE_PATH.fullmatch(path) else path, addresses=True)


def file_at(path: str, at: At) -> Path:
    """The file that `stage://NAME/file` names."""
    found = STAGE_PATH.fullmatch(path)
    assert found is not None
    return at(found[1]) / (found[2] or "")


class StageJob(Record):
    """Everything that the worker of a stage without training of its own needs to know."""

    version: Literal[1] = 1
    name: str
    pipeline: str
    seed: int
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    base: str
    """The absolute folder that the stage's relative paths start from; stage:// paths are absolute already."""
    stage: AnyStage
    models: dict[str, WiredModel] = field(default_factory=dict)
    """Models by their key in the stage: `base`, `experts.law`, `models.sft`, `model`, `method.model`."""
    scores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A comparison's absolute run directories (with :checkpoint), for each entry of `of`."""


class StageMemory(Record):
    """Memory during a stage. On a card: used on the whole card, by any process; on a CPU: resident in the stage's own
    processes."""

    device: Literal["cpu", "cuda"]
    before_bytes: int
    loaded_bytes: int | None
    """Memory after the model was loaded and before it did anything, the largest of several models; None if the stage
    loads none."""
    peak_bytes: int | None
    after_bytes: int


class StageOutcome(Record):
    """How such a worker ended. `failure` is None if it produced its output."""

    version: Literal[1] = 1
    summary: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    """Peak of the process: device memory on a card, resident memory on a CPU."""
    failure: Failure | None = None


class CacheInputs(Record):
    """What a stage depends on, written when it starts: begun.json."""

    version: Literal[2] = 2
    inputs: dict[str, str]
    """A digest for each name: `spec`, the files and models that the stage names, `finefit`."""
    document: dict[str, Any]
    """The stage's spec without paths, used to report which keys have changed."""
    command: str = ""
    """The command that forced the stage to run again."""


class FinishedStage(Record):
    """Written last, when a stage has produced its output: done.json."""

    version: Literal[1] = 1
    name: str
    kind: str
    key: str
    """A digest of the stage's spec, the content of its inputs and the version of finefit; equal keys make equal
    outputs."""
    inputs: dict[str, str]
    """A digest for each input, to report what has changed."""
    output_digest: str
    """The digest of the output, which is part of the keys of the stages that depend on it."""
    finefit: str
    seconds: float
    memory: StageMemory | None
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Sizes of the output's files by name. Empty for an evaluation, because each of its models has its own records."""


class StageState(Record):
    name: str
    kind: str
    place: str
    """The stage's folder, relative to the run directory; a reused stage is in another run."""
    status: Literal["waiting", "running", "done", "failed", "stopped"]
    reason: str = ""
    """Why it runs, or why it need not run."""


class PipelineState(Record):
    """The states of a run's stages, in their order: stages.json."""

    version: Literal[2] = 2
    stages: tuple[StageState, ...]
    forced: tuple[str, ...] = ()
    """Stages that an unfinished command asked to run again."""
    command: str = ""
    """Identifies that command; the same command resumes it."""


class SequenceGate(Record):
    """Chooses the expert for a prompt by its tokens: gate.json, beside the table of scores in gate.safetensors."""

    version: Literal[1] = 1
    experts: tuple[str, ...]
    """The experts in the order of the table's columns."""
    template_sha256: str
    """The hash of the template that rendered the training prompts."""
    form: str | None = None
    """The digest of the task that built their rows; None if rows are used as they are."""
    trained: dict[str, int]
    """The number of prompts of each expert."""
    held: dict[str, int]
    accuracy: Interval
    """The accuracy over all held-out prompts."""
    confusion: dict[str, dict[str, int]]
    """Held-out prompts by their true expert, then by the gate's choice."""
    telling: dict[str, tuple[str, ...]]
    """The tokens that favour each expert most in its own training prompts."""
    shared_prompts: int
    """Distinct prompts that occur in the rows of several experts: no choice is right for all of them."""


class SourceRouting(Record):
    """The experts to which the tokens of one data set are routed: for each layer, a share per expert."""

    rows: int
    tokens: int
    first: tuple[tuple[float, ...], ...]
    """The share of tokens whose first choice the expert is."""
    weight: tuple[tuple[float, ...], ...]
    """The expert's share of the routing weight."""


class Routing(Record):
    """How a mixture of experts routes its tokens: routing.json."""

    version: Literal[1] = 1
    experts: tuple[str, ...]
    """Experts by name if known, else by number."""
    top_k: int
    sources: dict[str, SourceRouting]
