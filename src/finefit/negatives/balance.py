"""Pairs whose sides cannot be told apart by length or words alone: options are chosen to that end, and the result is
audited.

The audit asks each classifier two questions: which side of a pair is wrong (`within`), and whether a side by itself is
wrong (`across`). Words are weighed by naive Bayes on four fifths of the rows and tested on the last fifth; both sides
of a row's pairs are in the same fifth.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from finefit.negatives.lexicon import words_of
from finefit.negatives.rules import Falsified, RuleName, seeded

Measure = Callable[[str], int]
Counts = Mapping[Hashable, float]
Scores = NDArray[np.float64]

LENGTH_LIMIT, WORDS_LIMIT = 0.6, 0.8
_SIDES = ("rejected", "chosen")
_FOLDS = 5
_FEWEST = 30
"""With fewer pairs, a guess is often right by chance."""
_SMOOTHING = 0.5
_MAX_SWEEPS = 8
_SHARED = 3
"""The number of rows whose options must contain a word before its side matters."""
_LENGTH, _WORD, _RULE = 2.0, 1.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    row: str
    """The same key for pairs that must not be separated."""
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Auc:
    """0.5 is a guess, 1 is certainty. Words may score below 0.5, if what was learnt from some rows misleads about
    others. That is common here: a term that is put into other answers was taken from the few that have it."""

    within: float
    across: float

    @property
    def worst(self) -> float:
        return max(self.within, self.across)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Pairs whose lengths differ by more than half of `up_to` and at most by `up_to`."""

    up_to: int
    longer: int
    shorter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAudit:
    pairs: int
    length: Mapping[str, Auc]
    """Keyed by measure."""
    words: Auc
    sizes: tuple[LengthBucket, ...]
    """Buckets of the first measure, without pairs of equal length."""
    warnings: tuple[str, ...]


def audit(sides: Sequence[Sides], measures: Mapping[str, Measure]) -> PairAudit | None:
    if not sides:
        return None
    length, sizes = dict[str, Auc](), Counter[tuple[int, bool]]()
    for name, measure in measures.items():
        rejected, chosen = (np.array([measure(getattr(pair, side)) for pair in sides], float) for side in _SIDES)
        within, across = _within(rejected, chosen), _area(rejected, chosen)
        # nothing is learnt here: it does not matter whether the longer or the shorter side is wrong
        length[name] = Auc(within=max(within, 1 - within), across=max(across, 1 - across))
        if len(length) == 1:
            sizes.update((bucket_of(int(by)), bool(by > 0)) for by in rejected - chosen if by)
    # within a pair only the words that differ count; across sides all of them do
    bags = [(Counter(words_of(pair.rejected)), Counter(words_of(pair.chosen))) for pair in sides]
    changed = [(rejected - chosen, chosen - rejected) for rejected, chosen in bags]
    folds = np.array([fold_of(pair.row) for pair in sides])
    words = Auc(within=_within(*_scored(changed, folds)), across=_area(*_scored(bags, folds)))
    return PairAudit(
        pairs=len(sides),
        length=length,
        words=words,
        sizes=tuple(
            LengthBucket(up_to=size, longer=sizes[size, True], shorter=sizes[size, False])
            for size in sorted({size for size, _ in sizes})
        ),
        warnings=tuple(_warnings(len(sides), length, words)),
    )


def bucket_of(difference: int) -> int:
    """The smallest power of two that is at least the difference."""
    return 1 << (abs(difference) - 1).bit_length()


def _warnings(num_pairs: int, length: Mapping[str, Auc], words: Auc) -> Iterator[str]:
    if num_pairs < _FEWEST:
        few = f"{num_pairs} pairs are too few to say whether their sides can be told apart by length or words"
        yield f"{few}; {_FEWEST} or more are needed"
        return
    told_apart = f"the sides of the {num_pairs} pairs can be told apart by"
    for name, auc in length.items():
        if auc.worst > LENGTH_LIMIT:
            problem = f"{told_apart} their number of {name} (AUC {auc.worst:.2f}, at most {LENGTH_LIMIT} is wanted)"
            yield f"{problem}, so training may learn to prefer a length: give more rows, or allow more rules"
    if words.worst > WORDS_LIMIT:
        problem = f"{told_apart} single words (AUC {words.worst:.2f}, at most {WORDS_LIMIT} is wanted)"
        remedy = "give more rows, allow more rules, or add opposites to the word lists"
        yield f"{problem}, so training may learn to prefer words, whatever they say: {remedy}"


def _scored(bags: Sequence[tuple[Counter[str], Counter[str]]], folds: NDArray[np.int64]) -> tuple[Scores, Scores]:
    """How wrong each side looks, judged by what was learnt from the other folds."""
    scores = np.zeros((2, len(bags)))
    for fold in np.unique(folds):
        wrong, right = Counter[str](), Counter[str]()
        for at in map(int, np.flatnonzero(folds != fold)):
            wrong.update(bags[at][0])
            right.update(bags[at][1])
        words = wrong.keys() | right.keys()
        of_right, of_wrong = (sum(side.values()) + _SMOOTHING * len(words) + 1 for side in (right, wrong))
        shift = math.log(of_right / of_wrong)
        learnt = {  # the log-odds of each word, smoothed
            word: math.log((wrong[word] + _SMOOTHING) / (right[word] + _SMOOTHING)) + shift for word in words
        }
        for at in map(int, np.flatnonzero(folds == fold)):
            scores[:, at] = [sum(learnt.get(word, 0.0) * count for word, count in side.items()) for side in bags[at]]
    return scores[0], scores[1]


def _within(rejected: Scores, chosen: Scores) -> float:
    """The share of pairs whose wrong side scores higher; ties count half."""
    return float(np.mean((rejected > chosen) + 0.5 * (rejected == chosen)))


def _area(above: Scores, below: Scores) -> float:
    """The share of all combinations in which the first is greater, ties counting half: the area under the ROC curve."""
    ordered = np.sort(below)
    smaller, up_to = (np.searchsorted(ordered, above, side).sum() for side in ("left", "right"))
    return float((smaller + up_to) / 2 / (len(above) * len(below)))


def fold_of(row: str) -> int:
    return blake2b(row.encode("utf-8", "surrogatepass"), digest_size=4).digest()[0] % _FOLDS


def balance(
    choices: Sequence[Sequence[Counts]], *, targets: Counts, weights: Counts, chance: random.Random
) -> list[int]:
    """The index of the option taken in each choice, for the smallest sum of squared distances of the counts from their
    targets: choices are revised one by one until none changes. The default target is 0; a count without a weight is
    ignored."""
    choices = [
        [{name: count for name, count in option.items() if name in weights} for option in options]
        for options in choices
    ]
    taken = [chance.randrange(len(options)) for options in choices]
    off: defaultdict[Hashable, float] = defaultdict(float, {name: -target for name, target in targets.items()})
    for options, at in zip(choices, taken, strict=True):
        _add(off, options[at])
    for _ in range(_MAX_SWEEPS):
        changed = False
        for choice, options in enumerate(choices):
            _add(off, options[taken[choice]], -1)
            # what each option adds to the sum of squares
            costs = [
                sum(weights[name] * count * (2 * off[name] + count) for name, count in option.items())
                for option in options
            ]
            best = min(range(len(options)), key=lambda at: (costs[at], at != taken[choice]))
            changed |= best != taken[choice]
            taken[choice] = best
            _add(off, options[best])
        if not changed:
            break
    return taken


def _add(total: defaultdict[Hashable, float], counts: Counts, sign: int = 1) -> None:
    for name, count in counts.items():
        total[name] += sign * count


def take_evenly(
    options: Mapping[str, Sequence[Falsified]],
    *,
    shares: Mapping[RuleName, float],
    per_row: int,
    lengths: Mapping[str, Measure],
    seed: int,
) -> dict[str, list[Falsified]]:
    """The changes that are taken, by the key of a row: up to `per_row` each, by different rules. The order of rows does
    not matter.

    No length and no word should be more common on one side than on the other. Words are made as even as a fair coin
    would leave them, and no more: if they were exactly even, the rows that a classifier has not seen would have what
    the others lack, and it would be wrong more often than a guess."""
    left = {
        key: [(change, _counts(change, lengths)) for change in options[key]] for key in sorted(options) if options[key]
    }
    taken: dict[str, list[Falsified]] = {key: [] for key in left}
    owed: defaultdict[Hashable, float] = defaultdict(float)
    for turn in range(per_row):
        chance = seeded(seed, f"turn {turn}")
        left = {key: rest for key, rest in left.items() if rest}
        choices = [[counts for _, counts in rest] for rest in left.values()]
        _add(owed, _wanted(choices, shares, chance))
        chosen = balance(choices, targets=owed, weights=_count_weights(choices), chance=chance)
        for (key, rest), at in zip(left.items(), chosen, strict=True):
            change, counts = rest[at]
            taken[key].append(change)
            _add(owed, counts, -1)
            left[key] = [other for other in rest if other[0].rule != change.rule]
    return taken


def length_counts(answer: str, text: str, lengths: Mapping[str, Measure]) -> Counts:
    """The sign of the difference in length, overall and within its bucket."""
    counts: dict[Hashable, float] = {}
    for name, measure in lengths.items():
        difference = measure(text) - measure(answer)
        if difference:
            counts[name, 0] = counts[name, bucket_of(difference)] = math.copysign(1.0, difference)
    return counts


def _counts(change: Falsified, lengths: Mapping[str, Measure]) -> Counts:
    """The counts of a change: its rule, its length, and the words that it adds and removes."""
    added = Counter(words_of(change.after))
    added.subtract(words_of(change.before))
    words: dict[Hashable, float] = {("word", word): float(count) for word, count in added.items() if count}
    return {change.rule: 1.0, **length_counts(change.answer, change.text, lengths), **words}


def _wanted(choices: Sequence[Sequence[Counts]], shares: Mapping[RuleName, float], chance: random.Random) -> Counts:
    """The targets: rules in their shares, lengths even, words as even as a fair coin leaves them."""
    spread: defaultdict[Hashable, float] = defaultdict(float)
    for options in choices:
        for option in options:
            for name, count in option.items():
                spread[name] += count * count / len(options)
    words = {
        name: chance.gauss(0, math.sqrt(spread[name]))
        for name in sorted(name for name in spread if _is_word(name))  # type: ignore[type-var]
    }
    return words | {rule: len(choices) * share / sum(shares.values()) for rule, share in shares.items()}


def _count_weights(choices: Iterable[Sequence[Counts]]) -> Counts:
    rows: Counter[Hashable] = Counter()
    for options in choices:
        rows.update({name for option in options for name in option})

    def weight(name: Hashable) -> float:
        return _RULE if not isinstance(name, tuple) else _WORD if _is_word(name) else _LENGTH

    return {name: weight(name) for name, num_rows in rows.items() if num_rows >= _SHARED or not _is_word(name)}


def _is_word(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[0] == "word"
