"""What the process of an evaluation is told, and the answers and scores that it leaves."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from finefit.artifacts.forecasts import Room
from finefit.artifacts.records import STRICT, Failure
from finefit.spec.models import Model, Tuning
from finefit.spec.rows import ImageLimits
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import Form
from finefit.stats.metrics import Metric


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
