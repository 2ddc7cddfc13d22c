"""The record of a comparison: plain data that tables, pages and `--json` are made from."""

import math
from dataclasses import field
from typing import Any, ClassVar, Literal

from finefit.artifacts.records import Record
from finefit.stats.comparisons import Spread
from finefit.stats.metrics import Metric

ABSENT = "(none)"
"""The value of a setting that a side does not have."""
Quantity = Literal["peak memory", "time per step", "tokens per second", "training time", "cost", "evaluation memory"]
QuantityUnit = Literal["bytes", "seconds", "tokens/s", "money"]


class Setting(Record):
    """A setting whose value is not the same on all sides."""

    key: str
    about: Literal["checkpoint", "spec", "data", "model", "evaluation", "version", "machine"]
    values: tuple[Any, ...]
    """One per side."""


class Side(Record):
    """One model of the comparison: a checkpoint of a run."""

    name: str
    run: str
    checkpoint: str
    """The checkpoint's name in the run directory."""
    role: str
    """The user's name for it: final, best, base, or the checkpoint itself."""
    seed: int | None
    status: str
    num_steps: int | None
    """The number of steps done, out of `total_steps`."""
    total_steps: int | None


class Group(Record):
    """Sides that differ in nothing that can change a score except the seed. A single side is a group too."""

    name: str
    sides: tuple[int, ...]


class ScoreInterval(Record):
    """A score with its 95 % interval; None is an unbounded end."""

    value: float
    low: float | None
    high: float | None


def finite(value: float) -> float | None:
    """None in place of infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


class SideDatasetScores(Record):
    n: int
    coverage: float
    metrics: dict[str, ScoreInterval]


class SideScores(Record):
    n: int
    available: int
    coverage: float
    metrics: dict[str, ScoreInterval]
    by_dataset: dict[str, SideDatasetScores] = field(default_factory=dict)
    """Filled if the items come from several data sets."""


class MetricDifference(Record):
    """One metric over the items that both groups have: the second group minus the first."""

    metric: str
    first: float
    second: float
    value: float
    low: float | None
    high: float | None
    p: float
    corrected_p: float
    """Corrected for all differences of this comparison (Holm)."""
    by_seed: dict[int, float]
    """The difference for each seed that both groups have, if there are several."""

    @property
    def is_clear(self) -> bool:
        return self.corrected_p < 0.05


class ItemChange(Record):
    key: str
    place: str
    prompt: str
    reference: str
    answers: tuple[str, str]
    failures: tuple[str | None, str | None]
    scores: tuple[dict[str, float], dict[str, float]]
    change: float
    """The change in the task's main metric; positive is better."""


class Pairing(Record):
    first: int
    second: int
    n: int
    only_first: int
    """Items that the second group did not answer."""
    only_second: int
    repeated: int
    """Items that occur more than once in a run; they are paired in order."""
    seeds: tuple[int, ...]
    """The seeds that were paired, if there are several."""
    left_out: tuple[str, ...]
    """Sides without a partner that has the same seed."""
    changes: tuple[MetricDifference, ...]
    num_better: int
    num_equal: int
    num_worse: int
    item_changes: tuple[float, ...]
    """Changes in the task's main metric; positive is better; largest first."""
    gained: tuple[ItemChange, ...]
    lost: tuple[ItemChange, ...]
    reworded: tuple[ItemChange, ...]
    """Items whose answers have the fewest words in common."""


class TaskComparison(Record):
    task: str
    metrics: tuple[Metric, ...]
    """The first is the task's main metric."""
    scored: tuple[SideScores | None, ...]
    """One per side; None if the side has no result."""
    missing: dict[int, str]
    """Maps a side to the reason why it has no result, and how to get one."""
    spreads: tuple[dict[str, Spread], ...]
    """One per group, over the group's seeds."""
    pairings: tuple[Pairing, ...]
    """Pairs every other group with the first."""


class Prediction(Record):
    """A prediction of the plan and the measured value, one of each per side."""

    quantity: Quantity
    unit: QuantityUnit
    predicted: tuple[float | None, ...]
    measured: tuple[float | None, ...]


class LossCurve(Record):
    """Training losses by step, and validation losses as (step, loss)."""

    side: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]


class Comparison(Record):
    MAX_BYTES: ClassVar[int] = 1 << 30
    """It may show every item whose score differs."""
    version: Literal[2] = 2
    sides: tuple[Side, ...]
    groups: tuple[Group, ...]
    differing: tuple[Setting, ...]
    """Settings that can change a score."""
    without_effect: tuple[Setting, ...]
    """Settings that cannot change a score: paths, checkpoint intervals, trackers, the card, exact levers."""
    declared: tuple[str, ...]
    """Settings that the user declared to differ (`--varies`)."""
    verdict: str
    """What can explain a difference in score."""
    is_one_variable: bool
    """Whether nothing differs except what is meant to."""
    tasks: tuple[TaskComparison, ...]
    predictions: tuple[Prediction, ...]
    curves: tuple[LossCurve, ...]
    warnings: tuple[str, ...]
