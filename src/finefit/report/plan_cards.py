"""The forecasts of several cards side by side: which fit, with what, how long and at what price."""

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import Forecast, Suggestion
from finefit.artifacts.records import Levers
from finefit.report.lines import print_lines, table
from finefit.report.plan import card_name, yes_or_no
from finefit.report.units import duration


def show_cards(forecasts: Sequence[Forecast], console: Console, *, now: datetime) -> None:
    """A row for each card; `now` is when the run would begin."""
    remarks = _remarks(forecasts)
    rows = [_card_row(forecast, remark, now) for forecast, remark in zip(forecasts, remarks, strict=True)]
    print_lines(console, table(console, rows, right=("GiB", "time", "cost"), below=("levers",)))


def _card_row(forecast: Forecast, remark: str, now: datetime) -> dict[str, Text]:
    """What does not fit has no time and no cost."""
    levers = ", ".join((f"micro {forecast.levers.micro_batch}", *_short_levers(forecast.levers)))
    return {
        "card": Text(card_name(forecast), style="bold"),
        "fits": yes_or_no(forecast.fits),
        "GiB": Text(f"{forecast.peak_bytes / 2**30:.1f} of {forecast.budget_bytes / 2**30:.1f}"),
        "levers": Text(levers, style="dim"),
        "time": Text(_card_time(forecast)),
        "finished": Text(
            "" if forecast.total_seconds is None or not forecast.fits else _moment(now, forecast.total_seconds)
        ),
        "cost": Text("" if forecast.cost is None or not forecast.fits else f"{forecast.cost:,.2f}"),
        "": Text(remark, style="bold green" if forecast.fits else ""),
    }


def _short_levers(levers: Levers) -> Iterator[str]:
    if levers.recompute:
        yield f"recompute {levers.recompute}"
    if levers.keep_attention:
        yield "attention kept"
    if levers.loss_chunk is not None:
        yield f"chunk {levers.loss_chunk:,}"
    if levers.offload:
        yield "offload"
    if levers.mlp_tiles > 1:
        yield f"tiles {levers.mlp_tiles}"
    if levers.packing:
        yield "packed"
    if levers.kernels == "fused":
        yield "fused"
    if levers.update == "inside":
        yield "update inside"
    if levers.compile:
        yield "compiled"


def _card_time(forecast: Forecast) -> str:
    if not forecast.fits:
        return ""
    if forecast.total_seconds is not None:
        return duration(forecast.total_seconds)
    return "not known" if forecast.step_seconds is None else f"{duration(forecast.step_seconds)} a step"


def _moment(now: datetime, seconds: float) -> str:
    """Local time; a weekday would mislead where it comes again before the end."""
    end = (now.astimezone(UTC) + timedelta(seconds=seconds)).astimezone()
    return end.strftime("%a %H:%M" if seconds < 6 * 86400 else "%d %b %H:%M")


def _remarks(forecasts: Sequence[Forecast]) -> list[str]:
    fitting = [forecast for forecast in forecasts if forecast.fits]
    least_cost = min((forecast.cost for forecast in fitting if forecast.cost is not None), default=None)
    least_time = min((seconds for forecast in fitting if (seconds := _seconds(forecast)) is not None), default=None)

    def remark(forecast: Forecast) -> str:
        if not forecast.fits:
            return _way_to_fit(forecast.suggestions)
        marks = {"cheapest": (forecast.cost, least_cost), "fastest": (_seconds(forecast), least_time)}
        return ", ".join(mark for mark, (value, least) in marks.items() if value is not None and value == least)

    return [remark(forecast) for forecast in forecasts]


def _seconds(forecast: Forecast) -> float | None:
    return forecast.step_seconds if forecast.total_seconds is None else forecast.total_seconds


def _way_to_fit(suggestions: Iterable[Suggestion]) -> str:
    """The cheapest: an exact one, then the fastest."""
    fitting = [suggestion for suggestion in suggestions if suggestion.fits]
    if not fitting:
        return "no change found that fits"
    best = min(fitting, key=lambda s: (not s.is_exact, math.inf if s.step_seconds is None else s.step_seconds))
    return "fits with " + ", ".join(change.removeprefix("levers.") for change in best.changes)
