"""Inversions: what an answer affirms becomes denied and the other way round, by `not`, by `no` and by opposites."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from finefit.negatives.lexicon import (
    Negation,
    Words,
    cased_like,
    sentences_of,
    sounds_like_a_vowel,
    with_article,
    words_of,
)

_AFTER_NOUN = (
    "in of on between for to that with and or at from by among as than when after during was were is are has have had"
)
_ENDS_NOUN = frozenset(_AFTER_NOUN.split())
_PHRASE = re.compile(r"[a-z][\w-]*", re.IGNORECASE)
_NOT = r"(?: not|not|n['’]t|['’]t)"
_CONTRACTED = re.compile(r"n['’]t\b")
_MOST_BEFORE_NOUN = 3


@dataclass(frozen=True, slots=True)
class Inversion:
    before: str
    after: str
    at: int


@lru_cache(maxsize=64)
def inversions_of(text: str, words: Words) -> tuple[Inversion, ...]:
    forms = _forms_of(words)
    found = [*_opposites(text, forms), *_without_not(text, forms), *_without_no(text, forms)]
    found += [Inversion(found["article"], "no", found.start("article")) for found in forms.existing.finditer(text)]
    for span in sentences_of(text, words):
        if not forms.negative & set(words_of(span.text)) and not _CONTRACTED.search(span.text):
            found += _with_not(text, span.start, span.end, forms)
    return tuple(sorted(set(found), key=lambda inversion: (inversion.at, inversion.before, inversion.after)))


class _Forms:
    """The word lists as patterns."""

    def __init__(self, lists: Negation) -> None:
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
            verb = found["verb"]
            affirmed = {"do": verb, "does": _third(verb), "did": _past(verb, forms.lists)}[found["do"]]
            yield Inversion(found[0], (found["adverb"] or "") + affirmed, found.start())


def _with_not(text: str, start: int, end: int, forms: _Forms) -> Iterator[Inversion]:
    """In a sentence without a negation."""
    for pattern in (forms.auxiliary, forms.perfect):
        for found in pattern.finditer(text, start, end):
            yield Inversion(found[0], "cannot" if found[0] == "can" else f"{found[0]} not", found.start())
    for pattern in (forms.spoken, forms.finite):
        for found in pattern.finditer(text, start, end):
            verb = found["verb"]
            # `have been` belongs to the perfect
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
    """The words up to the noun; empty where there are too many to be sure."""
    words: list[str] = []
    while (found := _PHRASE.match(text, at)) and found[0].lower() not in _ENDS_NOUN and len(words) <= _MOST_BEFORE_NOUN:
        words.append(found[0])
        at = found.end() + 1
        if text[found.end() : at] != " ":
            break
    return words if len(words) <= _MOST_BEFORE_NOUN else []


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


def _either(phrases: Iterable[str]) -> str:
    """As a pattern, the longest first; without phrases one that never matches."""
    return "|".join(map(re.escape, sorted(phrases, key=lambda phrase: (-len(phrase), phrase)))) or "(?!)"
