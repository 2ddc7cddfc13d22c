"""The records that the workers of a training and of an evaluation read and write."""

from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from finefit.artifacts.forecasts import EvalBatchLimit, Lengths, LeverCandidate
from finefit.artifacts.records import Failure, Levers, Record
from finefit.spec import Every
from finefit.spec.data import ImageLimits
from finefit.spec.models import Model, Tuning
from finefit.spec.schema import AdamW, Engine, Evaluation, Objective, OnNan, Save, Tracker
from finefit.spec.tasks import Form
from finefit.stats.metrics import Metric, mean


class ModelSetup(Record):
    """How a model is loaded and how its prompts are rendered. Paths are relative to the run directory."""

    model: Model
    model_name: str
    model_fingerprint: str
    tuning: Tuning
    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    threads: int
    seed: int
    template: Literal["chat", "plain"]
    template_options: dict[str, Any] = field(default_factory=dict)
    template_sha256: str
    images: ImageLimits = field(default_factory=ImageLimits)
    max_prompt_tokens: int | None = None
    """An evaluation cuts longer prompts as training does; None: never."""
    form: Form | None = None
    """How rows become prompt and answer."""


class Stage(ModelSetup):
    """Everything that a training worker needs to know."""

    version: Literal[2] = 2
    name: str
    deterministic: bool
    objective: Objective
    engine: Engine
    """The resolved engine, never `auto`."""
    num_ranks: int | None = None
    """Planned ranks on all nodes together."""
    trackers: tuple[Tracker, ...] = ()
    eval_limits: dict[str, EvalBatchLimit] = field(default_factory=dict)
    """Keyed by the evaluation's label."""
    optimizer: AdamW
    schedule: Literal["cosine", "linear", "constant"]
    total_steps: int
    warmup_steps: int
    steps_per_epoch: int
    num_rows: int
    global_batch: int
    levers: Levers
    predicted_bytes: int
    """Predicted reserved memory of the card; on a CPU, of the process."""
    candidates: tuple[LeverCandidate, ...] = ()
    """Levers among which the start of the run takes the fastest, `levers` first; empty where nothing is timed."""
    save: Save
    validate_every: Every | None
    on_nan: OnNan
    evaluate: tuple[Evaluation, ...]
    prepared: dict[str, str]
    """sha256 of every prepared file under data/."""

    def predicted_bytes_with(self, levers: Levers) -> int:
        """`predicted_bytes` of the candidate with these levers, if the run has taken another than the first."""
        return next((one.predicted_bytes for one in self.candidates if one.levers == levers), self.predicted_bytes)


class SourceLedger(Record):
    """What happened to the rows of one source: used + dropped = read. Cut rows are also used rows."""

    split: str
    source: str
    shape: str
    mapping: dict[str, str]
    """Which value was read from which column."""
    records: int
    """The number of records in the files."""
    read: int
    """The number of rows; a record may contain several."""
    used: int
    cut: int
    """Rows whose prompt was cut."""
    cut_tokens: int
    dropped: dict[str, int]
    """Counts of dropped rows, by reason."""
    examples: int
    """Sequences made from the used rows; a conversation or a long text may become several."""
    repeated: int
    """Examples seen again within an epoch because of the source's weight."""
    tokens: int
    """Each example is counted once; rows that are only answered count their prompts."""
    supervised_tokens: int
    images: int = 0
    """The number of images in the used rows."""


class LedgerRow(Record):
    """A row that was dropped, cut or repaired."""

    split: str
    source: str
    row: int
    part: int
    what: Literal["dropped", "cut", "repaired"]
    reason: str


class RowProblem(Record):
    """One problem that several rows share."""

    kind: Literal["unusable", "too long", "special token", "placeholder", "medium", "overlap", "duplicate", "repaired"]
    split: str
    count: int
    lines: tuple[str, ...]
    """The first few rows, with file and number."""
    remedy: str = ""


class Efficiency(Record):
    """Share of the computed tokens that belong to rows; the rest is padding."""

    own: float
    """The share in the layout that the run uses."""
    batches_per_step: float
    grouped: float
    """The share if rows were grouped by length and padded."""
    in_order: float
    """The share if rows were padded in their original order."""


class Preparation(Record):
    """The result of preparing a spec's data, before it is judged. The examples are beside it."""

    version: Literal[2] = 2
    sources: tuple[SourceLedger, ...]
    problems: tuple[RowProblem, ...]
    notes: tuple[str, ...]
    """Remarks on the template for the reader."""
    lengths: Lengths | None
    """None if no training row is usable."""
    template_sha256: str
    largest_token: int
    pad_is_end: bool
    prompt_tokens: int | None = None
    """The tokens of the longest prompt that an evaluation answers."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Image grids of the evaluation row with the most image tokens."""
    images_sha256: str | None = None
    """The hash of the contents of all images; None if there are none."""
    files: dict[str, str]
    """sha256 of every prepared file."""


class Best(Record):
    step: int
    validation_loss: float


class LossScale(Record):
    """The factor that keeps small gradients from vanishing in fp16."""

    scale: float
    good_steps: int
    """Steps without an overflow since the last change."""


class TrainState(Record):
    """The state of a training besides its tensors, stored in each checkpoint."""

    version: Literal[1] = 1
    step: int
    tokens: int
    supervised_tokens: int
    levers: Levers
    """The levers in force: those of the stage, or what an out-of-memory recovery changed them to."""
    loss_scale: LossScale | None = None
    """None except in fp16."""
    model_name: str
    model_fingerprint: str
    template_sha256: str
    tuning: Tuning
    skipped_steps: tuple[int, ...] = ()
    roll_backs: int = 0
    validation_loss: float | None = None
    best: Best | None = None


class StageResult(Record):
    """How a worker ended. `failure` is None if every step was done."""

    version: Literal[1] = 1
    step: int
    total_steps: int
    checkpoint: str | None
    trainable_parameters: int
    parameters: int
    tokens: int
    seconds: float
    """Training time of this process, without loading."""
    peak_bytes: int
    """Peak of this process: device memory on a card, resident memory on a CPU."""
    predicted_bytes: int | None = None
    """The plan's prediction of the same; None in runs of earlier versions."""
    frozen_unchanged: bool | None = None
    """Whether every frozen tensor still has the bytes that were loaded; None if none is frozen or the stage did not
    finish."""
    failure: Failure | None = None


class Subject(ModelSetup):
    """The model whose answers are scored. `tuning` has the bits of the base, and the adapter of the starting model."""

    weights: str | None = None
    """A folder with an adapter or with full weights, relative to the run directory; None means the starting model."""
    manifest_sha256: str | None = None
    """The manifest of `weights`, if it is one of finefit's checkpoints: another checkpoint with the same name is scored
    again."""
    items: str = "test.jsonl"
    """The file of the items among the prepared ones."""
    items_sha256: str


class EvalRequest(Record):
    """Everything that an evaluation process needs to know."""

    version: Literal[3] = 3
    checkpoint: str
    """`base`, or the name of a folder under checkpoints/."""
    evaluation: Evaluation
    subject: Subject
    batch_limit: EvalBatchLimit
    task_sha256: str | None = None
    """The hash of the user's own task file, which is beside the request."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Versions of finefit and of the packages that an answer depends on."""


class EvalStage(Record):
    """The subject of a run that only evaluates: eval.json, in place of a training's stage.json."""

    version: Literal[1] = 1
    name: str
    """Its scores are filed under this name, in place of a checkpoint's name."""
    subject: Subject
    prompt_tokens: int
    """The tokens of the longest prompt."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Image grids of the prompt with the most image tokens."""
    num_items: int


class EvalFailure(Record):
    """Why an evaluation has no result."""

    version: Literal[1] = 1
    failure: Failure


class CandidateAnswer(Record):
    """A given answer and its likelihood under the model."""

    text: str
    is_right: bool
    logprob: float
    tokens: int


class ItemImage(Record):
    name: str
    """The image's path when the rows were prepared."""
    sha256: str


class EvalItem(Record):
    item: int
    key: str
    """The digest of question and reference: equal keys are the same item in any file and run."""
    place: str
    """File and row."""
    dataset: str = ""
    """The source of the test row, if there are several."""
    prompt: str
    reference: str
    answer: str
    extracted: Any
    counts: dict[str, float]
    """Metrics are computed from the sums of these over all items."""
    scores: dict[str, float]
    """The scores of this item alone."""
    failure: str | None
    candidates: tuple[CandidateAnswer, ...] = ()
    new_tokens: int | None = None
    """The number of tokens in the answer; None if none was generated."""
    is_cut: bool = False
    """The answer reached max_new_tokens before its end."""
    verdict: str | None = None
    """What a judge wrote."""
    answered_by: str | None = None
    """The expert that a gate chose."""
    taken_from: str | None = None
    """The evaluation that generated this answer, if it was not this one."""
    images: tuple[ItemImage, ...] = ()


class Score(Record):
    """A missing end is infinite: one item of an unbounded metric says nothing about the spread."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    value: float
    low: float
    high: float


class DatasetScores(Record):
    """The scores of the items of one source."""

    n: int
    coverage: float
    metrics: dict[str, Score]


class EvalResult(Record):
    """All items count; a failed item counts as nothing found."""

    MAX_BYTES: ClassVar[int] = 1 << 30
    """About 5 kB for each item."""
    version: Literal[3] = 3
    task: str
    """The evaluation's label."""
    checkpoint: str
    n: int
    available: int
    """The number of items; more than n if a sample was requested."""
    coverage: float
    """The share of items with a result."""
    metrics: dict[str, Score]
    by_dataset: dict[str, DatasetScores] = field(default_factory=dict)
    """Scores by source of the test rows, if there are several."""
    definitions: tuple[Metric, ...]
    """How the metrics follow from the items' counts; the first metric is the task's main metric."""
    signature: dict[str, str]
    """Settings and versions that the numbers depend on."""
    warnings: tuple[str, ...] = ()
    seconds: float
    """The time of the process that finished it, without loading."""
    new_tokens: int = 0
    loaded_bytes: int | None = None
    """Memory after the model was loaded and before the first question; counted as the peak is."""
    peak_bytes: int | None = None
    """Reserved on a card, resident on a CPU; None if nothing was left to answer."""
    predicted_bytes: int | None = None
    items: tuple[EvalItem, ...] = field(repr=False)

    def metric(self, name: str) -> Metric:
        """A metric that is not defined over items, such as some of lm-eval's, is a plain number; it is not known
        whether higher is better."""
        plain = mean(name, unit="number", better="neither")
        return next((metric for metric in self.definitions if metric.name == name), plain)
