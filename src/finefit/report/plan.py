"""The plan of a run with any number of stages. On one card: a row for each stage, changes that would make it fit, and
the stage that needs the most memory in full. On several cards: a row for each card. In a run: the values that differ
from the defaults, with their sources."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.forecasts import (
    EvalBatchLimit,
    Forecast,
    Plan,
    PlanningProgress,
    Resolved,
    StageForecast,
    Suggestion,
)
from finefit.artifacts.records import Levers
from finefit.report import forecast
from finefit.report.layout import PLAIN_TABLE, duration, gib, hanging, print_lines, table, terminal_html, three_digits
from finefit.spec.data import Source
from finefit.spec.schema import Evaluation

_USUAL = {f"levers.{lever.name}": lever.default for lever in fields(Levers) if lever.default is not MISSING}
_USUAL |= {"engine.kind": "single", "engine.devices": 1, "accumulation": 1}
_ENTRIES: dict[str, type[BaseModel]] = {"data.train": Source, "data.test": Source, "evaluate": Evaluation}

_LONG_WAIT_SECONDS = 20.0
"""Without a spinner, a line is printed if nothing was shown for this long."""


class PlanningLine:
    """The current rehearsal, its card out of how many, and how long it has taken; redrawn in place on a terminal."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._began = self._said = self._card_began = clock()
        self._now: PlanningProgress | None = None
        self._num_candidates = 0

    def note(self, progress: PlanningProgress) -> None:
        is_same_card = self._now is not None and self._now.number == progress.number
        self._num_candidates = self._num_candidates + 1 if is_same_card else 1
        if not is_same_card:
            self._card_began = self._clock()
        self._now = progress

    def overdue(self) -> str | None:
        """The line, if the last one was printed long ago."""
        if self._clock() - self._said < _LONG_WAIT_SECONDS:
            return None
        self._said = self._clock()
        return str(self)

    def __str__(self) -> str:
        seconds = int(self._clock() - self._began)
        elapsed = duration(seconds) if seconds >= 60 else f"{seconds} s"
        if (now := self._now) is None:
            return f"{self._what}, {elapsed}"
        card = f"{now.card} (card {now.number} of {now.num_cards})" if now.num_cards > 1 else now.card
        left = self._seconds_left(now)
        if left is not None:
            elapsed += f", about {duration(left) if left >= 60 else f'{left:.0f} s'} left"
        return f"{self._what} for {card}, {elapsed}: candidate {self._num_candidates}, {now.doing}"

    def _seconds_left(self, now: PlanningProgress) -> float | None:
        """As long for each card to come as for those before; later ones share rehearsals and are rather quicker. None
        for the first card: how many candidates it takes is not known."""
        if now.number == 1:
            return None
        each = (self._card_began - self._began) / (now.number - 1)
        return max(0.0, each * (now.num_cards - now.number + 1) - (self._clock() - self._card_began))

    def __rich__(self) -> Text:
        return Text(str(self), no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    name: str
    is_flat: bool
    costs: Mapping[str, StageForecast]
    """One cost per stage, in their order."""
    free: tuple[int | None, ...] = ()
    """Free bytes of the disk for each card; None or empty if the disk is another machine's."""

    @property
    def num_cards(self) -> int:
        return max(len(one.fits) for one in self.costs.values())

    @property
    def disk_bytes(self) -> int:
        return sum(one.disk_bytes for one in self.costs.values())

    def lacking_disk(self, at: int = 0) -> int:
        """The number of bytes that the disk lacks."""
        there = self.free[at] if at < len(self.free) else None
        return 0 if there is None else max(0, self.disk_bytes - there)

    def too_large(self, at: int = 0) -> list[str]:
        return [name for name, one in self.costs.items() if not one.fits[at]]

    def fits(self, at: int = 0) -> bool:
        """Whether every stage fits on the card, and everything that they leave fits on the disk."""
        return not self.too_large(at) and not self.lacking_disk(at)

    def suggestions(self, at: int = 0) -> tuple[Suggestion, ...]:
        """Stage by stage, numbered from 1 in this order."""
        trainings = [one.forecasts[at] for one in self.costs.values() if one.forecasts]
        return tuple(suggestion for one in trainings for suggestion in forecast.ordered_suggestions(one.suggestions))

    def fullest(self, at: int = 0) -> str | None:
        """The training that fills the card most; None if nothing is trained."""
        trainings = {name: one.forecasts[at] for name, one in self.costs.items() if one.forecasts}
        shares = {name: one.peak_bytes / one.budget_bytes for name, one in trainings.items()}
        return max(shares, key=shares.__getitem__) if shares else None

    def fullest_forecast(self, at: int = 0) -> Forecast | None:
        name = self.fullest(at)
        return None if name is None else self.costs[name].forecasts[at]

    def seconds(self, at: int = 0) -> float | None:
        """The time of all trainings and, on the first card, of evaluations if known; None if that of a training is not
        known."""
        trained = [one.forecasts[at].total_seconds for one in self.costs.values() if one.forecasts]
        if any(seconds is None for seconds in trained):
            return None
        answered = [one.seconds or 0.0 for one in self.costs.values() if not one.forecasts and at == 0]
        return sum(seconds or 0.0 for seconds in trained) + sum(answered)

    def cost(self, at: int = 0) -> float | None:
        found, seconds = self.fullest_forecast(at), self.seconds(at)
        price = None if found is None else found.price_per_hour
        return None if price is None or seconds is None else price * seconds / 3600

    def step_seconds(self, at: int = 0) -> float | None:
        """The step time of a flat spec; steps of several stages have no common time."""
        found = self.fullest_forecast(at)
        return found.step_seconds if found is not None and self.is_flat else None

    def _repr_html_(self) -> str:
        return terminal_html(lambda console: show_plan(self, console, now=datetime.now().astimezone()))


def show_plan(plan: RunPlan, console: Console, *, now: datetime, only: str | None = None) -> None:
    """`only` is the stage to show in full instead of the one that needs the most memory; `now` is the time at which the
    run would begin."""
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
        forecast.show_forecast(found, console, stage=shown)


def plan_document(plan: RunPlan) -> dict[str, Any]:
    """The output of `--json`: the training that fills the first card most, the run's totals, each stage, each card."""
    limits = TypeAdapter(dict[str, dict[str, EvalBatchLimit]])
    stages: dict[str, dict[str, Any]] = {}
    for name, one in plan.costs.items():
        other = {"forecasts", "eval_limits", "seconds"}
        own: dict[str, Any] = TypeAdapter(StageForecast).dump_python(one, mode="json", exclude=other)
        own |= {"fits": one.fits[0], "total_seconds": one.seconds}
        if one.eval_limits:
            own["eval_limits"] = limits.dump_python(one.eval_limits[0], mode="json")
        if one.forecasts:
            own = forecast.forecast_object(one.forecasts[0]) | own | {"notes": [*one.notes, *one.forecasts[0].notes]}
        stages[name] = own
    return _card_object(plan, 0) | {"stages": stages, "cards": [_card_object(plan, at) for at in range(plan.num_cards)]}


def _card_object(plan: RunPlan, at: int) -> dict[str, Any]:
    found = plan.fullest_forecast(at)
    return (forecast.forecast_object(found) if found else {}) | {
        "stage": plan.fullest(at),
        "fits": plan.fits(at),
        "total_seconds": plan.seconds(at),
        "disk_bytes": plan.disk_bytes,
        "free_disk_bytes": plan.free[at] if plan.free else None,
        "cost": plan.cost(at),
        "suggestions": TypeAdapter(tuple[Suggestion, ...]).dump_python(plan.suggestions(at), mode="json"),
        "does_not_fit": plan.too_large(at),
    }


def _show_stages(plan: RunPlan, console: Console) -> None:
    card = next((f" on {forecast.card_name(one.forecasts[0])}" for one in plan.costs.values() if one.forecasts), "")
    if too_large := plan.too_large():
        reasons = ", ".join(_why_too_large(name, plan.costs[name]) for name in too_large)
        console.print(Text(f"{plan.name} does not fit{card}: {reasons}", style="bold red"))
    elif not plan.lacking_disk():
        console.print(Text(f"{plan.name}: all {len(plan.costs)} stages fit{card}", style="bold green"))
    rows = [_stage_row(name, one) for name, one in plan.costs.items()]
    right = ("GiB", "parameters", "trained", "time", "disk")
    print_lines(console, [*_disk_verdict(plan), *table(console, rows, right=right, below=())])
    seconds = plan.seconds()
    known = "not known, since that of a training is not" if seconds is None else f"about {duration(seconds)}"
    unknown = [name for name, one in plan.costs.items() if one.seconds is None and not one.forecasts]
    without = f" without {', '.join(unknown)}" if unknown and seconds is not None else ""
    console.print(Text(f"in all: time {known}{without}; {_size(plan.disk_bytes) or 'no'} of disk at most"))
    print_lines(console, [Text(), *_notes(plan, console)])
    if suggestions := plan.suggestions():
        print_lines(console, [Text(), *forecast.suggestion_lines(suggestions, console, fits=False)])


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
    """The memory that the card must provide and what it has, for a training or for the largest model that answers."""
    if one.forecasts:
        return one.forecasts[0].peak_bytes, one.forecasts[0].budget_bytes
    limits = [limit for model in (one.eval_limits[0] if one.eval_limits else {}).values() for limit in model.values()]
    known = [(limit.held_bytes, limit.budget_bytes) for limit in limits]
    return max(((held, budget) for held, budget in known if held is not None and budget is not None), default=None)


def _stage_row(name: str, one: StageForecast) -> dict[str, Text]:
    held, step = _held(one), one.forecasts[0].step_seconds if one.forecasts else None
    if one.seconds is not None:
        time = ("" if one.forecasts else "≤ ") + duration(one.seconds)
    elif step is not None:
        time = f"{duration(step)} a step"
    else:
        time = "not known" if one.forecasts or one.eval_limits else ""
    return {
        "stage": Text(name, style="bold"),
        "kind": Text(one.kind),
        "fits": Text() if held is None and one.host_bytes is None else forecast.yes_or_no(one.fits[0]),
        "GiB": Text("" if held is None else f"{held[0] / 2**30:.1f} of {held[1] / 2**30:.1f}"),
        "parameters": Text("" if one.parameters is None else _count(one.parameters)),
        "trained": Text("" if one.trainable_parameters is None else _count(one.trainable_parameters)),
        "time": Text(time),
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


def _notes(plan: RunPlan, console: Console) -> Iterator[Text]:
    for name, one in plan.costs.items():
        notes = [*one.notes]
        if one.host_bytes is not None and not one.forecasts:  # a training's listing has it
            notes.append(f"about {_size(one.host_bytes)} of host memory")
        for model, limits in (one.eval_limits[0] if one.eval_limits else {}).items():
            notes += [f"{model}, {forecast.limit_words(label, limit)}" for label, limit in limits.items()]
        label = Text(f"{name}: ", style="cyan")
        for note in notes:
            yield from hanging(console, label, Text(note, style="dim"), indent=len(name) + 2, width=console.width)


def _card_row(plan: RunPlan, at: int, now: datetime) -> dict[str, Text]:
    """One of several cards. A card on which the plan does not fit has no time and no cost."""
    found, fits, seconds, cost = plan.fullest_forecast(at), plan.fits(at), plan.seconds(at), plan.cost(at)
    pulled: dict[str, object] = {}
    if found is not None and plan.is_flat:
        levers = found.levers
        pulled = {
            f"micro {levers.micro_batch}": True,
            f"recompute {levers.recompute}": levers.recompute,
            "attention kept": levers.keep_attention,
            f"chunk {levers.loss_chunk or 0:,}": levers.loss_chunk is not None,
            "offload": levers.offload,
            f"tiles {levers.mlp_tiles}": levers.mlp_tiles > 1,
            "packed": levers.packing,
            "fused": levers.kernels == "fused",
            "update inside": levers.update == "inside",
            "compiled": levers.compile,
        }
    time, finished, price = "", "", ""
    if fits:
        step = plan.step_seconds(at)
        time = "not known" if step is None else f"{duration(step)} a step"
        time = time if seconds is None else duration(seconds)
    if fits and plan.is_flat:
        price = "" if cost is None else f"{cost:,.2f}"
        if seconds is not None:  # local time, with the date where a weekday would be ambiguous
            end = (now.astimezone(UTC) + timedelta(seconds=seconds)).astimezone()
            finished = end.strftime("%a %H:%M" if seconds < 6 * 86400 else "%d %b %H:%M")
    return {
        "card": Text("" if found is None else forecast.card_name(found), style="bold"),
        "fits": forecast.yes_or_no(fits),
        "fullest stage": Text("" if plan.is_flat else plan.fullest(at) or ""),
        "GiB": Text("" if found is None else f"{found.peak_bytes / 2**30:.1f} of {found.budget_bytes / 2**30:.1f}"),
        "levers": Text(", ".join(words for words, is_pulled in pulled.items() if is_pulled), style="dim"),
        "time": Text(time),
        "finished": Text(finished),
        "cost": Text(price),
        "": Text(_remark(plan, at), style="bold green" if fits else ""),
    }


def _remark(plan: RunPlan, at: int) -> str:
    """For a flat spec, whether this card is the cheapest or the fastest, or the first change suggested for it that
    makes the plan fit. For a pipeline, what does not fit."""
    if not plan.is_flat:
        names = plan.too_large(at) + (["the disk"] if plan.lacking_disk(at) else [])
        return "" if plan.fits(at) else f"does not fit: {', '.join(names)}"
    if not plan.fits(at):
        fitting = [one for one in plan.suggestions(at) if one.fits]
        if not fitting:
            return "no change found that fits"
        return "fits with " + ", ".join(change.removeprefix("levers.") for change in fitting[0].changes)

    def seconds(card: int) -> float | None:
        total = plan.seconds(card)
        return plan.step_seconds(card) if total is None else total

    marks = []
    for mark, measure in (("cheapest", plan.cost), ("fastest", seconds)):
        known = [value for card in range(plan.num_cards) if plan.fits(card) and (value := measure(card)) is not None]
        if known and measure(at) == min(known):
            marks.append(mark)
    return ", ".join(marks)


def plan_view(plan: Plan, path: Path) -> RenderableType:
    """The plan of a training in its run, limited to what differs from the defaults: decisions in a table, values of the
    spec in a paragraph. `path` is the record of all values."""
    parts: list[RenderableType] = []
    for name, values in plan.stages.items():
        decided = Table(title=f"stage {name}, decided", show_header=False, **PLAIN_TABLE)
        for key, resolved in values.items():
            if resolved.source not in ("spec", "default") and not _is_usual(key, resolved.value):
                decided.add_row(key, _value(resolved), Text(resolved.source, style="dim"))
        given = {key: replace(one, value=_without_defaults(key, one.value)) for key, one in values.items()}
        asked = ", ".join(f"{key} {_value(one)}" for key, one in given.items() if one.source == "spec")
        parts += [decided, Text(f"from the spec: {asked}", style="dim")]
        parts.append(Text(f"Other settings have their defaults; {path} lists every value with its source.", "dim"))
    towers = (line for one in plan.forecasts.values() for line in forecast.tower_lines(one.towers))
    return Group(*parts, *(Text(f"tower    {line}") for line in towers))


def _without_defaults(key: str, value: Any) -> Any:
    """The entries of a list, such as the sources of `data.train`, without default values."""
    if key not in _ENTRIES or not isinstance(value, list):
        return value
    usual = {name: field.get_default(call_default_factory=True) for name, field in _ENTRIES[key].model_fields.items()}
    return [{name: one for name, one in entry.items() if one not in ({}, []) and one != usual[name]} for entry in value]


def _is_usual(key: str, value: Any) -> bool:
    """Whether a reader takes a decision for granted, such as a lever that is not pulled. `total_steps` gives the number
    of steps in an epoch."""
    return key in ("threads", "steps_per_epoch") or (key in _USUAL and value == _USUAL[key])


def _value(resolved: Resolved) -> str:
    return resolved.value if isinstance(resolved.value, str) else json.dumps(resolved.value, ensure_ascii=False)
