"""The verdicts of a review: their journal, which is only appended to, and the results computed from them.

In the results an item counts once, however many raters judged it: the majority decides, and draws are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, TypeAdapter, ValidationError

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import Record
from finefit.errors import RunError
from finefit.review.items import ReviewSet
from finefit.stats.comparisons import Agreement, Preference, kappa, preference
from finefit.stats.intervals import Interval, wilson

VerdictChoice = Literal["good", "bad", "first", "second", "tie", "skip"]
"""`good` or `bad` for one model; for two models the better one, in the order of the models, not the order shown."""
Reason = Literal["fabricated", "contradiction", "unsupported", "wrong inference", "other"]
REASONS: tuple[Reason, ...] = get_args(Reason)


class ReviewOpened(Record):
    kind: Literal["opened"] = "opened"
    version: Literal[1] = 1
    at: str
    seed: int
    """Determines every rater's order of items and answers."""
    task: str
    models: tuple[str, ...]


class Verdict(Record):
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
    """The models in the order in which their answers were shown."""
    choice: VerdictChoice
    reasons: tuple[tuple[Reason, ...], ...]
    """Problems of each answer, in the order of the models."""
    note: str = ""

    @property
    def about(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return self.key, self.models, self.answers


class VerdictUndone(Record):
    kind: Literal["undone"] = "undone"
    version: Literal[1] = 1
    at: str
    rater: str
    number: int


class ResultsRevealed(Record):
    """A rater has seen the results, which name the models."""

    kind: Literal["revealed"] = "revealed"
    version: Literal[1] = 1
    at: str
    rater: str
    open: int
    """Items that this rater had not judged yet."""


JournalEntry = ReviewOpened | Verdict | VerdictUndone | ResultsRevealed
Write = Callable[[JournalEntry], None]
_ENTRY: TypeAdapter[JournalEntry] = TypeAdapter(Annotated[JournalEntry, Discriminator("kind")])


def read_entries(path: Path) -> list[JournalEntry]:
    """Skips an incomplete last line, which the rater never saw confirmed."""
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            entries.append(_ENTRY.validate_python(line))
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"entry {number} is not of this version: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise RunError(f"{path}: {problem}", "move the file away to start a new review") from None
    return entries


def entry_to_json(entry: JournalEntry) -> dict[str, Any]:
    values: dict[str, Any] = _ENTRY.dump_python(entry, mode="json")
    return values


def entries_about(entries: Sequence[JournalEntry], review_set: ReviewSet) -> list[JournalEntry]:
    """Leaves out verdicts on other texts, and their undoing."""
    known = {(item.key, review_set.models, item.digests) for item in review_set.items}
    others = {(e.rater, e.number) for e in entries if isinstance(e, Verdict) and e.about not in known}
    return [e for e in entries if not (isinstance(e, Verdict | VerdictUndone) and (e.rater, e.number) in others)]


def valid_verdicts(entries: Sequence[JournalEntry]) -> list[Verdict]:
    """Verdicts that were not undone; of one rater's verdicts on one item, the latest."""
    undone = {(entry.rater, entry.number) for entry in entries if isinstance(entry, VerdictUndone)}
    latest: dict[tuple[Any, ...], Verdict] = {}
    for entry in entries:
        if isinstance(entry, Verdict) and (entry.rater, entry.number) not in undone:
            latest[(entry.rater, *entry.about)] = entry
    return sorted(latest.values(), key=lambda verdict: verdict.number)


def unblinded_verdicts(entries: Sequence[JournalEntry]) -> frozenset[int]:
    """Numbers of verdicts given after the rater had seen the results."""
    informed, found = set[str](), set[int]()
    for entry in entries:
        if isinstance(entry, ResultsRevealed):
            informed.add(entry.rater)
        elif isinstance(entry, Verdict) and entry.rater in informed:
            found.add(entry.number)
    return frozenset(found)


Decision = VerdictChoice | Literal["split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFaults:
    model: str
    bad: Interval | None
    """Share of the judged items, None if there are none. With two models, the items with a reason that at least half of
    the raters marked."""
    reasons: dict[Reason, int]
    """Number of items by reason; an item may have several reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterSummary:
    rater: str
    judged: int
    skipped: int
    undone: int
    not_blind: int
    """Verdicts given after this rater had seen the results."""
    choices: dict[str, int]
    shown_first: int
    """How often the preferred answer of two was the one shown first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterAgreement:
    raters: tuple[str, str]
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewResults:
    task: str
    models: tuple[str, ...]
    items: int
    judged: int
    """Items that at least one rater judged."""
    skipped: int
    """Items that were only skipped."""
    split: int
    faults: tuple[ModelFaults, ...]
    preference: Preference | None
    """The preference for the first model over the second; None for one model, or if nothing is judged."""
    raters: tuple[RaterSummary, ...]
    agreement: tuple[RaterAgreement, ...]
    unpaired: int
    other_texts: int
    """Verdicts on other answers than these, given before an evaluation was repeated."""


def results_of(review_set: ReviewSet, entries: Sequence[JournalEntry]) -> ReviewResults:
    kept = entries_about(entries, review_set)
    verdicts = valid_verdicts(kept)
    judged = [verdict for verdict in verdicts if verdict.choice != "skip"]
    choices = majority_choices(review_set, entries)
    counts = Counter(choices.values())
    ties = counts["tie"] + counts["split"]  # an item without a majority is a tie
    is_compared = len(review_set.models) == 2 and counts["first"] + counts["second"] + ties > 0
    return ReviewResults(
        task=review_set.task,
        models=review_set.models,
        items=len(review_set.items),
        judged=len(choices) - counts["skip"],
        skipped=counts["skip"],
        split=counts["split"],
        faults=tuple(_faults(at, review_set, _by_key(judged), choices) for at in range(len(review_set.models))),
        preference=preference(counts["first"], counts["second"], ties) if is_compared else None,
        raters=tuple(_summary_of(rater, kept, verdicts) for rater in sorted({verdict.rater for verdict in verdicts})),
        agreement=tuple(_agreements(judged)),
        unpaired=review_set.unpaired,
        other_texts=len(valid_verdicts(entries)) - len(verdicts),
    )


def majority_choices(review_set: ReviewSet, entries: Sequence[JournalEntry]) -> dict[str, Decision]:
    """Maps an item's key to the choice of most raters; a skip counts only if nobody judged the item."""
    decisions: dict[str, Decision] = {}
    for key, verdicts in _by_key(valid_verdicts(entries_about(entries, review_set))).items():
        ranked = Counter(verdict.choice for verdict in verdicts if verdict.choice != "skip").most_common(2)
        is_split = len(ranked) == 2 and ranked[0][1] == ranked[1][1]
        decisions[key] = "split" if is_split else ranked[0][0] if ranked else "skip"
    return decisions


def _by_key(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.key, []).append(verdict)
    return found


def _faults(
    at: int, review_set: ReviewSet, judged: dict[str, list[Verdict]], choices: dict[str, Decision]
) -> ModelFaults:
    if len(review_set.models) == 1:  # half of the raters are enough to call an answer bad
        bad = sum(choices[key] in ("bad", "split") for key in judged)
    else:
        bad = sum(_half([bool(verdict.reasons[at]) for verdict in verdicts]) for verdicts in judged.values())
    reasons = {
        reason: sum(_half([reason in v.reasons[at] for v in verdicts]) for verdicts in judged.values())
        for reason in REASONS
    }
    return ModelFaults(model=review_set.models[at], bad=wilson(bad, len(judged)) if judged else None, reasons=reasons)


def _half(marks: Sequence[bool]) -> bool:
    """Whether at least half of the raters marked it."""
    return any(marks) and 2 * sum(marks) >= len(marks)


def _summary_of(rater: str, entries: Sequence[JournalEntry], verdicts: Sequence[Verdict]) -> RaterSummary:
    own = [verdict for verdict in verdicts if verdict.rater == rater]
    unblinded = unblinded_verdicts(entries)
    choices = Counter(verdict.choice for verdict in own)
    places: dict[VerdictChoice, int] = {"first": 0, "second": 1}
    return RaterSummary(
        rater=rater,
        judged=len(own) - choices["skip"],
        skipped=choices["skip"],
        undone=sum(isinstance(entry, VerdictUndone) and entry.rater == rater for entry in entries),
        not_blind=sum(verdict.number in unblinded for verdict in own),
        choices={choice: count for choice, count in sorted(choices.items()) if choice != "skip"},
        shown_first=sum(v.shown[0] == places[v.choice] for v in own if v.choice in places),
    )


def _agreements(judged: Sequence[Verdict]) -> list[RaterAgreement]:
    by_rater: dict[str, dict[str, VerdictChoice]] = {}
    for verdict in judged:
        by_rater.setdefault(verdict.rater, {})[verdict.key] = verdict.choice
    found = []
    for one, other in combinations(sorted(by_rater), 2):
        shared = [(by_rater[one][key], by_rater[other][key]) for key in by_rater[one] if key in by_rater[other]]
        if shared:
            found.append(RaterAgreement(raters=(one, other), agreement=kappa(shared)))
    return found
