"""Words and sentences of any script, by rules that need no data: what texts are compared by."""

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import regex
from nltk.stem.porter import PorterStemmer

_UNSPACED: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no space between words: each character is taken for one, with the marks that belong to it."""
_WORD: Final = regex.compile(
    rf"[{_UNSPACED}--\p{{M}}]\p{{M}}*|[\p{{L}}\p{{M}}\p{{N}}--[{_UNSPACED}--\p{{M}}]]+", regex.VERSION1
)
_SENTENCE_END: Final = regex.compile(
    r"(?<=[.!?…][\"'”’»)\]]*)\s+|(?<=[。！？｡][”’」』）]*)(?![。！？｡”’」』）])|\n+", regex.VERSION1
)
SENTENCE_RULE: Final = "at line ends, at . ! ? … before a space, at 。！？"


def words(text: str, *, stemmer: bool = False) -> list[str]:
    """Lower case. For text in ASCII they are those of rouge-score; of words in other letters no stem is taken."""
    found = _WORD.findall(unicodedata.normalize("NFC", text).lower())
    return [_stem(word) if len(word) > 3 and word.isascii() else word for word in found] if stemmer else found


@cache
def _porter() -> PorterStemmer:
    return PorterStemmer()


@lru_cache(1 << 16)
def _stem(word: str) -> str:
    stem: str = _porter().stem(word)
    return stem


def sentences(text: str) -> list[str]:
    return [sentence for part in _SENTENCE_END.split(text) if (sentence := part.strip())]


def ngrams(found: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(found[at : at + size]) for at in range(len(found) - size + 1)]
