"""A comparison as one self-contained page: no script, no external resource, all text escaped, light and dark.

`python -m finefit.report.compare_page COMPARISON.json` writes the page and the Markdown tables beside the record."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import read_record
from finefit.compare.records import Comparison, Pairing, TaskComparison
from finefit.errors import UserError
from finefit.report import compare
from finefit.report.layout import shortened, visible
from finefit.report.scores import format_value
from finefit.stats.metrics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_CELL, _MAX_TEXT = 400, 4000
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_CLASSES = {"strong": "strong", "soft": "soft", "good": "good", "bad": "bad", "missing": "warn"}
_INSTALL = "pip install 'finefit[plots]'"


def page(comparison: Comparison) -> str:
    if find_spec("matplotlib") is None:
        problem = "the page needs matplotlib for its plots, and matplotlib is not installed"
        raise UserError(problem, f"{_INSTALL}; --markdown, --json and the terminal work without it")
    return _page(comparison, has_plots=True)


def write_files(record: Path) -> None:
    """A stage that compares always gets its page; without matplotlib the page says what is missing."""
    found = read_record(record, Comparison)
    write_text(record.with_suffix(".html"), _page(found, has_plots=find_spec("matplotlib") is not None))
    write_text(record.with_suffix(".md"), compare.markdown(found))


def _page(comparison: Comparison, *, has_plots: bool) -> str:
    style = files("finefit.report").joinpath("compare.css").read_text(encoding="utf-8")
    title = _text(compare.compared_names(comparison))
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>",
        f'<p class="soft">finefit compare</p>\n<h1>{title}</h1>',
    ]
    if not has_plots:
        missing = f"because matplotlib is not installed: {_text(_INSTALL)}"
        parts.append(f"<p class=warn>This page has no plots, {missing}</p>")
    parts.append("<h2>Settings that differ</h2>")
    kind = "verdict" if comparison.is_one_variable else "verdict mixed"
    parts.append(f'<p class="{kind}">{_text(compare.sentence(comparison.verdict))}</p>')
    if comparison.differing:
        parts.append(_table(compare.settings_table("", comparison, comparison.differing)))
    if others := comparison.without_effect:
        parts.append(f"<details><summary>{len(others)} more that have differs, without effect on scores</summary>")
        parts.append(f"{_table(compare.settings_table('', comparison, others))}</details>")
    parts += [part for task in comparison.tasks for part in _task(comparison, task, has_plots=has_plots)]
    if comparison.curves and has_plots:
        parts += ["<h2>Training</h2>", _figure(_loss_plot(comparison), "loss by step; dots are validation")]
    if comparison.predictions:
        predictions = compare.predictions_table(comparison)
        parts += [f"<h2>{_text(compare.sentence(predictions.title).rstrip('.'))}</h2>", _table(predictions)]
    if comparison.warnings:
        parts.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{_text(one)}</li>' for one in comparison.warnings)}</ul>")
    return "\n".join([*parts, "</body>\n</html>\n"])


def _text(text: str) -> str:
    return escape(visible(text))


def _task(comparison: Comparison, task: TaskComparison, *, has_plots: bool) -> Iterator[str]:
    yield f"<h2>Task {_text(task.task)}</h2>"
    yield _table(compare.scores_table(comparison, task))
    if has_plots:
        for metric in task.metrics:
            if (svg := _score_plot(comparison, task, metric)) is not None:
                yield _figure(svg, f"{metric.name} with its 95 % interval")
    shown = [compare.pairing_view(comparison, task, pairing) for pairing in task.pairings]
    if shown:
        yield "<h3>Differences on the same items</h3>"
        for pairing in shown:
            yield f"<h4>{_text(pairing.differences.title)}</h4>{_table(pairing.differences)}"
        yield f'<p class="soft">{_text(compare.METHOD)}</p>'
        if has_plots and (svg := _difference_plot(comparison, task)) is not None:
            yield _figure(svg, "differences with their 95 % intervals")
    for recorded, pairing in zip(task.pairings, shown, strict=True):
        if pairing.counts:
            yield f"<h3>Item by item: {_text(pairing.title)}</h3><p>{_text(compare.sentence(pairing.counts))}</p>"
            if has_plots:
                yield _figure(_item_plot(comparison, task, recorded), "change of each item, largest gain first")
            yield from map(_item, pairing.items)


def _figure(svg: str, caption: str) -> str:
    return f'<figure role="img" aria-label="{_text(caption)}">{svg}</figure>'


def _table(data: compare.TableData) -> str:
    def line(cells: Sequence[compare.TableCell], tag: str) -> str:
        of_number = "" if data.holds_text else " class=n"
        return "".join(f"<{tag}{of_number if at else ''}>{_cell(cell)}</{tag}>" for at, cell in enumerate(cells))

    rows = (f"<tr{f' class={row.kind}' if row.kind else ''}>{line(row.cells, 'td')}</tr>" for row in data.rows)
    kind = " class=settings" if data.holds_text else ""
    head = f"<thead><tr>{line(data.columns, 'th')}</tr></thead>"
    return f'<div class="wide"><table{kind}>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _cell(cell: compare.TableCell) -> str:
    dot = "" if cell.side is None else f'<span class="dot" style="background:{_colour(cell.side)}"></span>'
    text = _text(shortened(cell.text, _MAX_CELL))
    if cell.style:
        text = f'<span class="{_CLASSES[cell.style]}">{text}</span>'
    return f'{dot}{text} <span class="soft">{_text(cell.detail)}</span>' if cell.detail else f"{dot}{text}"


def _item(item: compare.ItemView) -> str:
    parts = [f'<div class="both"><h4>prompt</h4>{_pre(item.prompt)}</div>']
    parts.append(f'<div class="both"><h4>reference</h4>{_pre(item.reference)}</div>')
    for label, answer, failure in item.answers:
        failed = "" if failure is None else f'<p class="warn">{_text(failure)}</p>'
        parts.append(f"<div><h4>{_text(label)}</h4>{_pre(answer)}{failed}</div>")
    summary = _text(f"{item.title}, {item.change}")
    return f'<details><summary>{summary}</summary><div class="item">{"".join(parts)}</div></details>'


def _pre(text: str) -> str:
    return f'<pre dir="auto">{_text(shortened(text.strip(), _MAX_TEXT))}</pre>'


_INK = "#010203"  # in the SVG text of a plot, replaced by the page's text colour
_GROUND = "#040506"  # replaced by the page's background
_COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899")
_GAIN, _LOSS = "#10b981", "#ef4444"
_WIDTH = 8.4
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is not a formula
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": _INK,
    "grid.alpha": 0.12,
}
_BEFORE_SVG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_GLOBAL_STYLE = re.compile(r"<defs>\s*<style[^>]*>\*\{.*?</style>\s*</defs>", re.DOTALL)


def _colour(side: int) -> str:
    return _COLOURS[side % len(_COLOURS)]


def _loss_plot(comparison: Comparison) -> str:
    """Training losses are lines, validation losses are dots."""

    def draw(axes: "Axes") -> None:
        for curve in comparison.curves:
            name, ink = _label(comparison.sides[curve.side].name), _colour(curve.side)
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

    return _svg("losses", draw, height=3.2)


def _score_plot(comparison: Comparison, task: TaskComparison, metric: Metric) -> str | None:
    """The score of every side with its interval, the first on top."""
    scored = [(at, found.metrics.get(metric.name)) for at, found in enumerate(task.scored) if found is not None]
    cells = [(at, cell) for at, cell in scored if cell is not None]
    if not cells:
        return None

    def draw(axes: "Axes") -> None:
        for row, (at, cell) in enumerate(cells):
            low, high = (cell.value if end is None else end for end in (cell.low, cell.high))
            _interval(axes, row, (low, cell.value, high), _colour(at))
            place: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(format_value(metric, cell.value), (cell.value, -row), **place)
        _name_rows(axes, [_label(comparison.sides[at].name) for at, _ in cells])
        axes.set_xlabel(metric.name if metric.better == "neither" else f"{metric.name}, {metric.better} is better")
        if metric.unit == "share":
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _svg(f"scores {task.task} {metric.name}", draw, height=0.75 + 0.45 * len(cells))


def _difference_plot(comparison: Comparison, task: TaskComparison) -> str | None:
    """Shares and points in one plot; other metrics have no common scale and are only in the table."""
    metrics = {metric.name: metric for metric in task.metrics}
    pairs = ((pairing, change) for pairing in task.pairings for change in pairing.changes)
    found = [(p, c, c.low, c.high) for p, c in pairs if metrics[c.metric].unit != "number"]
    bounded = [(p, c, low, high) for p, c, low, high in found if low is not None and high is not None]
    if not bounded:
        return None

    def draw(axes: "Axes") -> None:
        axes.axvline(0, color=_INK, linewidth=1, alpha=0.5)
        names = []
        for row, (pairing, change, low, high) in enumerate(bounded):
            scale = 100 if metrics[change.metric].unit == "share" else 1
            ink = _colour(comparison.groups[pairing.second].sides[0])
            ends = scale * low, scale * change.value, scale * high
            _interval(axes, row, ends, ink, fill=ink if change.is_clear else _GROUND)
            name = _label(comparison.groups[pairing.second].name)
            names.append(f"{name}: {change.metric}" if len(task.pairings) > 1 else change.metric)
        _name_rows(axes, names)
        axes.set_xlabel("difference in percentage points (filled: significant after Holm's correction)")

    return _svg(f"differences {task.task}", draw, height=0.75 + 0.36 * len(bounded))


def _item_plot(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> str:
    """The change of every item, the largest gain first."""
    metric = compare.main_metric(task, pairing)
    scale = 100 if metric.unit == "share" else 1
    changes = [scale * change for change in pairing.item_changes]

    def draw(axes: "Axes") -> None:
        edges = [at - 0.5 for at in range(1, len(changes) + 2)]
        axes.stairs([max(0.0, change) for change in changes], edges, fill=True, color=_GAIN, linewidth=0)
        axes.stairs([min(0.0, change) for change in changes], edges, fill=True, color=_LOSS, linewidth=0)
        axes.axhline(0, color=_INK, linewidth=1, alpha=0.6)
        axes.set_xlim(0.5, len(changes) + 0.5)
        axes.set_xlabel(f"{len(changes):,} items, by the gain of {_label(comparison.groups[pairing.second].name)}")
        axes.set_ylabel(metric.name if metric.better == "neither" else f"gain in {metric.name}")
        axes.grid(visible=True, axis="y")

    return _svg(f"items {task.task} {pairing.second}", draw, height=2.6)


def _interval(axes: "Axes", row: int, ends: tuple[float, float, float], ink: str, *, fill: str | None = None) -> None:
    low, value, high = ends
    axes.plot([low, high], [-row, -row], color=ink, linewidth=2.5, solid_capstyle="butt")
    axes.plot([value], [-row], color=ink, marker="o", markersize=7, markerfacecolor=fill or ink)


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.7)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)


def _label(name: str) -> str:
    return shortened(visible(name), 40)


def _svg(name: str, draw: Callable[["Axes"], None], *, height: float) -> str:
    """Draws on a figure of its own, so that nothing is shared with other plots in the process."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _BEFORE_SVG.sub("", text.getvalue(), count=1))
    svg = _GLOBAL_STYLE.sub("", svg)  # it would apply to the whole page
    return svg.replace(_INK, "currentColor").replace(_GROUND, "var(--ground)").strip()


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
