"""What a comparison comes to: plain data that tables, pages and `--json` are made from."""

from dataclasses import dataclass, field
from typing import Any, Literal

from finefit.artifacts.records import STRICT
from finefit.stats import Spread
from finefit.stats.metrics import Metric

ABSENT = "(none)"
"""The value of a setting that a side does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Something that not all sides have alike."""

    __pydantic_config__ = STRICT
    key: str
    about: Literal["checkpoint", "spec", "data", "model", "evaluation", "version", "machine"]
    values: tuple[Any, ...]
    """For each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One model of the comparison: a checkpoint of a run."""

    __pydantic_config__ = STRICT
    name: str
    run: str
    checkpoint: str
    """As it is called in the run directory."""
    role: str
    """What was asked for: final, best, base, or the checkpoint's own name."""
    seed: int | None
    status: str
    num_steps: int | None
    """Done by the run, of `total_steps`."""
    total_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sides that differ in nothing that can change a score but their seed. A side by itself is one too."""

    __pydantic_config__ = STRICT
    name: str
    sides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A score with its 95 % interval; an end that there is none of is None."""

    __pydantic_config__ = STRICT
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPart:
    """Of the items of one data set."""

    __pydantic_config__ = STRICT
    n: int
    coverage: float
    metrics: dict[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one side has of one task."""

    __pydantic_config__ = STRICT
    n: int
    available: int
    coverage: float
    metrics: dict[str, Cell]
    by_dataset: dict[str, ScoredPart] = field(default_factory=dict)
    """Where the items come from several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric over the items that both have: the second group less the first."""

    __pydantic_config__ = STRICT
    metric: str
    first: float
    second: float
    value: float
    low: float | None
    high: float | None
    p: float
    corrected_p: float
    """As it counts among all differences of this comparison (Holm)."""
    by_seed: dict[int, float]
    """The difference of each seed that both groups have, where there are several."""

    @property
    def is_clear(self) -> bool:
        return self.corrected_p < 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemChange:
    """One item, answered by both."""

    __pydantic_config__ = STRICT
    key: str
    place: str
    prompt: str
    reference: str
    answers: tuple[str, str]
    failures: tuple[str | None, str | None]
    scores: tuple[dict[str, float], dict[str, float]]
    change: float
    """Of the task's own metric, above zero for the better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two groups on one task."""

    __pydantic_config__ = STRICT
    first: int
    second: int
    n: int
    only_first: int
    """Items that the second group has no answer to."""
    only_second: int
    repeated: int
    """Items that stand in a run more than once; those are paired in their order."""
    seeds: tuple[int, ...]
    """That were paired, where there are several."""
    left_out: tuple[str, ...]
    """Sides without a partner of the same seed."""
    changes: tuple[Change, ...]
    num_better: int
    num_equal: int
    num_worse: int
    item_changes: tuple[float, ...]
    """Of the task's own metric, above zero for the better; largest first."""
    gained: tuple[ItemChange, ...]
    lost: tuple[ItemChange, ...]
    reworded: tuple[ItemChange, ...]
    """Whose answers have the fewest words in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    __pydantic_config__ = STRICT
    task: str
    metrics: tuple[Metric, ...]
    """The first is the task's own."""
    scored: tuple[Scored | None, ...]
    """For each side; None where it has no result."""
    missing: dict[int, str]
    """Why a side has none, and how to get one."""
    spreads: tuple[dict[str, Spread], ...]
    """For each group, over its seeds."""
    pairings: tuple[Pairing, ...]
    """Every other group with the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """What was said beforehand, and what came."""

    __pydantic_config__ = STRICT
    what: Literal["peak memory", "time per step", "tokens per second", "training time", "cost", "evaluation memory"]
    unit: Literal["bytes", "seconds", "tokens/s", "money"]
    predicted: tuple[float | None, ...]
    measured: tuple[float | None, ...]
    """For each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss by step, and what validation found."""

    __pydantic_config__ = STRICT
    side: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    sides: tuple[Side, ...]
    groups: tuple[Group, ...]
    differing: tuple[Setting, ...]
    """What can change a score."""
    apart: tuple[Setting, ...]
    """What cannot: paths, savings, trackers, the card, exact levers."""
    declared: tuple[str, ...]
    """Settings that the user said are meant to differ."""
    verdict: str
    """What a difference in score can be laid to."""
    is_one_variable: bool
    """Whether nothing differs but what is meant to."""
    tasks: tuple[TaskComparison, ...]
    foretold: tuple[Foretold, ...]
    curves: tuple[Curve, ...]
    warnings: tuple[str, ...]
