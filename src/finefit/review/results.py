"""What the verdicts come to: how often each model's answers are bad, which model is preferred, and how far raters agree.

An item counts once, however many have judged it: the choice of most raters is its own, and a draw between them is told."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from finefit.review.stack import Stack
from finefit.review.verdicts import REASONS, Choice, Entry, Reason, Undone, Verdict, of_stack, seen_before, standing
from finefit.stats.agreement import Agreement, Preference, kappa, preference
from finefit.stats.intervals import Interval, wilson

Decision = Choice | Literal["split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Of one model."""

    model: str
    bad: Interval | None
    """Share of the judged items; None where none is judged. Of two models: those in which most raters marked a reason."""
    reasons: dict[Reason, int]
    """Items by what most raters found wrong; an item may have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterLine:
    rater: str
    judged: int
    skipped: int
    undone: int
    informed: int
    """Verdicts given after the results had been seen."""
    choices: dict[str, int]
    stood_first: int
    """How often the preferred answer of two was the one that stood first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """How far two raters agree on the items that both have judged."""

    raters: tuple[str, str]
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    task: str
    models: tuple[str, ...]
    items: int
    judged: int
    """Items that at least one rater has judged."""
    skipped: int
    """Items that were only skipped."""
    split: int
    """Items on which as many raters chose one way as another."""
    faults: tuple[Faults, ...]
    preference: Preference | None
    """Of the first model over the second; None for one model, or where nothing is judged."""
    raters: tuple[RaterLine, ...]
    agreement: tuple[Between, ...]
    unpaired: int
    other_texts: int
    """Verdicts on answers that are not these: an evaluation was made anew."""


def results_of(stack: Stack, entries: Sequence[Entry]) -> Results:
    kept = of_stack(entries, stack)
    verdicts = standing(kept)
    judged = [verdict for verdict in verdicts if verdict.choice != "skip"]
    choices = decided(stack, entries)
    counts = Counter(choices.values())
    return Results(
        task=stack.task,
        models=stack.models,
        items=len(stack.sheets),
        judged=len(choices) - counts["skip"],
        skipped=counts["skip"],
        split=counts["split"],
        faults=tuple(_faults(at, stack, _by_key(judged), choices) for at in range(len(stack.models))),
        preference=_preference(counts) if len(stack.models) == 2 else None,
        raters=tuple(_line(rater, kept, verdicts) for rater in sorted({verdict.rater for verdict in verdicts})),
        agreement=tuple(_between(judged)),
        unpaired=stack.unpaired,
        other_texts=len(standing(entries)) - len(verdicts),
    )


def decided(stack: Stack, entries: Sequence[Entry]) -> dict[str, Decision]:
    """What most raters chose, by the sheet's key; a skip counts only where nobody judged."""
    by_key = _by_key(standing(of_stack(entries, stack)))
    return {
        key: _most(verdict.choice for verdict in verdicts if verdict.choice != "skip")
        for key, verdicts in by_key.items()
    }


def _most(choices: Iterable[Choice]) -> Decision:
    ranked = Counter(choices).most_common(2)
    if not ranked:
        return "skip"
    return "split" if len(ranked) == 2 and ranked[0][1] == ranked[1][1] else ranked[0][0]


def _by_key(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.key, []).append(verdict)
    return found


def _faults(at: int, stack: Stack, judged: dict[str, list[Verdict]], choices: dict[str, Decision]) -> Faults:
    if len(stack.models) == 1:  # half of the raters are enough to call an answer bad
        bad = sum(choices[key] in ("bad", "split") for key in judged)
    else:
        bad = sum(_half([bool(verdict.reasons[at]) for verdict in verdicts]) for verdicts in judged.values())
    reasons = {
        reason: sum(_half([reason in v.reasons[at] for v in verdicts]) for verdicts in judged.values())
        for reason in REASONS
    }
    return Faults(model=stack.models[at], bad=wilson(bad, len(judged)) if judged else None, reasons=reasons)


def _half(marks: Sequence[bool]) -> bool:
    """Whether at least half of the raters marked it."""
    return any(marks) and 2 * sum(marks) >= len(marks)


def _preference(counts: Counter[Decision]) -> Preference | None:
    """Where as many prefer the one as the other, the item is a tie."""
    wins, losses, ties = counts["first"], counts["second"], counts["tie"] + counts["split"]
    return preference(wins, losses, ties) if wins + losses + ties else None


def _line(rater: str, entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> RaterLine:
    own = [verdict for verdict in verdicts if verdict.rater == rater]
    informed = seen_before(entries)
    choices = Counter(verdict.choice for verdict in own)
    places: dict[Choice, int] = {"first": 0, "second": 1}
    return RaterLine(
        rater=rater,
        judged=len(own) - choices["skip"],
        skipped=choices["skip"],
        undone=sum(isinstance(entry, Undone) and entry.rater == rater for entry in entries),
        informed=sum(verdict.number in informed for verdict in own),
        choices={choice: count for choice, count in sorted(choices.items()) if choice != "skip"},
        stood_first=sum(v.shown[0] == places[v.choice] for v in own if v.choice in places),
    )


def _between(judged: Sequence[Verdict]) -> list[Between]:
    by_rater: dict[str, dict[str, Choice]] = {}
    for verdict in judged:
        by_rater.setdefault(verdict.rater, {})[verdict.key] = verdict.choice
    found = []
    for one, other in combinations(sorted(by_rater), 2):
        shared = [(by_rater[one][key], by_rater[other][key]) for key in by_rater[one] if key in by_rater[other]]
        if shared:
            found.append(Between(raters=(one, other), agreement=kappa(shared)))
    return found
