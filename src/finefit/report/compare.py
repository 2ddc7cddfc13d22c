"""A comparison as tables of plain data, built once; the terminal and Markdown are rendered here, the page in
`compare_page`."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.compare import records
from finefit.report.layout import SplitTable, duration, gib, shortened, three_digits, visible, without_markup
from finefit.report.scores import format_n, format_value
from finefit.report.tables import ItemView, Style, TableCell, TableData, TableRow, escaped_markdown, markdown_table
from finefit.stats.comparisons import Spread
from finefit.stats.metrics import Metric

MISSING = "missing"
METHOD = (
    "Intervals: 95 %, Wilson for rates, studentised bootstrap over items for other metrics. Differences are paired by "
    "item; p comes from exchanging the two models' answers per item, and p (Holm) is corrected for all differences "
    "shown."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingView:
    title: str
    differences: TableData
    counts: str
    items: tuple[ItemView, ...]


def compared_names(comparison: records.Comparison) -> str:
    return " and ".join(side.name for side in comparison.sides)


def settings_table(title: str, comparison: records.Comparison, settings: Sequence[records.Setting]) -> TableData:
    def shown(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    rows = [(setting.key, *map(shown, setting.values)) for setting in settings]
    return _side_table(title, "setting", comparison, rows, holds_text=True)


def _side_table(
    title: str, first: str, comparison: records.Comparison, rows: Iterable[Iterable[str]], *, holds_text: bool = False
) -> TableData:
    columns = (TableCell(first), *(TableCell(side.name, side=at) for at, side in enumerate(comparison.sides)))
    shown = tuple(TableRow(tuple(map(TableCell, row))) for row in rows)
    return TableData(title=title, columns=columns, rows=shown, holds_text=holds_text)


def scores_table(comparison: records.Comparison, task: records.TaskComparison) -> TableData:
    rows = []
    for group, spreads in zip(comparison.groups, task.spreads, strict=True):
        for at in group.sides:
            name, scored = comparison.sides[at].name, task.scored[at]
            missing = [TableCell(MISSING, style="missing")] * (2 + len(task.metrics))
            cells = missing if scored is None else _score_cells(task.metrics, scored)
            rows.append(TableRow((TableCell(name, side=at), *cells)))
            for dataset, part in ({} if scored is None else scored.by_dataset).items():
                rows.append(TableRow((TableCell(f"{name}, {dataset}"), *_score_cells(task.metrics, part)), "soft"))
        if len(group.sides) > 1:
            means = (TableCell(format_spread(metric, spreads[metric.name])) for metric in task.metrics)
            rows.append(TableRow((TableCell("mean over seeds"), TableCell(""), TableCell(""), *means), "mean"))
    return TableData(
        title=f"task {task.task}, 95 % intervals",
        columns=tuple(map(TableCell, ("model", "n", "coverage", *(metric.name for metric in task.metrics)))),
        rows=tuple(rows),
    )


def _score_cells(
    metrics: Sequence[Metric], scored: records.SideScores | records.SideDatasetScores
) -> Iterator[TableCell]:
    yield TableCell(format_n(scored) if isinstance(scored, records.SideScores) else f"{scored.n:,}")
    yield TableCell(f"{scored.coverage:.0%}")
    for metric in metrics:
        if (found := scored.metrics.get(metric.name)) is None:
            yield TableCell(MISSING, style="missing")
        else:
            yield TableCell(format_value(metric, found.value), format_interval(metric, found), "strong")


def pairing_view(comparison: records.Comparison, task: records.TaskComparison, pairing: records.Pairing) -> PairingView:
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
    more, less, by = ("larger", "smaller", "in") if metric.better == "neither" else ("better", "worse", "by")
    counts = f"{pairing.num_better} {more}, {pairing.num_equal} equal, {pairing.num_worse} {less} {by} {metric.name}"
    if pairing.only_first or pairing.only_second:
        counts += f"; {pairing.only_first:,} items only in the first, {pairing.only_second:,} only in the second"
    shown = (("most gained", pairing.gained), ("most lost", pairing.lost), ("most reworded", pairing.reworded))
    items = tuple(_item_view(kind, item, (first, second), metric) for kind, found in shown for item in found)
    return PairingView(title=title, differences=differences, counts=counts, items=items)


def main_metric(task: records.TaskComparison, pairing: records.Pairing) -> Metric:
    """The metric that items are ranked by: the first one that both sides have counts for."""
    return next(metric for metric in task.metrics if metric.name == pairing.changes[0].metric)


def _difference_row(task: records.TaskComparison, found: records.MetricDifference) -> TableRow:
    metric = next(metric for metric in task.metrics if metric.name == found.metric)
    style: Style = ""
    if found.is_clear and metric.better != "neither":
        style = "good" if (found.value > 0) == (metric.better == "higher") else "bad"
    values = (TableCell(format_value(metric, value)) for value in (found.first, found.second))
    difference = TableCell(format_difference(metric, found.value), style=style)
    interval = TableCell(format_interval(metric, found))
    chances = TableCell(format_p(found.p)), TableCell(format_p(found.corrected_p), style=style)
    return TableRow((TableCell(metric.name), *values, difference, interval, *chances))


def _item_view(kind: str, item: records.ItemChange, names: tuple[str, str], metric: Metric) -> ItemView:
    answers = []
    for name, answer, failure, scores in zip(names, item.answers, item.failures, item.scores, strict=True):
        score = f" ({format_value(metric, scores[metric.name])})" if metric.name in scores else ""
        answers.append((f"{name}{score}", answer, failure))
    return ItemView(
        title=f"{kind}: {item.place}",
        change=format_difference(metric, item.change),
        prompt=without_markup(item.prompt),
        reference=item.reference,
        answers=tuple(answers),
    )


def losses_table(comparison: records.Comparison) -> TableData | None:
    """The last training loss and the lowest validation loss of each side; None if no side was trained."""
    if not comparison.curves:
        return None
    curves = {curve.side: curve for curve in comparison.curves}

    def final(curve: records.LossCurve) -> str:
        return f"{curve.losses[-1]:.4f} (step {curve.steps[-1]})" if curve.losses else "-"

    def best(curve: records.LossCurve) -> str:
        step, loss = min(curve.validation, key=lambda point: point[1], default=(0, None))
        return "-" if loss is None else f"{loss:.4f} (step {step})"

    sides = range(len(comparison.sides))
    rows = [
        (name, *(shown(curves[at]) if at in curves else "-" for at in sides))
        for name, shown in (("final train", final), ("best validation", best))
    ]
    return _side_table("losses", "loss", comparison, rows)


def predictions_table(comparison: records.Comparison) -> TableData:
    sides = range(len(comparison.sides))
    rows = [(row.quantity, *(format_prediction(row, at) for at in sides)) for row in comparison.predictions]
    return _side_table("predicted -> measured (prediction error)", "quantity", comparison, rows)


def format_difference(metric: Metric, value: float) -> str:
    """Shares differ in percentage points."""
    match metric.unit:
        case "share":
            return f"{100 * value:+.1f} pp"
        case "points":
            return f"{value:+.1f}"
        case "number":
            return f"{'+' if value > 0 else ''}{three_digits(value)}"


def format_interval(metric: Metric, found: records.ScoreInterval | records.MetricDifference) -> str:
    if found.low is None or found.high is None:
        return "unbounded"
    write = format_difference if isinstance(found, records.MetricDifference) else format_value
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


def format_prediction(row: records.Prediction, at: int) -> str:
    predicted, measured, shown = row.predicted[at], row.measured[at], _FORMATS[row.unit]
    if predicted is None:
        return "-" if measured is None else f"{shown(measured)} measured"
    if measured is None:
        return f"{shown(predicted)} predicted"
    return f"{shown(predicted)} -> {shown(measured)} ({predicted / measured - 1:+.0%})"


_FORMATS: dict[records.QuantityUnit, Callable[[float], str]] = {
    "bytes": gib,
    "seconds": duration,
    "tokens/s": lambda value: f"{three_digits(value)}/s",
    "money": "{:.2f}".format,
}


def document(comparison: records.Comparison) -> str:
    """The output of `--json`: the record itself. An unbounded end of an interval is null."""
    return TypeAdapter(records.Comparison).dump_json(comparison, indent=2).decode()


_RICH: dict[str, str] = {"": "", "strong": "bold", "soft": "dim", "good": "green", "bad": "red", "missing": "yellow"}
_RICH_ROW = {"": "", "soft": "dim", "mean": "bold"}
_MAX_CELL, _MAX_TEXT, _MAX_LINE = 60, 240, 600


def terminal_view(comparison: records.Comparison) -> RenderableType:
    """Settings first, then scores, differences, items, losses, and predicted against measured."""
    parts: list[RenderableType] = []
    if comparison.differing:
        parts.append(_rich_table(settings_table("settings that differ", comparison, comparison.differing)))
    parts.append(_plain(comparison.verdict, "bold" if comparison.is_one_variable else "bold yellow"))
    if comparison.without_effect:
        others = settings_table("differs, without effect on scores", comparison, comparison.without_effect)
        rows = ([cell.text for cell in row.cells] for row in others.rows)
        words = "; ".join(f"{key} {' | '.join(values)}" for key, *values in rows)
        parts.append(_plain(shortened(f"{others.title}: {words}", _MAX_LINE), "dim"))
    for task in comparison.tasks:
        parts += [Text(), _split_scores(scores_table(comparison, task))]
        for pairing in task.pairings:
            view = pairing_view(comparison, task, pairing)
            parts.append(_rich_table(view.differences, is_light=True))
            parts += [_plain(view.counts)] if view.counts else []
            parts += [part for item in view.items for part in (_plain(item.title, "italic"), _rich_item(item))]
    if (losses := losses_table(comparison)) is not None:
        parts += [Text(), _rich_table(losses)]
    if comparison.predictions:
        parts += [Text(), _rich_table(predictions_table(comparison))]
    return Group(*parts, *(_plain(f"note: {warning}", "yellow") for warning in comparison.warnings))


def _plain(text: str, style: str = "") -> Text:
    """Names and paths come from the user and must not control the terminal."""
    return Text(visible(text), style=style)


def _split_scores(scores: TableData) -> RenderableType:
    """Puts as many metrics side by side as fit the terminal's width."""

    def part(columns: Sequence[int], is_first: bool) -> Table:
        kept = [0, 1, 2, *columns]
        rows = tuple(TableRow(tuple(row.cells[at] for at in kept), row.kind) for row in scores.rows)
        title = scores.title if is_first else ""
        return _rich_table(TableData(title=title, columns=tuple(scores.columns[at] for at in kept), rows=rows))

    return SplitTable(columns=range(3, len(scores.columns)), table=part)


def _rich_table(data: TableData, *, is_light: bool = False) -> Table:
    table = Table(title=_plain(data.title, "italic") if data.title else None, title_justify="left")
    if is_light:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for at, column in enumerate(data.columns):
        justify: Literal["left", "right"] = "right" if at > 0 and not data.holds_text else "left"
        is_wrapped = at > 0 and data.holds_text
        table.add_column(_plain(column.text), justify=justify, no_wrap=not is_wrapped, overflow="fold")
    for row in data.rows:
        cells = []
        for cell in row.cells:
            text = Text(shortened(visible(cell.text), _MAX_CELL), style=_RICH[cell.style])
            cells.append(Text.assemble(text, (f"  {visible(cell.detail)}", "dim")) if cell.detail else text)
        table.add_row(*cells, style=_RICH_ROW[row.kind], end_section=row.kind == "mean")
    return table


def _rich_item(item: ItemView) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", _one_line(item.prompt))
    table.add_row("reference", _one_line(item.reference))
    for label, answer, failure in item.answers:
        failed = ("", "") if failure is None else (f"  ({visible(failure)})", "yellow")
        table.add_row(_plain(label), Text.assemble(_one_line(answer), failed))
    return table


def _one_line(text: str) -> Text:
    return Text(shortened(visible(" ".join(text.split())), _MAX_TEXT))


def markdown(comparison: records.Comparison) -> str:
    """The tables, for a paper or a pull request."""
    lines = [f"# {escaped_markdown(compared_names(comparison))}", f"\n{escaped_markdown(sentence(comparison.verdict))}"]
    if comparison.differing:
        lines += markdown_table(settings_table("settings that differ", comparison, comparison.differing))
    for task in comparison.tasks:
        lines += [f"\n## {escaped_markdown(task.task)}", *markdown_table(scores_table(comparison, task))]
        for pairing in task.pairings:
            differences = pairing_view(comparison, task, pairing).differences
            lines += [f"\n**{escaped_markdown(differences.title)}**", *markdown_table(differences)]
        lines += [f"\n{METHOD}"] if task.pairings else []
    if (losses := losses_table(comparison)) is not None:
        lines += ["\n## Losses", *markdown_table(losses)]
    if comparison.predictions:
        predictions = predictions_table(comparison)
        lines += [f"\n## {escaped_markdown(sentence(predictions.title).rstrip('.'))}", *markdown_table(predictions)]
    if comparison.warnings:
        lines += ["", *(f"- {escaped_markdown(warning)}" for warning in comparison.warnings)]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
