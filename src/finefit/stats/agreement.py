"""What people say of the same items: how far two raters agree, and which of two models they prefer."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from finefit.stats.bootstrap import PLAIN, standard_error, studentised
from finefit.stats.intervals import CONFIDENCE, Interval, difference_ends, require_sample, wilson, wilson_ends
from finefit.stats.metrics import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of two raters on the same items."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 a class attribute that pydantic reads
    observed: Interval
    """Share of the items on which both say the same."""
    kappa: Interval | None
    """Cohen's: 1 is full agreement, 0 what chance would give. None where both say one and the same of every item, and chance would agree too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Of the first of two models."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    wins: int
    losses: int
    ties: int
    share: Interval
    """Of all items, a tie counted as half a win for each: one half is no preference."""
    p: float
    """Sign test, ties left out: how likely so uneven a count is among models that are liked alike."""


def kappa(pairs: Sequence[tuple[Hashable, Hashable]], *, seed: int = 0, confidence: float = CONFIDENCE) -> Agreement:
    """`pairs`: what the one and the other rater say of each item."""
    n = len(pairs)
    require_sample(n, confidence)
    labels = {label: at for at, label in enumerate(dict.fromkeys(label for pair in pairs for label in pair))}
    cells = np.zeros((n, len(labels), len(labels)))
    for at, (one, other) in enumerate(pairs):
        cells[at, labels[one], labels[other]] = 1
    observed = wilson(sum(one == other for one, other in pairs), n, confidence)
    return Agreement(
        observed=observed, kappa=_kappa(cells.reshape(n, -1), observed, seed, confidence) if len(labels) > 1 else None
    )


def _kappa(cells: Numbers, observed: Interval, seed: int, confidence: float) -> Interval:
    n, sums = len(cells), cells.sum(axis=0)
    value = float(_kappas(sums, n))
    if n == 1:
        low, high = -1.0, 1.0
    elif standard_error(_kappas, cells) == 0:
        by_chance = float(_chance(sums, n))
        low, high = ((share - by_chance) / (1 - by_chance) for share in wilson_ends(observed.value, n, confidence))
    else:
        low, high = studentised(_kappas, cells, scale=PLAIN, seed=seed, confidence=confidence)
    return Interval(value=value, low=max(-1.0, min(low, value)), high=min(1.0, max(high, value)), n=n)


def _kappas(sums: Numbers, n: int) -> Numbers:
    """1 where both raters say one and the same of all."""
    expected = _chance(sums, n)
    agreed: Numbers = np.trace(_square(sums), axis1=-2, axis2=-1) / n
    found: Numbers = np.divide(agreed - expected, 1 - expected, out=np.ones_like(agreed), where=expected < 1 - 1e-9)
    return found


def _chance(sums: Numbers, n: int) -> Numbers:
    """How often two would agree who use each label as often as these and know nothing of one another."""
    square = _square(sums)
    expected: Numbers = (square.sum(axis=-1) * square.sum(axis=-2)).sum(axis=-1) / n**2
    return expected


def _square(sums: Numbers) -> Numbers:
    side = math.isqrt(sums.shape[-1])
    return sums.reshape(*sums.shape[:-1], side, side)


def preference(wins: int, losses: int, ties: int, *, confidence: float = CONFIDENCE) -> Preference:
    n = wins + losses + ties
    require_sample(n, confidence)
    low, high = ((1 + end) / 2 for end in difference_ends(wins, losses, n, confidence))
    share = Interval(value=(wins + ties / 2) / n, low=low, high=high, n=n)
    return Preference(wins=wins, losses=losses, ties=ties, share=share, p=sign_test(wins, losses))


def sign_test(wins: int, losses: int) -> float:
    """Exact and two-sided: the chance that a fair coin falls as unevenly."""
    n, fewer = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    faces = np.arange(fewer)
    steps = np.concatenate([[-n * math.log(2)], np.log((n - faces) / (faces + 1))])
    return min(1.0, 2 * float(np.exp(np.cumsum(steps)).sum()))
