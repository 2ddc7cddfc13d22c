"""Studentised bootstrap of anything that is computed from sums over items.

Items are drawn anew with replacement, and each draw's deviation is measured in its own standard error, so a skewed sample gets a skewed interval.
It is taken on a scale without ends (log-odds for what has two, logarithm for what is positive) and is nowhere narrower than Student's t. Simulated,
95 % intervals hold the truth in 93 to 97 of 100 cases from 50 items on; the percentile bootstrap in 91 to 94 (`python -m bench.intervals`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from finefit.stats.intervals import CONFIDENCE, student_quantile
from finefit.stats.metrics import Numbers

RESAMPLES = 1999
"""One less than a round number: the ends of an interval are then draws, and nothing lies between two of them."""
_BLOCK_VALUES = 1 << 20  # weights of items at once: 8 MiB
_STEP = 1e-5  # of a sum, to find the slope at it
_NO_SPREAD = 1e-12
_LARGEST_EXPONENT = 700.0  # a double holds no more
_WIDEST = 3  # times Student's: what draws of a handful of items say beyond that is an accident of those

Statistic = Callable[[Numbers, int], Numbers]
"""The value of each row of sums (..., counts) over n items."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale on which a value has no ends, its slope, and the way back."""

    of: Callable[[Numbers], Numbers]
    slope: Callable[[Numbers], Numbers]
    back: Callable[[float], float]


def _same(values: Numbers) -> Numbers:
    return values


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


PLAIN = Scale(of=_same, slope=np.ones_like, back=lambda x: x)
LOGARITHM = Scale(of=np.log, slope=np.reciprocal, back=lambda x: math.exp(min(x, _LARGEST_EXPONENT)))


def log_odds(top: float) -> Scale:
    """Of a value from 0 to `top`."""
    return Scale(
        of=lambda v: np.log(v / (top - v)), slope=lambda v: top / (v * (top - v)), back=lambda x: top * _sigmoid(x)
    )


def standard_error(statistic: Statistic, table: Numbers) -> float:
    """By the jackknife; 0 where no item makes a difference."""
    n = len(table)
    with np.errstate(over="ignore", invalid="ignore"):  # a perplexity that hangs on one item has no bound without it
        without = statistic(table.sum(axis=0) - table, n - 1)
        error = float(np.sqrt(((without - without.mean()) ** 2).sum() * (n - 1) / n))
    if not math.isfinite(error):
        return math.inf
    return error if error > _NO_SPREAD * (1 + abs(float(without.mean()))) else 0.0


def studentised(
    statistic: Statistic, table: Numbers, *, scale: Scale, seed: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The ends of the interval; the table must show some spread. A side on which draws have no spread of their own is Student's alone."""
    n, error = len(table), standard_error(statistic, table)
    value = statistic(table.sum(axis=0), n)
    at, unit = float(scale.of(value)), error * float(scale.slope(value))
    usual = student_quantile(confidence, n - 1)
    deviations = np.sort(_deviations(statistic, table, scale, seed))
    outer = round((1 - confidence) / 2 * (len(deviations) + 1))
    above, below = (_within(usual, float(end)) for end in (deviations[-outer], -deviations[outer - 1]))
    return scale.back(at - above * unit), scale.back(at + below * unit)


def _within(usual: float, deviation: float) -> float:
    return max(usual, min(deviation, _WIDEST * usual)) if math.isfinite(deviation) else usual


def _deviations(statistic: Statistic, table: Numbers, scale: Scale, seed: int) -> Numbers:
    """Of every draw from the value, in standard errors of that draw; infinite where it has none. In blocks: memory does not grow with the draws."""
    rng, n = np.random.default_rng(seed), len(table)
    centred = table - table.mean(axis=0)
    value = statistic(table.sum(axis=0), n)
    block = max(1, _BLOCK_VALUES // n)
    parts = []
    for start in range(0, RESAMPLES, block):
        weights = _drawn(rng, min(block, RESAMPLES - start), n)
        sums = weights @ table
        with np.errstate(all="ignore"):  # a draw at an end of the scale, or of equal items, has no finite deviation
            drawn, errors = statistic(sums, n), _errors(statistic, sums, weights, centred)
            moved = (scale.of(drawn) - scale.of(value)) / (errors * scale.slope(drawn))
        flat = (errors <= _NO_SPREAD * (1 + np.abs(drawn))) | ~np.isfinite(moved)
        parts.append(np.where(flat, np.copysign(np.inf, drawn - value), moved))
    return np.concatenate(parts)


def _drawn(rng: np.random.Generator, draws: int, n: int) -> Numbers:
    """How often each draw holds each item."""
    picks = rng.integers(n, size=(draws, n)) + np.arange(draws)[:, None] * n
    weights: Numbers = np.bincount(picks.ravel(), minlength=draws * n).reshape(draws, n).astype(np.float64)
    return weights


def _errors(statistic: Statistic, sums: Numbers, weights: Numbers, centred: Numbers) -> Numbers:
    """The standard error of each draw by the slope of the statistic at its sums."""
    n = len(centred)
    influence = slopes(statistic, sums, n) @ centred.T
    mean = (weights * influence).sum(axis=1) / n
    variance = (weights * (influence - mean[:, None]) ** 2).sum(axis=1) * n / (n - 1)
    errors: Numbers = np.sqrt(variance)
    return errors


def slopes(statistic: Statistic, sums: Numbers, n: int) -> Numbers:
    """How the value changes with each sum; 0 at a sum of 0, which no drawn item adds to."""
    found = np.zeros_like(sums)
    for at in range(sums.shape[-1]):
        step = np.zeros_like(sums)
        step[..., at] = _STEP * np.abs(sums[..., at])
        change = statistic(sums + step, n) - statistic(sums - step, n)
        np.divide(change, 2 * step[..., at], out=found[..., at], where=step[..., at] != 0)
    return found
