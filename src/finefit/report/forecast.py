"""One forecast in full: whether it fits, what fills the card and when, how long it takes, what would make it fit."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import (
    EvalBatchLimit,
    Forecast,
    GradientMap,
    Lengths,
    Suggestion,
    TowerSize,
    grouped_names,
)
from finefit.artifacts.records import Levers
from finefit.report.layout import (
    GAP,
    GUTTER,
    apportion,
    duration,
    gib,
    hanging,
    print_lines,
    section,
    table,
    three_digits,
    trimmed,
)
from finefit.spec.schema import DeepSpeed

INSTANTS = ("load", "batch", "reference", "forward", "loss", "backward", "update", "validation", "generation")
TOWERS = ("language", "vision", "projector")
BAR_CELLS, INSTANT_CELLS, MAX_NAMES = 100, 14, 8
FIGURE = 6
"""Characters of a figure in GiB: 141.00."""
LOOKS = {
    "weights": ("W", "#4c78a8"),
    "activations": ("A", "#f58518"),
    "optimizer": ("O", "#b279a2"),
    "adapters": ("D", "#8cb4d8"),
    "gradients": ("G", "#54a24b"),
    "loss": ("L", "#eeca3b"),
    "temporary": ("T", "#72b7b2"),
    "workspace": ("S", "#ff9da6"),
    "batch": ("B", "#9d755d"),
    "held by the allocator": ("H", "#a8a8a8"),
    "CUDA context": ("C", "#808080"),
    "process": ("P", "#808080"),
    "margin": ("M", "#5c5c5c"),
}
"""A letter, for consoles without colours, and a colour."""
INSTANT_COLOUR = "#8d99a6"
OTHER_COLOURS = ("#8cb4d8", "#c49a3a", "#7a9e3f", "#b07aa1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of what the card must hold."""

    name: str
    num_bytes: int
    letter: str
    colour: str


def show_forecast(forecast: Forecast, console: Console, *, stage: str) -> None:
    print_lines(console, [_verdict(forecast, stage), *_bar(forecast, console), *_legend(forecast, console)])
    print_lines(console, [Text(), *section("allocated\nGiB", _instants(forecast, console)), Text()])
    for label, lines in _sections(forecast, console):
        print_lines(console, section(label, lines))
    if forecast.suggestions:
        suggestions = ordered_suggestions(forecast.suggestions)
        print_lines(console, [Text(), *suggestion_lines(suggestions, console, fits=forecast.fits)])


def ordered_suggestions(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """In the order of their numbers: exact ones first."""
    return tuple(sorted(suggestions, key=lambda suggestion: not suggestion.is_exact))


def forecast_object(forecast: Forecast) -> dict[str, Any]:
    ordered = replace(forecast, suggestions=ordered_suggestions(forecast.suggestions))
    found: dict[str, Any] = TypeAdapter(Forecast).dump_python(ordered, mode="json")
    return found


# The card


def _verdict(forecast: Forecast, stage: str) -> Text:
    budget, peak = forecast.budget_bytes / 2**30, forecast.peak_bytes / 2**30
    digits = next((digits for digits in (1, 2) if min(peak, abs(budget - peak)) >= 10**-digits), 3)
    card = f"each of {card_name(forecast)}" if forecast.devices > 1 else card_name(forecast)
    if forecast.fits:
        spare = round(budget, digits) - round(peak, digits)
        return Text(
            f"{stage} fits: {peak:.{digits}f} of {budget:.{digits}f} GiB on {card}, {spare:.{digits}f} GiB to spare",
            style="bold green",
        )
    over = round(peak, digits) - round(budget, digits)
    too_much = f" ({over:.{digits}f} GiB too much)" if over > 0 else ""
    return Text(
        f"{stage} does not fit: needs {peak:.{digits}f} GiB, {card} has {budget:.{digits}f}{too_much}", style="bold red"
    )


def card_name(forecast: Forecast) -> str:
    """With the count, without the price."""
    name = forecast.card.partition("@")[0].strip()
    is_counted = re.match(rf"{forecast.devices}\s*[xX×]", name)
    return name if forecast.devices == 1 or is_counted else f"{forecast.devices}x{name}"


def _is_cpu(forecast: Forecast) -> bool:
    return forecast.card.partition("@")[0].strip() == "cpu"


def _components(forecast: Forecast) -> list[_Part]:
    by_size = sorted(forecast.components.items(), key=lambda item: -item[1])
    return _parts({name.replace("_", " "): num_bytes for name, num_bytes in by_size})


def _overhead(forecast: Forecast) -> list[_Part]:
    context = "process" if _is_cpu(forecast) else "CUDA context"
    held = forecast.reserved_bytes - forecast.allocated_bytes
    return _parts({"held by the allocator": held, context: forecast.context_bytes, "margin": forecast.margin_bytes})


def _parts(sizes: Mapping[str, int]) -> list[_Part]:
    taken = {letter for letter, _ in LOOKS.values()}
    colours = iter(OTHER_COLOURS * len(sizes))
    parts = []
    for name, num_bytes in sizes.items():
        if name in LOOKS:
            letter, colour = LOOKS[name]
        else:
            letter, colour = next((c for c in name.upper() if c.isalpha() and c not in taken), "X"), next(colours)
            taken.add(letter)
        if num_bytes:
            parts.append(_Part(name=name, num_bytes=num_bytes, letter=letter, colour=colour))
    return parts


def _has_blocks(console: Console) -> bool:
    """Sixteen colours cannot tell eight components apart."""
    return console.color_system in ("256", "truecolor") and not console.no_color and not console.options.ascii_only


def _bar(forecast: Forecast, console: Console) -> Iterator[Text]:
    """As wide as the card; or, where it does not fit, as what the card would have to hold, with the card's edge marked
    and the rest paler or in lower case."""
    width, has_blocks = min(console.width, BAR_CELLS), _has_blocks(console)
    parts = [*_components(forecast), *_overhead(forecast)]
    free_bytes = forecast.budget_bytes - forecast.peak_bytes
    is_over = free_bytes < 0
    *cells, num_free = apportion([*(part.num_bytes for part in parts), max(free_bytes, 0)], width - is_over)
    bar = Text()
    for part, count in zip(parts, cells, strict=True):
        bar.append(("█" if has_blocks else part.letter) * count, style=part.colour)
    bar.append(("░" if has_blocks else ".") * num_free, style="dim")
    if not is_over:
        yield bar
        return
    edge = round(len(bar) * forecast.budget_bytes / forecast.peak_bytes)
    inside, beyond = bar.divide([edge])
    beyond.plain = beyond.plain.replace("█", "▒") if has_blocks else beyond.plain.lower()
    yield Text.assemble(inside, ("┃" if has_blocks else "|", "bold red"), beyond)
    words = "the memory ends here" if _is_cpu(forecast) else "the card ends here"
    has_room = edge + len(words) + 2 <= width
    yield Text(" " * edge + f"^ {words}" if has_room else f"{words} ^".rjust(edge + 1), style="red")


def _legend(forecast: Forecast, console: Console) -> Iterator[Text]:
    """Components by size, downwards; overhead in the last column."""
    components, overhead = _components(forecast), _overhead(forecast)
    sizes = [part.num_bytes for part in (*components, *overhead)]
    hundredths = dict(zip((*components, *overhead), apportion(sizes, round(sum(sizes) / 2**30 * 100)), strict=True))
    for num_columns in (3, 2, 1):
        height = max(math.ceil(len(components) / num_columns), len(overhead))
        columns = [components[at : at + height] for at in range(0, len(components), height)] + [overhead]
        columns = [column for column in columns if column]
        names = [max(len(part.name) for part in column) for column in columns]
        if sum(width + FIGURE + 3 for width in names) + 3 * (len(names) - 1) <= console.width:
            break
    yield Text("GiB at the peak", style="dim")
    for row in zip_longest(*columns):
        cells = [_legend_cell(part, hundredths, width, console) for part, width in zip(row, names, strict=True)]
        yield trimmed(Text("   ").join(cells))


def _legend_cell(part: _Part | None, hundredths: Mapping[_Part, int], width: int, console: Console) -> Text:
    if part is None:
        return Text(" " * (width + FIGURE + 3))
    shown = f"{hundredths[part] / 100:.2f}" if hundredths[part] else "<0.01"
    return Text.assemble(
        ("█" if _has_blocks(console) else part.letter, part.colour), f" {part.name:<{width}} {shown:>{FIGURE}}"
    )


def _instants(forecast: Forecast, console: Console) -> Iterator[Text]:
    """The place of the peak is behind its bar, or below all bars where the line would be too long."""
    most, place = max(1, *forecast.instants.values()), _place(forecast)
    names = [*INSTANTS, *(name for name in forecast.instants if name not in INSTANTS)]
    rows = {
        name: _instant_row(name, forecast.instants[name], most, console) for name in names if name in forecast.instants
    }
    limit = console.width - GUTTER - len(rows.get(forecast.peak_instant, "")) - len("  peak")
    for name, row in rows.items():
        if name == forecast.peak_instant:
            yield Text.assemble(row, "  peak", place if len(place) <= limit else "", style="bold")
        else:
            yield trimmed(row)
    if len(place) > limit:
        yield from hanging(console, Text(), Text(f"peak{place}", style="bold"), indent=0, width=console.width - GUTTER)


def _instant_row(name: str, num_bytes: int, most: int, console: Console) -> Text:
    """With half cells; of # on consoles without colours."""
    halves = round(2 * INSTANT_CELLS * num_bytes / most)
    bar = "━" * (halves // 2) + "╸" * (halves % 2) if _has_blocks(console) else "#" * round(halves / 2)
    return Text.assemble(f"{name:<10}{num_bytes / 2**30:>{FIGURE + 1}.2f}  ", (bar, INSTANT_COLOUR))


def _place(forecast: Forecast) -> str:
    """` in layers.27.mlp.down_proj, log_softmax backward`."""
    operation = forecast.peak_operation.removeprefix("aten::").lstrip("_").partition(".")[0]
    operation = re.sub(r"_backward(_data)?$", " backward", operation)
    where = ", ".join(part for part in (_readable(forecast.peak_module), operation) if part)
    return f" in {where}" if where else ""


# The sections below the card


def _sections(forecast: Forecast, console: Console) -> Iterator[tuple[str, Iterable[Text]]]:
    width = console.width - GUTTER

    def wrapped(*lines: str, style: str = "") -> list[Text]:
        return [
            piece
            for line in lines
            for piece in hanging(console, Text(), Text(line, style=style), indent=0, width=width)
        ]

    share = forecast.trainable_parameters / max(forecast.parameters, 1)
    yield "time", wrapped(*_time(forecast))
    yield "levers", _levers(forecast, console, width)
    if forecast.engine.kind != "single":
        yield "engine", wrapped(_engine(forecast))
    yield "pairs" if forecast.lengths.sides > 1 else "rows", wrapped(_rows(forecast.lengths))
    trained = f"{forecast.trainable_parameters:,} trained of {forecast.parameters:,}"
    yield "parameters", wrapped(f"{trained} ({_percent(share, 2)})")
    if forecast.towers:
        yield "towers", wrapped(*tower_lines(forecast.towers))
    yield "machine", wrapped(f"{gib(forecast.host_bytes)} of host memory, {gib(forecast.disk_bytes)} of disk")
    if forecast.eval_limits:
        yield "evaluation", wrapped(*(limit_words(label, limit) for label, limit in forecast.eval_limits.items()))
    reached, *missing = _gradients(forecast.gradients)
    yield "gradients", wrapped(reached, style="bold red" if missing else "") + wrapped(*missing)
    if forecast.notes:
        yield "notes", wrapped(*forecast.notes)
    if forecast.uncertainty is not None:
        yield "certainty", wrapped(f"earlier forecasts on this card were within {_percent(forecast.uncertainty, 1)}")


def tower_lines(towers: Mapping[str, TowerSize]) -> Iterator[str]:
    for name in (name for name in TOWERS if name in towers):
        tower = towers[name]
        missing = f", {tower.unreached:,} get no gradient" if tower.unreached else ""
        trained = f"{tower.trainable:,} trained in {tower.tensors:,} tensors{missing}" if tower.tensors else "frozen"
        yield f"{name}: {trained}, of {tower.parameters:,}"


def limit_words(label: str, limit: EvalBatchLimit) -> str:
    parts = [f"{label}: {limit.rows:,} answers at a time" if limit.rows > 1 else f"{label}: one answer at a time"]
    if limit.reserved_bytes is not None:
        parts.append(gib(limit.reserved_bytes))
    if limit.batch_seconds is not None:
        parts.append(f"about {duration(limit.batch_seconds)} for a batch of the longest")
    if limit.mlp_tiles > 1:
        parts.append(f"MLPs in {limit.mlp_tiles} pieces")
    if limit.devices > 1:
        spread, shared = f"one model spread over {limit.devices} cards", f"items shared over {limit.devices} processes"
        parts.append(spread if limit.is_spread else shared)
    return ", ".join(parts)


def _time(forecast: Forecast) -> Iterator[str]:
    steps = [] if forecast.total_steps is None else [f"{forecast.total_steps:,} steps"]
    work = f"{three_digits(forecast.flops_per_step / 1e12)} TFLOP and {forecast.tokens_per_step:,.0f} tokens a step"
    if forecast.step_seconds is None:
        yield f"no time: the rates of {card_name(forecast)} are not known"
        yield ", ".join((*steps, work))
        return
    rate = "" if forecast.tokens_per_second is None else f" ({forecast.tokens_per_second:,.0f} tokens/s)"
    total = [] if forecast.total_seconds is None else [duration(forecast.total_seconds)]
    yield ", ".join((f"{duration(forecast.step_seconds)} a step{rate}", *steps, *total))
    has_price = forecast.price_per_hour is not None and forecast.cost is not None
    yield f"costs {forecast.cost:,.2f} at {forecast.price_per_hour:.2f} an hour; {work}" if has_price else work


def _levers(forecast: Forecast, console: Console, width: int) -> Iterator[Text]:
    """Active ones with their reasons, the others in one line."""
    pulled = {"micro_batch": _micro_batch(forecast), **_pulled(forecast.levers)}
    indent = max(map(len, pulled.values())) + GAP
    for lever, words in pulled.items():
        yield from hanging(
            console, Text(words), Text(forecast.reasons.get(lever, ""), style="dim"), indent=indent, width=width
        )
    neutral = [words for lever, words in NEUTRAL.items() if lever not in pulled]
    if neutral:
        yield from hanging(console, Text(), Text(", ".join(neutral), style="dim"), indent=0, width=width)


def _engine(forecast: Forecast) -> str:
    engine = forecast.engine
    name = f"deepspeed, ZeRO stage {engine.stage}" if isinstance(engine, DeepSpeed) else engine.kind
    return (
        f"{name}, {forecast.devices:,} {'process' if forecast.devices == 1 else 'processes'}: "
        f"{forecast.reasons.get('engine', 'asked for')}"
    )


NEUTRAL = {
    "recompute": "no recomputation",
    "keep_attention": "no attention kept",
    "loss_chunk": "loss in one piece",
    "offload": "no offload",
    "mlp_tiles": "no MLP tiles",
    "adapter_inputs": "adapter inputs in fp32",
}


def _micro_batch(forecast: Forecast) -> str:
    about = "about " if forecast.levers.packing else ""
    times = "not accumulated" if forecast.accumulation == 1 else f"accumulated {about}{forecast.accumulation:,} times"
    return f"micro_batch {forecast.levers.micro_batch:,}, {times}"


def _pulled(levers: Levers) -> dict[str, str]:
    """Those that are not at their neutral value."""
    words = {
        "recompute": f"recompute {levers.recompute} {'layer' if levers.recompute == 1 else 'layers'}"
        if levers.recompute
        else None,
        "keep_attention": "keep their attention outputs" if levers.keep_attention else None,
        "loss_chunk": f"loss in chunks of {levers.loss_chunk:,} tokens" if levers.loss_chunk is not None else None,
        "offload": "offload their inputs to the host" if levers.offload else None,
        "mlp_tiles": f"MLPs in {levers.mlp_tiles} tiles" if levers.mlp_tiles > 1 else None,
        "adapter_inputs": "adapter inputs in bf16" if levers.adapter_inputs == "bf16" else None,
        "packing": "rows packed without padding" if levers.packing else None,
        "kernels": "fused kernels" if levers.kernels == "fused" else None,
        "update": "each tensor updated inside backward" if levers.update == "inside" else None,
        "compile": "layers compiled" if levers.compile else None,
    }
    return {lever: said for lever, said in words.items() if said is not None}


def _rows(lengths: Lengths) -> str:
    what, of = ("pairs", " of a side") if lengths.sides > 1 else ("rows", "")
    count = "" if lengths.num_rows is None else f"{lengths.num_rows:,} {what}, "
    tokens = f"longest {lengths.longest:,} tokens{of}, mean {lengths.mean:,.0f}"
    return (
        f"{count}{tokens}; supervised at most {lengths.supervised:,}, mean {lengths.mean_supervised:,.0f} "
        f"({lengths.source})"
    )


def _percent(share: float, digits: int) -> str:
    return f"{share * 100:.{digits}f} %"


def _gradients(gradients: GradientMap) -> Iterator[str]:
    missing = gradients.trainable - gradients.reached
    if not missing:
        yield f"all {gradients.trainable:,} trained tensors get a gradient"
        return
    yield f"{missing:,} of {gradients.trainable:,} trained tensors get no gradient{':' if gradients.unreached else ''}"
    groups = grouped_names(map(_readable, gradients.unreached))
    yield from (f"  {name}" for name in groups[:MAX_NAMES])
    if len(groups) > MAX_NAMES:
        yield f"  and {len(groups) - MAX_NAMES} more such names"
    yield from (f"likely because {cause}" for cause in gradients.causes)


def _readable(name: str) -> str:
    """base_model.model.model.layers.0.q_proj.lora_A.default.weight is layers.0.q_proj.lora_A."""
    return re.sub(r"^(base_model\.model\.)?(model\.)*", "", name).replace(".default", "").removesuffix(".weight")


# Suggestions


def suggestion_lines(suggestions: Sequence[Suggestion], console: Console, *, fits: bool) -> Iterator[Text]:
    """Numbered from 1; `fits`: whether the plan fits without them."""
    first = next((number for number, suggestion in enumerate(suggestions, start=1) if suggestion.fits), None)
    yield Text(
        "changes that "
        + ("need less memory" if fits else "make it fit, or bring it nearer" if first else "bring it nearer"),
        style="bold",
    )
    rows = [_suggestion_row(number, suggestion) for number, suggestion in enumerate(suggestions, start=1)]
    yield from table(console, rows, right=("GiB", "a step"), below=())
    if first is not None and not fits:
        yield Text(
            f"finefit plan SPEC --apply {first} writes {'the first' if first == 1 else f'number {first}'} into the spec"
        )


def _suggestion_row(number: int, suggestion: Suggestion) -> dict[str, Text]:
    return {
        "#": Text(str(number)),
        "--set": Text("\n".join(suggestion.changes), style="bold"),
        "GiB": Text(f"{suggestion.peak_bytes / 2**30:.2f}"),
        "fits": yes_or_no(suggestion.fits),
        "a step": Text("" if suggestion.step_seconds is None else duration(suggestion.step_seconds)),
        "gradient": Text("exact") if suggestion.is_exact else Text("lossy", style="yellow"),
        "price": Text(suggestion.price, style="dim"),
    }


def yes_or_no(fits: bool) -> Text:
    return Text("yes", style="green") if fits else Text("no", style="red")
