"""What rows become for a model: text in segments first, then examples of tokens, or a word on why there are none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from finefit.data.pictures import Picture


class Segment(NamedTuple):
    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A row as the model sees it; it ends with an answer's end token."""

    tokens: tuple[int, ...]
    """With those that stand for images."""
    supervised: tuple[bool, ...]
    images: tuple[Picture, ...] = ()
    """In the order of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What became of a row. It can be used if it has examples."""

    examples: tuple[Example, ...] = ()
    """Several where the template rewrites an answer once more follows, and for long plain text."""
    rejected: tuple[Example, ...] = ()
    """The other side of a preference pair."""
    cut_tokens: int = 0
    problem: str = ""
    """Why it cannot be used."""
    remedy: str = ""
    is_too_long: bool = False
    num_tokens: int = 0
    """Of the longest example, before anything was cut."""


class Sheet(NamedTuple):
    """An example in text."""

    segments: list[Segment]
    pictures: tuple[Picture, ...] = ()


class Draft(NamedTuple):
    """A row in text, example by example."""

    examples: list[Sheet]
    rejected: list[Sheet]


def joined(
    start: tuple[int, ...], pieces: Iterable[tuple[Segment, list[int]]], pictures: tuple[Picture, ...]
) -> Example:
    tokens, supervised = [*start], (False,) * len(start)
    for segment, ids in pieces:
        tokens += ids
        supervised += (segment.supervised,) * len(ids)
    if supervised[:1] == (True,):  # nothing stands before the first token that could predict it
        supervised = (False, *supervised[1:])
    return Example(tuple(tokens), supervised, pictures)


def unknown_character(character: str) -> Rendered:
    return Rendered(
        problem=f"the tokenizer has no token for {character!r}, so the model cannot be taught to write it",
        remedy="take the character out of the row, or take a model whose tokenizer knows it",
    )


def too_long(problem: str, num_tokens: int) -> Rendered:
    return Rendered(
        problem=problem,
        remedy="raise data.max_tokens, or set data.too_long: drop to leave such rows out; an answer is never cut",
        is_too_long=True,
        num_tokens=num_tokens,
    )
