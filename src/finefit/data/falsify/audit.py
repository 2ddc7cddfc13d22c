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
    """0.5 is a guess, 1 is certainty; below 0.5 what was learnt misleads."""

    within: float
    across: float

    @property
    def worst(self) -> float:
        """From 0.5 to 1, whichever way it leads."""
        return max(self.within, 1 - self.within, self.across, 1 - self.across)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    pairs: int
    length: Mapping[str, Auc]
    """By measure."""
    words: Auc
    longer: int
    shorter: int
    """Pairs whose wrong side is so, by the first measure."""
    warnings: tuple[str, ...]


def audit(sides: Sequence[Sides], measures: Mapping[str, Measure]) -> Audit | None:
    """None where there is nothing to tell apart."""
    if not sides:
        return None
    length = {name: _by_length(sides, measure) for name, measure in measures.items()}
    words = _by_words(sides)
    first = next(iter(measures.values()))
    differences = [first(pair.rejected) - first(pair.chosen) for pair in sides]
    return Audit(
        pairs=len(sides),
        length=length,
        words=words,
        longer=sum(difference > 0 for difference in differences),
        shorter=sum(difference < 0 for difference in differences),
        warnings=tuple(_warnings(len(sides), length, words)),
    )


def _warnings(num_pairs: int, length: Mapping[str, Auc], words: Auc) -> list[str]:
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
    return _auc(rejected, chosen, rejected, chosen)


def _by_words(sides: Sequence[Sides]) -> Auc:
    """Within a pair only the words that differ are weighed; across sides all of them are."""
    bags = [(Counter(words_of(pair.rejected)), Counter(words_of(pair.chosen))) for pair in sides]
    changed = [(rejected - chosen, chosen - rejected) for rejected, chosen in bags]
    folds = np.array([_fold(pair.row) for pair in sides])
    return _auc(*_scored(changed, folds), *_scored(bags, folds))


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
    shift = math.log((sum(right.values()) + _SMOOTHING * len(words) + 1) / (sum(wrong.values()) + _SMOOTHING * len(words) + 1))
    return {word: math.log((wrong[word] + _SMOOTHING) / (right[word] + _SMOOTHING)) + shift for word in words}


def _auc(rejected: Scores, chosen: Scores, rejected_alone: Scores, chosen_alone: Scores) -> Auc:
    within = float(np.mean((rejected > chosen) + 0.5 * (rejected == chosen)))
    return Auc(within=within, across=_area(rejected_alone, chosen_alone))


def _area(above: Scores, below: Scores) -> float:
    """The share of all couples in which the first is greater, ties half: the area under the ROC curve."""
    ordered = np.sort(below)
    smaller, up_to = (np.searchsorted(ordered, above, side).sum() for side in ("left", "right"))
    return float((smaller + up_to) / 2 / (len(above) * len(below)))


def _both(sides: Sequence[Sides]) -> tuple[list[str], list[str]]:
    return [pair.rejected for pair in sides], [pair.chosen for pair in sides]


def _fold(row: str) -> int:
    return blake2b(row.encode("utf-8", "surrogatepass"), digest_size=4).digest()[0] % _FOLDS
