"""What the rules know beside the answer: the row's own source, and the terms and sentences of all rows."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finefit.data.falsify.sentences import sentences_of, words_of
from finefit.data.falsify.terms import terms_of
from finefit.data.falsify.words import Words
from finefit.data.fingerprint import normalise

_CONTENT_LETTERS = 5
"""Shorter words tell little of what a text is about."""
_SHORTEST, _LONGEST = 5, 45
"""Words of a sentence that another answer can take."""


@dataclass(frozen=True, slots=True)
class Source:
    """All that a row says, its answer included: nothing of it is false for this row."""

    text: str
    words: frozenset[str]

    @staticmethod
    def of(*texts: str) -> "Source":
        words = [word for text in texts for word in words_of(text)]
        return Source(f" {' '.join(words)} ", frozenset(words))

    def holds(self, term: str) -> bool:
        """Or its singular or plural."""
        wanted = " ".join(words_of(term))
        forms = {wanted, f"{wanted}s", wanted.removesuffix("s")}
        return bool(forms & self.words) or any(f" {form} " in self.text for form in forms if " " in form)


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    content: frozenset[str]
    """Its longer words."""


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """Of all rows, sorted, so that their order makes no difference."""

    terms: Mapping[str, tuple[str, ...]]
    """By kind, each as often as answers have it: what is drawn is as frequent as what is taken out."""
    sentences: tuple[Sentence, ...]
    right: frozenset[str]
    """Every answer and reference, normalised: none of them can be a wrong answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    source: Source
    lexicon: Lexicon
    words: Words


def make_lexicon(answers: Iterable[str], references: Iterable[str], words: Words) -> Lexicon:
    terms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sentences: set[str] = set()
    right = {normalise(text) for text in references}
    for answer in answers:
        right.add(normalise(answer))
        for kind, term in {(term.kind, _plain(term.text, term.kind, words)) for term in terms_of(answer, words)}:
            terms[kind][term] += 1
        sentences |= {span.text for span in sentences_of(answer, words) if _stands_alone(span.text)}
    return Lexicon(
        {kind: tuple(sorted(found.elements())) for kind, found in sorted(terms.items())},
        tuple(Sentence(text, content_of(text)) for text in sorted(sentences)),
        frozenset(right),
    )


def content_of(text: str) -> frozenset[str]:
    return frozenset(word for word in words_of(text) if len(word) >= _CONTENT_LETTERS and word[0].isalpha())


def _plain(term: str, kind: str, words: Words) -> str:
    """A listed term at the start of a sentence has its capital from there."""
    return term.lower() if kind in words.kinds else term


def _stands_alone(sentence: str) -> bool:
    num_words = len(words_of(sentence))
    return _SHORTEST <= num_words <= _LONGEST and sentence[-1] in ".!?" and re.match(r"[A-Z]", sentence) is not None
