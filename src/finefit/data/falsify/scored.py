"""Sampled answers that a task has scored -> preference pairs: of each row the best against the worst, where they differ."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from finefit.data.falsify.audit import Audit, Measure, Sides, audit
from finefit.data.falsify.balance import Counts, balance
from finefit.data.falsify.even import length_counts
from finefit.data.falsify.make import LENGTHS, Unused, content_key
from finefit.data.falsify.options import seeded
from finefit.data.fingerprint import normalise
from finefit.data.rows import Row
from finefit.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    answer: str
    score: float
    """More is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    row: Row
    chosen: Sample
    rejected: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    pairs: tuple[ScoredPair, ...]
    unused: tuple[Unused, ...]
    audit: Audit | None


def from_scored(
    scored: Iterable[tuple[Row, Sequence[Sample]]],
    *,
    seed: int,
    margin: float = 0.0,
    lengths: Mapping[str, Measure] = LENGTHS,
) -> Scored:
    """Of rows that differ in what they say. The scores of a pair differ by more than `margin`; of equally good answers those are taken that keep
    lengths even."""
    options: dict[str, list[ScoredPair]] = {}
    unused: list[Unused] = []
    for row, samples in scored:
        reason = _unfit(row.place, samples, margin)
        if reason:
            unused.append(Unused(place=row.place, reason=reason))
        else:
            options[content_key(row)] = _best_against_worst(row, samples)
    pairs = _even(options, lengths, seed)
    sides = [
        Sides(row=content_key(pair.row), chosen=pair.chosen.answer, rejected=pair.rejected.answer) for pair in pairs
    ]
    return Scored(pairs=tuple(pairs), unused=tuple(unused), audit=audit(sides, lengths))


def _unfit(place: str, samples: Sequence[Sample], margin: float) -> str | None:
    if any(not math.isfinite(sample.score) for sample in samples):
        raise DataError(
            f"{place} has an answer whose score is no number, so the best cannot be told",
            "score every answer; a failed one counts zero",
        )
    if len(samples) < 2:
        return f"has {len(samples)} sampled answers, and a pair needs two"
    best, worst = (pick(sample.score for sample in samples) for pick in (max, min))
    if best - worst <= margin:
        return f"has scores from {worst:g} to {best:g}, which differ by no more than {margin:g}"
    return None if _couples(samples) else "has a best and a worst answer that read the same, or one that is empty"


def _best_against_worst(row: Row, samples: Sequence[Sample]) -> list[ScoredPair]:
    return [ScoredPair(row=row, chosen=one, rejected=other) for one, other in _couples(samples)]


def _couples(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Every best one with every worst one that reads differently."""
    best, worst = (pick(sample.score for sample in samples) for pick in (max, min))
    sides = (
        [sample for sample in samples if sample.score == score and sample.answer.strip()] for score in (best, worst)
    )
    couples = product(*(sorted(side, key=lambda sample: sample.answer) for side in sides))
    return [(one, other) for one, other in couples if normalise(one.answer) != normalise(other.answer)]


def _even(options: Mapping[str, Sequence[ScoredPair]], lengths: Mapping[str, Measure], seed: int) -> list[ScoredPair]:
    order = sorted(options)
    choices: list[list[Counts]] = [
        [length_counts(pair.chosen.answer, pair.rejected.answer, lengths) for pair in options[key]] for key in order
    ]
    weights = {name: 1.0 for row in choices for option in row for name in option}
    taken = dict(zip(order, balance(choices, targets={}, weights=weights, chance=seeded(seed, "scored")), strict=True))
    return [options[key][taken[key]] for key in options]
