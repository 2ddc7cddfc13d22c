"""What a stage of a pipeline stands on, is told, holds and leaves."""

from dataclasses import dataclass, field
from typing import Any, Literal

from finefit.artifacts.records import STRICT, Failure
from finefit.spec.models import Model
from finefit.spec.stages import AnyStage
from finefit.stats.intervals import Interval


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
    """When the model was there and had done nothing yet, of several the largest; None of a stage that puts none there."""
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
    asked: str = ""
    """By which command, where one asked for it although it was made."""


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
    forced: tuple[str, ...] = ()
    """What a command that has not come to its end asks for anew."""
    asked: str = ""
    """Tells that command from others; given again, it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGate:
    """Which expert answers a prompt, by its tokens alone: gate.json, beside the table of scores in gate.safetensors."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    experts: tuple[str, ...]
    """In the order of the table's columns."""
    template_sha256: str
    """What the prompts were rendered with that it was trained on."""
    form: str | None = None
    """What their rows were built with before, by content; None: taken as they stand."""
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
