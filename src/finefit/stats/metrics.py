"""A metric is a function of counts summed over items: a mean, a rate, an F1 over all pairs, a perplexity over all tokens.

So one resampling of items serves every metric, and two models can be compared from their records alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Aggregate = Literal["rate", "mean", "ratio", "f1", "perplexity", "bleu", "chrf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 a class attribute that pydantic reads
    name: str
    aggregate: Aggregate
    counts: tuple[str, ...]
    """What it is computed from, by the names that an item's counts have."""
    unit: Literal["share", "points", "number"] = "share"
    """How it is shown: a share as per cent, points as of a hundred."""
    better: Literal["higher", "lower"] = "higher"


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
    return np.array([[item[name] for name in metric.counts] for item in items], dtype=np.float64).reshape(len(items), len(metric.counts))


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


_COMBINED: dict[Aggregate, Callable[[Numbers, int], Numbers]] = {
    "rate": _mean,
    "mean": _mean,
    "ratio": _ratio,
    "f1": _f1,
    "perplexity": _perplexity,
}
