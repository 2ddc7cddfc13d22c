"""A review in words: what the verdicts come to, and a sheet as a terminal shows it."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from finefit.review.export import Pairs
from finefit.review.results import Results
from finefit.review.session import Face, Turn
from finefit.review.verdicts import REASONS, Reason
from finefit.stats.agreement import Agreement, Preference
from finefit.stats.intervals import Interval

REASON_KEYS: dict[Reason, str] = {
    "fabricated": "f",
    "contradiction": "c",
    "unsupported": "p",
    "wrong inference": "w",
    "other": "o",
}
_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of what follows."""
_SIDE_BY_SIDE = 100
"""Columns of a terminal from which two answers stand beside one another."""


def results_document(results: Results) -> dict[str, Any]:
    """What `--json` and the page show."""
    return {
        "task": results.task,
        "models": list(results.models),
        "items": results.items,
        "judged": results.judged,
        "skipped": results.skipped,
        "split": results.split,
        "unpaired": results.unpaired,
        "other_texts": results.other_texts,
        "faults": [{"model": f.model, "bad": _interval(f.bad), "reasons": f.reasons} for f in results.faults],
        "preference": None if results.preference is None else _preference(results.models, results.preference),
        "raters": [
            {
                name: getattr(line, name)
                for name in ("rater", "judged", "skipped", "undone", "informed", "choices", "stood_first")
            }
            for line in results.raters
        ],
        "agreement": [
            {"raters": list(between.raters), **_agreement(between.agreement)} for between in results.agreement
        ],
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return (
        None
        if interval is None
        else {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
    )


def _preference(models: Sequence[str], found: Preference) -> dict[str, Any]:
    return {
        "model": models[0],
        "over": models[1],
        "wins": found.wins,
        "losses": found.losses,
        "ties": found.ties,
        "share": _interval(found.share),
        "p": found.p,
    }


def _agreement(found: Agreement) -> dict[str, Any]:
    return {"n": found.observed.n, "observed": _interval(found.observed), "kappa": _interval(found.kappa)}


def results_view(results: Results) -> Group:
    return Group(*_parts(results))


def _parts(results: Results) -> Iterator[RenderableType]:
    yield Text(f"{results.judged} of {results.items} items of {results.task} judged" + _asides(results))
    if results.preference is not None:
        yield _preference_table(results.models, results.preference)
        yield Text(preference_words(results.models, results.preference))
    yield _faults_table(results)
    if results.raters:
        yield _raters_table(results)
    if results.agreement:
        yield _agreement_table(results)


def _asides(results: Results) -> str:
    counted = {
        "only skipped": results.skipped,
        "on which raters are split": results.split,
        "that only one model has answered left out": results.unpaired,
    }
    words = "".join(f", {count} {what}" for what, count in counted.items() if count)
    return words + (f"; {results.other_texts} verdicts on other texts not counted" if results.other_texts else "")


def preference_words(models: Sequence[str], found: Preference) -> str:
    n = found.wins + found.losses
    return (
        f"{models[0]} over {models[1]}: {_share(found.share)}, a tie counted as half; one half is no preference. "
        f"Sign test on the {n} that are no ties: p = {found.p:.3g}"
    )


def _share(interval: Interval | None) -> str:
    return "nothing judged" if interval is None else f"{interval.value:.1%} ({interval.low:.1%} .. {interval.high:.1%})"


def _preference_table(models: Sequence[str], found: Preference) -> Table:
    table = _table("preference", "preferred", "items")
    for name, count in ((models[0], found.wins), (models[1], found.losses), ("neither", found.ties)):
        table.add_row(name, str(count))
    return table


def _faults_table(results: Results) -> Table:
    title = "bad answers" if len(results.models) == 1 else "answers with a reason marked"
    table = _table(title, "", *results.models)
    table.add_row("share (95 % interval)", *(_share(faults.bad) for faults in results.faults))
    for reason in REASONS:
        table.add_row(reason, *(str(faults.reasons[reason]) for faults in results.faults))
    return table


def _raters_table(results: Results) -> Table:
    table = _table("raters", "rater", "judged", "skipped", "taken back", "not blind", "chose what stood first")
    for line in results.raters:
        preferred = line.choices.get("first", 0) + line.choices.get("second", 0)
        first = f"{line.stood_first} of {preferred}" if preferred else ""
        table.add_row(line.rater, str(line.judged), str(line.skipped), str(line.undone), str(line.informed), first)
    return table


def _agreement_table(results: Results) -> Table:
    table = _table("agreement", "raters", "items", "agree", "Cohen's kappa (95 % interval)")
    for between in results.agreement:
        found = between.agreement
        table.add_row(
            ", ".join(between.raters), str(found.observed.n), f"{found.observed.value:.1%}", kappa_words(found.kappa)
        )
    return table


def kappa_words(kappa: Interval | None) -> str:
    return (
        "none: both always chose the same"
        if kappa is None
        else f"{kappa.value:.2f} ({kappa.low:.2f} .. {kappa.high:.2f})"
    )


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def pairs_words(pairs: Pairs) -> str:
    left_out = ", ".join(f"{count} {why}" for why, count in pairs.left_out.items())
    return f"{len(pairs.rows)} pairs" + (f"; left out: {left_out}" if left_out else "")


def harmless(text: str) -> str:
    """Without what a terminal would take for a command, or would write backwards: it becomes visible. Joiners stay, which scripts and emoji need."""
    return "".join(_picture(character) if _is_command(character) else character for character in text)


def _is_command(character: str) -> bool:
    return character in _TURNS or (unicodedata.category(character) == "Cc" and character not in "\n\t")


def _picture(character: str) -> str:
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else f"<U+{ord(character):04X}>"


def show_sheet(turn: Turn, face: Face, marked: Sequence[set[Reason]], note: str, console: Console) -> None:
    console.rule(f"{turn.judged + turn.skipped + 1} of {turn.total}  {harmless(face.place)}")
    for said in face.prompt:
        console.print(_box(said.text, said.role or "asked"))
    for image in face.images:
        console.print(_box(image.name, "image"))
    if face.reference is not None:
        console.print(_box(face.reference, "reference"))
    boxes = [_box(answer, _title(at, len(face.answers), marked[at])) for at, answer in enumerate(face.answers)]
    console.print(_beside(boxes) if len(boxes) == 2 and console.width >= _SIDE_BY_SIDE else Group(*boxes))
    if note:
        console.print(_box(note, "note"))


def _box(text: str, title: str) -> Panel:
    return Panel(Text(harmless(text) or "(empty)", overflow="fold"), title=Text(harmless(title)), title_align="left")


def _title(at: int, num_answers: int, marked: set[Reason]) -> str:
    name = f"answer {at + 1}" if num_answers == 2 else "answer"
    return f"{name}: {', '.join(reason for reason in REASONS if reason in marked)}" if marked else name


def marked_words(marked: Sequence[set[Reason]]) -> str:
    return "; ".join(_title(at, len(marked), names) for at, names in enumerate(marked) if names) or "nothing is marked"


def _beside(boxes: Sequence[RenderableType]) -> Table:
    grid = Table.grid(expand=True)
    for _ in boxes:
        grid.add_column(ratio=1, overflow="fold")
    grid.add_row(*boxes)
    return grid


def legend(num_answers: int) -> str:
    main = "1 good  2 bad" if num_answers == 1 else "1 answer 1  2 answer 2  t tie"
    capitals = "" if num_answers == 1 else "\ncapital letters mark answer 2"
    reasons = "  ".join(f"{key} {reason}" for reason, key in REASON_KEYS.items())
    return f"{main}  s skip  u undo  n note  r results  q quit\n{reasons}{capitals}"
