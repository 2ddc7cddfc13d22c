"""A metric is a function of counts summed over items: a mean, a rate, an F1 over all pairs, a perplexity over all
tokens. So one resampling of items serves every metric, and two models can be compared from their records alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from finefit.stats.intervals import (
    CONFIDENCE,
    LOGARITHM,
    PLAIN,
    Interval,
    Numbers,
    log_odds,
    require_sample,
    standard_error,
    studentised,
    wilson,
    wilson_ends,
)

Aggregate = Literal["rate", "mean", "ratio", "f1", "perplexity", "bleu", "chrf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    aggregate: Aggregate
    counts: tuple[str, ...]
    """The names of the item counts that it is computed from."""
    unit: Literal["share", "points", "number"] = "share"
    """A share is shown as per cent, points as of a hundred."""
    better: Literal["higher", "lower", "neither"] = "higher"
    """`neither`: it only describes, as the length of answers does."""


def rate(name: str) -> Metric:
    """Of items, each 0 or 1."""
    return Metric(name=name, aggregate="rate", counts=(name,))


def mean(name: str, **more: Any) -> Metric:
    return Metric(name=name, aggregate="mean", counts=(name,), **more)


def combined(metric: Metric, sums: Numbers, n: int) -> Numbers:
    """The metric of each row of sums (..., counts) over `n` items."""
    return _COMBINED[metric.aggregate](sums, n)


def table(metric: Metric, items: Sequence[Mapping[str, float]]) -> Numbers:
    """Items x counts."""
    return np.array([[item[name] for name in metric.counts] for item in items], dtype=np.float64).reshape(
        len(items), len(metric.counts)
    )


def value(metric: Metric, items: Sequence[Mapping[str, float]]) -> float:
    """Of one item it is what that item scores alone."""
    return float(combined(metric, table(metric, items).sum(axis=0), len(items)))


def _over(above: Numbers, below: Numbers) -> Numbers:
    """0 where there is nothing to divide by."""
    quotient: Numbers = np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    return quotient


def _mean(sums: Numbers, n: int) -> Numbers:
    return sums[..., 0] / n


def _ratio(sums: Numbers, _: int) -> Numbers:
    return _over(sums[..., 0], sums[..., 1])


def _f1(sums: Numbers, _: int) -> Numbers:
    """Of what matched, what was predicted, and what is right."""
    return _over(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _perplexity(sums: Numbers, _: int) -> Numbers:
    """Of a sum of negative log-probabilities and the number of tokens."""
    perplexity: Numbers = np.exp(_over(sums[..., 0], sums[..., 1]))
    return perplexity


def _bleu(sums: Numbers, _: int) -> Numbers:
    """Of the answers' and the references' lengths, then matched and all n-grams of each order; an order without a match
    is smoothed exponentially."""
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


def _chrf(sums: Numbers, _: int) -> Numbers:
    """Of each order's n-grams in the answers, in the references and in both; orders that a side lacks are left out."""
    answered, wanted, matched = (sums[..., at::3] for at in range(3))
    has_both = (answered > 0) & (wanted > 0)
    orders = has_both.sum(axis=-1)
    precision, recall = (
        _over(np.where(has_both, _over(matched, side), 0.0).sum(axis=-1), orders) for side in (answered, wanted)
    )
    return 100 * _over((1 + _CHRF_BETA**2) * precision * recall, _CHRF_BETA**2 * precision + recall)


_COMBINED: dict[Aggregate, Callable[[Numbers, int], Numbers]] = {
    "rate": _mean,
    "mean": _mean,
    "ratio": _ratio,
    "f1": _f1,
    "perplexity": _perplexity,
    "bleu": _bleu,
    "chrf": _chrf,
}


FEW = 30
"""With fewer items an interval holds the truth in 90 to 99 of 100 simulated cases, depending on their skew."""
_AT_AN_END = 1e-12
_TOPS = {"share": 1.0, "points": 100.0, "number": None}


def interval_of(metric: Metric, table: Numbers, seed: int = 0, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's for a rate, the studentised bootstrap for anything else. `table`: items x counts. A single item has the
    whole range."""
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
    """Warnings about the intervals of so many items."""
    if n == 1:
        return ("1 item: nothing is known of the spread",)
    return (f"{n} items: the intervals may be too narrow",) if n < FEW else ()


def require_finite(metric: Metric, table: Numbers) -> float:
    """The metric's value; an infinite or undefined one would spoil every number beside it."""
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


def effective(metric: Metric, table: Numbers) -> float:
    """How many items of equal weight say as much (Kish): a long item weighs more if counts are summed."""
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
    n, statistic = effective(metric, table), partial(combined, metric)
    if not _AT_AN_END < value / top < 1 - _AT_AN_END or standard_error(statistic, table) == 0:
        unseen = wilson_ends(0.0, n, confidence)[1]  # this share of other items may not have come up, worth anything
        return value * (1 - unseen), value + (top - value) * unseen
    widest = wilson_ends(value / top, n, confidence)
    low, high = studentised(statistic, table, scale=log_odds(top), seed=seed, confidence=confidence)
    return max(low, top * widest[0]), min(high, top * widest[1])


def _open_ends(metric: Metric, table: Numbers, value: float, seed: int, confidence: float) -> tuple[float, float]:
    statistic = partial(combined, metric)
    if standard_error(statistic, table) == 0:
        return value, value
    scale = LOGARITHM if value > 0 and bool((table >= 0).all()) else PLAIN
    return studentised(statistic, table, scale=scale, seed=seed, confidence=confidence)
