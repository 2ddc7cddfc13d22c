"""Whether the sides of made pairs can be told apart without knowing anything: by their length alone, or by their words alone.

Each classifier is asked two ways: which side of a pair is the wrong one (`within`), and whether a side by itself is (`across`).
Words are weighed by naive Bayes on four fifths of the rows and asked on the last fifth; both sides of a row's pairs are in one fifth.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from finefit.data.falsify.sentences import words_of

Measure = Callable[[str], int]
Scores = NDArray[np.float64]

LENGTH_LIMIT, WORDS_LIMIT = 0.6, 0.8
_FOLDS = 5
_FEWEST = 30
"""Pairs, below which a guess is often right by chance."""
_SMOOTHING = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Two answers of a row."""

    row: str
    """Equal for pairs that must not be parted."""
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Auc:
    """0.5 is a guess, 1 is certainty. Words may come out below 0.5: then what was learnt from some rows misleads about others, and is no way out.
    That is usual here, for a term that is put into other answers has been taken, if at all, from the few that have it."""

    within: float
    across: float

    @property
    def worst(self) -> float:
        return max(self.within, self.across)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Pairs whose sides differ by more than half of `up_to` and no more than it."""

    up_to: int
    longer: int
    """Wrong sides that are so."""
    shorter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    pairs: int
    length: Mapping[str, Auc]
    """By measure."""
    words: Auc
    sizes: tuple[Size, ...]
    """By the first measure; pairs of equal length are in none."""
    warnings: tuple[str, ...]


def audit(sides: Sequence[Sides], measures: Mapping[str, Measure]) -> Audit | None:
    """None where there is nothing to tell apart."""
    if not sides:
        return None
    length = {name: _by_length(sides, measure) for name, measure in measures.items()}
    words = _by_words(sides)
    return Audit(
        pairs=len(sides),
        length=length,
        words=words,
        sizes=_sizes(sides, next(iter(measures.values()))),
        warnings=tuple(_warnings(len(sides), length, words)),
    )


def _sizes(sides: Sequence[Sides], measure: Measure) -> tuple[Size, ...]:
    differences = [measure(pair.rejected) - measure(pair.chosen) for pair in sides]
    longer, shorter = (
        Counter(size_of(difference) for difference in differences if sign * difference > 0) for sign in (1, -1)
    )
    return tuple(
        Size(up_to=size, longer=longer[size], shorter=shorter[size]) for size in sorted(longer.keys() | shorter.keys())
    )


def size_of(difference: int) -> int:
    """The power of two that it reaches."""
    return 1 << (abs(difference) - 1).bit_length()


def _warnings(num_pairs: int, length: Mapping[str, Auc], words: Auc) -> list[str]:
    if num_pairs < _FEWEST:
        return [
            f"{num_pairs} pairs are too few to say whether their sides can be told by length or words; {_FEWEST} or more are needed"
        ]
    found = [
        f"the sides of the {num_pairs} pairs can be told by their number of {name} (AUC {auc.worst:.2f}, at most {LENGTH_LIMIT} is wanted)"
        ", so training may learn to prefer a length: give more rows, or allow more rules"
        for name, auc in length.items()
        if auc.worst > LENGTH_LIMIT
    ]
    if words.worst > WORDS_LIMIT:
        found.append(
            f"the sides of the {num_pairs} pairs can be told by single words (AUC {words.worst:.2f}, at most {WORDS_LIMIT} is wanted)"
            ", so training may learn to prefer words, whatever they say: give more rows, allow more rules, or add opposites to the word lists"
        )
    return found


def _by_length(sides: Sequence[Sides], measure: Measure) -> Auc:
    rejected, chosen = (np.array([measure(text) for text in texts], float) for texts in _both(sides))
    within, across = _within(rejected, chosen), _area(rejected, chosen)
    # nothing is learnt here: whether the longer or the shorter side is wrong makes no difference
    return Auc(within=max(within, 1 - within), across=max(across, 1 - across))


def _by_words(sides: Sequence[Sides]) -> Auc:
    """Within a pair only the words that differ are weighed; across sides all of them are."""
    bags = [(Counter(words_of(pair.rejected)), Counter(words_of(pair.chosen))) for pair in sides]
    changed = [(rejected - chosen, chosen - rejected) for rejected, chosen in bags]
    folds = np.array([_fold(pair.row) for pair in sides])
    return Auc(within=_within(*_scored(changed, folds)), across=_area(*_scored(bags, folds)))


def _scored(bags: Sequence[tuple[Counter[str], Counter[str]]], folds: NDArray[np.int64]) -> tuple[Scores, Scores]:
    """How wrong each side looks by what other rows have taught."""
    scores = np.zeros((2, len(bags)))
    for fold in np.unique(folds):
        learnt = _weights([bag for bag, own in zip(bags, folds, strict=True) if own != fold])
        for at in map(int, np.flatnonzero(folds == fold)):
            scores[:, at] = [sum(learnt.get(word, 0.0) * count for word, count in side.items()) for side in bags[at]]
    return scores[0], scores[1]


def _weights(bags: Sequence[tuple[Counter[str], Counter[str]]]) -> dict[str, float]:
    """Log-odds of each word, smoothed."""
    wrong, right = (Counter[str](), Counter[str]())
    for rejected, chosen in bags:
        wrong.update(rejected)
        right.update(chosen)
    words = wrong.keys() | right.keys()
    shift = math.log(
        (sum(right.values()) + _SMOOTHING * len(words) + 1) / (sum(wrong.values()) + _SMOOTHING * len(words) + 1)
    )
    return {word: math.log((wrong[word] + _SMOOTHING) / (right[word] + _SMOOTHING)) + shift for word in words}


def _within(rejected: Scores, chosen: Scores) -> float:
    """The share of pairs whose wrong side scores higher, ties half."""
    return float(np.mean((rejected > chosen) + 0.5 * (rejected == chosen)))


def _area(above: Scores, below: Scores) -> float:
    """The share of all couples in which the first is greater, ties half: the area under the ROC curve."""
    ordered = np.sort(below)
    smaller, up_to = (np.searchsorted(ordered, above, side).sum() for side in ("left", "right"))
    return float((smaller + up_to) / 2 / (len(above) * len(below)))


def _both(sides: Sequence[Sides]) -> tuple[list[str], list[str]]:
    return [pair.rejected for pair in sides], [pair.chosen for pair in sides]


def _fold(row: str) -> int:
    return blake2b(row.encode("utf-8", "surrogatepass"), digest_size=4).digest()[0] % _FOLDS
