"""Confidence intervals: Wilson's for a rate, Bonett and Price's for the difference of two rates, and the studentised
bootstrap for anything that is computed from sums over items.

The bootstrap draws items with replacement and measures each draw's deviation in its own standard error, so a skewed
sample gets a skewed interval. It works on a scale without bounds (log-odds for values with two bounds, logarithm for
positive ones) and is nowhere narrower than Student's t. In simulations its 95 % intervals contain the truth in 93 to 97
of 100 cases from 50 items on; the percentile bootstrap's in 91 to 94 (`python -m bench.intervals`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
RESAMPLES = 1999
"""One less than a round number, so that the ends of an interval are draws and nothing is interpolated."""
_BLOCK_VALUES = 1 << 20  # weights of items at once: 8 MiB
_STEP = 1e-5  # of a sum, to find the slope at it
_NO_SPREAD = 1e-12
_LARGEST_EXPONENT = 700.0  # of a double
_WIDEST = 3  # times Student's: beyond that, draws of a handful of items are accidents

Numbers = NDArray[np.float64]
Statistic = Callable[[Numbers, int], Numbers]
"""Computes the value of each row of sums (..., counts) over n items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The estimate from `n` observations, and the ends of its confidence interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int) -> Interval:
    """Wilson's interval stays inside 0..1 and keeps a width at 0 and at n successes, where the textbook interval
    shrinks to a point."""
    require_sample(n)
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} observations; give 0 to {n}")
    low, high = wilson_ends(successes / n, n)
    return Interval(value=successes / n, low=low, high=high, n=n)


def wilson_ends(share: float, n: float) -> tuple[float, float]:
    """Wilson's ends for the mean of n values from 0 to 1. Zeros and ones spread most, so for other values it is never
    too narrow."""
    z, scale = _Z, 1 + _Z * _Z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding would leave 1e-17.
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def difference_ends(gained: float, lost: float, n: float) -> tuple[float, float]:
    """Bonett and Price's interval of (gained - lost) / n: of n items, `gained` went from 0 to 1 and `lost` from 1 to 0.
    One is added to both, so that the interval keeps a width if few items changed."""
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * math.sqrt(max(0.0, up + down - (up - down) ** 2) / (n + 2))
    # If all items changed alike, the shrunken centre must not exclude the observed value.
    seen = (gained - lost) / n
    return max(-1.0, min(seen, up - down - half)), min(1.0, max(seen, up - down + half))


def student_quantile(freedom: int) -> float:
    """A quantile of Student's t: exact for 1 and 2 degrees of freedom, then Fisher's expansion (within 1 % at 3, 0.1 %
    at 6)."""
    if freedom == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if freedom == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z, f = _Z, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / f + second / f**2 + third / f**3


def require_sample(n: int) -> None:
    if n < 1:
        raise ValueError(f"{n} observations; an interval needs at least 1")


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale on which a value has no bounds, its slope, and the way back."""

    of: Callable[[Numbers], Numbers]
    slope: Callable[[Numbers], Numbers]
    back: Callable[[float], float]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


PLAIN = Scale(of=lambda v: v, slope=np.ones_like, back=lambda x: x)
LOGARITHM = Scale(of=np.log, slope=np.reciprocal, back=lambda x: math.exp(min(x, _LARGEST_EXPONENT)))


def log_odds(top: float) -> Scale:
    """The log-odds scale of a value from 0 to `top`."""
    return Scale(
        of=lambda v: np.log(v / (top - v)), slope=lambda v: top / (v * (top - v)), back=lambda x: top * _sigmoid(x)
    )


def standard_error(statistic: Statistic, table: Numbers) -> float:
    """The jackknife's standard error; 0 if no item makes a difference."""
    n = len(table)
    with np.errstate(over="ignore", invalid="ignore"):  # a perplexity that depends on one item has no bound without it
        without = statistic(table.sum(axis=0) - table, n - 1)
        error = float(np.sqrt(((without - without.mean()) ** 2).sum() * (n - 1) / n))
    if not math.isfinite(error):
        return math.inf
    return error if error > _NO_SPREAD * (1 + abs(float(without.mean()))) else 0.0


def studentised(statistic: Statistic, table: Numbers, *, scale: Scale, seed: int) -> tuple[float, float]:
    """The table must show some spread. A side without bootstrap spread falls back to Student's t."""
    n, error = len(table), standard_error(statistic, table)
    value = statistic(table.sum(axis=0), n)
    at, unit = float(scale.of(value)), error * float(scale.slope(value))
    usual, deviations = student_quantile(n - 1), np.sort(_deviations(statistic, table, scale, seed))

    def within(deviation: float) -> float:
        return max(usual, min(deviation, _WIDEST * usual)) if math.isfinite(deviation) else usual

    outer = round((1 - CONFIDENCE) / 2 * (len(deviations) + 1))
    above, below = within(float(deviations[-outer])), within(float(-deviations[outer - 1]))
    return scale.back(at - above * unit), scale.back(at + below * unit)


def _deviations(statistic: Statistic, table: Numbers, scale: Scale, seed: int) -> Numbers:
    """The deviation of every draw from the value, in its own standard errors; infinite if that is zero. Works in
    blocks, to save memory."""
    rng, n = np.random.default_rng(seed), len(table)
    centred = table - table.mean(axis=0)
    value = statistic(table.sum(axis=0), n)
    block = max(1, _BLOCK_VALUES // n)
    parts = []
    for start in range(0, RESAMPLES, block):
        draws = min(block, RESAMPLES - start)
        picks = rng.integers(n, size=(draws, n)) + np.arange(draws)[:, None] * n
        # how often each draw holds each item
        weights = np.bincount(picks.ravel(), minlength=draws * n).reshape(draws, n).astype(np.float64)
        sums = weights @ table
        with np.errstate(all="ignore"):  # a draw at an end of the scale, or of equal items, has no finite deviation
            drawn = statistic(sums, n)
            # the standard error of each draw by the slope of the statistic at its sums
            influence = _slopes(statistic, sums, n) @ centred.T
            mean = (weights * influence).sum(axis=1) / n
            errors = np.sqrt((weights * (influence - mean[:, None]) ** 2).sum(axis=1) * n / (n - 1))
            moved = (scale.of(drawn) - scale.of(value)) / (errors * scale.slope(drawn))
        flat = (errors <= _NO_SPREAD * (1 + np.abs(drawn))) | ~np.isfinite(moved)
        parts.append(np.where(flat, np.copysign(np.inf, drawn - value), moved))
    return np.concatenate(parts)


def _slopes(statistic: Statistic, sums: Numbers, n: int) -> Numbers:
    """The derivative of the value with respect to each sum; 0 at a sum of 0, to which no drawn item adds."""
    found = np.zeros_like(sums)
    for at in range(sums.shape[-1]):
        step = np.zeros_like(sums)
        step[..., at] = _STEP * np.abs(sums[..., at])
        change = statistic(sums + step, n) - statistic(sums - step, n)
        np.divide(change, 2 * step[..., at], out=found[..., at], where=step[..., at] != 0)
    return found
