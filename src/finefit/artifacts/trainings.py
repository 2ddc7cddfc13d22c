"""What the worker of a training is told, what became of its rows, and how it ended."""

from dataclasses import dataclass, field
from typing import Any, Literal

from finefit.artifacts.forecasts import Lengths, Room
from finefit.artifacts.records import STRICT, Failure, Levers
from finefit.spec.every import Every
from finefit.spec.models import Model, Tuning
from finefit.spec.rows import ImageLimits
from finefit.spec.schema import AdamW, Engine, Evaluation, Objective, OnNan, Save, Tracker
from finefit.spec.tasks import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """All that a worker is told."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    seed: int
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    deterministic: bool
    threads: int
    model: Model
    """A folder's path is relative to the run directory."""
    model_name: str
    model_fingerprint: str
    tuning: Tuning
    """An adapter's path is relative to the run directory."""
    objective: Objective
    engine: Engine
    """Never `auto`: what it came to."""
    num_ranks: int | None = None
    """On all nodes together, as it was planned; earlier versions did not say."""
    trackers: tuple[Tracker, ...] = ()
    template: Literal["chat", "plain"]
    template_options: dict[str, Any] = field(default_factory=dict)
    template_sha256: str
    images: ImageLimits = field(default_factory=ImageLimits)
    """How large images are shown."""
    max_prompt_tokens: int | None = None
    """Longer prompts are cut in an evaluation as they are in training; None: never."""
    form: Form | None = None
    """How rows become prompt and answer."""
    rooms: dict[str, Room] = field(default_factory=dict)
    """What generation may hold at once in each evaluation, by its label."""
    optimizer: AdamW
    schedule: Literal["cosine", "linear", "constant"]
    total_steps: int
    warmup_steps: int
    steps_per_epoch: int
    num_rows: int
    global_batch: int
    levers: Levers
    foretold_bytes: int
    """Reserved on the card, by the forecast; on a CPU what the process holds."""
    save: Save
    validate_every: Every | None
    on_nan: OnNan
    evaluate: tuple[Evaluation, ...]
    prepared: dict[str, str]
    """sha256 of every prepared file under data/."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLedger:
    """What became of the rows of one source: used + dropped = read. What is cut is a part of what is used."""

    __pydantic_config__ = STRICT
    split: str
    source: str
    shape: str
    mapping: dict[str, str]
    """What was read from which column."""
    records: int
    """In the files."""
    read: int
    """Rows: a record may hold several."""
    used: int
    cut: int
    """Rows whose prompt was cut."""
    cut_tokens: int
    dropped: dict[str, int]
    """By reason."""
    examples: int
    """Sequences that the used rows have become: a conversation or a long text may be several."""
    repeated: int
    """Examples seen once more in an epoch, by weight."""
    tokens: int
    """Of the examples, each counted once; of prompts for rows that are only answered."""
    supervised_tokens: int
    images: int = 0
    """That the used rows show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A row that was dropped, cut, or repaired when it was built."""

    __pydantic_config__ = STRICT
    split: str
    source: str
    row: int
    part: int
    what: Literal["dropped", "cut", "repaired"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The same thing wrong with several rows."""

    __pydantic_config__ = STRICT
    kind: Literal["unusable", "too long", "special token", "overlap", "duplicate", "repaired"]
    split: str
    count: int
    lines: tuple[str, ...]
    """The first few, with their place."""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How many of the tokens that are computed are rows' own; the rest is padding."""

    __pydantic_config__ = STRICT
    own: float
    """As the run lays its rows out."""
    batches_per_step: float
    grouped: float
    """Were they grouped by length and padded."""
    in_order: float
    """Were they padded as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What the data of a spec became, before anything is judged. The examples lie beside it."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    sources: tuple[SourceLedger, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """What the reader must know of the template."""
    lengths: Lengths | None
    """None where no training row can be used."""
    template_sha256: str
    largest_token: int
    pad_is_end: bool
    prompt_tokens: int | None = None
    """Of the longest prompt to be answered in an evaluation."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Of the images of the row to be answered that shows most."""
    pictures_sha256: str | None = None
    """Of all images that rows show, by content; None where there are none."""
    files: dict[str, str]
    """sha256 of every prepared file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    __pydantic_config__ = STRICT
    step: int
    validation_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What losses are multiplied by in fp16, so that small gradients do not vanish."""

    __pydantic_config__ = STRICT
    scale: float
    good_steps: int
    """Since it was last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What a checkpoint knows beside its tensors."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    step: int
    tokens: int
    supervised_tokens: int
    levers: Levers
    """In force: those of the stage, or what a rescue has made of them."""
    loss_scale: LossScale | None = None
    """None but in fp16."""
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
    frozen_unchanged: bool | None = None
    """Whether every frozen tensor has the bytes that it was loaded with; None where none is frozen, or the stage did not end."""
    failure: Failure | None = None
