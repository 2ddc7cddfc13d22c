"""How far a measured rate or mean can be trusted: Wilson's interval for rates, the percentile bootstrap for means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_BLOCK_VALUES = 1 << 20  # values drawn at once: 8 MiB of indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The estimate from `n` observations, and the ends of its confidence interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Stays inside 0..1 and keeps a width at 0 and at n successes, where the textbook interval shrinks to a point."""
    _check(n, confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} observations; give 0 to {n}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding would leave 1e-17.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(value=rate, low=low, high=high, n=n)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = 2000, confidence: float = 0.95) -> Interval:
    """Percentile bootstrap: equal values give an interval without width, since the sample shows no spread.

    One value says nothing about its spread, so its ends are infinite.
    """
    n = len(values)
    _check(n, confidence)
    if resamples < 1:
        raise ValueError(f"{resamples} resamples; give at least 1")
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError(f"{int((~np.isfinite(sample)).sum())} of {n} values are not finite; leave them out and count them")
    first = float(sample[0])
    if n == 1:
        return Interval(value=first, low=-math.inf, high=math.inf, n=n)
    if (sample == first).all():
        return Interval(value=first, low=first, high=first, n=n)
    tail = (1 - confidence) / 2
    low, high = np.quantile(_resampled_means(sample, seed, resamples), [tail, 1 - tail])
    return Interval(value=math.fsum(sample) / n, low=float(low), high=float(high), n=n)


def _resampled_means(sample: np.ndarray[tuple[int], np.dtype[np.float64]], seed: int, resamples: int) -> list[float]:
    """In blocks, so that memory does not grow with resamples x n."""
    rng = np.random.default_rng(seed)
    n = len(sample)
    block = max(1, _BLOCK_VALUES // n)
    means: list[float] = []
    for start in range(0, resamples, block):
        picks = rng.integers(n, size=(min(block, resamples - start), n))
        means.extend(sample[picks].mean(axis=1).tolist())
    return means


def _check(n: int, confidence: float) -> None:
    if n < 1:
        raise ValueError(f"{n} observations; an interval needs at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is no share; give a number between 0 and 1, such as 0.95")
