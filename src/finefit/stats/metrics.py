"""A metric is a function of counts summed over items: a mean, a rate, an F1 over all pairs, a perplexity over all
tokens. So one resampling of items serves every metric, and two models can be compared from their records alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from finefit.stats import intervals
from finefit.stats.intervals import Interval, Numbers

Aggregate = Literal["rate", "mean", "ratio", "f1", "perplexity", "bleu", "chrf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    aggregate: Aggregate
    counts: tuple[str, ...]
    unit: Literal["share", "points", "number"] = "share"
    """A share is shown as per cent, points as out of a hundred."""
    better: Literal["higher", "lower", "neither"] = "higher"
    """`neither` marks a metric that only describes, such as the length of answers."""


def rate(name: str) -> Metric:
    """The share of items whose count is 1; each count is 0 or 1."""
    return Metric(name=name, aggregate="rate", counts=(name,))


def mean(name: str, **more: Any) -> Metric:
    return Metric(name=name, aggregate="mean", counts=(name,), **more)


def combined(metric: Metric, sums: Numbers, n: int) -> Numbers:
    """The metric of each row of sums (..., counts) over `n` items."""
    match metric.aggregate:
        case "rate" | "mean":
            found: Numbers = sums[..., 0] / n
        case "ratio":
            found = _over(sums[..., 0], sums[..., 1])
        case "f1":  # of what matched, what was predicted, and what is right
            found = _over(2 * sums[..., 0], sums[..., 1] + sums[..., 2])
        case "perplexity":  # of a sum of negative log-probabilities and the number of tokens
            found = np.exp(_over(sums[..., 0], sums[..., 1]))
        case "bleu":
            found = _bleu(sums)
        case "chrf":
            found = _chrf(sums)
    return found


def table(metric: Metric, items: Sequence[Mapping[str, float]]) -> Numbers:
    return np.array([[item[name] for name in metric.counts] for item in items], dtype=np.float64).reshape(
        len(items), len(metric.counts)
    )


def value(metric: Metric, items: Sequence[Mapping[str, float]]) -> float:
    """The value of one item alone is its own score."""
    return float(combined(metric, table(metric, items).sum(axis=0), len(items)))


def _over(above: Numbers, below: Numbers) -> Numbers:
    """0 if there is nothing to divide by."""
    quotient: Numbers = np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    return quotient


def _bleu(sums: Numbers) -> Numbers:
    """The counts are both lengths, then matched and all n-grams of each order. An order without a match is smoothed
    exponentially."""
    orders = (sums.shape[-1] - 2) // 2
    length, reference = sums[..., 0], sums[..., 1]
    matched, there = sums[..., 2 : 2 + orders], sums[..., 2 + orders :]
    halved = 0.5 ** np.cumsum((matched == 0) & (there > 0), axis=-1)
    precision = _over(np.where(matched > 0, matched, halved), there)
    is_defined = (there > 0).all(axis=-1) & (matched > 0).any(axis=-1)
    closeness = np.exp(np.log(np.where(precision > 0, precision, 1.0)).mean(axis=-1))
    brevity = np.exp(np.minimum(0.0, 1 - _over(reference, np.maximum(length, 1.0))))
    bleu: Numbers = np.where(is_defined, 100 * brevity * closeness, 0.0)
    return bleu


_CHRF_BETA = 2
"""Recall counts twice as much as precision."""


def _chrf(sums: Numbers) -> Numbers:
    """The counts are each order's n-grams in the answers, in the references and in both. Orders that a side lacks are
    left out."""
    answered, wanted, matched = (sums[..., at::3] for at in range(3))
    has_both = (answered > 0) & (wanted > 0)
    orders = has_both.sum(axis=-1)
    precision, recall = (
        _over(np.where(has_both, _over(matched, side), 0.0).sum(axis=-1), orders) for side in (answered, wanted)
    )
    return 100 * _over((1 + _CHRF_BETA**2) * precision * recall, _CHRF_BETA**2 * precision + recall)


FEW = 30
"""With fewer items an interval contains the truth in 90 to 99 of 100 simulated cases, depending on their skew."""
_AT_AN_END = 1e-12
_TOPS = {"share": 1.0, "points": 100.0, "number": None}


def interval_of(metric: Metric, table: Numbers, seed: int = 0) -> Interval:
    """Wilson's interval for a rate, else the studentised bootstrap. `table` is items x counts. One item gets the whole
    range."""
    n = len(table)
    intervals.require_sample(n)
    value = require_finite(metric, table)
    if metric.aggregate == "rate" and is_binary(table):
        return intervals.wilson(int(table.sum()), n)
    top, statistic = top_of(metric, table, value), partial(combined, metric)
    if n == 1:
        low, high = (0.0 if (table >= 0).all() else -math.inf), (math.inf if top is None else top)
    elif top is None and intervals.standard_error(statistic, table) == 0:
        low, high = value, value
    elif top is None:
        scale = intervals.LOGARITHM if value > 0 and (table >= 0).all() else intervals.PLAIN
        low, high = intervals.studentised(statistic, table, scale=scale, seed=seed)
    elif not _AT_AN_END < value / top < 1 - _AT_AN_END or intervals.standard_error(statistic, table) == 0:
        # this share of other items may not have come up, worth anything
        unseen = intervals.wilson_ends(0.0, effective(metric, table))[1]
        low, high = value * (1 - unseen), value + (top - value) * unseen
    else:
        widest = intervals.wilson_ends(value / top, effective(metric, table))
        low, high = intervals.studentised(statistic, table, scale=intervals.log_odds(top), seed=seed)
        low, high = max(low, top * widest[0]), min(high, top * widest[1])
    return Interval(value=value, low=min(low, value), high=max(high, value), n=n)


def cautions(n: int) -> tuple[str, ...]:
    if n == 1:
        return ("1 item: nothing is known of the spread",)
    return (f"{n} items: the intervals may be too narrow",) if n < FEW else ()


def require_finite(metric: Metric, table: Numbers) -> float:
    """Requires the metric's value to be finite; an infinite or undefined one would spoil every number beside it."""
    if broken := int((~np.isfinite(table)).any(axis=1).sum()):
        problem = f"{metric.name}: the counts of {broken} of {len(table)} items are not finite"
        raise ValueError(f"{problem}; score such an item as nothing found")
    with np.errstate(over="ignore"):
        value = float(combined(metric, table.sum(axis=0), len(table)))
    if not math.isfinite(value):
        raise ValueError(f"{metric.name} of {len(table)} items is {value}: no interval can be given")
    return value


def is_binary(table: Numbers) -> bool:
    return bool(((table == 0) | (table == 1)).all())


def top_of(metric: Metric, table: Numbers, value: float) -> float | None:
    """The largest possible value; None if there is none."""
    top = _TOPS[metric.unit]
    return top if top is not None and 0 <= value <= top and bool((table >= 0).all()) else None


def item_weights(metric: Metric, table: Numbers) -> Numbers:
    """The weight of each item: a long one weighs more if counts are summed."""
    match metric.aggregate:
        case "rate" | "mean":
            return np.ones(len(table))
        case "ratio":
            weights: Numbers = table[:, 1]
        case "f1":
            weights = table[:, 1] + table[:, 2]
        case _:
            weights = table.sum(axis=1)
    return weights


def effective(metric: Metric, table: Numbers) -> float:
    """The number of items of equal weight that say as much (Kish)."""
    weights = item_weights(metric, table)
    squares = float((weights**2).sum())
    return max(1.0, float(weights.sum()) ** 2 / squares) if squares > 0 else float(len(table))
