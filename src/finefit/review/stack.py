"""What is judged: sheets, each with what was asked and what one or two models have answered."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache

from finefit.review.exhibits import Exhibit


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of a prompt."""

    role: str
    """Empty where a prompt is one text."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    key: str
    """The same item has the same key in every run."""
    prompt: tuple[Said, ...]
    answers: tuple[str, ...]
    """In the order of the stack's models."""
    tools: str = ""
    """That the prompt offers: a JSON list, or nothing."""
    reference: str | None = None
    is_reference_whole: bool = True
    """Whether it is all that its row answers: not beside tool calls or thoughts, which are no text of it."""
    place: str = ""
    """Where the item comes from; shown, so it says nothing of a model."""
    images: tuple[Exhibit, ...] = ()
    """That the prompt shows, in their order."""
    is_rendered: bool = False
    """Whether the prompt is known only as a template made it: a training would put it into a template once more."""

    @property
    def digests(self) -> tuple[str, ...]:
        """A verdict on one text says nothing about another that took its place."""
        return tuple(digest(answer) for answer in self.answers)

    @property
    def handle(self) -> str:
        """What the page calls the sheet: a key may be of the user's own making and name a model."""
        return digest(json.dumps([self.key, *self.digests]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    name: str
    """Of the journal that holds its verdicts."""
    task: str
    models: tuple[str, ...]
    """One or two."""
    sheets: tuple[Sheet, ...] = field(repr=False)
    unpaired: int = 0
    """Items that only one of the two has answered."""


@lru_cache(maxsize=1 << 16)  # every turn asks for those of all sheets
def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
