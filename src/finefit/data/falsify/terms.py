"""The terms of a text by kind: words of the lists, words with the ending of a kind, acronyms and names. Terms of a kind can replace each other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from finefit.data.falsify.words import Words

_ACRONYM = re.compile(r"(?<![\w-])(?=[\w-]*[A-Z][\w-]*[A-Z])[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*(?![\w-])")
_NAME = re.compile(r"(?<=[a-z,;)] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})*(?![\w-])")
_ADJECTIVE = re.compile(r"(?:ese|ian|ish|can|ean)$")
_VOWEL = re.compile(r"[aeio]|u(?!n[aeiou]|s[aeiou]|r[aeiou]|t[aeiou])|hour|honest|heir", re.IGNORECASE)
_ARTICLE = re.compile(r"\b([Aa])(n?)( )$")
_SPELT_WITH_A_VOWEL = frozenset("AEFHILMNORSX")


@dataclass(frozen=True, slots=True)
class Term:
    kind: str
    text: str
    at: int

    @property
    def end(self) -> int:
        return self.at + len(self.text)


@lru_cache(maxsize=4096)  # also of the sentences that are drawn again and again
def terms_of(text: str, words: Words) -> tuple[Term, ...]:
    """In order, none overlapping another; of overlapping ones the first, and of those the longest."""
    found = sorted(
        [*_listed(text, words), *_acronyms(text), *_names(text)], key=lambda term: (term.at, -term.end, term.kind)
    )
    kept: list[Term] = []
    for term in found:
        if not kept or term.at >= kept[-1].end:
            kept.append(term)
    return tuple(kept)


def with_article(text: str, at: int, end: int, instead: str) -> tuple[int, str, str]:
    """(at, before, after) of a replacement, with the article in front of it made to fit."""
    article = _ARTICLE.search(text, max(0, at - 4), at)
    if article is None:
        return at, text[at:end], instead
    fitting = article[1] + ("n" if sounds_like_a_vowel(instead) else "") + article[3]
    if fitting == article[0]:
        return at, text[at:end], instead
    return article.start(), text[article.start() : end], fitting + instead


def sounds_like_a_vowel(word: str) -> bool:
    is_spelt = len(word) > 1 and word[:2].isupper()
    return word[0] in _SPELT_WITH_A_VOWEL if is_spelt else _VOWEL.match(word) is not None


def cased_like(word: str, model: str) -> str:
    """With a capital where the model has one and is otherwise a plain word."""
    return word[:1].upper() + word[1:] if model[:1].isupper() and model[1:].islower() else word


def _listed(text: str, words: Words) -> Iterator[Term]:
    pattern, kinds = _pattern(words)
    for found in pattern.finditer(text):
        kind = kinds.get(found[0].lower()) or next((kind for kind, name in _groups(words) if found[name]), None)
        if kind and found[0].lower() not in words.no_terms:
            yield Term(kind, found[0], found.start())


def _acronyms(text: str) -> Iterator[Term]:
    for found in _ACRONYM.finditer(text):
        stem = found[0].removesuffix("s")
        yield Term("acronyms" if stem != found[0] and stem[-1:].isupper() else "acronym", found[0], found.start())


def _names(text: str) -> Iterator[Term]:
    for found in _NAME.finditer(text):
        yield Term("adjective of a name" if _ADJECTIVE.search(found[0]) else "name", found[0], found.start())


@lru_cache(maxsize=8)
def _pattern(words: Words) -> tuple[re.Pattern[str], dict[str, str]]:
    kinds = {word.lower(): kind for kind, known in reversed(list(words.kinds.items())) for word in known.words}
    listed = sorted(kinds, key=len, reverse=True)
    ended = [
        f"(?P<{name}>[a-z]{{2,}}(?:{'|'.join(map(re.escape, words.kinds[kind].endings))}))"
        for kind, name in _groups(words)
    ]
    either = [*map(re.escape, listed), *ended] or ["(?!)"]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(either)})(?![\w-])", re.IGNORECASE), kinds


def _groups(words: Words) -> list[tuple[str, str]]:
    """Kinds with endings, each with the name of its group in the pattern."""
    return [(kind, f"kind{at}") for at, (kind, known) in enumerate(words.kinds.items()) if known.endings]
