"""The interval of a metric from the counts of its items: Wilson's for a rate, the studentised bootstrap for anything else."""

import math

import numpy as np

from finefit.stats.bootstrap import LOGARITHM, PLAIN, log_odds, standard_error, studentised
from finefit.stats.intervals import CONFIDENCE, Interval, require_sample, wilson, wilson_ends
from finefit.stats.metrics import Metric, Numbers, combined

FEW = 30
"""Below so many items an interval holds the truth in 90 to 99 of 100 simulated cases, by how skewed they are."""
_AT_AN_END = 1e-12
_TOPS = {"share": 1.0, "points": 100.0, "number": None}


def interval_of(metric: Metric, table: Numbers, seed: int = 0, confidence: float = CONFIDENCE) -> Interval:
    """`table`: items x counts. A single item says nothing, which is the whole range."""
    n = len(table)
    require_sample(n, confidence)
    value = require_finite(metric, table)
    if metric.aggregate == "rate" and is_binary(table):
        return wilson(int(table.sum()), n, confidence)
    top = top_of(metric, table, value)
    if n == 1:
        low, high = (0.0 if (table >= 0).all() else -math.inf), (math.inf if top is None else top)
    elif top is None:
        low, high = _open_ends(metric, table, value, seed, confidence)
    else:
        low, high = _bounded_ends(metric, table, value, top, seed, confidence)
    return Interval(value=value, low=min(low, value), high=max(high, value), n=n)


def cautions(n: int) -> tuple[str, ...]:
    """What must be said beside the intervals of so many items."""
    if n == 1:
        return ("1 item: nothing is known of the spread",)
    return (f"{n} items: the intervals may be too narrow",) if n < FEW else ()


def require_finite(metric: Metric, table: Numbers) -> float:
    """The metric's value; an infinite or undefined one would spoil every number beside it."""
    if broken := int((~np.isfinite(table)).any(axis=1).sum()):
        raise ValueError(
            f"{metric.name}: the counts of {broken} of {len(table)} items are not finite; score such an item as nothing found"
        )
    with np.errstate(over="ignore"):
        value = float(combined(metric, table.sum(axis=0), len(table)))
    if not math.isfinite(value):
        raise ValueError(f"{metric.name} of {len(table)} items is {value}: no interval can be given")
    return value


def is_binary(table: Numbers) -> bool:
    return bool(((table == 0) | (table == 1)).all())


def top_of(metric: Metric, table: Numbers, value: float) -> float | None:
    """The largest value that there is; None where there is none."""
    top = _TOPS[metric.unit]
    return top if top is not None and 0 <= value <= top and bool((table >= 0).all()) else None


def effective(metric: Metric, table: Numbers) -> float:
    """How many items of equal weight say as much (Kish): a long item weighs more where counts are summed."""
    match metric.aggregate:
        case "rate" | "mean":
            return float(len(table))
        case "ratio":
            weights = table[:, 1]
        case "f1":
            weights = table[:, 1] + table[:, 2]
        case _:
            weights = table.sum(axis=1)
    squares = float((weights**2).sum())
    return max(1.0, float(weights.sum()) ** 2 / squares) if squares > 0 else float(len(table))


def _bounded_ends(
    metric: Metric, table: Numbers, value: float, top: float, seed: int, confidence: float
) -> tuple[float, float]:
    n = effective(metric, table)

    def statistic(sums: Numbers, n: int) -> Numbers:
        return combined(metric, sums, n)

    if not _AT_AN_END < value / top < 1 - _AT_AN_END or standard_error(statistic, table) == 0:
        unseen = wilson_ends(0.0, n, confidence)[
            1
        ]  # so large a share of other items may not have come up, and may be worth anything
        return value * (1 - unseen), value + (top - value) * unseen
    widest = wilson_ends(value / top, n, confidence)
    low, high = studentised(statistic, table, scale=log_odds(top), seed=seed, confidence=confidence)
    return max(low, top * widest[0]), min(high, top * widest[1])


def _open_ends(metric: Metric, table: Numbers, value: float, seed: int, confidence: float) -> tuple[float, float]:
    def statistic(sums: Numbers, n: int) -> Numbers:
        return combined(metric, sums, n)

    if standard_error(statistic, table) == 0:
        return value, value
    scale = LOGARITHM if value > 0 and bool((table >= 0).all()) else PLAIN
    return studentised(statistic, table, scale=scale, seed=seed, confidence=confidence)
