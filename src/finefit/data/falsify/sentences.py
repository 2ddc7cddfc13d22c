"""A text as sentences and words, by full stops and capitals alone."""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from finefit.data.falsify.words import Words

_WORD = re.compile(r"[^\W_]+(?:['’.,/-][^\W_]+)*%?")
_BOUNDARY = re.compile(r"""(?P<stop>[.!?]["')\]”’]*)\s+(?=["'(\[“‘]?[^\Wa-z_])|\s*\n\s*""")
_LAST_WORD = re.compile(r"[\w.]+$")


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int
    text: str


def words_of(text: str) -> list[str]:
    """In lower case, numbers with their decimals and percent signs."""
    return [word.lower() for word in _WORD.findall(text)]


@lru_cache(maxsize=64)
def sentences_of(text: str, words: Words) -> tuple[Span, ...]:
    """In order, without the white space between them."""
    cuts = [
        (found.start() + len(found["stop"] or ""), found.end())
        for found in _BOUNDARY.finditer(text)
        if _ends(text, found, words)
    ]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    spans = (_trimmed(text, start, end) for start, end in zip(starts, ends, strict=True))
    return tuple(span for span in spans if span.text)


def gap_before(text: str, spans: tuple[Span, ...]) -> str:
    """What parts the sentences of a text; a space where it has but one."""
    return next((text[one.end : other.start] for one, other in pairwise(spans)), " ")


def _ends(text: str, found: re.Match[str], words: Words) -> bool:
    if not found["stop"] or found["stop"][0] != ".":
        return True
    last = _LAST_WORD.search(text[max(0, found.start() - 20) : found.start()])
    # a single capital is an initial
    return last is None or not (
        last[0].lower() in words.sentences.abbreviations or (len(last[0]) == 1 and last[0].isupper())
    )


def _trimmed(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return Span(start, start + len(piece.strip()), piece.strip())
