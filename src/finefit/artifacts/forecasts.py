"""What is foretold of a run before it begins: memory, time, levers, and what was asked to know them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from finefit.artifacts.records import STRICT, Failure, Levers
from finefit.spec.schema import Engine, Single

_SINGLE = Single(kind="single")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A decision and where it came from."""

    __pydantic_config__ = STRICT
    value: Any
    source: str


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
    """Cards, or on a CPU processes, that the items are shared over; or cards that one model is spread over."""
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
    version: Literal[2] = 2
    parameters: int
    outside: int
    """Embeddings, head and what else belongs to no layer."""
    largest_layer: int
    foreign: str | None
    """A tensor of an MLP that no mean of experts has a place for."""


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
