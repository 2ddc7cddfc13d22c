"""One change that makes an answer false, and what a rule is."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from finefit.data.falsify.corpus import Context

RuleName = Literal["entity", "number", "negation", "fabrication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsified:
    """`before`, which stands at character `at` of the answer, became `after`; all else is the answer's own."""

    answer: str
    rule: RuleName
    before: str
    after: str
    at: int

    @property
    def text(self) -> str:
        return self.answer[: self.at] + self.after + self.answer[self.at + len(self.before) :]


Rule = Callable[[str, Context, random.Random], Falsified | None]
"""Makes one thing in an answer false; None where it finds nothing to change."""
