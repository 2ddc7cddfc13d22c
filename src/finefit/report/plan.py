"""The plan of a run, whatever the number of its stages. On one card: a row for each stage, changes that would make it
fit, and the fullest stage in full. On several cards: a row for each card."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, StageForecast, Suggestion
from finefit.artifacts.records import Levers
from finefit.report.forecast import (
    card_name,
    forecast_object,
    limit_words,
    ordered_suggestions,
    show_forecast,
    suggestion_lines,
    yes_or_no,
)
from finefit.report.layout import duration, gib, hanging, print_lines, table, three_digits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The forecasts of all stages on all cards."""

    name: str
    is_flat: bool
    costs: Mapping[str, StageForecast]
    """By stage, in their order."""
    free: tuple[int | None, ...] = ()
    """Free bytes of the disk beside each card; None, or nothing, where that is another machine's."""

    @property
    def num_cards(self) -> int:
        return max(len(one.fits) for one in self.costs.values())

    @property
    def disk_bytes(self) -> int:
        return sum(one.disk_bytes for one in self.costs.values())

    def lacking_disk(self, at: int = 0) -> int:
        """Bytes that the disk has too few."""
        there = self.free[at] if at < len(self.free) else None
        return 0 if there is None else max(0, self.disk_bytes - there)

    def too_large(self, at: int = 0) -> list[str]:
        return [name for name, one in self.costs.items() if not one.fits[at]]

    def fits(self, at: int = 0) -> bool:
        """Every stage on the card, and everything they leave on the disk."""
        return not self.too_large(at) and not self.lacking_disk(at)

    def suggestions(self, at: int = 0) -> tuple[Suggestion, ...]:
        """Stage by stage, as they are numbered from 1."""
        trainings = [one.forecasts[at] for one in self.costs.values() if one.forecasts]
        return tuple(suggestion for one in trainings for suggestion in ordered_suggestions(one.suggestions))

    def fullest(self, at: int = 0) -> str | None:
        """The training that fills the card most; None where nothing is trained."""
        trainings = {name: one.forecasts[at] for name, one in self.costs.items() if one.forecasts}
        shares = {name: one.peak_bytes / one.budget_bytes for name, one in trainings.items()}
        return max(shares, key=shares.__getitem__) if shares else None

    def fullest_forecast(self, at: int = 0) -> Forecast | None:
        name = self.fullest(at)
        return None if name is None else self.costs[name].forecasts[at]

    def seconds(self, at: int = 0) -> float | None:
        """Of all trainings, and of the evaluations whose time is known, on the first card alone; None where the time of
        a training is not known."""
        trained = [one.forecasts[at].total_seconds for one in self.costs.values() if one.forecasts]
        if any(seconds is None for seconds in trained):
            return None
        answered = [one.seconds or 0.0 for one in self.costs.values() if not one.forecasts and at == 0]
        return sum(seconds or 0.0 for seconds in trained) + sum(answered)

    def cost(self, at: int = 0) -> float | None:
        found, seconds = self.fullest_forecast(at), self.seconds(at)
        price = None if found is None else found.price_per_hour
        return None if price is None or seconds is None else price * seconds / 3600


def show_plan(plan: RunPlan, console: Console, *, now: datetime, only: str | None = None) -> None:
    """`only`: the stage to show in full instead of the fullest; `now`: when the run would begin."""
    if plan.num_cards > 1:
        rows = [_card_row(plan, at, now) for at in range(plan.num_cards)]
        print_lines(console, table(console, rows, right=("GiB", "time", "cost"), below=("levers",)))
        return
    shown = only or plan.fullest()
    found = None if shown is None else plan.costs[shown].forecasts[0]
    if plan.is_flat:
        print_lines(console, _disk_verdict(plan))
    else:
        _show_stages(plan, console)
        found = None if found is None else replace(found, suggestions=())
    if found is not None and shown is not None:
        print_lines(console, [] if plan.is_flat else [Text()])
        show_forecast(found, console, stage=shown)


def plan_document(plan: RunPlan) -> dict[str, Any]:
    """What `--json` prints: the training that fills the first card most, the totals of the run, each stage, each
    card."""
    stages = {name: _stage_object(one) for name, one in plan.costs.items()}
    return _card_object(plan, 0) | {"stages": stages, "cards": [_card_object(plan, at) for at in range(plan.num_cards)]}


def _card_object(plan: RunPlan, at: int) -> dict[str, Any]:
    found = plan.fullest_forecast(at)
    return (forecast_object(found) if found else {}) | {
        "stage": plan.fullest(at),
        "fits": plan.fits(at),
        "total_seconds": plan.seconds(at),
        "disk_bytes": plan.disk_bytes,
        "free_disk_bytes": plan.free[at] if plan.free else None,
        "cost": plan.cost(at),
        "suggestions": TypeAdapter(tuple[Suggestion, ...]).dump_python(plan.suggestions(at), mode="json"),
        "does_not_fit": plan.too_large(at),
    }


def _stage_object(one: StageForecast) -> dict[str, Any]:
    own: dict[str, Any] = TypeAdapter(StageForecast).dump_python(
        one, mode="json", exclude={"forecasts", "eval_limits", "seconds"}
    )
    own |= {"fits": one.fits[0], "total_seconds": one.seconds}
    if one.eval_limits:
        limits = TypeAdapter(dict[str, dict[str, EvalBatchLimit]])
        own["eval_limits"] = limits.dump_python(one.eval_limits[0], mode="json")
    if one.forecasts:
        own = forecast_object(one.forecasts[0]) | own | {"notes": [*one.notes, *one.forecasts[0].notes]}
    return own


# One card, several stages


def _show_stages(plan: RunPlan, console: Console) -> None:
    rows = [_stage_row(name, one) for name, one in plan.costs.items()]
    right = ("GiB", "parameters", "trained", "time", "disk")
    print_lines(console, [*_verdict(plan), *_disk_verdict(plan), *table(console, rows, right=right, below=())])
    print_lines(console, [_totals(plan), Text(), *_notes(plan, console)])
    if suggestions := plan.suggestions():
        print_lines(console, [Text(), *suggestion_lines(suggestions, console, fits=False)])


def _verdict(plan: RunPlan) -> Iterator[Text]:
    card = next((f" on {card_name(one.forecasts[0])}" for one in plan.costs.values() if one.forecasts), "")
    if too_large := plan.too_large():
        reasons = ", ".join(_why_too_large(name, plan.costs[name]) for name in too_large)
        yield Text(f"{plan.name} does not fit{card}: {reasons}", style="bold red")
    elif not plan.lacking_disk():
        yield Text(f"{plan.name}: all {len(plan.costs)} stages fit{card}", style="bold green")


def _disk_verdict(plan: RunPlan) -> Iterator[Text]:
    if lacking := plan.lacking_disk():
        free = _size(plan.disk_bytes - lacking) or "0 MiB"
        needed = f"it takes up to {_size(plan.disk_bytes)}, {free} are free"
        yield Text(f"{plan.name} does not fit on the disk: {needed}", style="bold red")


def _why_too_large(name: str, one: StageForecast) -> str:
    if one.forecasts and one.forecasts[0].fits:
        return f"{name} has trained tensors that no gradient reaches"
    if (held := _held(one)) is not None:
        return f"{name} needs {held[0] / 2**30:.1f} of {held[1] / 2**30:.1f} GiB"
    return name if one.host_bytes is None else f"{name} needs about {_size(one.host_bytes)} of host memory"


def _held(one: StageForecast) -> tuple[int, int] | None:
    """What the card must hold and what it has: for a training, or for the largest model that answers."""
    if one.forecasts:
        return one.forecasts[0].peak_bytes, one.forecasts[0].budget_bytes
    limits = [limit for model in (one.eval_limits[0] if one.eval_limits else {}).values() for limit in model.values()]
    known = [(limit.held_bytes, limit.budget_bytes) for limit in limits]
    return max(((held, budget) for held, budget in known if held is not None and budget is not None), default=None)


def _stage_row(name: str, one: StageForecast) -> dict[str, Text]:
    held = _held(one)
    return {
        "stage": Text(name, style="bold"),
        "kind": Text(one.kind),
        "fits": Text() if held is None and one.host_bytes is None else yes_or_no(one.fits[0]),
        "GiB": Text("" if held is None else f"{held[0] / 2**30:.1f} of {held[1] / 2**30:.1f}"),
        "parameters": Text("" if one.parameters is None else _count(one.parameters)),
        "trained": Text("" if one.trainable_parameters is None else _count(one.trainable_parameters)),
        "time": Text(_time(one)),
        "disk": Text(_size(one.disk_bytes)),
    }


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{three_digits(parameters / size)} {unit}"
    return str(parameters)


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return ""
    return gib(num_bytes) if num_bytes >= 2**30 / 20 else f"{max(num_bytes / 2**20, 0.1):.1f} MiB"


def _time(one: StageForecast) -> str:
    if one.seconds is not None:
        return ("" if one.forecasts else "≤ ") + duration(one.seconds)
    step = one.forecasts[0].step_seconds if one.forecasts else None
    return f"{duration(step)} a step" if step is not None else "not known" if one.forecasts or one.eval_limits else ""


def _totals(plan: RunPlan) -> Text:
    seconds = plan.seconds()
    known = "not known, since that of a training is not" if seconds is None else f"about {duration(seconds)}"
    unknown = [name for name, one in plan.costs.items() if one.seconds is None and not one.forecasts]
    without = f" without {', '.join(unknown)}" if unknown and seconds is not None else ""
    return Text(f"in all: time {known}{without}; {_size(plan.disk_bytes) or 'no'} of disk at most")


def _notes(plan: RunPlan, console: Console) -> Iterator[Text]:
    for name, one in plan.costs.items():
        label = Text(f"{name}: ", style="cyan")
        for note in (*one.notes, *_own_notes(one)):
            body = Text(note, style="dim")
            yield from hanging(console, label, body, indent=len(name) + 2, width=console.width)


def _own_notes(one: StageForecast) -> Iterator[str]:
    if one.host_bytes is not None and not one.forecasts:  # a training's listing has it
        yield f"about {_size(one.host_bytes)} of host memory"
    for model, limits in (one.eval_limits[0] if one.eval_limits else {}).items():
        yield from (f"{model}, {limit_words(label, limit)}" for label, limit in limits.items())


# Several cards


def _card_row(plan: RunPlan, at: int, now: datetime) -> dict[str, Text]:
    """What does not fit has no time and no cost."""
    found, fits, seconds, cost = plan.fullest_forecast(at), plan.fits(at), plan.seconds(at), plan.cost(at)
    levers = "" if found is None or not plan.is_flat else ", ".join(_short_levers(found.levers))
    is_shown = fits and plan.is_flat
    return {
        "card": Text("" if found is None else card_name(found), style="bold"),
        "fits": yes_or_no(fits),
        "fullest stage": Text("" if plan.is_flat else plan.fullest(at) or ""),
        "GiB": Text("" if found is None else f"{found.peak_bytes / 2**30:.1f} of {found.budget_bytes / 2**30:.1f}"),
        "levers": Text(levers, style="dim"),
        "time": Text(_card_time(plan, at) if fits else ""),
        "finished": Text(_moment(now, seconds) if is_shown and seconds is not None else ""),
        "cost": Text(f"{cost:,.2f}" if is_shown and cost is not None else ""),
        "": Text(_remark(plan, at), style="bold green" if fits else ""),
    }


def _short_levers(levers: Levers) -> Iterator[str]:
    yield f"micro {levers.micro_batch}"
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


def _card_time(plan: RunPlan, at: int) -> str:
    if (seconds := plan.seconds(at)) is not None:
        return duration(seconds)
    step = _step_seconds(plan, at)
    return "not known" if step is None else f"{duration(step)} a step"


def _step_seconds(plan: RunPlan, at: int) -> float | None:
    found = plan.fullest_forecast(at)
    return found.step_seconds if found is not None and plan.is_flat else None


def _moment(now: datetime, seconds: float) -> str:
    """Local time, with the date where a weekday would be ambiguous."""
    end = (now.astimezone(UTC) + timedelta(seconds=seconds)).astimezone()
    return end.strftime("%a %H:%M" if seconds < 6 * 86400 else "%d %b %H:%M")


def _remark(plan: RunPlan, at: int) -> str:
    """Which card is cheapest and fastest, as far as a flat spec fits; else what does not fit, or what would make it."""
    if not plan.fits(at):
        names = plan.too_large(at) + (["the disk"] if plan.lacking_disk(at) else [])
        return _way_to_fit(plan.suggestions(at)) if plan.is_flat else f"does not fit: {', '.join(names)}"
    if not plan.is_flat:
        return ""
    fitting = [card for card in range(plan.num_cards) if plan.fits(card)]
    marks = []
    for mark, measure in (("cheapest", plan.cost), ("fastest", partial(_rank_seconds, plan))):
        known = [value for card in fitting if (value := measure(card)) is not None]
        if known and measure(at) == min(known):
            marks.append(mark)
    return ", ".join(marks)


def _rank_seconds(plan: RunPlan, at: int) -> float | None:
    seconds = plan.seconds(at)
    return _step_seconds(plan, at) if seconds is None else seconds


def _way_to_fit(suggestions: Iterable[Suggestion]) -> str:
    """The cheapest: an exact one, then the fastest."""
    fitting = [suggestion for suggestion in suggestions if suggestion.fits]
    if not fitting:
        return "no change found that fits"
    best = min(fitting, key=lambda one: (not one.is_exact, math.inf if one.step_seconds is None else one.step_seconds))
    return "fits with " + ", ".join(change.removeprefix("levers.") for change in best.changes)
