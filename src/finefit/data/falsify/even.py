"""Which of a row's options are taken: those that leave no length and no word more often on one side than on the other, over all rows.

Words are made as even as a fair coin would have left them, not more: of words that are exactly even, what some rows lack the others have,
and a classifier that has seen the first would be wrong on the second more often than a guess.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from finefit.data.falsify.audit import Measure, size_of
from finefit.data.falsify.balance import Counts, balance
from finefit.data.falsify.falsified import Falsified, RuleName
from finefit.data.falsify.options import seeded
from finefit.data.falsify.sentences import words_of

_SHARED = 3
"""Rows whose options have a word, before it matters on which side the word stands."""
_LENGTH, _WORD, _RULE = 2.0, 1.0, 0.5
"""What an uneven count weighs."""


@dataclass(frozen=True, slots=True)
class _Option:
    change: Falsified
    counts: Counts


def take_evenly(
    options: Mapping[str, Sequence[Falsified]],
    *,
    shares: Mapping[RuleName, float],
    per_row: int,
    lengths: Mapping[str, Measure],
    seed: int,
) -> dict[str, list[Falsified]]:
    """By the key of a row; up to `per_row` changes each, by different rules. The order of rows makes no difference."""
    left = {
        key: [_Option(change, _counts(change, lengths)) for change in options[key]]
        for key in sorted(options)
        if options[key]
    }
    taken: dict[str, list[Falsified]] = {key: [] for key in left}
    owed: defaultdict[Hashable, float] = defaultdict(float)
    for turn in range(per_row):
        chance = seeded(seed, f"turn {turn}")
        left = {key: rest for key, rest in left.items() if rest}
        choices = [[option.counts for option in rest] for rest in left.values()]
        _add(owed, _wanted(choices, shares, chance))
        chosen = balance(choices, targets=owed, weights=_weights(choices), chance=chance)
        for (key, rest), at in zip(left.items(), chosen, strict=True):
            option = rest[at]
            taken[key].append(option.change)
            _add(owed, {name: -count for name, count in option.counts.items()})
            left[key] = [other for other in rest if other.change.rule != option.change.rule]
    return taken


def length_counts(answer: str, text: str, lengths: Mapping[str, Measure]) -> Counts:
    """Whether the text is longer or shorter than the answer: the sign, and the sign within the size of the difference."""
    counts: dict[Hashable, float] = {}
    for name, measure in lengths.items():
        difference = measure(text) - measure(answer)
        if difference:
            counts[name, 0] = counts[name, size_of(difference)] = math.copysign(1.0, difference)
    return counts


def _counts(change: Falsified, lengths: Mapping[str, Measure]) -> Counts:
    """Its rule, its length, and the words that it adds and takes."""
    added = Counter(words_of(change.after))
    added.subtract(words_of(change.before))
    words: dict[Hashable, float] = {("word", word): float(count) for word, count in added.items() if count}
    return {change.rule: 1.0, **length_counts(change.answer, change.text, lengths), **words}


def _wanted(choices: Sequence[Sequence[Counts]], shares: Mapping[RuleName, float], chance: random.Random) -> Counts:
    """Rules in their shares, lengths even, words as even as by a fair coin."""
    spread: defaultdict[Hashable, float] = defaultdict(float)
    for options in choices:
        for option in options:
            for name, count in option.items():
                spread[name] += count * count / len(options)
    words = {
        name: chance.gauss(0, math.sqrt(spread[name])) for name in sorted(name for name in spread if _is_word(name))
    }  # type: ignore[type-var]
    return words | {rule: len(choices) * share / sum(shares.values()) for rule, share in shares.items()}


def _weights(choices: Iterable[Sequence[Counts]]) -> Counts:
    rows: Counter[Hashable] = Counter()
    for options in choices:
        rows.update({name for option in options for name in option})
    return {name: _weight(name) for name, num_rows in rows.items() if num_rows >= _SHARED or not _is_word(name)}


def _weight(name: Hashable) -> float:
    return _RULE if not isinstance(name, tuple) else _WORD if _is_word(name) else _LENGTH


def _is_word(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[0] == "word"


def _add(total: defaultdict[Hashable, float], counts: Counts) -> None:
    for name, count in counts.items():
        total[name] += count
