"""The rules that make one thing in an answer false: another entity, another number, a negation, a fabricated sentence.
What they make of a row is a pure function of seed, row and lexicon."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from finefit.data.fingerprint import normalise
from finefit.negatives import lexicon
from finefit.negatives.lexicon import RuleContext, Words, cased_like, with_article

RuleName = Literal["entity", "number", "negation", "fabrication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsified:
    """At character `at` of the answer, `before` became `after`; everything else is unchanged."""

    answer: str
    rule: RuleName
    before: str
    after: str
    at: int

    @property
    def text(self) -> str:
        return self.answer[: self.at] + self.after + self.answer[self.at + len(self.before) :]


Rule = Callable[[str, RuleContext, random.Random], Falsified | None]
"""Makes one thing in an answer false; None if it finds nothing to change."""


_TERM_DRAWS = 40
_ENOUGH = 4
"""If the corpus has this many terms of a kind, the lists are not used, because their words would all be on one side."""


def swap_entity(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    """Replaces a term of the answer by another of its kind that the row does not mention."""
    terms = lexicon.terms_of(answer, context.words)
    for term in chance.sample(terms, len(terms)):
        for other in _terms_of_kind(term.kind, context, chance):
            if abs(len(other) - len(term.text)) <= max(3, len(term.text) // 2) and not context.source.holds(other):
                at, before, after = with_article(answer, term.start, term.end, cased_like(other, term.text))
                return Falsified(answer=answer, rule="entity", before=before, after=after, at=at)
    return None


def _terms_of_kind(kind: str, context: RuleContext, chance: random.Random) -> Iterator[str]:
    """Candidates weighted by frequency, then each once. If the rows have few, the lists are used too, and all
    candidates come once."""
    ours = context.lexicon.terms.get(kind, ())
    known = sorted(set(ours))
    if len(known) < _ENOUGH and kind in context.words.kinds:
        known = sorted({*known, *context.words.kinds[kind].words})
    else:
        yield from (chance.choice(ours) for _ in range(_TERM_DRAWS) if ours)
    yield from chance.sample(known, len(known))


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
"""The largest factor, up or down, so that a number stays plausible."""


@dataclass(frozen=True, slots=True)
class Number:
    text: str
    at: int
    least: float
    most: float
    """A new value stays within these limits: a share is at most 100, and the ends of a range stay in order."""
    is_year: bool


def change_number(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    """Replaces a number by one of the same form: decimals, separators, sign, unit and roundness stay, and years stay
    years."""
    numbers = numbers_of(answer, context.words)
    for number in chance.sample(numbers, len(numbers)):
        for _ in range(_TRIES):
            other = _changed(number, chance)
            if other is not None and not context.source.holds(other) and not context.source.holds(f"{other}%"):
                return Falsified(answer=answer, rule="number", before=number.text, after=other, at=number.at)
    return None


@lru_cache(maxsize=64)
def numbers_of(text: str, words: Words) -> tuple[Number, ...]:
    """Quantities and years, but not the numbers in names, dates and confidence levels."""
    within_dates = {at for found in _DATE.finditer(text) for at in range(*found.span())}
    bounds: dict[int, tuple[float, float]] = {}  # by the place of an end of a range: between them it keeps the order
    for span in _RANGE.finditer(text):
        low, high = (_value(span[name]) for name in ("low", "high"))
        if low < high:
            bounds[span.start("low")], bounds[span.start("high")] = (0.0, high), (low, math.inf)
    numbers = []
    for found in _NUMBER.finditer(text):
        behind, follows = _BEHIND.match(text, found.end()), _FOLLOWS.match(text, found.end())
        unit = (behind["unit"] or "").lower() if behind else ""
        is_other = (unit and unit not in words.numbers.units) or (follows and follows[1].lower() in words.numbers.fixed)
        if is_other or found.start() in within_dates:
            continue
        value, (least, most) = _value(found[0]), bounds.get(found.start(), (0.0, math.inf))
        is_percent = bool(behind and behind["percent"])
        if is_percent and value <= 100:
            most = min(most, 100.0)
        is_year = value in _YEARS and found[0].isdecimal() and not is_percent and not unit
        numbers.append(Number(found[0], found.start(), least, most, is_year))
    return tuple(numbers)


def _changed(number: Number, chance: random.Random) -> str | None:
    """Changes the digits between the leading and the trailing zeros, so that a probability stays below 1. A last 5
    stays, as in rounded numbers. None if the draw cannot be used."""
    text, old = number.text, _value(number.text)
    if number.is_year:
        year = int(old) + chance.choice((-1, 1)) * chance.randint(1, 12)
        return str(year) if number.least < year < number.most and year in _YEARS else None
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    telling = [at for at in digits if text[at] != "0"] or digits[-1:]
    first, last = telling[0], telling[-1]
    new = list(text)
    for at in digits:
        if first <= at <= last and not (at == last > first and text[at] == "5"):
            new[at] = chance.choice("123456789" if at in (first, last) else "0123456789")
    other = "".join(new)
    value = _value(other)
    is_near = old == 0 or (max(value, old) <= _FARTHEST * min(value, old) and abs(value - old) >= _LEAST_CHANGE * old)
    return other if other != text and is_near and number.least < value < number.most else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


_SENTENCE_DRAWS = 24
_NEAREST = 6
_LEAST_NEW = 1 / 3
"""At least this share of the longer words must be new to the row; with fewer, the sentence may well be true of the
row."""


def fabricate(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    """Adds a sentence of another answer, changed to mention this row's terms, or puts it in place of one."""
    spans = lexicon.sentences_of(answer, context.words)
    sentence = _foreign_sentence(context, chance)
    if sentence is None or not spans:
        return None
    sentence = _about_this_row(sentence, answer, context, chance)
    if len(spans) > 1 and chance.random() < 0.5:
        span = chance.choice(spans)
        return Falsified(answer=answer, rule="fabrication", before=span.text, after=sentence, at=span.start)
    # what separates the sentences; nothing can follow a last sentence without an end
    gap = next((answer[one.end : other.start] for one, other in pairwise(spans)), " ")
    place = chance.randint(0, len(spans) - (spans[-1].text[-1] not in ".!?"))
    is_last = place == len(spans)
    after, at = (gap + sentence, spans[-1].end) if is_last else (sentence + gap, spans[place].start)
    return Falsified(answer=answer, rule="fabrication", before="", after=after, at=at)


def _foreign_sentence(context: RuleContext, chance: random.Random) -> str | None:
    """One of the sentences nearest to the row, so that it fits in."""
    every = context.lexicon.sentences
    drawn = {sentence.text: sentence for sentence in (chance.choice(every) for _ in range(_SENTENCE_DRAWS) if every)}
    known = context.source.words

    def farness(sentence: lexicon.Sentence) -> tuple[float, str]:
        return -len(sentence.content & known) / len(sentence.content), sentence.text

    new = (one for one in drawn.values() if len(one.content - known) >= max(2, _LEAST_NEW * len(one.content)))
    nearest = sorted(new, key=farness)[:_NEAREST]
    return chance.choice(nearest).text if nearest else None


def _about_this_row(sentence: str, answer: str, context: RuleContext, chance: random.Random) -> str:
    """The sentence with its names and acronyms replaced by the answer's, each used at most once."""
    own = {kind: chance.sample(found, len(found)) for kind, found in _names_in(answer, context).items()}
    instead = {
        name: own[kind].pop() for kind, found in _names_in(sentence, context).items() for name in found if own.get(kind)
    }
    if not instead:
        return sentence
    pattern = "|".join(map(re.escape, sorted(instead, key=lambda text: (-len(text), text))))
    return re.sub(rf"(?<![\w-])(?:{pattern})(?![\w-])", lambda found: instead[found[0]], sentence)


def _names_in(text: str, context: RuleContext) -> dict[str, list[str]]:
    """Names by kind, each once, without the words of the lists."""
    found: dict[str, list[str]] = {}
    for term in lexicon.terms_of(text, context.words):
        if term.kind not in context.words.kinds and term.text not in found.setdefault(term.kind, []):
            found[term.kind].append(term.text)
    return found


_AFTER_NOUN = (
    "in of on between for to that with and or at from by among as than when after during was were is are has have had"
)
_ENDS_NOUN = frozenset(_AFTER_NOUN.split())
_PHRASE = re.compile(r"[a-z][\w-]*", re.IGNORECASE)
_NOT = r"(?: not|not|n['’]t|['’]t)"
_CONTRACTED = re.compile(r"n['’]t\b")
_MOST_WORDS = 3


class Inversion(NamedTuple):
    at: int
    before: str
    after: str


def invert(answer: str, context: RuleContext, chance: random.Random) -> Falsified | None:
    """Denies what an answer affirms and the other way round, by `not`, by `no` and by opposites."""
    found = inversions_of(answer, context.words)
    return Falsified(answer=answer, rule="negation", **chance.choice(found)._asdict()) if found else None


@lru_cache(maxsize=64)
def inversions_of(text: str, words: Words) -> tuple[Inversion, ...]:
    forms = _forms_of(words)
    inversions = [*_without_not(text, forms), *_without_no(text, forms)]
    inversions += [Inversion(found.start("article"), found["article"], "no") for found in forms.existing.finditer(text)]
    for found in forms.opposites.finditer(text):
        instead = cased_like(forms.opposite[found[0].lower()], found[0])
        inversions.append(Inversion(*with_article(text, found.start(), found.end(), instead)))
    for span in lexicon.sentences_of(text, words):
        if not forms.negative & set(lexicon.words_of(span.text)) and not _CONTRACTED.search(span.text):
            inversions += _with_not(text, span.start, span.end, forms)
    return tuple(sorted(set(inversions)))


class _Forms:
    def __init__(self, lists: lexicon.Negation) -> None:
        self.lists, self.negative = lists, frozenset(lists.negative)
        self.opposite: dict[str, str] = {}
        for one, other in lists.opposites:
            self.opposite.setdefault(one, other)
            self.opposite.setdefault(other, one)
        self.denied: dict[str, str] = {}  # the negated form of each form of a verb
        for verb in dict.fromkeys((*lists.verbs, *lists.finite)):
            self.denied |= {
                verb: f"do not {verb}",
                _third(verb): f"does not {verb}",
                _past(verb, lists): f"did not {verb}",
            }
        third, kept = [_third(verb) for verb in lists.finite], {*lists.auxiliaries, *lists.perfect}
        # not after `no`: the opposite of `no longer` is not `no shorter`
        opposites = rf"(?<![\w-])(?<!\bno )(?:{_either(self.opposite)})(?![\w-])"
        participle = rf"(?:\w+ly )?(?:{_either(lists.participles)}|\w+ed)\b"
        existing = rf"\b(?P<kept>{_either(lists.existing)}) (?P<article>an?) (?=[a-z])"
        self.opposites = re.compile(opposites, re.IGNORECASE)
        self.auxiliary = re.compile(rf"(?<=[\w,)] )\b({_either(lists.auxiliaries)})\b(?! not\b)(?= \w)")
        self.perfect = re.compile(rf"(?<=\w )\b({_either(lists.perfect)})\b(?= {participle})")
        self.spoken = re.compile(rf"\b({_either(lists.subjects)}) (?P<verb>{_either(self.denied)})\b", re.IGNORECASE)
        self.finite = re.compile(rf"(?<=\w )(?P<verb>{_either(third)})\b")
        self.support = re.compile(rf"\b(?P<do>do|does|did){_NOT} (?P<adverb>\w+ly )?(?P<verb>[a-z]{{2,}})\b")
        self.bare = re.compile(rf"\b(?P<kept>{_either(kept)}){_NOT}\b(?! (?:{_either(lists.bound)})\b)")
        self.existing = re.compile(existing, re.IGNORECASE)


@lru_cache(maxsize=8)
def _forms_of(words: Words) -> _Forms:
    return _Forms(words.negation)


def _without_not(text: str, forms: _Forms) -> Iterator[Inversion]:
    for found in forms.bare.finditer(text):
        yield Inversion(found.start(), found[0], found["kept"])
    for found in forms.support.finditer(text):
        if found["verb"] not in forms.lists.bound:
            verb = found["verb"]
            affirmed = {"do": verb, "does": _third(verb), "did": _past(verb, forms.lists)}[found["do"]]
            yield Inversion(found.start(), found[0], (found["adverb"] or "") + affirmed)


def _with_not(text: str, start: int, end: int, forms: _Forms) -> Iterator[Inversion]:
    """Adds `not` to a sentence without a negation."""
    for pattern in (forms.auxiliary, forms.perfect):
        for found in pattern.finditer(text, start, end):
            yield Inversion(found.start(), found[0], "cannot" if found[0] == "can" else f"{found[0]} not")
    for pattern in (forms.spoken, forms.finite):
        for found in pattern.finditer(text, start, end):
            verb = found["verb"]
            # `have been` belongs to the perfect
            if verb.lower() in forms.denied and not forms.perfect.match(text, found.start("verb")):
                yield Inversion(found.start("verb"), verb, forms.denied[verb.lower()])


def _without_no(text: str, forms: _Forms) -> Iterator[Inversion]:
    """`no difference` -> `a difference`, `no differences` -> `differences`."""
    for found in re.finditer(r"\b[Nn]o (?=[a-z])", text):
        phrase, at = list[str](), found.end()  # the words up to the noun
        while (word := _PHRASE.match(text, at)) and word[0].lower() not in _ENDS_NOUN and len(phrase) <= _MOST_WORDS:
            phrase.append(word[0])
            at = word.end() + 1
            if text[word.end() : at] != " ":
                break
        # with too many words it is not sure which one is the noun
        if not 1 <= len(phrase) <= _MOST_WORDS or phrase[0] in ("longer", "matter", "one", "more", "less"):
            continue
        noun = phrase[-1]
        is_bare = noun in forms.lists.uncountable or (noun.endswith("s") and not noun.endswith(("ss", "is", "us")))
        article = "" if is_bare else "an " if lexicon.sounds_like_a_vowel(phrase[0]) else "a "
        before, after = f"{found[0]}{phrase[0]}", f"{article}{phrase[0]}"
        yield Inversion(found.start(), before, after[0].upper() + after[1:] if found[0][0] == "N" else after)


def _third(verb: str) -> str:
    if verb == "have":
        return "has"
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{verb}s"


def _past(verb: str, lists: lexicon.Negation) -> str:
    if verb in lists.past:
        return lists.past[verb]
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ied"
    return f"{verb}d" if verb.endswith("e") else f"{verb}ed"


def _either(phrases: Iterable[str]) -> str:
    """A pattern that matches any of the phrases, the longest first; without phrases, one that never matches."""
    return "|".join(map(re.escape, sorted(phrases, key=lambda phrase: (-len(phrase), phrase)))) or "(?!)"


RULES: Final[Mapping[RuleName, Rule]] = {
    "entity": swap_entity,
    "number": change_number,
    "negation": invert,
    "fabrication": fabricate,
}
_RULE_DRAWS = 12
"""Draws of each rule; balancing chooses among them."""


def options_of(
    answer: str, context: RuleContext, rules: tuple[RuleName, ...], *, seed: int, key: str
) -> list[Falsified]:
    """Everything that the rules can make of one row's answer, each once. `key` is that of the row's content."""
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
    """Whether it differs in more than white space, case and punctuation and is not a right answer of any row."""
    text, is_other = normalise(option.text), normalise(option.before) != normalise(option.after)
    return is_other and text != normalise(option.answer) and text not in context.lexicon.right


def seeded(seed: int, *parts: str) -> random.Random:
    digest = blake2b("\x1f".join((str(seed), *parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))
