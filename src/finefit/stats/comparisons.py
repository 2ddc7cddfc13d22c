"""Compares two models, or two raters, on the same items: how much they differ, and how certain that is."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finefit.stats import intervals
from finefit.stats.intervals import Interval, Numbers
from finefit.stats.metrics import Metric, combined, effective, is_binary, item_weights, require_finite, top_of

EXACT_AT_MOST = 13
"""If at most this many items differ, every exchange is tried: 8,192 of them."""
EXCHANGES = 9999
"""The number of random exchanges otherwise; together with the observed one, a round number."""
_BLOCK_VALUES = 1 << 20
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The second model's value minus the first's, over `n` items that both have answered."""

    value: float
    low: float
    high: float
    p: float
    """How often the difference is at least as large if chance decides for every item which model gave which answer."""
    n: int


def paired(metric: Metric, first: Numbers, second: Numbers, *, seed: int = 0) -> Difference:
    """Rows of both tables belong to the same items."""
    if first.shape != second.shape:
        sizes = f"{len(first)} and {len(second)}"
        raise ValueError(f"{sizes} items cannot be paired; give the same items in the same order")
    n = len(first)
    intervals.require_sample(n)
    values = require_finite(metric, first), require_finite(metric, second)
    value = values[1] - values[0]
    low, high = _ends(metric, first, second, values, seed)
    p = permutation_p(metric, first, second, seed=seed)
    return Difference(value=value, low=min(low, value), high=max(high, value), p=p, n=n)


def _ends(
    metric: Metric, first: Numbers, second: Numbers, values: tuple[float, float], seed: int
) -> tuple[float, float]:
    n, both = len(first), np.concatenate([first, second], axis=1)
    tops = [top_of(metric, table, value) for table, value in zip((first, second), values, strict=True)]
    top = tops[0] if None not in tops else None
    if metric.aggregate == "rate" and is_binary(both):
        return intervals.difference_ends(float((second > first).sum()), float((second < first).sum()), n)
    if n == 1:
        return (-np.inf, np.inf) if top is None else (-top, top)

    def statistic(sums: Numbers, n: int) -> Numbers:
        half = sums.shape[-1] // 2
        return combined(metric, sums[..., half:], n) - combined(metric, sums[..., :half], n)

    widest = (-np.inf, np.inf)
    if metric.aggregate in ("rate", "mean", "ratio", "f1") and top is not None:
        widest = _widest(metric, first, second, top)
    if intervals.standard_error(statistic, both) == 0:
        return widest if math.isfinite(widest[0]) else (values[1] - values[0],) * 2
    low, high = intervals.studentised(statistic, both, scale=intervals.PLAIN, seed=seed)
    return max(low, widest[0]), min(high, widest[1])


def _widest(metric: Metric, first: Numbers, second: Numbers, top: float) -> tuple[float, float]:
    """Treats every item's change as a share of items that go from 0 to the top or back, the widest possible spread."""
    n = min(effective(metric, first), effective(metric, second))
    weights = item_weights(metric, first) + item_weights(metric, second)
    whole = float(weights.sum())
    weights = weights / whole if whole else np.full(len(first), 1 / len(first))
    changes = (combined(metric, second, 1) - combined(metric, first, 1)) / top
    gained, lost = (float((weights * np.maximum(sign * changes, 0)).sum()) * n for sign in (1, -1))
    low, high = intervals.difference_ends(gained, lost, n)
    return top * low, top * high


def permutation_p(metric: Metric, first: Numbers, second: Numbers, *, seed: int = 0) -> float:
    """Two-sided. Exact if few items differ, else by seeded exchanges that include the observed one."""
    change = second - first
    change = change[(change != 0).any(axis=1)]
    n, one, other = len(first), first.sum(axis=0), second.sum(axis=0)

    def difference(exchanged: Numbers) -> Numbers:
        """The difference between models that have exchanged these items."""
        moved = exchanged @ change
        return combined(metric, other - moved, n) - combined(metric, one + moved, n)

    seen = abs(float(difference(np.zeros((1, len(change))))[0]))

    def extreme(exchanges: NDArray[Any]) -> int:
        return int((np.abs(difference(exchanges.astype(np.float64))) >= seen - _TIE * (1 + seen)).sum())

    if (width := len(change)) <= EXACT_AT_MOST:
        return extreme((np.arange(1 << width)[:, None] >> np.arange(width)) & 1) / (1 << width)
    rng, block = np.random.default_rng(seed), max(1, _BLOCK_VALUES // width)
    sizes = [min(block, EXCHANGES - start) for start in range(0, EXCHANGES, block)]
    found = sum(extreme(rng.integers(2, size=(size, width), dtype=np.uint8)) for size in sizes)
    return (found + 1) / (EXCHANGES + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number: if nothing differs, the chance that any is as small is at most this
    (Holm)."""
    corrected, floor = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        floor = max(floor, min(1.0, (len(ps) - rank) * ps[at]))
        corrected[at] = floor
    return corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The values of runs that differ only in their seed."""

    mean: float | None
    deviation: float | None
    """The sample standard deviation (n - 1); None for fewer than two values."""
    n: int
    missing: int


def spread(values: Sequence[float | None]) -> Spread:
    found = [value for value in values if value is not None]
    return Spread(
        mean=float(np.mean(found)) if found else None,
        deviation=float(np.std(found, ddof=1)) if len(found) > 1 else None,
        n=len(found),
        missing=len(values) - len(found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    observed: Interval
    """Share of the items on which both agree."""
    kappa: Interval | None
    """Cohen's kappa: 1 is full agreement, 0 what chance would give. None if both raters give all items one and the same
    label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    wins: int
    losses: int
    ties: int
    share: Interval
    """The share of all items, with a tie as half a win for each: one half means no preference."""
    p: float
    """The sign test without ties: how likely a count this uneven is if both are liked equally."""


def kappa(pairs: Sequence[tuple[Hashable, Hashable]], *, seed: int = 0) -> Agreement:
    """`pairs` are the two raters' labels of each item."""
    n = len(pairs)
    intervals.require_sample(n)
    labels = {label: at for at, label in enumerate(dict.fromkeys(label for pair in pairs for label in pair))}
    cells = np.zeros((n, len(labels), len(labels)))
    for at, (one, other) in enumerate(pairs):
        cells[at, labels[one], labels[other]] = 1
    observed = intervals.wilson(sum(one == other for one, other in pairs), n)
    if len(labels) == 1:
        return Agreement(observed=observed, kappa=None)
    table = cells.reshape(n, -1)
    sums = table.sum(axis=0)
    value = float(_kappas(sums, n))
    if n == 1:
        low, high = -1.0, 1.0
    elif intervals.standard_error(_kappas, table) == 0:
        by_chance = float(_chance(sums, n))
        low, high = ((share - by_chance) / (1 - by_chance) for share in intervals.wilson_ends(observed.value, n))
    else:
        low, high = intervals.studentised(_kappas, table, scale=intervals.PLAIN, seed=seed)
    found = Interval(value=value, low=max(-1.0, min(low, value)), high=min(1.0, max(high, value)), n=n)
    return Agreement(observed=observed, kappa=found)


def _kappas(sums: Numbers, n: int) -> Numbers:
    """Cohen's kappa of each row, which is 1 if both raters give one and the same label to all items."""
    expected = _chance(sums, n)
    agreed: Numbers = np.trace(_square(sums), axis1=-2, axis2=-1) / n
    found: Numbers = np.divide(agreed - expected, 1 - expected, out=np.ones_like(agreed), where=expected < 1 - 1e-9)
    return found


def _chance(sums: Numbers, n: int) -> Numbers:
    """How often two independent raters with these frequencies of labels would agree."""
    square = _square(sums)
    expected: Numbers = (square.sum(axis=-1) * square.sum(axis=-2)).sum(axis=-1) / n**2
    return expected


def _square(sums: Numbers) -> Numbers:
    side = math.isqrt(sums.shape[-1])
    return sums.reshape(*sums.shape[:-1], side, side)


def preference(wins: int, losses: int, ties: int) -> Preference:
    n = wins + losses + ties
    intervals.require_sample(n)
    low, high = ((1 + end) / 2 for end in intervals.difference_ends(wins, losses, n))
    share = Interval(value=(wins + ties / 2) / n, low=low, high=high, n=n)
    return Preference(wins=wins, losses=losses, ties=ties, share=share, p=sign_test(wins, losses))


def sign_test(wins: int, losses: int) -> float:
    """Exact and two-sided: the chance that a fair coin falls this unevenly."""
    n, fewer = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    faces = np.arange(fewer)
    steps = np.concatenate([[-n * math.log(2)], np.log((n - faces) / (faces + 1))])
    return min(1.0, 2 * float(np.exp(np.cumsum(steps)).sum()))
