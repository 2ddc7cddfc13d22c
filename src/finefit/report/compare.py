"""A comparison as tables of plain data, built once; the terminal and Markdown are rendered here, the page in
`compare_page`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.compare.records import (
    Comparison,
    ItemChange,
    MetricDifference,
    Pairing,
    Prediction,
    ScoreInterval,
    Setting,
    SideDatasetScores,
    SideScores,
    TaskComparison,
)
from finefit.report.layout import SplitTable, duration, gib, shortened, three_digits, visible
from finefit.report.scores import format_value
from finefit.stats.comparisons import Spread
from finefit.stats.metrics import Metric

MISSING = "missing"
METHOD = (
    "Intervals: 95 %, Wilson for rates, studentised bootstrap over items for other metrics. Differences are paired by "
    "item; p comes from exchanging the two models' answers per item, and p (Holm) is corrected for all differences "
    "shown."
)
Style = Literal["", "strong", "soft", "good", "bad", "missing"]


@dataclass(frozen=True, slots=True)
class TableCell:
    text: str
    detail: str = ""
    """Less prominent, after the text: an interval."""
    style: Style = ""
    side: int | None = None
    """The side that the cell names; the page shows its colour."""


@dataclass(frozen=True, slots=True)
class TableRow:
    cells: tuple[TableCell, ...]
    kind: Literal["", "soft", "mean"] = ""
    """`soft`: one data set of the row above; `mean`: the seeds above taken together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    title: str
    columns: tuple[TableCell, ...]
    rows: tuple[TableRow, ...]
    """The first column names the row."""
    holds_text: bool = False
    """Whether the other columns hold text instead of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    title: str
    change: str
    prompt: str
    reference: str
    answers: tuple[tuple[str, str, str | None], ...]
    """For both models: its name and score, the answer, and why scoring failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingView:
    title: str
    differences: TableData
    counts: str
    items: tuple[ItemView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    name: str
    scores: TableData
    pairings: tuple[PairingView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView:
    title: str
    verdict: str
    is_one_variable: bool
    settings: TableData | None
    other_settings: TableData | None
    """Settings that cannot change a score."""
    tasks: tuple[TaskView, ...]
    predictions: TableData | None
    warnings: tuple[str, ...]


def comparison_view(comparison: Comparison) -> ComparisonView:
    return ComparisonView(
        title=" and ".join(side.name for side in comparison.sides),
        verdict=comparison.verdict,
        is_one_variable=comparison.is_one_variable,
        settings=_settings_table("settings that differ", comparison, comparison.differing),
        other_settings=_settings_table("no effect on scores", comparison, comparison.without_effect),
        tasks=tuple(_task_view(comparison, task) for task in comparison.tasks),
        predictions=_predictions_table(comparison),
        warnings=comparison.warnings,
    )


def _settings_table(title: str, comparison: Comparison, settings: Sequence[Setting]) -> TableData | None:
    if not settings:
        return None
    rows = (TableRow(tuple(map(TableCell, (row.key, *map(_setting_value, row.values))))) for row in settings)
    return TableData(title=title, columns=_side_columns("setting", comparison), rows=tuple(rows), holds_text=True)


def _setting_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _side_columns(first: str, comparison: Comparison) -> tuple[TableCell, ...]:
    return (TableCell(first), *(TableCell(side.name, side=at) for at, side in enumerate(comparison.sides)))


def _task_view(comparison: Comparison, task: TaskComparison) -> TaskView:
    scores = TableData(
        title=f"task {task.task}, 95 % intervals",
        columns=tuple(map(TableCell, ("model", "n", "coverage", *(metric.name for metric in task.metrics)))),
        rows=tuple(_score_rows(comparison, task)),
    )
    pairings = tuple(_pairing_view(comparison, task, pairing) for pairing in task.pairings)
    return TaskView(name=task.task, scores=scores, pairings=pairings)


def _score_rows(comparison: Comparison, task: TaskComparison) -> Iterator[TableRow]:
    for group, spreads in zip(comparison.groups, task.spreads, strict=True):
        for at in group.sides:
            name, scored = comparison.sides[at].name, task.scored[at]
            if scored is None:
                missing = [TableCell(MISSING, style="missing")] * (2 + len(task.metrics))
                yield TableRow((TableCell(name, side=at), *missing))
                continue
            yield TableRow((TableCell(name, side=at), *_score_cells(task.metrics, scored)))
            for dataset, part in scored.by_dataset.items():
                yield TableRow((TableCell(f"{name}, {dataset}"), *_score_cells(task.metrics, part)), "soft")
        if len(group.sides) > 1:
            means = (TableCell(format_spread(metric, spreads[metric.name])) for metric in task.metrics)
            yield TableRow((TableCell("mean over seeds"), TableCell(""), TableCell(""), *means), "mean")


def _score_cells(metrics: Sequence[Metric], scored: SideScores | SideDatasetScores) -> Iterator[TableCell]:
    available = scored.available if isinstance(scored, SideScores) else scored.n
    yield TableCell(f"{scored.n:,}" if scored.n == available else f"{scored.n:,} of {available:,}")
    yield TableCell(f"{scored.coverage:.0%}")
    for metric in metrics:
        if (found := scored.metrics.get(metric.name)) is None:
            yield TableCell(MISSING, style="missing")
        else:
            yield TableCell(format_value(metric, found.value), format_interval(metric, found), "strong")


def _pairing_view(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> PairingView:
    first, second = (comparison.groups[at].name for at in (pairing.first, pairing.second))
    title = f"{second} minus {first}"
    head = ("metric", "first", "second", "difference", "95 % interval", "p", "p (Holm)")
    differences = TableData(
        title=f"{title}, {pairing.n:,} items",
        columns=tuple(map(TableCell, head)),
        rows=tuple(_difference_row(task, found) for found in pairing.changes),
    )
    if not pairing.changes:
        return PairingView(title=title, differences=differences, counts="", items=())
    metric = main_metric(task, pairing)
    shown = (("most gained", pairing.gained), ("most lost", pairing.lost), ("most reworded", pairing.reworded))
    items = tuple(_item_view(kind, item, (first, second), metric) for kind, found in shown for item in found)
    return PairingView(title=title, differences=differences, counts=_counts(pairing, metric), items=items)


def main_metric(task: TaskComparison, pairing: Pairing) -> Metric:
    """The metric that items are ranked by: the first one that both sides have counts for."""
    return next(metric for metric in task.metrics if metric.name == pairing.changes[0].metric)


def _difference_row(task: TaskComparison, found: MetricDifference) -> TableRow:
    metric = next(metric for metric in task.metrics if metric.name == found.metric)
    style: Style = ""
    if found.is_clear and metric.better != "neither":
        style = "good" if (found.value > 0) == (metric.better == "higher") else "bad"
    values = (TableCell(format_value(metric, value)) for value in (found.first, found.second))
    difference = TableCell(format_difference(metric, found.value), style=style)
    interval = TableCell(format_interval(metric, found))
    chances = TableCell(format_p(found.p)), TableCell(format_p(found.corrected_p), style=style)
    return TableRow((TableCell(metric.name), *values, difference, interval, *chances))


def _counts(pairing: Pairing, metric: Metric) -> str:
    more, less, by = ("larger", "smaller", "in") if metric.better == "neither" else ("better", "worse", "by")
    counts = f"{pairing.num_better} {more}, {pairing.num_equal} equal, {pairing.num_worse} {less} {by} {metric.name}"
    if pairing.only_first or pairing.only_second:
        counts += f"; {pairing.only_first:,} items only in the first, {pairing.only_second:,} only in the second"
    return counts


def _item_view(kind: str, item: ItemChange, names: tuple[str, str], metric: Metric) -> ItemView:
    answers = []
    for name, answer, failure, scores in zip(names, item.answers, item.failures, item.scores, strict=True):
        score = f" ({format_value(metric, scores[metric.name])})" if metric.name in scores else ""
        answers.append((f"{name}{score}", answer, failure))
    return ItemView(
        title=f"{kind}: {item.place}",
        change=format_difference(metric, item.change),
        prompt=item.prompt,
        reference=item.reference,
        answers=tuple(answers),
    )


def _predictions_table(comparison: Comparison) -> TableData | None:
    if not comparison.predictions:
        return None
    rows = []
    for row in comparison.predictions:
        found = (format_prediction(row, at) for at in range(len(comparison.sides)))
        rows.append(TableRow(tuple(map(TableCell, (row.quantity, *found)))))
    columns = _side_columns("quantity", comparison)
    return TableData(title="predicted -> measured (prediction error)", columns=columns, rows=tuple(rows))


def format_difference(metric: Metric, value: float) -> str:
    """Shares differ in percentage points."""
    match metric.unit:
        case "share":
            return f"{100 * value:+.1f} pp"
        case "points":
            return f"{value:+.1f}"
        case "number":
            return f"{'+' if value > 0 else ''}{three_digits(value)}"


def format_interval(metric: Metric, found: ScoreInterval | MetricDifference) -> str:
    if found.low is None or found.high is None:
        return "unbounded"
    write = format_difference if isinstance(found, MetricDifference) else format_value
    low, high = (write(metric, end).removesuffix(" pp") for end in (found.low, found.high))
    return f"{low} .. {high}"


def format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_spread(metric: Metric, found: Spread) -> str:
    """Mean and standard deviation over the seeds, and how many seeds are missing."""
    if found.mean is None:
        return MISSING
    deviation = "" if found.deviation is None else f" ± {format_value(metric, found.deviation)}"
    missing = f", {found.missing} missing" if found.missing else ""
    return f"{format_value(metric, found.mean)}{deviation} ({found.n} {'seed' if found.n == 1 else 'seeds'}{missing})"


def format_prediction(row: Prediction, at: int) -> str:
    predicted, measured = row.predicted[at], row.measured[at]
    if predicted is None:
        return "-" if measured is None else f"{_quantity(row, measured)} measured"
    if measured is None:
        return f"{_quantity(row, predicted)} predicted"
    return f"{_quantity(row, predicted)} -> {_quantity(row, measured)} ({predicted / measured - 1:+.0%})"


def _quantity(row: Prediction, value: float) -> str:
    match row.unit:
        case "bytes":
            return gib(value)
        case "seconds":
            return duration(value)
        case "tokens/s":
            return f"{three_digits(value)}/s"
        case "money":
            return f"{value:.2f}"


def document(comparison: Comparison) -> str:
    """What `--json` prints: the record itself. An unbounded end of an interval is null."""
    return TypeAdapter(Comparison).dump_json(comparison, indent=2).decode()


_RICH: dict[str, str] = {"": "", "strong": "bold", "soft": "dim", "good": "green", "bad": "red", "missing": "yellow"}
_RICH_ROW = {"": "", "soft": "dim", "mean": "bold"}
_MAX_CELL, _MAX_TEXT, _MAX_LINE = 60, 240, 600


def terminal_view(comparison: Comparison) -> RenderableType:
    """Settings first, then scores, differences, items, and predicted against measured."""
    return Group(*_terminal_parts(comparison_view(comparison)))


def _terminal_parts(view: ComparisonView) -> Iterator[RenderableType]:
    if view.settings is not None:
        yield _rich_table(view.settings)
    yield _plain(view.verdict, "bold" if view.is_one_variable else "bold yellow")
    if view.other_settings is not None:
        rows = ([cell.text for cell in row.cells] for row in view.other_settings.rows)
        words = "; ".join(f"{key} {' | '.join(values)}" for key, *values in rows)
        yield _plain(shortened(f"{view.other_settings.title}: {words}", _MAX_LINE), "dim")
    for task in view.tasks:
        yield Text()
        yield _split_scores(task.scores)
        for pairing in task.pairings:
            yield _rich_table(pairing.differences, is_light=True)
            if pairing.counts:
                yield _plain(pairing.counts)
            yield from (part for item in pairing.items for part in _rich_item(item))
    if view.predictions is not None:
        yield Text()
        yield _rich_table(view.predictions)
    yield from (_plain(f"note: {warning}", "yellow") for warning in view.warnings)


def _plain(text: str, style: str = "") -> Text:
    """Names and paths come from the user and must not control the terminal."""
    return Text(visible(text), style=style)


def _split_scores(scores: TableData) -> RenderableType:
    """As many metrics beside one another as the terminal is wide enough for."""

    def part(columns: Sequence[int], is_first: bool) -> Table:
        kept = [0, 1, 2, *columns]
        rows = tuple(TableRow(tuple(row.cells[at] for at in kept), row.kind) for row in scores.rows)
        title = scores.title if is_first else ""
        return _rich_table(TableData(title=title, columns=tuple(scores.columns[at] for at in kept), rows=rows))

    return SplitTable(columns=range(3, len(scores.columns)), table=part)


def _rich_table(data: TableData, *, is_light: bool = False) -> Table:
    title = _plain(data.title, "italic") if data.title else None
    table = Table(title=title, title_justify="left")
    if is_light:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for at, column in enumerate(data.columns):
        is_number = at > 0 and not data.holds_text
        is_wrapped = data.holds_text and at > 0
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(_plain(column.text), justify=justify, no_wrap=not is_wrapped, overflow="fold")
    for row in data.rows:
        table.add_row(*map(_rich_cell, row.cells), style=_RICH_ROW[row.kind], end_section=row.kind == "mean")
    return table


def _rich_cell(cell: TableCell) -> Text:
    text = Text(shortened(visible(cell.text), _MAX_CELL), style=_RICH[cell.style])
    return Text.assemble(text, (f"  {visible(cell.detail)}", "dim")) if cell.detail else text


def _rich_item(item: ItemView) -> Iterator[RenderableType]:
    yield _plain(item.title, "italic")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", _one_line(item.prompt))
    table.add_row("reference", _one_line(item.reference))
    for label, answer, failure in item.answers:
        failed = ("", "") if failure is None else (f"  ({visible(failure)})", "yellow")
        table.add_row(_plain(label), Text.assemble(_one_line(answer), failed))
    yield table


def _one_line(text: str) -> Text:
    return Text(shortened(visible(" ".join(text.split())), _MAX_TEXT))


_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#$"} | {"\n": " ", "\t": " "})


def markdown(comparison: Comparison) -> str:
    """The tables, for a paper or a pull request."""
    return "\n".join(_markdown_lines(comparison_view(comparison))) + "\n"


def _markdown_lines(view: ComparisonView) -> Iterator[str]:
    yield f"# {_escaped(view.title)}"
    yield f"\n{_escaped(sentence(view.verdict))}"
    if view.settings is not None:
        yield from _markdown_table(view.settings)
    for task in view.tasks:
        yield f"\n## {_escaped(task.name)}"
        yield from _markdown_table(task.scores)
        for pairing in task.pairings:
            yield f"\n**{_escaped(pairing.differences.title)}**"
            yield from _markdown_table(pairing.differences)
        if task.pairings:
            yield f"\n{METHOD}"
    if view.predictions is not None:
        yield f"\n## {_escaped(sentence(view.predictions.title).rstrip('.'))}"
        yield from _markdown_table(view.predictions)
    if view.warnings:
        yield ""
        yield from (f"- {_escaped(warning)}" for warning in view.warnings)


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _markdown_table(data: TableData) -> Iterator[str]:
    yield f"\n{_markdown_row(data.columns)}"
    yield f"|{'---|' * len(data.columns)}"
    yield from (_markdown_row(row.cells) for row in data.rows)


def _markdown_row(cells: Sequence[TableCell]) -> str:
    texts = (f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in cells)
    return f"| {' | '.join(map(_escaped, texts))} |"


def _escaped(text: str) -> str:
    return visible(text).translate(_SPECIAL)
