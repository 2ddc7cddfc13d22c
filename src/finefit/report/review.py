"""Shows reviews: the results of the verdicts, and an item on the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from finefit.report.layout import visible
from finefit.review.export import PreferencePairs
from finefit.review.session import BlindItem, Turn
from finefit.review.verdicts import REASONS, Reason, ReviewResults
from finefit.stats.intervals import Interval

REASON_KEYS: dict[Reason, str] = {
    "fabricated": "f",
    "contradiction": "c",
    "unsupported": "p",
    "wrong inference": "w",
    "other": "o",
}
_SIDE_BY_SIDE = 100
"""Minimum columns of a terminal to show two answers side by side."""


def results_document(results: ReviewResults) -> dict[str, Any]:
    """The output of `--json`, which the page also shows."""
    of_review = ("task", "models", "items", "judged", "skipped", "split", "unpaired", "other_texts")
    of_rater = ("rater", "judged", "skipped", "undone", "not_blind", "choices", "shown_first")
    agreement = []
    for pair in results.agreement:
        observed, kappa = pair.agreement.observed, pair.agreement.kappa
        measures = {"observed": _interval(observed), "kappa": _interval(kappa)}
        agreement.append({"raters": list(pair.raters), "n": observed.n, **measures})
    preference = None
    if (found := results.preference) is not None:
        sides = {"model": results.models[0], "over": results.models[1]}
        counts = {"wins": found.wins, "losses": found.losses, "ties": found.ties}
        preference = sides | counts | {"share": _interval(found.share), "p": found.p}
    return {name: getattr(results, name) for name in of_review} | {
        "faults": [{"model": f.model, "bad": _interval(f.bad), "reasons": f.reasons} for f in results.faults],
        "preference": preference,
        "raters": [{name: getattr(rater, name) for name in of_rater} for rater in results.raters],
        "agreement": agreement,
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def results_view(results: ReviewResults) -> Group:
    counted = {
        "only skipped": results.skipped,
        "with raters split": results.split,
        "left out because only one model answered": results.unpaired,
    }
    remarks = "".join(f", {count} {what}" for what, count in counted.items() if count)
    if results.other_texts:
        remarks += f"; {results.other_texts} verdicts on other texts do not count"
    judged = f"{results.judged} of {results.items} items of {results.task} judged{remarks}"
    return Group(Text(judged), *_result_tables(results))


def _result_tables(results: ReviewResults) -> Iterator[RenderableType]:
    if (preference := results.preference) is not None:
        one, other = results.models
        table = _table("preference", "preferred", "items")
        for name, count in ((one, preference.wins), (other, preference.losses), ("neither", preference.ties)):
            table.add_row(name, str(count))
        yield table
        yield Text(
            f"{one} over {other}: {_share(preference.share)}, where a tie counts as half and 50% means no preference. "
            f"Sign test on the {preference.wins + preference.losses} items without a tie: p = {preference.p:.3g}"
        )
    title = "bad answers" if len(results.models) == 1 else "answers with a reason marked"
    table = _table(title, "", *results.models)
    table.add_row("share (95 % interval)", *(_share(faults.bad) for faults in results.faults))
    for reason in REASONS:
        table.add_row(reason, *(str(faults.reasons[reason]) for faults in results.faults))
    yield table
    if results.raters:
        table = _table("raters", "rater", "judged", "skipped", "undone", "not blind", "preferred the first shown")
        for found in results.raters:
            preferred = found.choices.get("first", 0) + found.choices.get("second", 0)
            first = f"{found.shown_first} of {preferred}" if preferred else ""
            counts = (found.judged, found.skipped, found.undone, found.not_blind)
            table.add_row(found.rater, *map(str, counts), first)
        yield table
    if results.agreement:
        table = _table("agreement", "raters", "items", "agree", "Cohen's kappa (95 % interval)")
        for pair in results.agreement:
            observed, kappa = pair.agreement.observed, pair.agreement.kappa
            shown = "none: both always chose the same"
            if kappa is not None:
                shown = f"{kappa.value:.2f} ({kappa.low:.2f} .. {kappa.high:.2f})"
            table.add_row(", ".join(pair.raters), str(observed.n), f"{observed.value:.1%}", shown)
        yield table


def _share(interval: Interval | None) -> str:
    return "nothing judged" if interval is None else f"{interval.value:.1%} ({interval.low:.1%} .. {interval.high:.1%})"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def describe_pairs(pairs: PreferencePairs) -> str:
    left_out = ", ".join(f"{count} {why}" for why, count in pairs.left_out.items())
    return f"{len(pairs.rows)} pairs" + (f"; left out: {left_out}" if left_out else "")


def show_item(turn: Turn, item: BlindItem, marked: Sequence[set[Reason]], note: str, console: Console) -> None:
    console.rule(f"{turn.judged + turn.skipped + 1} of {turn.total}  {visible(item.place)}")
    for message in item.prompt:
        console.print(_box(message.text, message.role or "prompt"))
    for image in item.images:
        console.print(_box(image.name, "image"))
    if item.reference is not None:
        console.print(_box(item.reference, "reference"))
    boxes = [_box(answer, _title(at, len(item.answers), marked[at])) for at, answer in enumerate(item.answers)]
    if len(boxes) == 2 and console.width >= _SIDE_BY_SIDE:
        grid = Table.grid(expand=True)
        for _ in boxes:
            grid.add_column(ratio=1, overflow="fold")
        grid.add_row(*boxes)
        console.print(grid)
    else:
        console.print(Group(*boxes))
    if note:
        console.print(_box(note, "note"))


def _box(text: str, title: str) -> Panel:
    return Panel(Text(visible(text) or "(empty)", overflow="fold"), title=Text(visible(title)), title_align="left")


def _title(at: int, num_answers: int, marked: set[Reason]) -> str:
    name = f"answer {at + 1}" if num_answers == 2 else "answer"
    return f"{name}: {', '.join(reason for reason in REASONS if reason in marked)}" if marked else name


def describe_marks(marked: Sequence[set[Reason]]) -> str:
    return "; ".join(_title(at, len(marked), names) for at, names in enumerate(marked) if names) or "nothing is marked"


def legend(num_answers: int) -> str:
    main = "1 good  2 bad" if num_answers == 1 else "1 answer 1  2 answer 2  t tie"
    capitals = "" if num_answers == 1 else "\ncapital letters mark answer 2"
    reasons = "  ".join(f"{key} {reason}" for reason, key in REASON_KEYS.items())
    return f"{main}  s skip  u undo  n note  r results  q quit\n{reasons}{capitals}"
