"""The journal of a review: what was decided, by whom, about which texts. Lines are only ever added; what was taken back is a line of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, TypeAdapter, ValidationError

from finefit.artifacts.journal import read_lines
from finefit.errors import RunError
from finefit.review.stack import Sheet, Stack

STRICT = ConfigDict(extra="forbid")
Choice = Literal["good", "bad", "first", "second", "tie", "skip"]
"""`good` and `bad` of one model; of two which is better, by the order of the models and not by where they stood."""
Reason = Literal["fabricated", "contradiction", "unsupported", "wrong inference", "other"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    __pydantic_config__ = STRICT
    kind: Literal["opened"] = "opened"
    version: Literal[1] = 1
    at: str
    seed: int
    """Decides every rater's order, and where each answer stands."""
    task: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    __pydantic_config__ = STRICT
    kind: Literal["verdict"] = "verdict"
    version: Literal[1] = 1
    number: int
    at: str
    rater: str
    key: str
    models: tuple[str, ...]
    answers: tuple[str, ...]
    """Digests of the judged texts, in the order of the models."""
    shown: tuple[int, ...]
    """Which of the models stood first, and which second."""
    choice: Choice
    reasons: tuple[tuple[Reason, ...], ...]
    """What is wrong with each answer, in the order of the models."""
    note: str = ""

    @property
    def about(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return self.key, self.models, self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    __pydantic_config__ = STRICT
    kind: Literal["undone"] = "undone"
    version: Literal[1] = 1
    at: str
    rater: str
    number: int
    """Of the verdict that is taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """A rater has seen the results, and with them which model is which."""

    __pydantic_config__ = STRICT
    kind: Literal["revealed"] = "revealed"
    version: Literal[1] = 1
    at: str
    rater: str
    open: int
    """Sheets that this rater had not judged yet."""


Entry = Opened | Verdict | Undone | Revealed
Write = Callable[[Entry], None]
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Discriminator("kind")])


def read_entries(path: Path) -> list[Entry]:
    """A line that a kill tore is passed over: nobody was told that it is kept."""
    return [_entry(line, path, number) for number, line in enumerate(read_lines(path), start=1)]


def _entry(line: dict[str, Any], path: Path, number: int) -> Entry:
    try:
        return _ENTRY.validate_python(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(
            f"{path}: entry {number} is none of this version: {place}: {first['msg']}",
            "move the file away to begin anew",
        ) from None


def dumped(entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = _ENTRY.dump_python(entry, mode="json")
    return values


def about(sheet: Sheet, stack: Stack) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return sheet.key, stack.models, sheet.digests


def of_stack(entries: Sequence[Entry], stack: Stack) -> list[Entry]:
    """Without verdicts on other texts, and without what became of those."""
    known = {about(sheet, stack) for sheet in stack.sheets}
    foreign = {(e.rater, e.number) for e in entries if isinstance(e, Verdict) and e.about not in known}
    return [e for e in entries if not (isinstance(e, Verdict | Undone) and (e.rater, e.number) in foreign)]


def standing(entries: Sequence[Entry]) -> list[Verdict]:
    """What holds: not taken back, and of one rater on one sheet the latest."""
    undone = {(entry.rater, entry.number) for entry in entries if isinstance(entry, Undone)}
    latest: dict[tuple[Any, ...], Verdict] = {}
    for entry in entries:
        if isinstance(entry, Verdict) and (entry.rater, entry.number) not in undone:
            latest[(entry.rater, *entry.about)] = entry
    return sorted(latest.values(), key=lambda verdict: verdict.number)


def seen_before(entries: Sequence[Entry]) -> frozenset[int]:
    """Numbers of verdicts whose rater knew by then which model is which."""
    informed: set[str] = set()
    found: set[int] = set()
    for entry in entries:
        if isinstance(entry, Revealed):
            informed.add(entry.rater)
        elif isinstance(entry, Verdict) and entry.rater in informed:
            found.add(entry.number)
    return frozenset(found)
