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
    better: Literal["higher", "lower", "neither"] = "higher"
    """`neither`: it describes, as the length of answers does."""


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
    """Of the answers' and the references' lengths, then matched and all n-grams of each order; an order without a match is smoothed exponentially."""
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
    """Of each order's n-grams in the answers, in the references, and in both; orders that one side has none of are left out."""
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
