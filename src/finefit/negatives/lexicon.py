"""The knowledge behind the rules: word lists (ours or a user's file), and the sentences and terms of one text and of
all rows."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError

from finefit import bounded
from finefit.data.fingerprint import normalise
from finefit.errors import DataError
from finefit.spec import Part
from finefit.spec.reader import Reader

MAX_WORDS_BYTES = 1 << 20


class _LexiconPart(Part):
    model_config = ConfigDict(strict=False)  # YAML has lists, which a strict tuple would refuse


class KindOfTerm(_LexiconPart):
    words: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()


class Negation(_LexiconPart):
    auxiliaries: tuple[str, ...] = ()
    perfect: tuple[str, ...] = ()
    participles: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    past: Mapping[str, str] = Field(default_factory=dict)
    existing: tuple[str, ...] = ()
    uncountable: tuple[str, ...] = ()
    opposites: tuple[tuple[str, str], ...] = ()
    bound: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()


class Sentences(_LexiconPart):
    abbreviations: tuple[str, ...] = ()


class Numbers(_LexiconPart):
    units: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


class Words(_LexiconPart):
    """words.yaml explains each list. Instances compare and hash by identity, so that what is derived from them can be
    cached."""

    kinds: Mapping[str, KindOfTerm] = Field(default_factory=dict)
    no_terms: tuple[str, ...] = ()
    negation: Negation = Negation()
    sentences: Sentences = Sentences()
    numbers: Numbers = Numbers()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@cache
def shipped_words() -> Words:
    return _parse(files("finefit.negatives").joinpath("words.yaml").read_text("utf-8"), "words.yaml")


def read_words(path: Path) -> Words:
    try:
        text = bounded.read_text(path, MAX_WORDS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a YAML file in UTF-8, or leave it out for the shipped lists"
        raise DataError(f"the word lists {path} cannot be read: {error}", remedy) from None
    return _parse(text, str(path))


def _parse(text: str, name: str) -> Words:
    remedy = "fix it; the shipped words.yaml shows the form"
    reader = Reader(text, lambda line: (line, f"{name}:{line}"))
    values = reader.read()
    if reader.problems:
        raise DataError(f"{name} is not YAML: {'; '.join(map(str, reader.problems))}", remedy)
    try:
        return Words.model_validate(values)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors())
        raise DataError(f"{name} contains entries other than lists of words: {'; '.join(faults)}", remedy) from None


_WORD = re.compile(r"[^\W_]+(?:['’.,/-][^\W_]+)*%?")
_BOUNDARY = re.compile(r"""(?P<stop>[.!?]["')\]”’]*)\s+(?=["'(\[“‘]?[^\Wa-z_])|\s*\n\s*""")
_LAST_WORD = re.compile(r"[\w.]+$")


@dataclass(frozen=True, slots=True)
class Span:
    """A sentence, or a term of one kind."""

    start: int
    text: str
    kind: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def words_of(text: str) -> list[str]:
    """Words in lower case; numbers keep their decimals and percent signs."""
    return [word.lower() for word in _WORD.findall(text)]


@lru_cache(maxsize=64)
def sentences_of(text: str, words: Words) -> tuple[Span, ...]:
    """Sentences, found by full stops and capitals alone; in order, without the white space between them."""
    starts, ends = [0], list[int]()
    for found in _BOUNDARY.finditer(text):
        stop = found["stop"] or ""
        last = _LAST_WORD.search(text[max(0, found.start() - 20) : found.start()]) if stop.startswith(".") else None
        is_initial = last is not None and len(last[0]) == 1 and last[0].isupper()
        if last is None or not (is_initial or last[0].lower() in words.sentences.abbreviations):
            ends.append(found.start() + len(stop))
            starts.append(found.end())
    spans = []
    for start, end in zip(starts, [*ends, len(text)], strict=True):
        if sentence := text[start:end].strip():
            spans.append(Span(end - len(text[start:end].lstrip()), sentence))
    return tuple(spans)


_ACRONYM = re.compile(r"(?<![\w-])(?=[\w-]*[A-Z][\w-]*[A-Z])[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*(?![\w-])")
_NAME = re.compile(r"(?<=[a-z,;)] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})*(?![\w-])")
_ADJECTIVE = re.compile(r"(?:ese|ian|ish|can|ean)$")
_VOWEL = re.compile(r"[aeio]|u(?!n[aeiou]|s[aeiou]|r[aeiou]|t[aeiou])|hour|honest|heir", re.IGNORECASE)
_ARTICLE = re.compile(r"\b([Aa])(n?)( )$")
_SPELT_WITH_A_VOWEL = frozenset("AEFHILMNORSX")


@lru_cache(maxsize=4096)  # also of the sentences that are drawn again and again
def terms_of(text: str, words: Words) -> tuple[Span, ...]:
    """Words of the lists, words with the ending of a kind, acronyms and names; terms of one kind can replace each
    other. They are in order and do not overlap: the first term wins and, of those that start together, the longest."""
    kept, terms = list[Span](), list[Span]()
    pattern, kinds = _pattern(words)
    for found in pattern.finditer(text):
        kind = kinds.get(found[0].lower()) or next((kind for kind, name in _groups(words) if found[name]), None)
        if kind and found[0].lower() not in words.no_terms:
            terms.append(Span(found.start(), found[0], kind))
    for found in _ACRONYM.finditer(text):
        stem = found[0].removesuffix("s")
        is_plural = stem != found[0] and stem[-1:].isupper()
        terms.append(Span(found.start(), found[0], "acronyms" if is_plural else "acronym"))
    for found in _NAME.finditer(text):
        is_adjective = _ADJECTIVE.search(found[0])
        terms.append(Span(found.start(), found[0], "adjective of a name" if is_adjective else "name"))
    for term in sorted(terms, key=lambda term: (term.start, -term.end, term.kind)):
        if not kept or term.start >= kept[-1].end:
            kept.append(term)
    return tuple(kept)


def with_article(text: str, at: int, end: int, instead: str) -> tuple[int, str, str]:
    """(at, before, after) of a replacement, with a fitting article in front of it."""
    if article := _ARTICLE.search(text, max(0, at - 4), at):
        fitting = article[1] + ("n" if sounds_like_a_vowel(instead) else "") + article[3]
        if fitting != article[0]:
            return article.start(), text[article.start() : end], fitting + instead
    return at, text[at:end], instead


def sounds_like_a_vowel(word: str) -> bool:
    is_spelt = len(word) > 1 and word[:2].isupper()
    return word[0] in _SPELT_WITH_A_VOWEL if is_spelt else _VOWEL.match(word) is not None


def cased_like(word: str, model: str) -> str:
    """The word with a capital if `model` is a plain word with one."""
    return word[:1].upper() + word[1:] if model[:1].isupper() and model[1:].islower() else word


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
    """The kinds that have endings, and the names of their groups in the pattern."""
    return [(kind, f"kind{at}") for at, (kind, known) in enumerate(words.kinds.items()) if known.endings]


_CONTENT_LETTERS = 5
"""Shorter words say little about a text's subject."""
_SHORTEST, _LONGEST = 5, 45
"""The number of words in a sentence that may be put into another answer."""


@dataclass(frozen=True, slots=True)
class RowText:
    """Everything that a row says, its answer included; none of it is false for this row."""

    text: str
    words: frozenset[str]

    @staticmethod
    def of(*texts: str) -> "RowText":
        words = [word for text in texts for word in words_of(text)]
        return RowText(f" {' '.join(words)} ", frozenset(words))

    def holds(self, term: str) -> bool:
        """Whether the text contains the term, or its singular or plural."""
        wanted = " ".join(words_of(term))
        forms = {wanted, f"{wanted}s", wanted.removesuffix("s")}
        return bool(forms & self.words) or any(f" {form} " in self.text for form in forms if " " in form)


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    content: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """The terms and sentences of all rows, sorted, so that the order of the rows does not matter."""

    terms: Mapping[str, tuple[str, ...]]
    """By kind, each as often as it occurs in answers, so that drawn terms are as frequent as replaced ones."""
    sentences: tuple[Sentence, ...]
    right: frozenset[str]
    """Terms by kind, each as often as it occurs in answers, so that drawn terms are as frequent as replaced ones."""


@dataclass(frozen=True, slots=True, eq=False)
class RuleContext:
    source: RowText
    lexicon: Lexicon
    words: Words


def make_lexicon(answers: Iterable[str], references: Iterable[str], words: Words) -> Lexicon:
    terms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sentences: set[str] = set()
    right = {normalise(text) for text in references}
    for answer in answers:
        right.add(normalise(answer))
        # a listed term has a capital only at the start of a sentence
        found = {
            (term.kind, term.text.lower() if term.kind in words.kinds else term.text)
            for term in terms_of(answer, words)
        }
        for kind, term in found:
            terms[kind][term] += 1
        for span in sentences_of(answer, words):
            is_usual = _SHORTEST <= len(words_of(span.text)) <= _LONGEST
            if is_usual and span.text[-1] in ".!?" and re.match(r"[A-Z]", span.text):
                sentences.add(span.text)
    return Lexicon(
        {kind: tuple(sorted(found.elements())) for kind, found in sorted(terms.items())},
        tuple(Sentence(text, content_of(text)) for text in sorted(sentences)),
        frozenset(right),
    )


def content_of(text: str) -> frozenset[str]:
    return frozenset(word for word in words_of(text) if len(word) >= _CONTENT_LETTERS and word[0].isalpha())
