"""Predictions for a run before it begins (memory, time and levers) and the requests for these predictions."""

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from finefit.artifacts.records import Levers, Record
from finefit.spec.schema import Engine, Single

_SINGLE = Single(kind="single")
_FORMER_NAME = Field(validation_alias=AliasChoices("is_split_over_cards", "is_spread"))


class Resolved(Record):
    """A decision and its source."""

    value: Any
    source: str


class Lengths(Record):
    """Row lengths in tokens: counted if the data exists, else assumed from `data.max_tokens`.

    Batches and orders count rows. A row is `sides` sequences, and all lengths are per sequence: a micro-batch of m rows
    has at most sides x m sequences of `longest` tokens, of which `supervised` reach the head."""

    num_rows: int | None
    """None if the data does not exist yet."""
    longest: int
    mean: float
    supervised: int
    """The largest number of supervised tokens in one row."""
    mean_supervised: float
    source: str
    validation: tuple[int, int] | None = None
    """The tokens of the longest validation row, and the most supervised tokens in one; None if there are no validation
    rows."""
    prompt: int | None = None
    """The tokens of the longest prompt that an evaluation answers."""
    sides: int = 1
    """2 for preference pairs: both answers, each after the prompt."""
    prompt_grids: tuple[tuple[int, ...], ...] = ()
    """Image grids of the evaluation row with the most image tokens."""
    grids: tuple[tuple[int, ...], ...] = ()
    """Image grids of the training row with the most image tokens, as the model's family counts them."""


class GradientMap(Record):
    """How many trainable tensors backward reaches, and which it does not reach."""

    trainable: int
    reached: int
    unreached: tuple[str, ...]
    causes: tuple[str, ...] = ()
    """Likely reasons why the other tensors are not reached."""
    frozen: tuple[str, ...] = ()
    """Adapters without any training."""


class TowerSize(Record):
    """Parameters of one tower of a vision-language model; `tensors` counts the trained ones."""

    parameters: int
    trainable: int
    tensors: int
    unreached: int = 0
    """Trained tensors without a gradient."""


class Suggestion(Record):
    """A change of the spec that makes the plan fit, or brings it closer."""

    changes: tuple[str, ...]
    """Written as for `--set`: key=value."""
    saves_bytes: int
    peak_bytes: int
    """Memory needed on the card after the change."""
    fits: bool
    is_exact: bool
    """Whether the gradient is unchanged."""
    price: str
    step_seconds: float | None = None


class EvalBatchLimit(Record):
    """The most rows that generation may hold at once, and the most tokens of prompts and answers together."""

    rows: int
    tokens: int
    mlp_tiles: int = 1
    """Pieces in which a long prompt passes an MLP."""
    reserved_bytes: int | None = None
    """Predicted bytes: reserved on a card, allocated on a CPU."""
    devices: int = 1
    """The number of cards (or processes on a CPU) that share the items, or of cards that one model is split over."""
    is_split_over_cards: Annotated[bool, _FORMER_NAME] = False
    batch_seconds: float | None = None
    """Predicted time of a full batch of the longest prompts and answers; None if the card's rates are not known."""
    held_bytes: int | None = None
    """Memory needed on the device: reserved + context + margin."""
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """True without a prediction."""
        return self.held_bytes is None or self.budget_bytes is None or self.held_bytes <= self.budget_bytes


class LeverCandidate(Record):
    """Levers that fit, and their predicted cost. The start of a run on a card times the candidates."""

    levers: Levers
    predicted_bytes: int
    """Reserved memory of the card."""
    step_seconds: float
    """Predicted without what earlier runs on this card and host measured."""


class Forecast(Record):
    """The resources that one stage needs on one kind of card, from a rehearsal."""

    card: str
    """The card as requested; there are `devices` of them."""
    devices: int
    fits: bool
    budget_bytes: int
    """Memory of one card that a program can use."""
    peak_bytes: int
    """Memory needed on one card: reserved + context + margin. If an evaluation needs more than the training, its
    memory."""
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    margin_bytes: int
    peak_instant: str
    peak_module: str
    peak_operation: str
    components: dict[str, int]
    """Bytes at the peak by purpose; they add up to allocated_bytes."""
    instants: dict[str, int]
    """Peak allocation during load, forward, loss, backward, update, validation and generation."""
    levers: Levers
    reasons: dict[str, str]
    """Why each lever has its value."""
    accumulation: int
    tokens_per_step: float
    step_seconds: float | None
    """None if the rates of the card are not known."""
    tokens_per_second: float | None
    total_steps: int | None
    total_seconds: float | None
    price_per_hour: float | None
    cost: float | None
    flops_per_step: float
    host_bytes: int
    """Peak of host memory: weights while loading, pinned buffers, the process itself."""
    disk_bytes: int
    """Disk space of the run directory: the kept checkpoints and one that is being written."""
    parameters: int
    trainable_parameters: int
    lengths: Lengths
    gradients: GradientMap
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]
    """Replacements for what the card lacks, and other remarks for the reader."""
    uncertainty: float | None = None
    """Largest relative error of earlier measured predictions for this card and these versions."""
    engine: Engine = _SINGLE
    """The resolved engine, never `auto`; `reasons` says why."""
    eval_limits: dict[str, EvalBatchLimit] = field(default_factory=dict)
    """Keyed by the evaluation's label."""
    active_parameters: int | None = None
    """Parameters that a token uses in a mixture of experts; None if it uses all."""
    training_bytes: int | None = None
    """`peak_bytes` without evaluations; None in plans of earlier versions."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """The towers of a vision-language model: language, vision, projector."""
    candidates: tuple[LeverCandidate, ...] = ()
    """The chosen levers, and those that come next by predicted time; empty for several cards, and on a CPU."""

    def predicted_bytes(self, device: str) -> int:
        """The value that a training's measured peak is compared with: reserved memory on a card, all memory of the
        process on a CPU."""
        return self.reserved_bytes if device == "cuda" else self.training_bytes or self.peak_bytes


class Plan(Record):
    version: Literal[2] = 2
    stages: dict[str, dict[str, Resolved]]
    forecasts: dict[str, Forecast] = field(default_factory=dict)
    """Forecasts by stage, for the card that it runs on."""


class LoadProof(Record):
    """Proof from the headers of its files that a model can be loaded."""

    version: Literal[1] = 1
    num_tensors: int


class ModelSize(Record):
    """Parameter counts of a model that need not exist yet."""

    version: Literal[2] = 2
    parameters: int
    outside: int
    """Embeddings, head and everything else outside the layers."""
    largest_layer: int
    foreign: str | None
    """An MLP tensor that an average of experts cannot hold."""


class StageForecast(Record):
    """The predicted needs and outputs of one stage of a pipeline."""

    kind: str
    fits: tuple[bool, ...]
    """One value per card."""
    parameters: int | None = None
    """The parameters of the model that it trains or builds."""
    trainable_parameters: int | None = None
    host_bytes: int | None = None
    disk_bytes: int = 0
    seconds: float | None = None
    """The time on the first card; None if not known."""
    forecasts: tuple[Forecast, ...] = ()
    """A training's forecasts, one per card."""
    eval_limits: tuple[dict[str, dict[str, EvalBatchLimit]], ...] = ()
    """An evaluation's limits, for each card, by model and label."""
    notes: tuple[str, ...] = ()


class RehearsalRequest(Record):
    """Everything that the rehearsal process needs to know."""

    version: Literal[2] = 2
    spec: str
    """The spec as JSON."""
    config: dict[str, Any]
    """The model's config.json."""
    cards: tuple[str, ...]
    lengths: Lengths
    budget_bytes: int | None = None
    """A limit on the card's memory; None for all of it."""
    visible: tuple[int, ...] | None = None
    """The numbers of this machine's cards that `auto` means; None means all."""
    allocator: str | None = None
    """The user's own setting of torch's allocator, which workers keep; None if finefit sets it."""
    only_eval_limits: bool = False
    """Whether nothing is trained and only the batch limits of evaluations are needed."""


class PlanningProgress(Record):
    """The current work of the planning process."""

    card: str
    number: int
    """The card's number, counted from 1."""
    num_cards: int
    doing: str
    """The candidate or the evaluation that is being rehearsed."""


class RehearsalResult(Record):
    version: Literal[2] = 2
    forecasts: tuple[Forecast, ...] = ()
    eval_limits: tuple[dict[str, EvalBatchLimit], ...] = ()
    """Limits for each card, by the evaluations' labels, if only these are needed."""


def grouped_names(names: Iterable[str]) -> list[str]:
    """Merges names that differ only in numbers: `layers.{0..11}.q_proj`."""
    split = list(dict.fromkeys(tuple(name.split(".")) for name in names))
    for at in range(max(map(len, split), default=0)):
        numbers: dict[tuple[str, ...], list[int]] = {}
        for parts in split:
            if at < len(parts) and parts[at].isdecimal():
                numbers.setdefault((*parts[:at], "{}", *parts[at + 1 :]), []).append(int(parts[at]))
            else:
                numbers[parts] = []
        split = [(*parts[:at], _span(found), *parts[at + 1 :]) if found else parts for parts, found in numbers.items()]
    return [".".join(parts) for parts in split]


def _span(numbers: list[int]) -> str:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    shown = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return f"{{{shown}}}" if len(numbers) > 1 else shown
