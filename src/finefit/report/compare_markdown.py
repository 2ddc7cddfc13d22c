"""A comparison as tables for a paper: scores with intervals, differences with p, settings that differ."""

from collections.abc import Iterator, Sequence

from finefit.compare.records import Cell, Comparison, TaskComparison
from finefit.report.board import shown_value
from finefit.report.compare_words import (
    FORETOLD,
    MISSING,
    against,
    chance,
    change,
    foretold_words,
    interval,
    parts_of,
    setting_value,
    spread_words,
    visible,
)
from finefit.stats.metrics import Metric


def markdown(comparison: Comparison) -> str:
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"# {' and '.join(_plain(side.name) for side in comparison.sides)}"
    yield ""
    yield f"{_plain(comparison.verdict[0].upper() + comparison.verdict[1:])}."
    if comparison.differing:
        names = [side.name for side in comparison.sides]
        yield from _table(
            ["setting", *names],
            [[row.key, *(setting_value(row, at) for at in range(len(names)))] for row in comparison.differing],
        )
    for task in comparison.tasks:
        yield ""
        yield f"## {_plain(task.task)}"
        yield from _table(
            ["model", "n", "coverage", *(metric.name for metric in task.metrics)], list(_scores(comparison, task))
        )
        if task.pairings:
            head = ["difference", "metric", "n", "first", "second", "difference", "95 % interval", "p", "p (Holm)"]
            yield from _table(head, list(_differences(comparison, task)))
            yield ""
            yield _METHOD
    if comparison.foretold:
        yield ""
        yield "## Foretold and measured"
        rows = [
            [row.what, *(foretold_words(row, at) for at in range(len(comparison.sides)))] for row in comparison.foretold
        ]
        yield from _table([FORETOLD, *(side.name for side in comparison.sides)], rows)
    if comparison.warnings:
        yield ""
        yield from (f"- {_plain(warning)}" for warning in comparison.warnings)


_METHOD = (
    "Intervals: 95 %, Wilson for rates, studentised bootstrap over items for the rest; differences are paired by item, "
    "p by exchanging the two models' answers per item, corrected for all differences shown (Holm)."
)


def _scores(comparison: Comparison, task: TaskComparison) -> Iterator[list[str]]:
    for group, spreads in zip(comparison.groups, task.spreads, strict=True):
        for at in group.sides:
            scored, name = task.scored[at], comparison.sides[at].name
            if scored is None:
                yield [name, *([MISSING] * (2 + len(task.metrics)))]
                continue
            n = str(scored.n) if scored.n == scored.available else f"{scored.n} of {scored.available}"
            yield [
                name,
                n,
                f"{scored.coverage:.0%}",
                *(_cell(metric, scored.metrics.get(metric.name)) for metric in task.metrics),
            ]
            for dataset, part in parts_of(task, at):
                cells = (_cell(metric, part.metrics.get(metric.name)) for metric in task.metrics)
                yield [f"{name}, {dataset}", str(part.n), f"{part.coverage:.0%}", *cells]
        if len(group.sides) > 1:
            yield [
                f"mean over seeds of {group.name}",
                "",
                "",
                *(spread_words(metric, spreads[metric.name]) for metric in task.metrics),
            ]


def _cell(metric: Metric, cell: Cell | None) -> str:
    return MISSING if cell is None else f"{shown_value(metric, cell.value)} ({interval(metric, cell)})"


def _differences(comparison: Comparison, task: TaskComparison) -> Iterator[list[str]]:
    for pairing in task.pairings:
        for found in pairing.changes:
            metric = next(one for one in task.metrics if one.name == found.metric)
            values = [
                shown_value(metric, found.first),
                shown_value(metric, found.second),
                change(metric, found.value),
                interval(metric, found),
            ]
            yield [
                against(comparison, pairing),
                metric.name,
                str(pairing.n),
                *values,
                chance(found.p),
                chance(found.corrected_p),
            ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(map(_plain, head))} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_plain, row))} |"


_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#$"} | {"\n": " ", "\t": " "})


def _plain(text: str) -> str:
    """As it stands: nothing in it is markup."""
    return visible(text).translate(_SPECIAL)
