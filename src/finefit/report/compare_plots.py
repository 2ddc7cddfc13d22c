"""Plots of a comparison as SVG text: losses, scores and differences with intervals, items one by one. Readable on light and dark ground."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finefit.compare.records import Comparison, Pairing, TaskComparison
from finefit.report.board import shown_value
from finefit.report.compare_words import own_metric, shortened, visible
from finefit.stats.metrics import Metric

_INK = "#010203"  # stands for the page's own text colour, which is not known here
_GROUND = "#040506"  # and this for what lies behind it
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899")
GAIN, LOSS = "#10b981", "#ef4444"
_WIDTH = 8.4
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": _INK,
    "grid.alpha": 0.12,
}
_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_ABOUT = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_GLOBAL = re.compile(r"<defs>\s*<style[^>]*>\*\{.*?</style>\s*</defs>", re.DOTALL)


def colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def loss_plot(comparison: Comparison) -> str | None:
    """Training as lines, validation as dots."""
    if not comparison.curves:
        return None

    def draw(axes: Axes) -> None:
        for curve in comparison.curves:
            name, ink = _label(comparison.sides[curve.side].name), colour(curve.side)
            axes.plot(curve.steps, curve.losses, color=ink, linewidth=1.4, label=name)
            if curve.validation:
                axes.plot(
                    *zip(*curve.validation, strict=True),
                    color=ink,
                    linestyle="none",
                    marker="o",
                    markersize=5,
                    label=f"{name}, validation",
                )
        losses = [loss for curve in comparison.curves for loss in curve.losses if loss > 0]
        if losses and max(losses) > 10 * min(losses):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(visible=True)
        axes.legend(fontsize=9)

    return _drawn("losses", draw, height=3.2)


def score_plot(comparison: Comparison, task: TaskComparison, metric: Metric) -> str | None:
    """Every side's score with its interval, the first on top."""
    cells = [
        (at, cell)
        for at, scored in enumerate(task.scored)
        if scored is not None and (cell := scored.metrics.get(metric.name)) is not None
    ]
    if not cells:
        return None

    def draw(axes: Axes) -> None:
        for row, (at, cell) in enumerate(cells):
            low, high = (cell.value if end is None else end for end in (cell.low, cell.high))
            axes.plot([low, high], [-row, -row], color=colour(at), linewidth=2.5, solid_capstyle="butt")
            axes.plot([cell.value], [-row], color=colour(at), marker="o", markersize=7)
            axes.annotate(
                shown_value(metric, cell.value),
                (cell.value, -row),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        _rows(axes, [_label(comparison.sides[at].name) for at, _ in cells])
        axes.set_xlabel(_axis(metric))
        if metric.unit == "share":
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _drawn(f"scores {task.task} {metric.name}", draw, height=0.75 + 0.45 * len(cells))


def difference_plot(comparison: Comparison, task: TaskComparison) -> str | None:
    """Differences in shares and of points together; other metrics have no common scale, and stand in the table alone."""
    metrics = {metric.name: metric for metric in task.metrics}
    found = [
        (p, c)
        for p in task.pairings
        for c in p.changes
        if metrics[c.metric].unit != "number" and c.low is not None and c.high is not None
    ]
    if not found:
        return None
    several = len(task.pairings) > 1

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=_INK, linewidth=1, alpha=0.5)
        for row, (pairing, change) in enumerate(found):
            scale = 100 if metrics[change.metric].unit == "share" else 1
            ink = colour(comparison.groups[pairing.second].sides[0])
            axes.plot(
                [scale * (change.low or 0), scale * (change.high or 0)],
                [-row, -row],
                color=ink,
                linewidth=2.5,
                solid_capstyle="butt",
            )
            axes.plot(
                [scale * change.value],
                [-row],
                color=ink,
                marker="o",
                markersize=7,
                markerfacecolor=ink if change.is_clear else _GROUND,
            )
        names = [f"{_label(comparison.groups[p.second].name)}: {c.metric}" if several else c.metric for p, c in found]
        _rows(axes, names)
        axes.set_xlabel("difference in points of 100 (filled: clear among all of this comparison)")

    return _drawn(f"differences {task.task}", draw, height=0.75 + 0.36 * len(found))


def item_plot(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> str | None:
    """The change of every item, the largest gain first."""
    if not pairing.item_changes:
        return None
    changes, metric = pairing.item_changes, own_metric(task, pairing)
    scale = 100 if metric.unit == "share" else 1

    def draw(axes: Axes) -> None:
        edges = [at - 0.5 for at in range(1, len(changes) + 2)]
        for ink, values in (
            (GAIN, [max(0.0, scale * c) for c in changes]),
            (LOSS, [min(0.0, scale * c) for c in changes]),
        ):
            axes.stairs(values, edges, fill=True, color=ink, linewidth=0)
        axes.axhline(0, color=_INK, linewidth=1, alpha=0.6)
        axes.set_xlim(0.5, len(changes) + 0.5)
        axes.set_xlabel(f"{len(changes):,} items, by what {_label(comparison.groups[pairing.second].name)} gained")
        axes.set_ylabel(metric.name if metric.better == "neither" else f"{metric.name}, for the better")
        axes.grid(visible=True, axis="y")

    return _drawn(f"items {task.task} {pairing.second}", draw, height=2.6)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.7)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)


def _axis(metric: Metric) -> str:
    better = "" if metric.better == "neither" else f", {metric.better} is better"
    return f"{metric.name}{better}"


def _label(name: str) -> str:
    return shortened(visible(name), 40)


def _drawn(name: str, draw: Callable[[Axes], None], *, height: float) -> str:
    """A figure of its own each time: nothing is shared with another program's plots in the same process."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _bare(text.getvalue())


def _bare(svg: str) -> str:
    """What a page needs of it, in the colour of the page's own text; a style for everything would reach out of the picture."""
    without = _GLOBAL.sub("", _ABOUT.sub("", _HEAD.sub("", svg, count=1)))
    return without.replace(_INK, "currentColor").replace(_GROUND, "var(--ground)").strip()
