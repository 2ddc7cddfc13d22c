"""A review session: what a rater sees next, and what happens to a decision. The page and the terminal both use it.

All state is in the journal, so a session can end at any moment and continue from it."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from finefit.artifacts.atomic import Journal
from finefit.artifacts.processes import holder_of, run_lock
from finefit.errors import RunError
from finefit.review import verdicts as journal
from finefit.review.items import PromptMessage, ReviewItem, ReviewSet
from finefit.review.verdicts import REASONS, JournalEntry, Reason, ResultsRevealed, Verdict, VerdictChoice

Press = Literal["1", "2", "tie", "skip"]
Marks = tuple[tuple[Reason, ...], ...]
NAME_LENGTH = 40
NOTE_LENGTH = 4000
_GOOD_OR_BAD: dict[Press, VerdictChoice] = {"1": "good", "2": "bad", "skip": "skip"}
_FIRST_OR_SECOND: tuple[VerdictChoice, VerdictChoice] = ("first", "second")


class Refused(Exception):
    """The decision makes no sense; the message is for the rater."""


class Stale(Exception):
    """The decision is about another item than the current one: a second key press, or a page left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindImage:
    """An image without its path, which only the server needs."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindItem:
    """An item as a rater sees it; nothing in it reveals which model gave which answer."""

    handle: str
    prompt: tuple[PromptMessage, ...]
    answers: tuple[str, ...]
    """The answers in the order in which they are shown."""
    reference: str | None
    place: str
    images: tuple[BlindImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a rater had marked before undoing a verdict."""

    reasons: Marks
    """The reasons in the order in which the answers are shown."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    rater: str
    judged: int
    skipped: int
    total: int
    item: BlindItem | None
    draft: Draft
    can_undo: bool
    has_seen_results: bool


class Session:
    def __init__(
        self,
        review_set: ReviewSet,
        entries: Sequence[JournalEntry],
        write: journal.Write,
        *,
        overlap: int | None = None,
        shows_reference: bool = True,
    ) -> None:
        self.review_set, self._entries, self._write = review_set, list(entries), write
        self._overlap, self._shows_reference, self._seed = overlap, shows_reference, _seed_of(entries)

    @property
    def entries(self) -> list[JournalEntry]:
        return list(self._entries)

    def turn(self, rater: str) -> Turn:
        rater = rater_name(rater)
        entries = journal.entries_about(self._entries, self.review_set)
        own = [verdict for verdict in journal.valid_verdicts(entries) if verdict.rater == rater]
        skipped = sum(verdict.choice == "skip" for verdict in own)
        undone = _last_undone(rater, entries)
        left = self._left(rater, entries, undone)
        shown, draft = None, Draft(reasons=((),) * len(self.review_set.models), note="")
        if left:
            item = left[0]
            shown = BlindItem(
                handle=item.handle,
                prompt=item.prompt,
                answers=tuple(item.answers[at] for at in answer_order(item, self._seed, rater)),
                reference=item.reference if self._shows_reference else None,
                place=item.place,
                images=tuple(BlindImage(name=image.name, sha256=image.sha256) for image in item.images),
            )
            if undone is not None and undone.key == item.key:
                draft = Draft(reasons=_reordered(undone.reasons, undone.shown), note=undone.note)
        return Turn(
            rater=rater,
            judged=len(own) - skipped,
            skipped=skipped,
            total=len(own) + len(left),
            item=shown,
            draft=draft,
            can_undo=bool(own),
            has_seen_results=any(isinstance(entry, ResultsRevealed) and entry.rater == rater for entry in entries),
        )

    def judge(
        self, rater: str, handle: str, press: Press, *, reasons: Sequence[Sequence[str]] = (), note: str = ""
    ) -> Turn:
        """`press` and `reasons` refer to the answers in the order in which they are shown."""
        current = self.turn(rater).item
        if current is None or current.handle != handle:
            raise Stale
        rater = rater_name(rater)
        item = next(item for item in self.review_set.items if item.handle == handle)
        shown = answer_order(item, self._seed, rater)
        choice: VerdictChoice
        if len(shown) == 1:
            if press not in _GOOD_OR_BAD:
                raise Refused("a single answer is good or bad; there is no tie")
            choice = _GOOD_OR_BAD[press]
        elif press == "tie" or press == "skip":
            choice = press
        else:
            choice = _FIRST_OR_SECOND[shown[int(press) - 1]]
        if len(note) > NOTE_LENGTH:
            raise Refused(f"the note has {len(note)} characters; at most {NOTE_LENGTH} are allowed")
        verdict = Verdict(
            number=1 + max((entry.number for entry in self._entries if isinstance(entry, Verdict)), default=0),
            at=_now(),
            rater=rater,
            key=item.key,
            models=self.review_set.models,
            answers=item.digests,
            shown=shown,
            choice=choice,
            reasons=_reordered(_checked(reasons, choice, len(shown)), shown),
            note=note.strip(),
        )
        self._keep(verdict)
        return self.turn(rater)

    def undo(self, rater: str) -> Turn:
        """Undoes the rater's latest verdict: its item comes next, marked as it was."""
        valid = journal.valid_verdicts(journal.entries_about(self._entries, self.review_set))
        own = [verdict for verdict in valid if verdict.rater == rater_name(rater)]
        if not own:
            raise Refused("there is no verdict to undo")
        self._keep(journal.VerdictUndone(at=_now(), rater=own[-1].rater, number=own[-1].number))
        return self.turn(rater)

    def reveal(self, rater: str) -> None:
        """The reveal is recorded, because this rater's later decisions are not blind."""
        turn = self.turn(rater)
        if not turn.has_seen_results:
            self._keep(ResultsRevealed(at=_now(), rater=turn.rater, open=turn.total - turn.judged - turn.skipped))

    def _keep(self, entry: JournalEntry) -> None:
        self._write(entry)
        self._entries.append(entry)

    def _left(self, rater: str, entries: Sequence[JournalEntry], undone: Verdict | None) -> list[ReviewItem]:
        """The items that the rater has yet to judge, in an order of their own that begins with the shared items."""
        verdicts = journal.valid_verdicts(entries)
        own = {verdict.key for verdict in verdicts if verdict.rater == rater}
        shared = {item.key for item in shared_order(self.review_set, self._seed)[: self._overlap]}
        ordered = sorted(
            self.review_set.items,
            key=lambda item: (item.key not in shared, _hash("order", self._seed, rater, item.key)),
        )
        if self._overlap is not None:  # items after the shared ones are judged by one rater each
            others = {verdict.key for verdict in verdicts if verdict.rater != rater and verdict.choice != "skip"}
            ordered = [item for at, item in enumerate(ordered) if at < self._overlap or item.key not in others]
        left = [item for item in ordered if item.key not in own]
        return sorted(left, key=lambda item: undone is None or item.key != undone.key)


def _last_undone(rater: str, entries: Sequence[JournalEntry]) -> Verdict | None:
    """The verdict that the rater undid last, if they have decided nothing since."""
    own = [entry for entry in entries if isinstance(entry, Verdict | journal.VerdictUndone) and entry.rater == rater]
    if not own or not isinstance(own[-1], journal.VerdictUndone):
        return None
    return next(entry for entry in own if isinstance(entry, Verdict) and entry.number == own[-1].number)


def _checked(reasons: Sequence[Sequence[str]], choice: VerdictChoice, num_answers: int) -> Marks:
    """The reasons in a fixed order, so that equal marks give equal entries."""
    if len(reasons) not in (0, num_answers):
        raise Refused(f"there are reasons for {len(reasons)} answers, but {num_answers} answers")
    if unknown := [name for marked in reasons for name in marked if name not in REASONS]:
        raise Refused(f"{unknown[0]} is not a reason; choose from {', '.join(REASONS)}")
    marked = tuple(tuple(reason for reason in REASONS if reason in names) for names in reasons) or ((),) * num_answers
    if choice == "good" and any(marked):
        raise Refused("the answer is judged good, but a reason against it is marked; remove the mark or judge it bad")
    return marked


def _reordered(reasons: Marks, shown: tuple[int, ...]) -> Marks:
    """Converts the order shown to the order of the models, or back: with two answers both are the same swap."""
    return tuple(reasons[at] for at in shown)


def rater_name(name: str) -> str:
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise Refused(f"a rater's name must have 1 to {NAME_LENGTH} printable characters")
    return name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def journal_of(folder: Path, name: str) -> Path:
    return folder / "reviews" / f"{name}.jsonl"


@contextmanager
def open_session(
    review_set: ReviewSet,
    folder: Path,
    *,
    seed: int | None = None,
    limit: int | None = None,
    overlap: int | None = None,
    shows_reference: bool = True,
    draw: Callable[[], int] = lambda: secrets.randbits(32),
) -> Iterator[Session]:
    """The only writer of the review's journal. A verdict is on disk before the rater sees the next item."""
    path = journal_of(folder, review_set.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    if (pid := holder_of(lock)) is not None:
        remedy = "judge there, since it takes several raters at once, or stop it first"
        raise RunError(f"the review {path} is already open in process {pid}", remedy)
    with run_lock(lock):

        def write(entry: JournalEntry) -> None:
            with Journal(path) as file:  # reopened each time: a line cut off by a full disk is closed first
                file.write(**journal.entry_to_json(entry))
                file.sync()

        entries = journal.read_entries(path)
        if not any(isinstance(entry, journal.ReviewOpened) for entry in entries):
            drawn = draw() if seed is None else seed
            opened = journal.ReviewOpened(at=_now(), seed=drawn, task=review_set.task, models=review_set.models)
            write(opened)
            entries.append(opened)
        if seed not in (None, _seed_of(entries)):
            problem = f"{path} was started with seed {_seed_of(entries)}"
            remedy = f"leave out --seed {seed}, or start another review with --name"
            raise RunError(f"{problem}, and another seed would change every rater's order", remedy)
        chosen = sampled(review_set, entries, limit)
        yield Session(chosen, entries, write, overlap=overlap, shows_reference=shows_reference)


def _seed_of(entries: Sequence[JournalEntry]) -> int:
    return next(entry.seed for entry in entries if isinstance(entry, journal.ReviewOpened))


def sampled(review_set: ReviewSet, entries: Sequence[JournalEntry], limit: int | None) -> ReviewSet:
    """The same sample of the items for every rater."""
    if limit is None or not any(isinstance(entry, journal.ReviewOpened) for entry in entries):
        return review_set
    return replace(review_set, items=tuple(shared_order(review_set, _seed_of(entries))[:limit]))


def shared_order(review_set: ReviewSet, seed: int) -> list[ReviewItem]:
    """An order common to all raters; its beginning is a sample of the items. Here and in each rater's own order, a
    place depends only on seed, rater and item, so neither a restart nor an item that is added or removed changes it."""
    return sorted(review_set.items, key=lambda item: _hash("shared", seed, item.key))


def answer_order(item: ReviewItem, seed: int, rater: str) -> tuple[int, ...]:
    if len(item.answers) == 1:
        return (0,)
    return (0, 1) if _hash("sides", seed, rater, item.key) % 2 == 0 else (1, 0)


def _hash(*of: str | int) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(of).encode()).digest()[:8])
