"""Two models on the same items: what they differ by, how far that can be trusted, and how likely it is where they are alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from finefit.stats.bootstrap import PLAIN, Statistic, standard_error, studentised
from finefit.stats.intervals import CONFIDENCE, difference_ends, require_sample
from finefit.stats.metrics import Metric, Numbers, combined
from finefit.stats.scores import effective, is_binary, require_finite, top_of

EXACT_AT_MOST = 13
"""Items that differ, up to which every exchange is tried: 8,192 of them."""
EXCHANGES = 9999
"""Drawn beyond that; with the one that was seen a round number."""
_BLOCK_VALUES = 1 << 20
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The second model's value less the first's, over `n` items that both have answered."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 a class attribute that pydantic reads
    value: float
    low: float
    high: float
    p: float
    """How often the difference is at least as large when for every item it is left to chance which model gave which answer."""
    n: int


def paired(
    metric: Metric, first: Numbers, second: Numbers, *, seed: int = 0, confidence: float = CONFIDENCE
) -> Difference:
    """Rows of both tables belong to the same items."""
    if first.shape != second.shape:
        raise ValueError(
            f"{len(first)} and {len(second)} items cannot be paired; give the same items in the same order"
        )
    n = len(first)
    require_sample(n, confidence)
    values = require_finite(metric, first), require_finite(metric, second)
    value = values[1] - values[0]
    low, high = _ends(metric, first, second, values, seed, confidence)
    return Difference(
        value=value, low=min(low, value), high=max(high, value), p=permutation_p(metric, first, second, seed=seed), n=n
    )


def _ends(
    metric: Metric, first: Numbers, second: Numbers, values: tuple[float, float], seed: int, confidence: float
) -> tuple[float, float]:
    n, both = len(first), np.concatenate([first, second], axis=1)
    tops = [top_of(metric, table, value) for table, value in zip((first, second), values, strict=True)]
    top = tops[0] if None not in tops else None
    if metric.aggregate == "rate" and is_binary(both):
        return difference_ends(float((second > first).sum()), float((second < first).sum()), n, confidence)
    if n == 1:
        return (-np.inf, np.inf) if top is None else (-top, top)
    statistic = _difference(metric)
    spread = standard_error(statistic, both)
    if metric.aggregate in ("rate", "mean", "ratio", "f1") and top is not None:
        widest = _widest(metric, first, second, top, confidence)
        if spread == 0:
            return widest
        low, high = studentised(statistic, both, scale=PLAIN, seed=seed, confidence=confidence)
        return max(low, widest[0]), min(high, widest[1])
    return (
        studentised(statistic, both, scale=PLAIN, seed=seed, confidence=confidence)
        if spread
        else (values[1] - values[0],) * 2
    )


def _difference(metric: Metric) -> Statistic:
    def statistic(sums: Numbers, n: int) -> Numbers:
        half = sums.shape[-1] // 2
        return combined(metric, sums[..., half:], n) - combined(metric, sums[..., :half], n)

    return statistic


def _widest(metric: Metric, first: Numbers, second: Numbers, top: float, confidence: float) -> tuple[float, float]:
    """As if every item's change were a share of items that change from 0 to all, or back: nothing with these changes spreads wider."""
    n = min(effective(metric, first), effective(metric, second))
    weights = _weights(metric, first, second)
    changes = (combined(metric, second, 1) - combined(metric, first, 1)) / top
    gained, lost = (float((weights * np.maximum(sign * changes, 0)).sum()) * n for sign in (1, -1))
    low, high = difference_ends(gained, lost, n, confidence)
    return top * low, top * high


def _weights(metric: Metric, first: Numbers, second: Numbers) -> Numbers:
    """How much each item has to say, summing to 1."""
    match metric.aggregate:
        case "ratio":
            weights = first[:, 1] + second[:, 1]
        case "f1":
            weights = first[:, 1:3].sum(axis=1) + second[:, 1:3].sum(axis=1)
        case _:
            weights = np.ones(len(first))
    whole = float(weights.sum())
    shares: Numbers = weights / whole if whole else np.full(len(first), 1 / len(first))
    return shares


def permutation_p(metric: Metric, first: Numbers, second: Numbers, *, seed: int = 0) -> float:
    """Two-sided. Exact where few items differ, else of seeded exchanges, the one that was seen among them."""
    change = second - first
    change = change[(change != 0).any(axis=1)]
    n, one, other = len(first), first.sum(axis=0), second.sum(axis=0)

    def difference(exchanged: Numbers) -> Numbers:
        """Of models that have exchanged these items."""
        moved = exchanged @ change
        return combined(metric, other - moved, n) - combined(metric, one + moved, n)

    seen = abs(float(difference(np.zeros((1, len(change))))[0]))
    is_exact = len(change) <= EXACT_AT_MOST
    blocks = _every_exchange(len(change)) if is_exact else _some_exchanges(len(change), seed)
    counted = [(int((np.abs(difference(block)) >= seen - _TIE * (1 + seen)).sum()), len(block)) for block in blocks]
    extreme, tried = sum(found for found, _ in counted), sum(size for _, size in counted)
    return extreme / tried if is_exact else (extreme + 1) / (tried + 1)


def _every_exchange(n: int) -> Iterator[Numbers]:
    yield ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1).astype(np.float64)


def _some_exchanges(n: int, seed: int) -> Iterator[Numbers]:
    rng, block = np.random.default_rng(seed), max(1, _BLOCK_VALUES // n)
    for start in range(0, EXCHANGES, block):
        yield rng.integers(2, size=(min(block, EXCHANGES - start), n), dtype=np.uint8).astype(np.float64)


def holm(ps: Sequence[float]) -> list[float]:
    """Each p as it counts among so many: the chance that any of those is as small where nothing differs is no larger than it (Holm)."""
    corrected, floor = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        floor = max(floor, min(1.0, (len(ps) - rank) * ps[at]))
        corrected[at] = floor
    return corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of runs that differ only in their seed."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    mean: float | None
    deviation: float | None
    """Of a sample (n - 1); None for fewer than two."""
    n: int
    missing: int
    """Runs that have no value."""


def spread(values: Sequence[float | None]) -> Spread:
    found = [value for value in values if value is not None]
    return Spread(
        mean=float(np.mean(found)) if found else None,
        deviation=float(np.std(found, ddof=1)) if len(found) > 1 else None,
        n=len(found),
        missing=len(values) - len(found),
    )
