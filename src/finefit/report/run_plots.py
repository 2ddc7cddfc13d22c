"""The plots of a training: whether it learns, how fast, and how much memory it takes, each beside what was planned."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from finefit.report.plots import INK, colour, svg_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
_MOST_POINTS = 1500
_SMOOTH_SHARE = 0.04
"""Of all steps: the width of the window that a smoothed loss is the mean of."""
_SMALL = 4.3
_MEASURES = {
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens", "rows", "seconds"),
    *("wait_seconds", "forward_seconds", "backward_seconds", "update_seconds", "tokens_per_second", "time", "batch"),
    *("card_utilisation", "card_watts", "card_celsius"),
}
"""Keys of a step that have a plot of their own, or none; others, such as a preference margin, are measures of the
objective."""
_MARKED = {
    "spike": "spike",
    "not_finite": "not finite",
    "rolled_back": "rolled back",
    "oom_recovered": "out of memory, recovered",
    "resumed": "resumed",
}
_MOST_MEASURES = 4
_PHASES = {"wait": "waiting for rows", "forward": "forward", "backward": "backward", "update": "update"}
_CARD = {"card_utilisation": "share of time in which the card computes", "card_watts": "power of the card in watts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLines:
    """What a training has written, in memory once for all plots."""

    steps: Sequence[Line]
    validations: Sequence[Line]
    events: Sequence[Line]
    memory: Sequence[Line]
    planned_bytes: int | None
    budget_bytes: int | None
    """Of the card; None on a CPU."""
    planned_tokens_per_second: float | None


def loss_plot(lines: TrainingLines) -> str:
    """Raw and smoothed losses, validation losses as dots, and lines where something happened."""

    def draw(axes: "Axes") -> None:
        losses = series(lines.steps, "loss")
        axes.plot(*_drawn(losses), color=colour(0), linewidth=0.9, alpha=0.4, label="training, each step")
        if len(losses) > 20:
            axes.plot(*_drawn(smoothed(losses)), color=colour(0), linewidth=2, label="training, smoothed")
        if found := series(lines.validations, "validation_loss"):
            axes.plot(*_drawn(found), color=colour(1), marker="o", markersize=5, linewidth=1, label="validation")
        for at, (event, words) in enumerate(_MARKED.items()):
            steps = {line["step"] for line in lines.events if line.get("event") == event}
            for number, step in enumerate(sorted(steps)):
                style: dict[str, Any] = {"color": colour(at + 2), "linewidth": 1, "linestyle": ":"}
                axes.axvline(step, label="" if number else words, **style)
        values = [loss for _, loss in losses if loss > 0]
        if values and max(values) > 10 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _finish(axes, "loss")

    return svg_plot("loss", draw, height=3.4)


def small_plots(lines: TrainingLines) -> Iterator[tuple[str, Callable[[], str]]]:
    """Captions with what draws them; a quantity that was not recorded has no plot."""
    yield from _memory_plot(lines)
    speed, planned = series(lines.steps, "tokens_per_second"), lines.planned_tokens_per_second
    if speed:
        yield "tokens per second", partial(_curve, "tokens per second", speed, planned)
    for key, caption in (("learning_rate", "learning rate"), ("grad_norm", "norm of the gradient")):
        if found := series(lines.steps, key):
            yield caption, partial(_curve, caption, found, None)
    if found := series(lines.steps, "seconds"):
        parts = [(words, series(lines.steps, f"{key}_seconds")) for key, words in _PHASES.items()]
        yield "seconds per step", partial(_curve, "seconds per step", found, None, [part for part in parts if part[1]])
    for key, caption in _CARD.items():
        if found := series(lines.steps, key):
            yield caption, partial(_curve, caption, found, None)
    names = {name for line in lines.steps for name in line if name not in _MEASURES and _is_number(line[name])}
    for name in sorted(names)[:_MOST_MEASURES]:
        yield name, partial(_curve, name, series(lines.steps, name), None)


def _memory_plot(lines: TrainingLines) -> Iterator[tuple[str, Callable[[], str]]]:
    """What the card or the process held at its peak, beside the plan and the card's limit."""

    def draw(axes: "Axes") -> None:
        peak = [(step, held / 2**30) for step, held in series(lines.memory, "peak_bytes")]
        axes.plot(*_drawn(peak), color=colour(0), linewidth=1.6, label="measured peak")
        for held, words, at in ((lines.planned_bytes, "planned", 1), (lines.budget_bytes, "the card has", 4)):
            if held is not None:
                axes.axhline(held / 2**30, color=colour(at), linewidth=1.2, linestyle="--", label=words)
        axes.set_ylim(bottom=0)
        _finish(axes, "GiB")

    if series(lines.memory, "peak_bytes"):
        yield "memory, measured and planned", partial(svg_plot, "memory", draw, height=2.6, width=_SMALL)


def _curve(name: str, points: Points, planned: float | None, below: Sequence[tuple[str, Points]] = ()) -> str:
    def draw(axes: "Axes") -> None:
        has_others = planned is not None or bool(below)
        axes.plot(*_drawn(points), color=colour(0), linewidth=1.4, label="measured" if has_others else None)
        if planned is not None:
            axes.axhline(planned, color=colour(1), linewidth=1.2, linestyle="--", label="planned")
        for number, (words, found) in enumerate(below, start=1):
            axes.plot(*_drawn(found), color=colour(number), linewidth=1.2, label=words)
        if has_others:
            axes.set_ylim(bottom=0)
        _finish(axes, "")

    return svg_plot(name, draw, height=2.6, width=_SMALL)


def _finish(axes: "Axes", unit: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(visible=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, labelcolor=INK)


def series(lines: Iterable[Line], key: str) -> list[tuple[float, float]]:
    """(step, value) of the lines that have a finite number there."""
    return [(line["step"], line[key]) for line in lines if _is_number(line.get(key)) and _is_number(line.get("step"))]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The mean of the steps around each, so that the curve does not lag behind; fewer at both ends."""
    reach = max(1, round(_SMOOTH_SHARE * len(points) / 2))
    sums = [0.0, *accumulate(value for _, value in points)]
    found = []
    for at, (step, _) in enumerate(points):
        near = min(reach, at, len(points) - 1 - at)
        found.append((step, (sums[at + near + 1] - sums[at - near]) / (2 * near + 1)))
    return found


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """The lowest and the highest of each stretch, in their order, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    found: list[tuple[float, float]] = []
    size = math.ceil(2 * len(points) / most)
    for stretch in (points[at : at + size] for at in range(0, len(points), size)):
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        found += sorted(ends)
    return found


def _drawn(points: Points) -> tuple[list[float], list[float]]:
    kept = thinned(points)
    return [step for step, _ in kept], [value for _, value in kept]
