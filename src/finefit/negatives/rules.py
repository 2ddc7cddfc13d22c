"""The rules that make one thing in an answer false: another entity, another number, a negation, a fabricated sentence.
What they make of a row is a pure function of seed, row and lexicon."""

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Literal

from finefit.data.fingerprint import normalise
from finefit.negatives.lexicon import (
    RuleContext,
    Sentence,
    Span,
    Term,
    Words,
    cased_like,
    gap_before,
    sentences_of,
    terms_of,
    with_article,
)
from finefit.negatives.negation import inversions_of

RuleName = Literal["entity", "number", "negation", "fabrication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsified:
    """`before`, at character `at` of the answer, became `after`; everything else is unchanged."""

    answer: str
    rule: RuleName
    before: str
    after: str
    at: int

    @property
    def text(self) -> str:
        return self.answer[: self.at] + self.after + self.answer[self.at + len(self.before) :]


Rule = Callable[[str, RuleContext, random.Random], Falsified | None]
"""Makes one thing in an answer false; None where it finds nothing to change."""


# Entities: a term of the answer is replaced by another of its kind that the row does not mention

_TERM_DRAWS = 40
_ENOUGH = 4
"""Different terms of a kind in the corpus, from which on the lists are not used: their words would all be on one
side."""


def swap_entity(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    terms = terms_of(answer, context.words)
    for term in chance.sample(terms, len(terms)):
        for other in _drawn(term, context, chance):  # of similar length, and not mentioned in the row
            if abs(len(other) - len(term.text)) <= max(3, len(term.text) // 2) and not context.source.holds(other):
                at, before, after = with_article(answer, term.at, term.end, cased_like(other, term.text))
                return Falsified(answer=answer, rule="entity", before=before, after=after, at=at)
    return None


def _drawn(term: Term, context: RuleContext, chance: random.Random) -> Iterator[str]:
    """Terms of the same kind: first as often as the rows have them, then each once; also those of the lists where the
    rows have few."""
    ours = context.lexicon.terms.get(term.kind, ())
    known = sorted(set(ours))
    if len(known) < _ENOUGH and term.kind in context.words.kinds:
        known = sorted({*known, *context.words.kinds[term.kind].words})
    else:
        yield from (chance.choice(ours) for _ in range(_TERM_DRAWS) if ours)
    yield from chance.sample(known, len(known))


# Numbers: a number becomes another one of the same form: digits, decimals, separators, sign, unit and roundness stay,
# and years stay years

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.?[0-9]+)"
_NUMBER = re.compile(rf"(?<![\w.,/:\[#])(?<![^\W\d][-–]){_DIGITS}(?![.,:/]\d)(?!\d)")
_RANGE = re.compile(rf"(?P<low>{_DIGITS})(?P<sign>\s?%)?\s?(?:-|–|to)\s?(?P<high>{_DIGITS})")
_BEHIND = re.compile(r"(?P<percent>\s?%)|-?(?P<unit>[A-Za-z]+)")
_FOLLOWS = re.compile(r"\s?%?\s*([A-Za-z]+)")
_DATE = re.compile(r"\d+[-/]\d+[-/]\d+")
_TRIES = 60
_YEARS = range(1900, 2051)
_LEAST_CHANGE = 0.15
_FARTHEST = 3.0
"""Factor, up or down: a number stays plausible."""


@dataclass(frozen=True, slots=True)
class Number:
    text: str
    at: int
    least: float
    most: float
    """A new value stays between these: a share is at most 100, and the ends of a range stay in their order."""
    is_year: bool

    @property
    def value(self) -> float:
        return _value(self.text)


def change_number(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    numbers = numbers_of(answer, context.words)
    for number in chance.sample(numbers, len(numbers)):
        for _ in range(_TRIES):
            other = _changed(number, chance)
            if other is not None and not context.source.holds(other) and not context.source.holds(f"{other}%"):
                return Falsified(answer=answer, rule="number", before=number.text, after=other, at=number.at)
    return None


@lru_cache(maxsize=64)
def numbers_of(text: str, words: Words) -> tuple[Number, ...]:
    """Quantities and years; not the numbers in names, dates and confidence levels."""
    within_dates = {at for found in _DATE.finditer(text) for at in range(*found.span())}
    ranges = _ranges(text)
    found = (
        _number(text, match, ranges, words) for match in _NUMBER.finditer(text) if match.start() not in within_dates
    )
    return tuple(number for number in found if number is not None)


def _ranges(text: str) -> dict[int, tuple[float, float]]:
    """By the place of each end of a range, the values between which it keeps the order."""
    bounds: dict[int, tuple[float, float]] = {}
    for span in _RANGE.finditer(text):
        low, high = (_value(span[name]) for name in ("low", "high"))
        if low < high:
            bounds[span.start("low")], bounds[span.start("high")] = (0.0, high), (low, math.inf)
    return bounds


def _number(text: str, found: re.Match[str], ranges: dict[int, tuple[float, float]], words: Words) -> Number | None:
    behind = _BEHIND.match(text, found.end())
    unit = (behind["unit"] or "").lower() if behind else ""
    follows = _FOLLOWS.match(text, found.end())
    if (unit and unit not in words.numbers.units) or (follows and follows[1].lower() in words.numbers.fixed):
        return None
    value = _value(found[0])
    least, most = ranges.get(found.start(), (0.0, math.inf))
    is_percent = bool(behind and behind["percent"])
    if is_percent and value <= 100:
        most = min(most, 100.0)
    is_year = value in _YEARS and found[0].isdecimal() and not is_percent and not unit
    return Number(found[0], found.start(), least, most, is_year)


def _changed(number: Number, chance: random.Random) -> str | None:
    """None where the draw cannot be used."""
    if number.is_year:
        year = int(number.value) + chance.choice((-1, 1)) * chance.randint(1, 12)
        return str(year) if number.least < year < number.most and year in _YEARS else None
    other = _redrawn(number.text, chance)
    value, old = _value(other), number.value
    is_near = old == 0 or (max(value, old) <= _FARTHEST * min(value, old) and abs(value - old) >= _LEAST_CHANGE * old)
    return other if other != number.text and is_near and number.least < value < number.most else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _redrawn(text: str, chance: random.Random) -> str:
    """Other digits between the leading and the trailing zeros, so that a probability stays below 1; a last 5 stays, as
    in rounded numbers."""
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    telling = [at for at in digits if text[at] != "0"] or digits[-1:]
    first, last = telling[0], telling[-1]
    new = list(text)
    for at in digits:
        if first <= at <= last and not (at == last > first and text[at] == "5"):
            new[at] = chance.choice("123456789" if at in (first, last) else "0123456789")
    return "".join(new)


# Fabrication: a sentence of another answer, made to mention this row's terms, is put between its sentences or in place
# of one

_SENTENCE_DRAWS = 24
_NEAREST = 6
_LEAST_NEW = 1 / 3
"""Share of the longer words that the row lacks: with fewer the sentence may well be true of the row."""


def fabricate(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    spans = sentences_of(answer, context.words)
    sentence = _foreign_sentence(context, chance)
    if sentence is None or not spans:
        return None
    sentence = _about_this_row(sentence, answer, context, chance)
    if len(spans) > 1 and chance.random() < 0.5:
        span = chance.choice(spans)
        return Falsified(answer=answer, rule="fabrication", before=span.text, after=sentence, at=span.start)
    # nothing can follow a last sentence without an end
    return _inserted(answer, spans, sentence, chance.randint(0, len(spans) - (spans[-1].text[-1] not in ".!?")))


def _inserted(answer: str, spans: tuple[Span, ...], sentence: str, place: int) -> Falsified:
    """Before the sentence at that place; the last place is the end."""
    gap = gap_before(answer, spans)
    if place == len(spans):
        return Falsified(answer=answer, rule="fabrication", before="", after=gap + sentence, at=spans[-1].end)
    return Falsified(answer=answer, rule="fabrication", before="", after=sentence + gap, at=spans[place].start)


def _foreign_sentence(context: RuleContext, chance: random.Random) -> str | None:
    """One of those nearest to the row, so that it is not out of place."""
    every = context.lexicon.sentences
    drawn = {sentence.text: sentence for sentence in (chance.choice(every) for _ in range(_SENTENCE_DRAWS) if every)}
    known = context.source.words

    def is_new(sentence: Sentence) -> bool:
        return len(sentence.content - known) >= max(2, _LEAST_NEW * len(sentence.content))

    def nearness(sentence: Sentence) -> float:
        return len(sentence.content & known) / len(sentence.content)

    fitting = filter(is_new, drawn.values())
    nearest = sorted(fitting, key=lambda sentence: (-nearness(sentence), sentence.text))[:_NEAREST]
    return chance.choice(nearest).text if nearest else None


def _about_this_row(sentence: str, answer: str, context: RuleContext, chance: random.Random) -> str:
    """With the answer's names and acronyms in place of the sentence's, each at most once."""
    own = {kind: chance.sample(found, len(found)) for kind, found in _names_in(answer, context).items()}
    instead = {
        name: own[kind].pop() for kind, found in _names_in(sentence, context).items() for name in found if own.get(kind)
    }
    if not instead:
        return sentence
    pattern = "|".join(map(re.escape, sorted(instead, key=lambda text: (-len(text), text))))
    return re.sub(rf"(?<![\w-])(?:{pattern})(?![\w-])", lambda found: instead[found[0]], sentence)


def _names_in(text: str, context: RuleContext) -> dict[str, list[str]]:
    """By kind, each once, without the words of the lists."""
    found: dict[str, list[str]] = {}
    for term in terms_of(text, context.words):
        if term.kind not in context.words.kinds and term.text not in found.setdefault(term.kind, []):
            found[term.kind].append(term.text)
    return found


# Options: everything that the rules can make of one row's answer


def invert(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    found = inversions_of(answer, context.words)
    if not found:
        return None
    taken = chance.choice(found)
    return Falsified(answer=answer, rule="negation", before=taken.before, after=taken.after, at=taken.at)


RULES: Final[Mapping[RuleName, Rule]] = {
    "entity": swap_entity,
    "number": change_number,
    "negation": invert,
    "fabrication": fabricate,
}
_RULE_DRAWS = 12
"""Of each rule; balancing chooses among them."""


def options_of(
    answer: str, context: RuleContext, rules: tuple[RuleName, ...], *, seed: int, key: str
) -> list[Falsified]:
    """Each once. `key` is the row's content."""
    found: dict[tuple[str, str, int], Falsified] = {}
    for name in rules:
        chance = seeded(seed, name, key)
        for _ in range(_RULE_DRAWS):
            option = RULES[name](answer, context, chance)
            if option is None:
                break
            if is_wrong(option, context):
                found.setdefault((option.before, option.after, option.at), option)
    return list(found.values())


def is_wrong(option: Falsified, context: RuleContext) -> bool:
    """It differs in more than white space, case and punctuation, and is not a right answer of any row."""
    text = normalise(option.text)
    return (
        normalise(option.before) != normalise(option.after)
        and text != normalise(option.answer)
        and text not in context.lexicon.right
    )


def seeded(seed: int, *parts: str) -> random.Random:
    digest = blake2b("\x1f".join((str(seed), *parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))
