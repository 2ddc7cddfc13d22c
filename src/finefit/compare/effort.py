"""What the plan said and what then came: memory, time, money; and the losses on the way."""

import math
from collections.abc import Callable, Sequence
from statistics import median

from finefit.artifacts.forecasts import Forecast
from finefit.artifacts.journal import read_lines, read_steps
from finefit.compare.records import Curve, Foretold
from finefit.compare.settings import is_trained
from finefit.compare.sides import Opened

_POINTS = 500
Figure = Callable[[Opened, Forecast], tuple[float | None, float | None]]
"""What was foretold of a side, and what was measured."""


def foretold_of(sides: Sequence[Opened]) -> tuple[Foretold, ...]:
    """Of sides that were trained; a figure that no side has is left out."""
    rows = [_row(what, unit, figure, sides) for what, unit, figure in _FIGURES]
    return tuple(
        row
        for row in (*rows, _of_evaluation(sides))
        if any(value is not None for value in (*row.predicted, *row.measured))
    )


def _row(what: str, unit: str, figure: Figure, sides: Sequence[Opened]) -> Foretold:
    found = [(None, None) if (forecast := _forecast(side)) is None else figure(side, forecast) for side in sides]
    return Foretold(what=what, unit=unit, predicted=tuple(p for p, _ in found), measured=tuple(m for _, m in found))  # type: ignore[arg-type]


def _forecast(side: Opened) -> Forecast | None:
    if side.plan is None or side.stage is None or not is_trained(side):
        return None
    return side.plan.forecasts.get(side.stage.name)


def _memory(side: Opened, forecast: Forecast) -> tuple[float | None, float | None]:
    """Reserved on a card; on a CPU what the process holds."""
    on_card = side.stage is not None and side.stage.device == "cuda"
    return (
        forecast.reserved_bytes if on_card else forecast.peak_bytes,
        None if side.ended is None else side.ended.peak_bytes,
    )


def _step_seconds(side: Opened, forecast: Forecast) -> tuple[float | None, float | None]:
    """The median: the first step, and one that another program held up, are no usual ones."""
    return forecast.step_seconds, median(seconds) if (seconds := _seconds(side)) else None


def _tokens_per_second(side: Opened, forecast: Forecast) -> tuple[float | None, float | None]:
    steps = [step for step in read_steps(side.where.metrics) if "tokens" in step and "seconds" in step]
    seconds = sum(step["seconds"] for step in steps)
    return forecast.tokens_per_second, sum(step["tokens"] for step in steps) / seconds if seconds else None


def _training_seconds(side: Opened, forecast: Forecast) -> tuple[float | None, float | None]:
    return forecast.total_seconds, sum(_seconds(side)) or None


def _cost(side: Opened, forecast: Forecast) -> tuple[float | None, float | None]:
    price = forecast.price_per_hour
    return forecast.cost, None if price is None else price * sum(_seconds(side)) / 3600


def _seconds(side: Opened) -> list[float]:
    return [step["seconds"] for step in read_steps(side.where.metrics) if "seconds" in step]


_FIGURES: tuple[tuple[str, str, Figure], ...] = (
    ("peak memory", "bytes", _memory),
    ("time per step", "seconds", _step_seconds),
    ("tokens per second", "tokens/s", _tokens_per_second),
    ("training time", "seconds", _training_seconds),
    ("cost", "money", _cost),
)


def _of_evaluation(sides: Sequence[Opened]) -> Foretold:
    """The most that any of a side's evaluations took, with what was said of that one."""
    most = [
        max(
            (
                (r.result.peak_bytes, r.result.foretold_bytes)
                for r in side.evaluated.values()
                if r.result.peak_bytes is not None
            ),
            default=(None, None),
            key=lambda pair: pair[0] or 0,
        )
        for side in sides
    ]
    return Foretold(
        what="evaluation memory",
        unit="bytes",
        predicted=tuple(foretold for _, foretold in most),
        measured=tuple(measured for measured, _ in most),
    )


def curves_of(sides: Sequence[Opened]) -> tuple[Curve, ...]:
    return tuple(
        _curve(at, side) for at, side in enumerate(sides) if is_trained(side) and read_steps(side.where.metrics)
    )


def _curve(at: int, side: Opened) -> Curve:
    """Thinned evenly where there are very many steps. A loss that is not finite is a gap."""
    steps = [
        step for step in read_steps(side.where.metrics) if step["loss"] is not None and math.isfinite(step["loss"])
    ]
    thin = steps[:: max(1, math.ceil(len(steps) / _POINTS))]
    if steps and thin[-1] is not steps[-1]:
        thin.append(steps[-1])
    last = steps[-1]["step"] if steps else 0
    found = {
        line["step"]: line["validation_loss"]
        for line in read_lines(side.where.metrics)
        if line.get("event") == "validated"
    }
    validation = tuple((step, loss) for step, loss in sorted(found.items()) if step <= last and math.isfinite(loss))
    return Curve(
        side=at, steps=tuple(s["step"] for s in thin), losses=tuple(s["loss"] for s in thin), validation=validation
    )
