"""Plots as SVG for pages: text stays text, ink and ground are those of the page, and nothing is shared with other plots
in the process."""

import io
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from finefit.report.layout import shortened, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'finefit[plots]'"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


INK = "#010203"  # in the SVG text of a plot, replaced by the page's text colour
GROUND = "#040506"  # replaced by the page's background
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899")
GAIN, LOSS = "#10b981", "#ef4444"
_WIDTH = 8.4
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is not a formula
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
}
_BEFORE_SVG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL)
_GLOBAL_STYLE = re.compile(r"<defs>\s*<style[^>]*>\*\{.*?</style>\s*</defs>", re.DOTALL)


def colour(side: int) -> str:
    return COLOURS[side % len(COLOURS)]


def interval(axes: "Axes", row: int, ends: tuple[float, float, float], ink: str, *, fill: str | None = None) -> None:
    low, value, high = ends
    axes.plot([low, high], [-row, -row], color=ink, linewidth=2.5, solid_capstyle="butt")
    axes.plot([value], [-row], color=ink, marker="o", markersize=7, markerfacecolor=fill or ink)


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.7)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)


def label(name: str) -> str:
    return shortened(visible(name), 40)


def svg_plot(name: str, draw: Callable[["Axes"], None], *, height: float, width: float = _WIDTH) -> str:
    """Draws on a figure of its own, so that nothing is shared with other plots in the process."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _BEFORE_SVG.sub("", text.getvalue(), count=1))
    svg = _GLOBAL_STYLE.sub("", svg)  # it would apply to the whole page
    return svg.replace(INK, "currentColor").replace(GROUND, "var(--ground)").strip()
