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
from finefit.spec.schema import AdamW, Engine, Evaluation, Form, ImageLimits, Model, Objective, OnNan, Save, Single, Tracker, Tuning
from finefit.spec.stages import AnyStage
from finefit.stats.intervals import Interval
from finefit.stats.metrics import Metric

STRICT = ConfigDict(extra="forbid")
R = TypeVar("R")
_SINGLE = Single(kind="single")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run stands on, by content. Equal inputs and an equal spec are the same run."""

    __pydantic_config__ = STRICT
    data: dict[str, tuple[tuple[FileFact, ...], ...]]
    """Files by split and source; paths relative to the run directory."""
    model: str
    """The model's name as the user knows it."""
    model_fingerprint: str
    template_sha256: str
    """Of chat template, special tokens and template kind: equal hashes render equal prompts."""
    engine_sha256: str | None = None
    """Of a DeepSpeed JSON of the user's own."""
    tasks_sha256: tuple[str | None, ...] = ()
    """Of task files of the user's own, for each evaluation; empty where there are none."""
    code_sha256: str | None = None
    """Of the file that builds a model of the user's own; None for any other model."""
    pictures_sha256: str | None = None
    """Of all images that rows show; None where there are none."""


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
class Check:
    """What was found before the run, errors first."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A decision and where it came from."""

    __pydantic_config__ = STRICT
    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """The exact levers in force: plan and step share this one description. None of them changes the gradient."""

    __pydantic_config__ = STRICT
    micro_batch: int
    recompute: int = 0
    """Layers computed again in backward, counted from the first: those are reached last, when the kept ones are gone."""
    keep_attention: bool = False
    loss_chunk: int | None = None
    offload: bool = False
    mlp_tiles: int = 1
    adapter_inputs: Literal["bf16", "fp32"] = "fp32"
    packing: bool = False
    """Rows of a step stand behind one another without padding, each seeing only itself."""
    kernels: Literal["torch", "fused"] = "torch"
    update: Literal["after", "inside"] = "after"
    """Of each tensor when its gradient is there, which is then given back, or of all of them after backward."""
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What the rows ask of a step: counted where the data is there, else assumed from `data.max_tokens`.

    A row is what the order, the global batch and the micro-batch count. It is `sides` sequences, and all lengths are those of one sequence: a
    micro-batch of m rows is at most sides x m sequences of `longest` tokens, `supervised` of which meet the head in each."""

    __pydantic_config__ = STRICT
    num_rows: int | None
    """None where the data is not there."""
    longest: int
    mean: float
    supervised: int
    """The most that one row has."""
    mean_supervised: float
    source: str
    validation: tuple[int, int] | None = None
    """Tokens of the longest validation row, and the most that one has supervised; None where none were counted."""
    prompt: int | None = None
    """Tokens of the longest prompt to be answered in an evaluation."""
    sides: int = 1
    """2 where a row is a preference pair: both answers, each behind the prompt."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Of the images of the row to be answered that shows most."""
    grids: tuple[tuple[int, ...], ...] = ()
    """Of the images of the row that shows most, as the model's family counts them; none where no row has an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMap:
    """Which trained tensors a backward reaches."""

    __pydantic_config__ = STRICT
    trainable: int
    reached: int
    unreached: tuple[str, ...]
    causes: tuple[str, ...] = ()
    """Why the others are likely not reached."""
    frozen: tuple[str, ...] = ()
    """Adapters that are not trained at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Of one tower of a model that sees, in parameters; `tensors` are those that are trained."""

    __pydantic_config__ = STRICT
    parameters: int
    trainable: int
    tensors: int
    unreached: int = 0
    """Of the trained tensors, how many no gradient reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change of the spec that makes the plan fit, or brings it nearer."""

    __pydantic_config__ = STRICT
    changes: tuple[str, ...]
    """As `--set` takes them: key=value."""
    saves_bytes: int
    peak_bytes: int
    """What the card must hold then."""
    fits: bool
    is_exact: bool
    """Whether the gradient stays as it is."""
    price: str
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What generation may hold at once, by the plan: at most so many rows, and so many tokens of prompts and answers together."""

    __pydantic_config__ = STRICT
    rows: int
    tokens: int
    mlp_tiles: int = 1
    """Pieces in which a prompt passes an MLP, where it is long."""
    reserved_bytes: int | None = None
    """Foretold, on a card; on a CPU what is allocated."""
    devices: int = 1
    """Cards that the items are shared over, or that one model is spread over."""
    is_spread: bool = False
    batch_seconds: float | None = None
    """Of as many of the longest prompts with the longest answers as there is room for, foretold; None where the rates are not known."""
    held_bytes: int | None = None
    """What the device must hold for it: reserved + context + margin."""
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Where nothing is foretold, nothing speaks against it."""
        return self.held_bytes is None or self.budget_bytes is None or self.held_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one stage will take on one card, rehearsed before it runs."""

    __pydantic_config__ = STRICT
    card: str
    """As it was asked for; `devices` of them."""
    devices: int
    fits: bool
    budget_bytes: int
    """What a program can get from one card."""
    peak_bytes: int
    """What one card must hold: reserved + context + margin."""
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    margin_bytes: int
    peak_instant: str
    peak_module: str
    peak_operation: str
    components: dict[str, int]
    """Bytes by what they are, at the peak; they sum to allocated_bytes."""
    instants: dict[str, int]
    """The most that is allocated during load, forward, loss, backward, update, validation, generation."""
    levers: Levers
    reasons: dict[str, str]
    """Why each lever stands as it does."""
    accumulation: int
    tokens_per_step: float
    step_seconds: float | None
    """None where the rates of the card are not known."""
    tokens_per_second: float | None
    total_steps: int | None
    total_seconds: float | None
    price_per_hour: float | None
    cost: float | None
    flops_per_step: float
    host_bytes: int
    """Of host memory at its peak: weights on their way, pinned buffers, the process itself."""
    disk_bytes: int
    """Of the run directory: checkpoints kept, one more while it is written."""
    parameters: int
    trainable_parameters: int
    lengths: Lengths
    gradients: GradientMap
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]
    """What is used in place of what the card does not have, and what else the reader must know."""
    uncertainty: float | None = None
    """Largest relative error of earlier forecasts of this card and these versions, where some were measured."""
    engine: Engine = _SINGLE
    """Never `auto`: what it came to; why stands among the reasons."""
    rooms: dict[str, Room] = field(default_factory=dict)
    """What generation may hold at once in each evaluation, by its label."""
    active_parameters: int | None = None
    """That a token meets in a mixture of experts; None where it meets all."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Of a model that sees: language, vision, projector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    stages: dict[str, dict[str, Resolved]]
    forecasts: dict[str, Forecast] = field(default_factory=dict)
    """By stage, on the card that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of a model that need not exist yet, in parameters."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    parameters: int
    outside: int
    """Embeddings, head and what else belongs to no layer."""
    largest_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutlook:
    """What a stage of a pipeline will take and leave, before it runs."""

    __pydantic_config__ = STRICT
    kind: str
    fits: tuple[bool, ...]
    """On each card."""
    parameters: int | None = None
    """Of the model that it trains or makes; None where there is none."""
    trainable_parameters: int | None = None
    host_bytes: int | None = None
    disk_bytes: int = 0
    seconds: float | None = None
    """On the first card; None where it is not known."""
    forecasts: tuple[Forecast, ...] = ()
    """Of a training, on each card."""
    rooms: tuple[dict[str, dict[str, Room]], ...] = ()
    """Of an evaluation, on each card: by model, by label."""
    notes: tuple[str, ...] = ()


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
class Question:
    """What a forecast is asked for: everything that the process which rehearses is told."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    spec: str
    """As JSON."""
    config: dict[str, Any]
    """The model's config.json."""
    cards: tuple[str, ...]
    lengths: Lengths
    budget_bytes: int | None = None
    """The most that may be used of the card; None for all of it."""
    visible: tuple[int, ...] | None = None
    """Which of this machine's cards `auto` means, by their numbers; None: all of them."""
    allocator: str | None = None
    """The user's own setting of torch's allocator, which workers keep; None where finefit sets it."""
    only_rooms: bool = False
    """Nothing is trained: only what evaluations have room for is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    forecasts: tuple[Forecast, ...] = ()
    rooms: tuple[dict[str, Room], ...] = ()
    """For each card, by the evaluations' labels, where only they are asked for."""
    failure: Failure | None = None


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
    kind: Literal["train", "eval", "pipeline"] = "train"
    """`eval`: nothing was trained here; a model or answers made elsewhere are scored. `pipeline`: its stages are runs, or folders with an output."""
    status: Literal["prepared", "running", "finished", "stopped", "failed"]
    overrides: tuple[str, ...] = ()
    amendments: tuple[Amendment, ...] = ()
    failure: Failure | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose answers are scored, and how they are asked for."""

    __pydantic_config__ = STRICT
    model: Model
    """A folder's path is relative to the run directory."""
    model_name: str
    model_fingerprint: str
    weights: str | None = None
    """A folder with an adapter or with whole weights, relative to the run directory; None: the model as it is."""
    manifest_sha256: str | None = None
    """Of `weights`, where it is a checkpoint of ours: another one of the same name is scored anew."""
    tuning: Tuning
    """In what bits the model is loaded, and which adapter the model as it is has; its path is relative to the run directory."""
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    threads: int
    seed: int
    template: Literal["chat", "plain"]
    template_options: dict[str, Any] = field(default_factory=dict)
    template_sha256: str
    images: ImageLimits = field(default_factory=ImageLimits)
    """How large images are shown."""
    max_prompt_tokens: int | None = None
    """Longer prompts are cut as they are in training; None: never."""
    form: Form | None = None
    """What the items were built with."""
    items: str = "test.jsonl"
    """The file of the items among the prepared ones."""
    items_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """All that an evaluation's process is told."""

    __pydantic_config__ = STRICT
    version: Literal[2] = 2
    checkpoint: str
    """`base`, or the name of a folder under checkpoints/."""
    evaluation: Evaluation
    subject: Subject
    room: Room
    task_sha256: str | None = None
    """Of a task file of the user's own, which lies beside the request."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Versions of finefit and of the packages that an answer depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalStage:
    """Of a run that only evaluates: whose answers are scored. It lies where a training stage has its stage.json."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    """By which its scores are filed, in the place of a checkpoint's name."""
    subject: Subject
    prompt_tokens: int
    """Of the longest prompt."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Of the images of the prompt that shows most."""
    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFailure:
    """Why an evaluation left no result."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A given answer and how likely it is to the model."""

    __pydantic_config__ = STRICT
    text: str
    is_right: bool
    logprob: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemImage:
    """That an item shows."""

    __pydantic_config__ = STRICT
    name: str
    """Where it lay when its rows were prepared."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalItem:
    __pydantic_config__ = STRICT
    item: int
    key: str
    """Of what is asked and what is right: equal keys are the same item, in whatever file and run."""
    place: str
    """File and row."""
    dataset: str = ""
    """The source of the test rows, where there are several."""
    prompt: str
    reference: str
    answer: str
    extracted: Any
    counts: dict[str, float]
    """What the metrics are computed from, over all items."""
    scores: dict[str, float]
    """Of this item alone."""
    failure: str | None
    candidates: tuple[Candidate, ...] = ()
    new_tokens: int | None = None
    """Of the answer; None where none was generated."""
    is_cut: bool = False
    """The answer reached max_new_tokens before its end."""
    verdict: str | None = None
    """A judge's words."""
    answered_by: str | None = None
    """Which of several models, where a gate chose among them."""
    images: tuple[ItemImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    __pydantic_config__ = STRICT | ConfigDict(ser_json_inf_nan="strings")
    value: float
    low: float
    high: float
    """An end that there is none of is infinite: a single item of a metric without ends says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScores:
    """Of the items of one source."""

    __pydantic_config__ = STRICT
    n: int
    coverage: float
    metrics: dict[str, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All items count; one that failed counts as nothing found."""

    __pydantic_config__ = STRICT
    version: Literal[2] = 2
    task: str
    """The evaluation's label."""
    checkpoint: str
    n: int
    available: int
    """Items that there are; more than n where a sample was asked for."""
    coverage: float
    """Share of the items that a result was found for."""
    metrics: dict[str, Score]
    by_dataset: dict[str, DatasetScores] = field(default_factory=dict)
    """By source of the test rows, where there are several."""
    definitions: tuple[Metric, ...]
    """How the metrics follow from the items' counts; the first is the task's own."""
    signature: dict[str, str]
    """Settings and versions that the numbers depend on."""
    warnings: tuple[str, ...] = ()
    seconds: float
    """Of the process that ended it, loading excluded."""
    new_tokens: int = 0
    loaded_bytes: int | None = None
    """When the model was there and nothing was asked yet; counted as the peak is."""
    peak_bytes: int | None = None
    """Reserved on a card, resident on a CPU; None where nothing was left to answer."""
    foretold_bytes: int | None = None
    items: tuple[EvalItem, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WiredModel:
    """A model with everything known that a spec leaves to another stage."""

    __pydantic_config__ = STRICT
    model: Model
    """A folder's path is absolute."""
    adapter: str | None = None
    """A folder with one that is laid over the model; absolute."""
    gate: str | None = None
    """A folder with a gate, where the model is the choice among its experts; absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that the process of a stage is told which trains nothing itself."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    pipeline: str
    seed: int
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    base: str
    """Where the relative paths of the stage start; absolute. What was stage:// is absolute already."""
    stage: AnyStage
    models: dict[str, WiredModel] = field(default_factory=dict)
    """By where they stand in the stage: `base`, `experts.law`, `models.sft`, `model`, `method.model`."""
    scores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a comparison: for each entry of `of`, the run directories (with :checkpoint) that it means; absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage held. On a card: used on the whole card, by whomever; on a CPU: resident in the stage's own processes."""

    __pydantic_config__ = STRICT
    device: Literal["cpu", "cuda"]
    before_bytes: int
    loaded_bytes: int | None
    """When the model was there and had done nothing yet, of several the largest; None of all but trainings and evaluations."""
    peak_bytes: int | None
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How the process of such a stage ended. `failure` is None when it has made what it is for."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    summary: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    """The most that the process held: device memory on a card, resident memory on a CPU."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a stage stands on, written when its work begins: begun.json."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    inputs: dict[str, str]
    """A digest each, by name: `spec`, the files and models that it names, `finefit`."""
    document: dict[str, Any]
    """The stage's spec without paths, so that it can be said which keys have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Written last, when a stage has made what it is for. It lies in the stage's folder as done.json."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    kind: str
    key: str
    """Of the stage's spec, the content of its inputs and the version of finefit: equal keys make equal outputs."""
    inputs: dict[str, str]
    """What it stood on, by name: a digest each, so that it can be said what has changed."""
    output_digest: str
    """Of what it has made; part of the keys of the stages that stand on it."""
    finefit: str
    seconds: float
    memory: StageMemory | None
    summary: dict[str, Any] = field(default_factory=dict)
    """What the stage tells of itself."""
    files: dict[str, int] = field(default_factory=dict)
    """What it has made: sizes by name within its output. Of an evaluation nothing: each of its models has records of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    __pydantic_config__ = STRICT
    name: str
    kind: str
    place: str
    """Of the stage's folder, relative to the run directory; one that another run has made lies there."""
    status: Literal["waiting", "running", "done", "failed", "stopped"]
    reason: str = ""
    """Why it runs, or why it need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """Where the stages of a run stand, in their order: stages.json."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    stages: tuple[StageState, ...]
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of all files and models from outside, when the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGate:
    """Which expert answers a prompt, by its tokens alone: gate.json, beside the table of scores in gate.safetensors."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    experts: tuple[str, ...]
    """In the order of the table's columns."""
    template_sha256: str
    """What the prompts were rendered with that it was trained on."""
    trained: dict[str, int]
    """Prompts of each expert."""
    held: dict[str, int]
    accuracy: Interval
    """Over all held-out prompts."""
    confusion: dict[str, dict[str, int]]
    """Held-out prompts by whose they are, then by whom the gate chose."""
    telling: dict[str, tuple[str, ...]]
    """The tokens that speak most for each expert in its own training prompts."""
    shared_prompts: int
    """Different prompts that stand in the rows of several experts: no choice is right for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRouting:
    """Where the tokens of one data set go: by layer, for each expert a share."""

    __pydantic_config__ = STRICT
    rows: int
    tokens: int
    first: tuple[tuple[float, ...], ...]
    """Of the tokens, those whose first choice it is."""
    weight: tuple[tuple[float, ...], ...]
    """Of what the experts that answer weigh together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a mixture of experts sends its tokens: routing.json."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    experts: tuple[str, ...]
    """By name where they are known, else by number."""
    top_k: int
    sources: dict[str, SourceRouting]


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
