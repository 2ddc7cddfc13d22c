"""A review at work: what a rater sees next, and what becomes of a decision. Page and terminal both ask here; nothing here knows of either.

All state is the journal's: a session that ends at any instant goes on from it."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from finefit.artifacts.journal import Journal
from finefit.artifacts.lock import holder_of, run_lock
from finefit.errors import RunError
from finefit.review.order import order_of, shared_first, sides
from finefit.review.stack import Said, Sheet, Stack
from finefit.review.verdicts import (
    REASONS,
    Choice,
    Entry,
    Opened,
    Reason,
    Revealed,
    Undone,
    Verdict,
    Write,
    dumped,
    of_stack,
    read_entries,
    standing,
)

Press = Literal["1", "2", "tie", "skip"]
NAME_LENGTH = 40
NOTE_LENGTH = 4000
_ONE: dict[Press, Choice] = {"1": "good", "2": "bad", "skip": "skip"}
_SIDES: tuple[Choice, Choice] = ("first", "second")


class Refused(Exception):
    """A decision that means nothing; the reason is for the rater."""


class Stale(Exception):
    """The rater decided on a sheet that is not the one before them: a second press, or a page that was left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An image of a sheet: where it lies is the server's matter."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """A sheet as a rater sees it: nothing in it says whose the answers are."""

    handle: str
    prompt: tuple[Said, ...]
    answers: tuple[str, ...]
    """In the order in which they stand."""
    reference: str | None
    place: str
    images: tuple[Shown, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a rater had marked before taking a verdict back."""

    reasons: tuple[tuple[Reason, ...], ...]
    """In the order in which the answers stand."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    rater: str
    judged: int
    skipped: int
    total: int
    face: Face | None
    """None where nothing is left."""
    draft: Draft
    can_undo: bool
    has_seen_results: bool


class Session:
    def __init__(
        self,
        stack: Stack,
        entries: Sequence[Entry],
        write: Write,
        *,
        overlap: int | None = None,
        shows_reference: bool = True,
    ) -> None:
        self.stack = stack
        self._entries = list(entries)
        self._write = write
        self._overlap = overlap
        self._shows_reference = shows_reference
        self._seed = next(entry.seed for entry in entries if isinstance(entry, Opened))

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries)

    def turn(self, rater: str) -> Turn:
        rater = rater_name(rater)
        entries = of_stack(self._entries, self.stack)
        own = [verdict for verdict in standing(entries) if verdict.rater == rater]
        skipped = sum(verdict.choice == "skip" for verdict in own)
        left = self._open(rater, entries)
        sheet = left[0] if left else None
        return Turn(
            rater=rater,
            judged=len(own) - skipped,
            skipped=skipped,
            total=len(own) + len(left),
            face=None if sheet is None else self._face(sheet, rater),
            draft=self._draft(sheet, rater, entries),
            can_undo=bool(own),
            has_seen_results=any(isinstance(entry, Revealed) and entry.rater == rater for entry in entries),
        )

    def judge(
        self, rater: str, handle: str, press: Press, *, reasons: Sequence[Sequence[str]] = (), note: str = ""
    ) -> Turn:
        """`press` and `reasons` go by where the answers stand."""
        face = self.turn(rater).face
        if face is None or face.handle != handle:
            raise Stale
        rater = rater_name(rater)
        sheet = next(sheet for sheet in self.stack.sheets if sheet.handle == handle)
        shown = sides(sheet, self._seed, rater)
        choice = _choice(press, shown)
        verdict = Verdict(
            number=1 + max((entry.number for entry in self._entries if isinstance(entry, Verdict)), default=0),
            at=_now(),
            rater=rater,
            key=sheet.key,
            models=self.stack.models,
            answers=sheet.digests,
            shown=shown,
            choice=choice,
            reasons=_moved(_checked(reasons, choice, len(shown)), shown),
            note=_note(note),
        )
        self._keep(verdict)
        return self.turn(rater)

    def undo(self, rater: str) -> Turn:
        """Takes the rater's latest verdict back: its sheet comes next, as it was marked."""
        own = [
            verdict for verdict in standing(of_stack(self._entries, self.stack)) if verdict.rater == rater_name(rater)
        ]
        if not own:
            raise Refused("there is no verdict to take back")
        self._keep(Undone(at=_now(), rater=own[-1].rater, number=own[-1].number))
        return self.turn(rater)

    def reveal(self, rater: str) -> None:
        """Kept, since what this rater decides from now on is not blind."""
        turn = self.turn(rater)
        if not turn.has_seen_results:
            self._keep(Revealed(at=_now(), rater=turn.rater, open=turn.total - turn.judged - turn.skipped))

    def _keep(self, entry: Entry) -> None:
        self._write(entry)
        self._entries.append(entry)

    def _open(self, rater: str, entries: Sequence[Entry]) -> list[Sheet]:
        """What the rater has still to judge, the next one first."""
        verdicts = standing(entries)
        own = {verdict.key for verdict in verdicts if verdict.rater == rater}
        ordered = order_of(self.stack, self._seed, rater, overlap=self._overlap)
        if self._overlap is not None:  # beyond the shared ones each sheet is judged once
            others = {verdict.key for verdict in verdicts if verdict.rater != rater and verdict.choice != "skip"}
            ordered = [sheet for at, sheet in enumerate(ordered) if at < self._overlap or sheet.key not in others]
        left = [sheet for sheet in ordered if sheet.key not in own]
        last = _taken_back(rater, entries)
        return sorted(left, key=lambda sheet: last is None or sheet.key != last.key)

    def _face(self, sheet: Sheet, rater: str) -> Face:
        answers = tuple(sheet.answers[at] for at in sides(sheet, self._seed, rater))
        reference = sheet.reference if self._shows_reference else None
        images = tuple(Shown(name=exhibit.name, sha256=exhibit.sha256) for exhibit in sheet.images)
        return Face(
            handle=sheet.handle,
            prompt=sheet.prompt,
            answers=answers,
            reference=reference,
            place=sheet.place,
            images=images,
        )

    def _draft(self, sheet: Sheet | None, rater: str, entries: Sequence[Entry]) -> Draft:
        last = _taken_back(rater, entries)
        if sheet is None or last is None or last.key != sheet.key:
            return Draft(reasons=((),) * len(self.stack.models), note="")
        return Draft(reasons=_moved(last.reasons, last.shown), note=last.note)


def _taken_back(rater: str, entries: Sequence[Entry]) -> Verdict | None:
    """The verdict that the rater took back last, if they have decided nothing since."""
    own = [entry for entry in entries if isinstance(entry, Verdict | Undone) and entry.rater == rater]
    if not own or not isinstance(own[-1], Undone):
        return None
    return next(entry for entry in own if isinstance(entry, Verdict) and entry.number == own[-1].number)


def _choice(press: Press, shown: tuple[int, ...]) -> Choice:
    if len(shown) == 1:
        if press not in _ONE:
            raise Refused("one answer is good or bad; there is no tie")
        return _ONE[press]
    if press == "tie" or press == "skip":
        return press
    return _SIDES[shown[int(press) - 1]]


def _checked(reasons: Sequence[Sequence[str]], choice: Choice, num_answers: int) -> tuple[tuple[Reason, ...], ...]:
    """In one order, so that equal marks are equal entries."""
    if len(reasons) not in (0, num_answers):
        raise Refused(f"reasons for {len(reasons)} answers where {num_answers} stand")
    if unknown := [name for marked in reasons for name in marked if name not in REASONS]:
        raise Refused(f"there is no reason {unknown[0]}; there are {', '.join(REASONS)}")
    marked = tuple(tuple(reason for reason in REASONS if reason in names) for names in reasons) or ((),) * num_answers
    if choice == "good" and any(marked):
        raise Refused("the answer is called good and a reason against it is marked; take the mark away, or call it bad")
    return marked


def _moved(reasons: tuple[tuple[Reason, ...], ...], shown: tuple[int, ...]) -> tuple[tuple[Reason, ...], ...]:
    """From where answers stand to the order of the models; with two places there and back are the same."""
    return tuple(reasons[at] for at in shown)


def _note(note: str) -> str:
    if len(note) > NOTE_LENGTH:
        raise Refused(f"the note has {len(note)} characters; at most {NOTE_LENGTH} are kept")
    return note.strip()


def rater_name(name: str) -> str:
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise Refused(f"a rater's name has 1 to {NAME_LENGTH} printable characters")
    return name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def journal_of(folder: Path, name: str) -> Path:
    return folder / "reviews" / f"{name}.jsonl"


@contextmanager
def open_session(
    stack: Stack,
    folder: Path,
    *,
    seed: int | None = None,
    limit: int | None = None,
    overlap: int | None = None,
    shows_reference: bool = True,
    draw: Callable[[], int] = lambda: secrets.randbits(32),
) -> Iterator[Session]:
    """The only writer of the review's journal, for as long as it is open; a verdict is on disk before the rater sees the next sheet."""
    path = journal_of(folder, stack.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    if (pid := holder_of(lock)) is not None:
        raise RunError(
            f"the review {path} is already open in process {pid}",
            "judge there: it takes several raters at once; or end it first",
        )
    with run_lock(lock):

        def write(entry: Entry) -> None:
            with Journal(path) as journal:  # opened anew: what a full disk tore is closed before the next entry
                journal.write(**dumped(entry))
                journal.sync()

        entries = read_entries(path)
        if not any(isinstance(entry, Opened) for entry in entries):
            opened = Opened(at=_now(), seed=draw() if seed is None else seed, task=stack.task, models=stack.models)
            write(opened)
            entries.append(opened)
        _require_seed(entries, seed, path)
        yield Session(sampled(stack, entries, limit), entries, write, overlap=overlap, shows_reference=shows_reference)


def sampled(stack: Stack, entries: Sequence[Entry], limit: int | None) -> Stack:
    """The same sheets for every rater."""
    seeds = [entry.seed for entry in entries if isinstance(entry, Opened)]
    if limit is None or not seeds:
        return stack
    return replace(stack, sheets=tuple(shared_first(stack, seeds[0])[:limit]))


def _require_seed(entries: Sequence[Entry], seed: int | None, path: Path) -> None:
    kept = next(entry.seed for entry in entries if isinstance(entry, Opened))
    if seed not in (None, kept):
        raise RunError(
            f"{path} was begun with seed {kept}, and another would change every rater's order",
            f"leave --seed {seed} away, or give --name",
        )
