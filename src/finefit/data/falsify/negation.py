"""What the answer affirms it denies, and the other way round: by `not`, by `no`, and by opposites."""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from finefit.data.falsify.corpus import Context
from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.sentences import sentences_of, words_of
from finefit.data.falsify.terms import cased_like, sounds_like_a_vowel, with_article
from finefit.data.falsify.words import Negation, Words

_ENDS_NOUN = frozenset(
    {
        *(
            "in",
            "of",
            "on",
            "between",
            "for",
            "to",
            "that",
            "with",
            "and",
            "or",
            "at",
            "from",
            "by",
            "among",
            "as",
            "than",
            "when",
            "after",
            "during",
        ),
        *("was", "were", "is", "are", "has", "have", "had"),
    }
)
_PHRASE = re.compile(r"[a-z][\w-]*", re.IGNORECASE)
_NOT = r"(?: not|not|n['’]t|['’]t)"
_CONTRACTED = re.compile(r"n['’]t\b")
_MOST_BEFORE_NOUN = 3


@dataclass(frozen=True, slots=True)
class Inversion:
    before: str
    after: str
    at: int


def invert(answer: str, context: Context, chance: random.Random) -> Falsified | None:
    found = inversions_of(answer, context.words)
    if not found:
        return None
    taken = chance.choice(found)
    return Falsified(answer=answer, rule="negation", before=taken.before, after=taken.after, at=taken.at)


@lru_cache(maxsize=64)
def inversions_of(text: str, words: Words) -> tuple[Inversion, ...]:
    forms = _Forms.of(words)
    found = [*_opposites(text, forms), *_without_not(text, forms), *_without_no(text, forms), *_with_no(text, forms)]
    for span in sentences_of(text, words):
        if not forms.negative & set(words_of(span.text)) and not _CONTRACTED.search(span.text):
            found += _with_not(text, span.start, span.end, forms)
    return tuple(sorted(set(found), key=lambda inversion: (inversion.at, inversion.before, inversion.after)))


@dataclass(frozen=True, slots=True, eq=False)
class _Forms:
    """The lists as patterns."""

    lists: Negation
    opposite: dict[str, str]
    opposites: re.Pattern[str]
    negative: frozenset[str]
    auxiliary: re.Pattern[str]
    perfect: re.Pattern[str]
    spoken: re.Pattern[str]
    finite: re.Pattern[str]
    denied: dict[str, str]
    """By form of a verb, what it is after `not`."""
    support: re.Pattern[str]
    bare: re.Pattern[str]
    existing: re.Pattern[str]

    @staticmethod
    @lru_cache(maxsize=8)
    def of(words: Words) -> "_Forms":
        lists = words.negation
        opposite: dict[str, str] = {}
        for one, other in lists.opposites:
            opposite.setdefault(one, other)
            opposite.setdefault(other, one)
        denied = {
            form: negated
            for verb in dict.fromkeys((*lists.verbs, *lists.finite))
            for form, negated in _negated(verb, lists)
        }
        third = [_third(verb) for verb in lists.finite]
        kept = {*lists.auxiliaries, *lists.perfect}
        return _Forms(
            lists=lists,
            opposite=opposite,
            opposites=_any_of(opposite),
            negative=frozenset(lists.negative),
            auxiliary=re.compile(rf"(?<=[\w,)] )\b({_either(lists.auxiliaries)})\b(?! not\b)(?= \w)"),
            perfect=re.compile(
                rf"(?<=\w )\b({_either(lists.perfect)})\b(?= (?:\w+ly )?(?:{_either(lists.participles)}|\w+ed)\b)"
            ),
            spoken=re.compile(rf"\b({_either(lists.subjects)}) (?P<verb>{_either(denied)})\b", re.IGNORECASE),
            finite=re.compile(rf"(?<=\w )(?P<verb>{_either(third)})\b"),
            denied=denied,
            support=re.compile(rf"\b(?P<do>do|does|did){_NOT} (?P<adverb>\w+ly )?(?P<verb>[a-z]{{2,}})\b"),
            bare=re.compile(rf"\b(?P<kept>{_either(kept)}){_NOT}\b(?! (?:{_either(lists.bound)})\b)"),
            existing=re.compile(rf"\b(?P<kept>{_either(lists.existing)}) (?P<article>an?) (?=[a-z])", re.IGNORECASE),
        )


def _opposites(text: str, forms: _Forms) -> Iterator[Inversion]:
    for found in forms.opposites.finditer(text):
        instead = cased_like(forms.opposite[found[0].lower()], found[0])
        at, before, after = with_article(text, found.start(), found.end(), instead)
        yield Inversion(before, after, at)


def _without_not(text: str, forms: _Forms) -> Iterator[Inversion]:
    for found in forms.bare.finditer(text):
        yield Inversion(found[0], found["kept"], found.start())
    for found in forms.support.finditer(text):
        if found["verb"] not in forms.lists.bound:
            yield Inversion(
                found[0], (found["adverb"] or "") + _affirmed(found["do"], found["verb"], forms.lists), found.start()
            )


def _with_not(text: str, start: int, end: int, forms: _Forms) -> Iterator[Inversion]:
    """Of a sentence that has no negation yet."""
    for pattern in (forms.auxiliary, forms.perfect):
        for found in pattern.finditer(text, start, end):
            yield Inversion(found[0], "cannot" if found[0] == "can" else f"{found[0]} not", found.start())
    for pattern in (forms.spoken, forms.finite):
        for found in pattern.finditer(text, start, end):
            verb = found["verb"]
            # `have been` is the perfect's
            if verb.lower() in forms.denied and not forms.perfect.match(text, found.start("verb")):
                yield Inversion(verb, forms.denied[verb.lower()], found.start("verb"))


def _without_no(text: str, forms: _Forms) -> Iterator[Inversion]:
    """`no difference` -> `a difference`, `no differences` -> `differences`."""
    for found in re.finditer(r"\b[Nn]o (?=[a-z])", text):
        phrase = _noun_phrase(text, found.end())
        if not phrase or phrase[0] in ("longer", "matter", "one", "more", "less"):
            continue
        noun = phrase[-1]
        is_bare = noun in forms.lists.uncountable or (noun.endswith("s") and not noun.endswith(("ss", "is", "us")))
        article = "" if is_bare else "an " if sounds_like_a_vowel(phrase[0]) else "a "
        before, after = f"{found[0]}{phrase[0]}", f"{article}{phrase[0]}"
        yield Inversion(before, after[0].upper() + after[1:] if found[0][0] == "N" else after, found.start())


def _noun_phrase(text: str, at: int) -> list[str]:
    """The words up to the noun; none where they are too many to tell."""
    words: list[str] = []
    while (found := _PHRASE.match(text, at)) and found[0].lower() not in _ENDS_NOUN and len(words) <= _MOST_BEFORE_NOUN:
        words.append(found[0])
        at = found.end() + 1
        if text[found.end() : at] != " ":
            break
    return words if len(words) <= _MOST_BEFORE_NOUN else []


def _with_no(text: str, forms: _Forms) -> Iterator[Inversion]:
    for found in forms.existing.finditer(text):
        yield Inversion(found["article"], "no", found.start("article"))


def _negated(verb: str, lists: Negation) -> Iterator[tuple[str, str]]:
    yield verb, f"do not {verb}"
    yield _third(verb), f"does not {verb}"
    yield _past(verb, lists), f"did not {verb}"


def _affirmed(do: str, verb: str, lists: Negation) -> str:
    return {"do": verb, "does": _third(verb), "did": _past(verb, lists)}[do]


def _third(verb: str) -> str:
    if verb == "have":
        return "has"
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{verb}s"


def _past(verb: str, lists: Negation) -> str:
    if verb in lists.past:
        return lists.past[verb]
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ied"
    return f"{verb}d" if verb.endswith("e") else f"{verb}ed"


def _any_of(phrases: Iterable[str]) -> re.Pattern[str]:
    """But not behind `no`: the opposite of `no longer` is not `no shorter`."""
    return re.compile(rf"(?<![\w-])(?<!\bno )(?:{_either(phrases)})(?![\w-])", re.IGNORECASE)


def _either(phrases: Iterable[str]) -> str:
    """As a pattern, the longest first; one that matches nothing where there are none."""
    return "|".join(map(re.escape, sorted(phrases, key=lambda phrase: (-len(phrase), phrase)))) or "(?!)"
