"""Pairs that people have judged: from the reviews in a run directory, or from the files that `finefit review --export-pairs` wrote."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.rundir import is_run, open_run
from finefit.data.falsify.audit import Sides, audit
from finefit.data.falsify.make import LENGTHS, Unused
from finefit.data.falsify.written import messages_record, tools_record
from finefit.data.rows import BadRow, Row
from finefit.errors import DataError, RunError
from finefit.pipeline.making.pair_splits import Split, named_alone, open_anywhere
from finefit.review.export import preference_pairs
from finefit.review.runs import Named, stack_of_runs
from finefit.review.stack import Stack
from finefit.review.verdicts import Entry, Opened, read_entries
from finefit.spec.rows import Source
from finefit.spec.stages import Verdicts

_EXPORT = "write the pairs into a file with `finefit review RUN RUN --export-pairs pairs.jsonl`, and name that"
_IN_PART = "which a stage's pairs do not carry: train on the file itself"
_HAS_IMAGES = (
    "shows images, which a stage's pairs do not carry: train on the file that `finefit review --export-pairs` writes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Pairs with where they come from, and what became none."""

    pairs: tuple[tuple[str, dict[str, Any]], ...]
    unused: tuple[Unused, ...]


def judged(method: Verdicts, base: Path) -> Split:
    found = [part for name in method.of for part in _of(name, base)]
    pairs, repeated = _agreed([pair for part in found for pair in part.pairs])
    unused = [row for part in found for row in part.unused] + repeated
    sides = [Sides(row=str(pair["prompt"]), chosen=pair["chosen"], rejected=pair["rejected"]) for pair in pairs]
    return Split(
        read=len(pairs) + len(unused),
        used=len(pairs),
        pairs=tuple(pairs),
        unused=tuple(unused),
        audit=audit(sides, LENGTHS),
    )


def _of(name: str, base: Path) -> Iterator[_Found]:
    path = base / name
    if is_run(path):
        yield from _reviews(path, name)
    elif path.is_file():
        yield _exported(name, base)
    else:
        raise RunError(
            f"{name} is neither a run directory nor a file with judged pairs",
            "name a run that was reviewed, or " + _EXPORT,
        )


# reviews in a run directory


def _reviews(run: Path, name: str) -> Iterator[_Found]:
    journals = sorted((run / "reviews").glob("*.jsonl"))
    if not journals:
        raise RunError(
            f"{name} has no reviews, so nobody has judged its answers", f"judge them with `finefit review {name}`"
        )
    for journal in journals:
        entries = read_entries(journal)
        yield _decided(_stack(run, journal, entries), entries, f"{named_alone(name)}/reviews/{journal.name}")


def _decided(stack: Stack, entries: list[Entry], place: str) -> _Found:
    made = preference_pairs(stack, entries)
    blind = [row for row in made.rows if not row.get("images")]
    rows = ((place, row | {"prompt": _as_messages(row["prompt"]), "rule": "judged", "row": place}) for row in blind)
    reasons = {**made.left_out, _HAS_IMAGES: len(made.rows) - len(blind)}
    unused = [Unused(place=place, reason=reason) for reason, count in reasons.items() for _ in range(count)]
    return _Found(pairs=tuple(rows), unused=tuple(unused))


def _as_messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _stack(run: Path, journal: Path, entries: Iterable[Entry]) -> Stack:
    """What was judged, found again by what the journal says of it."""
    opened = next((entry for entry in entries if isinstance(entry, Opened)), None)
    if opened is None:
        raise RunError(f"{journal} does not say what it judges", "move the file away, or " + _EXPORT)
    return stack_of_runs([_named(run, model, journal) for model in opened.models], task=opened.task, name=journal.stem)


def _named(run: Path, model: str, journal: Path) -> Named:
    """A model is called RUN:CHECKPOINT there, RUN by as much of its path as tells it from the other one's."""
    tail, _, checkpoint = model.rpartition(":")
    place = run.resolve().parents[len(Path(tail).parts) - 1] / tail
    if not is_run(place):
        raise RunError(f"{journal} judges {model}, which is not beside {run.name}", _EXPORT)
    return Named(run=open_run(place), checkpoint=checkpoint)


# exported files


def _exported(name: str, base: Path) -> _Found:
    pairs: list[tuple[str, dict[str, Any]]] = []
    unused: list[Unused] = []
    for row in open_anywhere(Source(path=name), base, split="train").rows():
        if isinstance(row, BadRow):
            unused.append(Unused(place=row.place, reason=row.reason))
        elif row.kind != "pair":
            raise DataError(f"{row.place} is no judged pair of two answers: it is {row.kind}", _EXPORT)
        elif reason := _unfit(row):
            unused.append(Unused(place=row.place, reason=reason))
        else:
            sides = {"chosen": row.answer, "rejected": row.rejected[0].content, **tools_record(row)}
            pairs.append(
                (row.place, {"prompt": messages_record(row.prompt), **sides, "rule": "judged", "row": row.place})
            )
    return _Found(pairs=tuple(pairs), unused=tuple(unused))


def _unfit(row: Row) -> str | None:
    """A side of a made pair is one text."""
    chosen, rejected = row.messages[row.num_given :], row.rejected
    if row.images:
        return _HAS_IMAGES
    if len(chosen) != 1 or len(rejected) != 1:
        return f"has sides of several messages, {_IN_PART}"
    if any(side.tool_calls or side.reasoning for side in (*chosen, *rejected)):
        return f"has an answer with tool calls or reasoning, {_IN_PART}"
    return None


# several reviews


def _agreed(found: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[Unused]]:
    """Each pair once, and none that another review has decided the other way."""
    decided = Counter(_key(pair) for _, pair in found)
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    unused: list[Unused] = []
    for place, pair in found:
        prompt, chosen, rejected = key = _key(pair)
        if decided[prompt, rejected, chosen]:
            unused.append(Unused(place=place, reason="is judged the other way in another review"))
        elif key in kept:
            unused.append(Unused(place=place, reason="is judged the same in another review"))
        else:
            kept[key] = pair
    return list(kept.values()), unused


def _key(pair: dict[str, Any]) -> tuple[str, str, str]:
    return str((pair["prompt"], pair.get("tools"))), pair["chosen"], pair["rejected"]
