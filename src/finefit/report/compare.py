"""A comparison in the terminal: settings that differ first, then scores, differences, items, and what was foretold."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.compare.records import Cell, Comparison, ItemChange, Pairing, TaskComparison
from finefit.report.board import shown_value
from finefit.report.compare_words import (
    FORETOLD,
    MISSING,
    against,
    chance,
    change,
    counts_words,
    foretold_words,
    interval,
    is_better,
    own_metric,
    parts_of,
    setting_value,
    shortened,
    spread_words,
    visible,
)
from finefit.report.fitted import Fitted
from finefit.stats.metrics import Metric

_MOST_CHARACTERS = 240
_MOST_OF_A_VALUE = 60


def comparison_view(comparison: Comparison) -> RenderableType:
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    yield from _settings(comparison)
    for task in comparison.tasks:
        yield Text()
        yield _scores(comparison, task)
        for pairing in task.pairings:
            yield _differences(comparison, task, pairing)
            yield from _items(comparison, task, pairing)
    if comparison.foretold:
        yield Text()
        yield _foretold(comparison)
    for warning in comparison.warnings:
        yield _plain(f"note: {warning}", style="yellow")


def _plain(text: str, style: str = "") -> Text:
    """Names and places are the user's: nothing in them steers the terminal."""
    return Text(visible(text), style=style)


def _settings(comparison: Comparison) -> Iterator[RenderableType]:
    if comparison.differing:
        table = Table(title="settings that differ", title_justify="left")
        table.add_column("setting", no_wrap=True)
        for side in comparison.sides:
            table.add_column(_plain(side.name), overflow="fold")
        for row in comparison.differing:
            table.add_row(_plain(row.key), *(_value(setting_value(row, at)) for at in range(len(comparison.sides))))
        yield table
    yield _plain(comparison.verdict, style="bold" if comparison.is_one_variable else "bold yellow")
    if comparison.apart:
        words = "; ".join(
            f"{row.key} {' | '.join(setting_value(row, at) for at in range(len(row.values)))}"
            for row in comparison.apart
        )
        yield Text(f"without effect on a score: {shortened(visible(words), 600)}", style="dim")


def _value(text: str) -> Text:
    return Text(shortened(visible(text), _MOST_OF_A_VALUE))


def _scores(comparison: Comparison, task: TaskComparison) -> RenderableType:
    return Fitted(
        columns=task.metrics, table=lambda metrics, is_first: _scored(comparison, task, metrics, is_first=is_first)
    )


def _scored(comparison: Comparison, task: TaskComparison, metrics: Sequence[Metric], *, is_first: bool) -> Table:
    table = Table(
        title=_plain(f"task {task.task}, 95 % intervals", style="italic") if is_first else None, title_justify="left"
    )
    table.add_column("model", no_wrap=True)
    for column in ("n", "coverage", *(metric.name for metric in metrics)):
        table.add_column(column, justify="right", no_wrap=True)
    for group, spreads in zip(comparison.groups, task.spreads, strict=True):
        for at in group.sides:
            table.add_row(_plain(comparison.sides[at].name), *_cells(task, metrics, at))
            for name, part in parts_of(task, at):
                table.add_row(
                    _plain(f"  {name}", style="dim"),
                    Text(f"{part.n:,}"),
                    Text(f"{part.coverage:.0%}"),
                    *_values(metrics, part.metrics),
                )
        if len(group.sides) > 1:
            means = (Text(spread_words(metric, spreads[metric.name]), style="bold") for metric in metrics)
            table.add_row(Text("mean over seeds", style="bold"), "", "", *means)
            table.add_section()
    return table


def _cells(task: TaskComparison, metrics: Sequence[Metric], at: int) -> Iterator[Text]:
    scored = task.scored[at]
    if scored is None:
        yield from (Text(MISSING, style="yellow") for _ in range(2 + len(metrics)))
        return
    yield Text(f"{scored.n:,}" if scored.n == scored.available else f"{scored.n:,} of {scored.available:,}")
    yield Text(f"{scored.coverage:.0%}")
    yield from _values(metrics, scored.metrics)


def _values(metrics: Sequence[Metric], cells: Mapping[str, Cell]) -> Iterator[Text]:
    for metric in metrics:
        cell = cells.get(metric.name)
        yield (
            Text(MISSING, style="yellow")
            if cell is None
            else Text.assemble((shown_value(metric, cell.value), "bold"), (f"  {interval(metric, cell)}", "dim"))
        )


def _differences(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> Table:
    title = f"{against(comparison, pairing)}, {pairing.n:,} items"
    table = Table(title=_plain(title, style="italic"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for column in ("values", "difference", "95 % interval", "p", "p (Holm)"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in pairing.changes:
        metric = next(one for one in task.metrics if one.name == found.metric)
        style = {True: "green", False: "red", None: ""}[is_better(metric, found)]
        table.add_row(
            metric.name,
            f"{shown_value(metric, found.first)} -> {shown_value(metric, found.second)}",
            Text(change(metric, found.value), style=style),
            interval(metric, found),
            chance(found.p),
            Text(chance(found.corrected_p), style=style),
        )
    return table


def _items(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> Iterator[RenderableType]:
    if not pairing.changes:
        return
    metric = own_metric(task, pairing)
    yield Text(counts_words(pairing, metric))
    kinds = (("most gained", pairing.gained), ("most lost", pairing.lost), ("most reworded", pairing.reworded))
    names = [comparison.groups[at].name for at in (pairing.first, pairing.second)]
    for title, items in kinds:
        for item in items:
            yield _item(title, item, names, metric)


def _item(title: str, item: ItemChange, names: list[str], metric: Metric) -> RenderableType:
    table = Table(
        title=_plain(f"{title}: {item.place}", style="italic"),
        title_justify="left",
        box=None,
        show_header=False,
        padding=(0, 1, 0, 2),
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("asked", _text(item.prompt))
    table.add_row("right", _text(item.reference))
    for name, answer, failure, scores in zip(names, item.answers, item.failures, item.scores, strict=True):
        score = shown_value(metric, scores[metric.name]) if metric.name in scores else ""
        table.add_row(
            _plain(f"{name} {score}"),
            _text(answer) if failure is None else Text.assemble(_text(answer), (f"  ({visible(failure)})", "yellow")),
        )
    return table


def _text(text: str) -> Text:
    """On as few lines as it takes; the page shows it as it stands."""
    return Text(shortened(visible(" ".join(text.split())), _MOST_CHARACTERS))


def _foretold(comparison: Comparison) -> Table:
    table = Table(title=FORETOLD, title_justify="left")
    table.add_column("what", no_wrap=True)
    for side in comparison.sides:
        table.add_column(_plain(side.name), justify="right")
    for row in comparison.foretold:
        table.add_row(row.what, *(foretold_words(row, at) for at in range(len(comparison.sides))))
    return table
