"""An estimate with the ends of its interval, and two closed forms: Wilson's for a rate, Bonett and Price's for what two rates differ by."""

import math
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The estimate from `n` observations, and the ends of its confidence interval."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Stays inside 0..1 and keeps a width at 0 and at n successes, where the textbook interval shrinks to a point."""
    require_sample(n, confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} observations; give 0 to {n}")
    low, high = wilson_ends(successes / n, n, confidence)
    return Interval(value=successes / n, low=low, high=high, n=n)


def wilson_ends(share: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Of any mean of n values from 0 to 1: none spreads wider than zeros and ones, so for others the interval is too wide and never too narrow."""
    z = normal_quantile(confidence)
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding would leave 1e-17.
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def difference_ends(gained: float, lost: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bonett and Price's interval of (gained - lost) / n: of n items, `gained` went from 0 to 1 and `lost` from 1 to 0.

    One is added to both, so that it keeps a width where few items changed."""
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = normal_quantile(confidence) * math.sqrt(max(0.0, up + down - (up - down) ** 2) / (n + 2))
    # All items changed alike: the shrunken centre must not leave out what was seen.
    seen = (gained - lost) / n
    return max(-1.0, min(seen, up - down - half)), min(1.0, max(seen, up - down + half))


def normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def student_quantile(confidence: float, freedom: int) -> float:
    """Of Student's t: exact for 1 and 2 degrees of freedom, by Fisher's expansion above (within 1 % at 3, 0.1 % at 6)."""
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z, f = normal_quantile(confidence), freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / f + second / f**2 + third / f**3


def require_sample(n: int, confidence: float) -> None:
    if n < 1:
        raise ValueError(f"{n} observations; an interval needs at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is no share; give a number between 0 and 1, such as 0.95")
