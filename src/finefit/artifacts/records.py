"""Every record of a run directory: plain frozen data with a version, one writer, one reader."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from finefit.artifacts.atomic import write_text
from finefit.errors import FinefitError, RunError
from finefit.facts.files import FileFact
from finefit.facts.machine import Machine
from finefit.spec.every import Every
from finefit.spec.schema import AdamW, Evaluation, Model, OnNan, Save, Tuning

STRICT = ConfigDict(extra="forbid")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run stands on, by content. Equal inputs and an equal spec are the same run."""

    __pydantic_config__ = STRICT
    data: dict[str, tuple[FileFact, ...]]
    """Files by split; paths relative to the run directory."""
    model: str
    """The model's name as the user knows it."""
    model_fingerprint: str
    template_sha256: str
    """Of chat template, special tokens and template kind: equal hashes render equal prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    machine: Machine
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    __pydantic_config__ = STRICT
    level: Literal["error", "warning", "note"]
    """Only an error keeps from going on."""
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A decision and where it came from."""

    __pydantic_config__ = STRICT
    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    stages: dict[str, dict[str, Resolved]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """All that a worker is told."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    seed: int
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp32"]
    deterministic: bool
    threads: int
    model: Model
    """A folder's path is relative to the run directory."""
    model_name: str
    model_fingerprint: str
    tuning: Tuning
    template: Literal["chat", "plain"]
    template_sha256: str
    optimizer: AdamW
    schedule: Literal["cosine", "linear", "constant"]
    total_steps: int
    warmup_steps: int
    steps_per_epoch: int
    num_rows: int
    global_batch: int
    micro_batch: int
    save: Save
    validate_every: Every | None
    on_nan: OnNan
    evaluate: tuple[Evaluation, ...]
    prepared: dict[str, str]
    """sha256 of every prepared file under data/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    __pydantic_config__ = STRICT
    kind: str
    problem: str
    remedy: str
    exit_code: int

    @classmethod
    def of(cls, error: FinefitError) -> "Failure":
        return cls(kind=type(error).__name__, problem=error.problem, remedy=error.remedy, exit_code=error.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """A change that a run went on with."""

    __pydantic_config__ = STRICT
    after_step: int
    changes: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    digest: str
    finefit: str
    created: str
    status: Literal["prepared", "running", "finished", "stopped", "failed"]
    overrides: tuple[str, ...] = ()
    amendments: tuple[Amendment, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLedger:
    """used + dropped = read."""

    __pydantic_config__ = STRICT
    split: str
    source: str
    read: int
    used: int
    dropped: dict[str, int]
    tokens: int
    supervised_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    __pydantic_config__ = STRICT
    split: str
    source: str
    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    __pydantic_config__ = STRICT
    step: int
    validation_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What a checkpoint knows beside its tensors."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    step: int
    tokens: int
    supervised_tokens: int
    micro_batch: int
    model_name: str
    model_fingerprint: str
    template_sha256: str
    tuning: Tuning
    skipped_steps: tuple[int, ...] = ()
    roll_backs: int = 0
    validation_loss: float | None = None
    best: Best | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How a worker ended. `failure` is None when every step was done."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    step: int
    total_steps: int
    checkpoint: str | None
    trainable_parameters: int
    parameters: int
    tokens: int
    seconds: float
    """Of training in this process, loading excluded."""
    peak_bytes: int
    """The most that this process held: device memory on a card, resident memory on a CPU."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    checkpoint: str
    """`base`, or the name of a folder under checkpoints/."""
    evaluation: Evaluation
    manifest_sha256: str | None = None
    """Of the checkpoint, so that another one of the same name is scored anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFailure:
    """Why an evaluation left no result."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalItem:
    __pydantic_config__ = STRICT
    item: int
    prompt: str
    reference: str
    answer: str
    extracted: Any
    scores: dict[str, float]
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    __pydantic_config__ = STRICT
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All items count; one that failed scores zero."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    task: str
    checkpoint: str
    n: int
    coverage: float
    """Share of the answers that a result could be extracted from."""
    metrics: dict[str, Score]
    seconds: float
    items: tuple[EvalItem, ...] = field(repr=False)


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""Made once for each kind of record; a view reads several of them many times a second."""


def _adapter(kind: type[R]) -> TypeAdapter[R]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def write_record(path: Path, record: object) -> None:
    write_text(path, _adapter(type(record)).dump_json(record, indent=1, by_alias=True).decode() + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path} is missing", "the run directory is incomplete; start again with --new") from None
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path} is no {kind.__name__} record of this version: {place}: {first['msg']}") from None
