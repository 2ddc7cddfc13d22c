"""The plan of a whole pipeline: a row for each stage, what does not fit, what would make it fit, and the fullest stage in full."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import Forecast, Room, StageOutlook, Suggestion
from finefit.report.lines import hanging, print_lines, table
from finefit.report.plan import (
    card_name,
    forecast_object,
    in_order,
    room_words,
    show_forecast,
    suggestion_lines,
    yes_or_no,
)
from finefit.report.units import duration, gib, three_digits

Outlooks = Mapping[str, StageOutlook]
"""By stage, in their order."""
Free = tuple[int | None, ...]
"""For each card the bytes that the disk beside it has; None, as for cards that are not named, where it is another machine's."""


def show_outlooks(outlooks: Outlooks, console: Console, *, name: str, only: str | None = None, free: Free = ()) -> None:
    """On one card. `only`: this stage in full instead of the fullest."""
    print_lines(
        console, [*_verdict(outlooks, name, free), *_stage_table(outlooks, console), *_totals(outlooks), Text()]
    )
    print_lines(console, _notes(outlooks, console))
    suggestions = suggestions_of(outlooks)
    if suggestions:
        print_lines(console, [Text(), *suggestion_lines(suggestions, console, fits=False)])
    shown = only or worst_of(outlooks)
    if shown is not None and outlooks[shown].forecasts:
        print_lines(console, [Text()])
        show_forecast(replace(outlooks[shown].forecasts[0], suggestions=()), console, stage=shown)


def show_outlooks_on_cards(outlooks: Outlooks, console: Console, *, free: Free = ()) -> None:
    """A row for each card."""
    rows = [_card_row(outlooks, at, free) for at in range(num_cards(outlooks))]
    print_lines(console, table(console, rows, right=("GiB", "time"), below=()))


def num_cards(outlooks: Outlooks) -> int:
    return max(len(one.fits) for one in outlooks.values())


def fit_on(outlooks: Outlooks, at: int = 0, free: Free = ()) -> bool:
    """Every stage on the card, and all that they leave on the disk."""
    return all(one.fits[at] for one in outlooks.values()) and not _lacking(outlooks, at, free)


def _lacking(outlooks: Outlooks, at: int, free: Free) -> int:
    """Bytes that the disk has too few."""
    there = free[at] if at < len(free) else None
    return 0 if there is None else max(0, _disk_bytes(outlooks) - there)


def suggestions_of(outlooks: Outlooks, at: int = 0) -> tuple[Suggestion, ...]:
    """As they are numbered from 1: stage by stage."""
    return tuple(
        suggestion
        for one in outlooks.values()
        if one.forecasts
        for suggestion in in_order(one.forecasts[at].suggestions)
    )


def worst_of(outlooks: Outlooks, at: int = 0) -> str | None:
    """The training that fills the card most; None where nothing is trained."""
    shares = {
        name: one.forecasts[at].peak_bytes / one.forecasts[at].budget_bytes
        for name, one in outlooks.items()
        if one.forecasts
    }
    return max(shares, key=shares.__getitem__) if shares else None


def outlook_document(outlooks: Outlooks, *, free: Free = ()) -> dict[str, Any]:
    """What `--json` prints: the training that fills the first card most, and what the whole takes."""
    return _card_object(outlooks, 0, free) | {
        "stages": {name: _stage_object(one) for name, one in outlooks.items()},
        "cards": [_card_object(outlooks, at, free) for at in range(num_cards(outlooks))],
    }


def _card_object(outlooks: Outlooks, at: int, free: Free) -> dict[str, Any]:
    worst = worst_of(outlooks, at)
    found = {} if worst is None else forecast_object(outlooks[worst].forecasts[at])
    seconds = _seconds(outlooks, at)
    whole = {
        "stage": worst,
        "fits": fit_on(outlooks, at, free),
        "total_seconds": seconds,
        "disk_bytes": _disk_bytes(outlooks),
        "free_disk_bytes": free[at] if free else None,
        "cost": _cost(found, seconds),
    }
    suggestions = TypeAdapter(tuple[Suggestion, ...]).dump_python(suggestions_of(outlooks, at), mode="json")
    return (
        found
        | whole
        | {"suggestions": suggestions, "does_not_fit": [name for name, one in outlooks.items() if not one.fits[at]]}
    )


def _cost(worst: Mapping[str, Any], seconds: float | None) -> float | None:
    price = worst.get("price_per_hour")
    return None if price is None or seconds is None else float(price) * seconds / 3600


def _stage_object(one: StageOutlook) -> dict[str, Any]:
    """A training has all that a spec without stages has."""
    own: dict[str, Any] = TypeAdapter(StageOutlook).dump_python(
        one, mode="json", exclude={"forecasts", "rooms", "seconds"}
    )
    own |= {"fits": one.fits[0], "total_seconds": one.seconds}
    if one.rooms:
        own["rooms"] = TypeAdapter(dict[str, dict[str, Room]]).dump_python(one.rooms[0], mode="json")
    if one.forecasts:
        own = forecast_object(one.forecasts[0]) | own | {"notes": [*one.notes, *one.forecasts[0].notes]}
    return own


def _seconds(outlooks: Outlooks, at: int = 0) -> float | None:
    """Of all trainings and of the evaluations whose time is known; None where that of a training is not. Evaluations are known on the first card."""
    trained = [one.forecasts[at].total_seconds for one in outlooks.values() if one.forecasts]
    if any(seconds is None for seconds in trained):
        return None
    return sum(seconds or 0.0 for seconds in trained) + sum(
        one.seconds or 0.0 for one in outlooks.values() if not one.forecasts and at == 0
    )


def _disk_bytes(outlooks: Outlooks) -> int:
    return sum(one.disk_bytes for one in outlooks.values())


# One card


def _verdict(outlooks: Outlooks, name: str, free: Free) -> Iterator[Text]:
    too_large = [stage for stage, one in outlooks.items() if not one.fits[0]]
    card = next((f" on {card_name(one.forecasts[0])}" for one in outlooks.values() if one.forecasts), "")
    lacking = _lacking(outlooks, 0, free)
    if too_large:
        yield Text(
            f"{name} does not fit{card}: {', '.join(_too_large(stage, outlooks[stage]) for stage in too_large)}",
            style="bold red",
        )
    elif not lacking:
        yield Text(f"{name}: all {len(outlooks)} stages fit{card}", style="bold green")
    if lacking:
        needed = _disk_bytes(outlooks)
        there = _size(needed - lacking) or "0 MiB"
        yield Text(
            f"{name} does not fit on the disk: its stages leave up to {_size(needed)}, {there} are free",
            style="bold red",
        )


def _too_large(name: str, one: StageOutlook) -> str:
    if one.forecasts and one.forecasts[0].fits:
        return f"{name} has trained tensors that no gradient reaches"
    held = _held(one)
    if held is not None:
        return f"{name} needs {held[0] / 2**30:.1f} of {held[1] / 2**30:.1f} GiB"
    return name if one.host_bytes is None else f"{name} needs about {_size(one.host_bytes)} of host memory"


def _held(one: StageOutlook) -> tuple[int, int] | None:
    """What the card must hold and what it has: of a training, or of the largest model that answers."""
    if one.forecasts:
        return one.forecasts[0].peak_bytes, one.forecasts[0].budget_bytes
    rooms = [room for model in (one.rooms[0] if one.rooms else {}).values() for room in model.values()]
    known = [
        (room.held_bytes, room.budget_bytes)
        for room in rooms
        if room.held_bytes is not None and room.budget_bytes is not None
    ]
    return max(known, default=None)


def _stage_table(outlooks: Outlooks, console: Console) -> Iterator[Text]:
    yield from table(console, [_stage_row(name, one) for name, one in outlooks.items()], right=_RIGHT, below=())


_RIGHT = ("GiB", "parameters", "trained", "time", "disk")


def _stage_row(name: str, one: StageOutlook) -> dict[str, Text]:
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


def _time(one: StageOutlook) -> str:
    if one.seconds is not None:
        return ("" if one.forecasts else "≤ ") + duration(one.seconds)
    step = one.forecasts[0].step_seconds if one.forecasts else None
    return f"{duration(step)} a step" if step is not None else "not known" if one.forecasts or one.rooms else ""


def _totals(outlooks: Outlooks) -> Iterator[Text]:
    seconds = _seconds(outlooks)
    known = "not known, since that of a training is not" if seconds is None else f"about {duration(seconds)}"
    unknown = [name for name, one in outlooks.items() if one.seconds is None and not one.forecasts]
    without = f" without {', '.join(unknown)}" if unknown and seconds is not None else ""
    yield Text(f"in all: time {known}{without}; {_size(_disk_bytes(outlooks)) or 'no'} of disk at most")


def _notes(outlooks: Outlooks, console: Console) -> Iterator[Text]:
    for name, one in outlooks.items():
        for note in (*one.notes, *_host(one), *_answers(one)):
            yield from hanging(
                console,
                Text(f"{name}: ", style="cyan"),
                Text(note, style="dim"),
                indent=len(name) + 2,
                width=console.width,
            )


def _host(one: StageOutlook) -> Iterator[str]:
    """A training says so in its own picture."""
    if one.host_bytes is not None and not one.forecasts:
        yield f"about {_size(one.host_bytes)} of host memory"


def _answers(one: StageOutlook) -> Iterator[str]:
    for model, rooms in (one.rooms[0] if one.rooms else {}).items():
        yield from (f"{model}, {room_words(label, room)}" for label, room in rooms.items())


# Several cards


def _card_row(outlooks: Outlooks, at: int, free: Free) -> dict[str, Text]:
    worst = worst_of(outlooks, at)
    found: Forecast | None = None if worst is None else outlooks[worst].forecasts[at]
    fits, seconds = fit_on(outlooks, at, free), _seconds(outlooks, at)
    too_large = [name for name, one in outlooks.items() if not one.fits[at]] + (
        ["the disk"] if _lacking(outlooks, at, free) else []
    )
    return {
        "card": Text("" if found is None else card_name(found), style="bold"),
        "fits": yes_or_no(fits),
        "fullest stage": Text(worst or ""),
        "GiB": Text("" if found is None else f"{found.peak_bytes / 2**30:.1f} of {found.budget_bytes / 2**30:.1f}"),
        "time": Text("" if not fits else "not known" if seconds is None else duration(seconds)),
        "": Text(f"does not fit: {', '.join(too_large)}" if too_large else ""),
    }
