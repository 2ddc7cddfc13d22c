"""A comparison as one self-contained page: no script, no external resource, all text escaped, light and dark.

`python -m finefit.report.compare_page COMPARISON.json` writes the page and the Markdown tables beside the record."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import read_record
from finefit.compare.records import Comparison, Pairing, TaskComparison
from finefit.errors import UserError
from finefit.report import compare
from finefit.report.page import escaped, figure, html_item, html_page, html_table, no_plots
from finefit.report.plots import (
    GAIN,
    GROUND,
    INK,
    INSTALL,
    LOSS,
    can_plot,
    colour,
    interval,
    label,
    name_rows,
    svg_plot,
)
from finefit.report.scores import format_value
from finefit.stats.metrics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def page(comparison: Comparison) -> str:
    if not can_plot():
        problem = "the page needs matplotlib for its plots, and matplotlib is not installed"
        raise UserError(problem, f"{INSTALL}; --markdown, --json and the terminal work without it")
    return page_with_what_is_installed(comparison)


def write_files(record: Path) -> None:
    """A stage that compares always gets its page; without matplotlib the page says what is missing."""
    found = read_record(record, Comparison)
    write_text(record.with_suffix(".html"), page_with_what_is_installed(found))
    write_text(record.with_suffix(".md"), compare.markdown(found))


def page_with_what_is_installed(comparison: Comparison) -> str:
    has_plots = can_plot()
    parts = [] if has_plots else [no_plots()]
    parts.append("<h2>Settings that differ</h2>")
    kind = "verdict" if comparison.is_one_variable else "verdict mixed"
    parts.append(f'<p class="{kind}">{escaped(compare.sentence(comparison.verdict))}</p>')
    if comparison.differing:
        parts.append(html_table(compare.settings_table("", comparison, comparison.differing)))
    if others := comparison.without_effect:
        parts.append(f"<details><summary>{len(others)} more that differ, without effect on scores</summary>")
        parts.append(f"{html_table(compare.settings_table('', comparison, others))}</details>")
    parts += [part for task in comparison.tasks for part in _task(comparison, task, has_plots=has_plots)]
    if comparison.curves and has_plots:
        parts += ["<h2>Training</h2>", figure(_loss_plot(comparison), "loss by step; dots are validation")]
    if comparison.predictions:
        predictions = compare.predictions_table(comparison)
        parts += [f"<h2>{escaped(compare.sentence(predictions.title).rstrip('.'))}</h2>", html_table(predictions)]
    if comparison.warnings:
        parts.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{escaped(one)}</li>' for one in comparison.warnings)}</ul>")
    return html_page("finefit compare", compare.compared_names(comparison), parts)


def _task(comparison: Comparison, task: TaskComparison, *, has_plots: bool) -> Iterator[str]:
    yield f"<h2>Task {escaped(task.task)}</h2>"
    yield html_table(compare.scores_table(comparison, task))
    if has_plots:
        for metric in task.metrics:
            if (svg := _score_plot(comparison, task, metric)) is not None:
                yield figure(svg, f"{metric.name} with its 95 % interval")
    shown = [compare.pairing_view(comparison, task, pairing) for pairing in task.pairings]
    if shown:
        yield "<h3>Differences on the same items</h3>"
        for pairing in shown:
            yield f"<h4>{escaped(pairing.differences.title)}</h4>{html_table(pairing.differences)}"
        yield f'<p class="soft">{escaped(compare.METHOD)}</p>'
        if has_plots and (svg := _difference_plot(comparison, task)) is not None:
            yield figure(svg, "differences with their 95 % intervals")
    for recorded, pairing in zip(task.pairings, shown, strict=True):
        if pairing.counts:
            yield f"<h3>Item by item: {escaped(pairing.title)}</h3><p>{escaped(compare.sentence(pairing.counts))}</p>"
            if has_plots:
                yield figure(_item_plot(comparison, task, recorded), "change of each item, largest gain first")
            yield from map(html_item, pairing.items)


def _loss_plot(comparison: Comparison) -> str:
    """Training losses are lines, validation losses are dots."""

    def draw(axes: "Axes") -> None:
        for curve in comparison.curves:
            name, ink = label(comparison.sides[curve.side].name), colour(curve.side)
            axes.plot(curve.steps, curve.losses, color=ink, linewidth=1.4, label=name)
            if curve.validation:
                dots: dict[str, Any] = {"color": ink, "linestyle": "none", "marker": "o", "markersize": 5}
                axes.plot(*zip(*curve.validation, strict=True), label=f"{name}, validation", **dots)
        losses = [loss for curve in comparison.curves for loss in curve.losses if loss > 0]
        if losses and max(losses) > 10 * min(losses):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(visible=True)
        axes.legend(fontsize=9)

    return svg_plot("losses", draw, height=3.2)


def _score_plot(comparison: Comparison, task: TaskComparison, metric: Metric) -> str | None:
    """The score of every side with its interval, the first on top."""
    scored = [(at, found.metrics.get(metric.name)) for at, found in enumerate(task.scored) if found is not None]
    cells = [(at, cell) for at, cell in scored if cell is not None]
    if not cells:
        return None

    def draw(axes: "Axes") -> None:
        for row, (at, cell) in enumerate(cells):
            low, high = (cell.value if end is None else end for end in (cell.low, cell.high))
            interval(axes, row, (low, cell.value, high), colour(at))
            place: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(format_value(metric, cell.value), (cell.value, -row), **place)
        name_rows(axes, [label(comparison.sides[at].name) for at, _ in cells])
        axes.set_xlabel(metric.name if metric.better == "neither" else f"{metric.name}, {metric.better} is better")
        if metric.unit == "share":
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return svg_plot(f"scores {task.task} {metric.name}", draw, height=0.75 + 0.45 * len(cells))


def _difference_plot(comparison: Comparison, task: TaskComparison) -> str | None:
    """Shares and points in one plot; other metrics have no common scale and are only in the table."""
    metrics = {metric.name: metric for metric in task.metrics}
    pairs = ((pairing, change) for pairing in task.pairings for change in pairing.changes)
    found = [(p, c, c.low, c.high) for p, c in pairs if metrics[c.metric].unit != "number"]
    bounded = [(p, c, low, high) for p, c, low, high in found if low is not None and high is not None]
    if not bounded:
        return None

    def draw(axes: "Axes") -> None:
        axes.axvline(0, color=INK, linewidth=1, alpha=0.5)
        names = []
        for row, (pairing, change, low, high) in enumerate(bounded):
            scale = 100 if metrics[change.metric].unit == "share" else 1
            ink = colour(comparison.groups[pairing.second].sides[0])
            ends = scale * low, scale * change.value, scale * high
            interval(axes, row, ends, ink, fill=ink if change.is_clear else GROUND)
            name = label(comparison.groups[pairing.second].name)
            names.append(f"{name}: {change.metric}" if len(task.pairings) > 1 else change.metric)
        name_rows(axes, names)
        axes.set_xlabel("difference in percentage points (filled: significant after Holm's correction)")

    return svg_plot(f"differences {task.task}", draw, height=0.75 + 0.36 * len(bounded))


def _item_plot(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> str:
    """The change of every item, the largest gain first."""
    metric = compare.main_metric(task, pairing)
    scale = 100 if metric.unit == "share" else 1
    changes = [scale * change for change in pairing.item_changes]

    def draw(axes: "Axes") -> None:
        edges = [at - 0.5 for at in range(1, len(changes) + 2)]
        axes.stairs([max(0.0, change) for change in changes], edges, fill=True, color=GAIN, linewidth=0)
        axes.stairs([min(0.0, change) for change in changes], edges, fill=True, color=LOSS, linewidth=0)
        axes.axhline(0, color=INK, linewidth=1, alpha=0.6)
        axes.set_xlim(0.5, len(changes) + 0.5)
        axes.set_xlabel(f"{len(changes):,} items, by the gain of {label(comparison.groups[pairing.second].name)}")
        axes.set_ylabel(metric.name if metric.better == "neither" else f"gain in {metric.name}")
        axes.grid(visible=True, axis="y")

    return svg_plot(f"items {task.task} {pairing.second}", draw, height=2.6)


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
