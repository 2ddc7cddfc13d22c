"""One forecast in full: whether it fits, what fills the card and when, how long it takes, what would make it fit."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, GradientMap, Suggestion, TowerSize, grouped_names
from finefit.report import layout
from finefit.spec.schema import DeepSpeed

INSTANTS = ("load", "batch", "reference", "forward", "loss", "backward", "update", "validation", "generation")
TOWERS = ("language", "vision", "projector")
BAR_CELLS, INSTANT_CELLS, MAX_NAMES = 100, 14, 8
FIGURE = 6
"""The width of a figure in GiB: 141.00."""
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
NEUTRAL = {
    "recompute": "no recomputation",
    "keep_attention": "no attention kept",
    "loss_chunk": "loss in one piece",
    "offload": "no offload",
    "mlp_tiles": "no MLP tiles",
    "adapter_inputs": "adapter inputs in fp32",
}
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that only allocate memory; their names say nothing about the place of a peak."""
OTHER_COLOURS = ("#8cb4d8", "#c49a3a", "#7a9e3f", "#b07aa1")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what the card must hold."""

    name: str
    num_bytes: int
    letter: str
    colour: str


def show_forecast(forecast: Forecast, console: Console, *, stage: str) -> None:
    components, overhead = _parts(forecast)
    lines = [_verdict(forecast, stage), *_bar(forecast, [*components, *overhead], console)]
    lines += [*_legend(components, overhead, console), Text()]
    lines += [*layout.section("allocated\nGiB", _instants(forecast, console)), Text()]
    for label, found in _sections(forecast, console):
        lines += layout.section(label, found)
    if forecast.suggestions:
        suggestions = ordered_suggestions(forecast.suggestions)
        lines += [Text(), *suggestion_lines(suggestions, console, fits=forecast.fits)]
    layout.print_lines(console, lines)


def ordered_suggestions(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """Suggestions in the order of their numbers, exact ones first."""
    return tuple(sorted(suggestions, key=lambda suggestion: not suggestion.is_exact))


def forecast_object(forecast: Forecast) -> dict[str, Any]:
    ordered = replace(forecast, suggestions=ordered_suggestions(forecast.suggestions))
    found: dict[str, Any] = TypeAdapter(Forecast).dump_python(ordered, mode="json")
    return found


def _verdict(forecast: Forecast, stage: str) -> Text:
    budget, peak = forecast.budget_bytes / 2**30, forecast.peak_bytes / 2**30
    digits = next((digits for digits in (1, 2) if min(peak, abs(budget - peak)) >= 10**-digits), 3)
    card = f"each of {card_name(forecast)}" if forecast.devices > 1 else card_name(forecast)
    if forecast.fits:
        spare = f"{round(budget, digits) - round(peak, digits):.{digits}f} GiB to spare"
        held = f"{peak:.{digits}f} of {budget:.{digits}f} GiB on {card}"
        return Text(f"{stage} fits: {held}, {spare}", style="bold green")
    over = round(peak, digits) - round(budget, digits)
    too_much = f" ({over:.{digits}f} GiB too much)" if over > 0 else ""
    problem = f"{stage} does not fit: needs {peak:.{digits}f} GiB, {card} has {budget:.{digits}f}{too_much}"
    return Text(problem, style="bold red")


def card_name(forecast: Forecast) -> str:
    """Includes the count, but not the price."""
    name = forecast.card.partition("@")[0].strip()
    is_counted = re.match(rf"{forecast.devices}\s*[xX×]", name)
    return name if forecast.devices == 1 or is_counted else f"{forecast.devices}x{name}"


def _is_cpu(forecast: Forecast) -> bool:
    return forecast.card.partition("@")[0].strip() == "cpu"


def _parts(forecast: Forecast) -> tuple[list[_Part], list[_Part]]:
    """The components by size, and the overhead; parts of zero bytes are left out."""
    by_size = sorted(forecast.components.items(), key=lambda item: -item[1])
    components = {name.replace("_", " "): num_bytes for name, num_bytes in by_size}
    overhead = {
        "held by the allocator": forecast.reserved_bytes - forecast.allocated_bytes,
        "process" if _is_cpu(forecast) else "CUDA context": forecast.context_bytes,
        "margin": forecast.margin_bytes,
    }
    looks, taken = dict(LOOKS), {letter for letter, _ in LOOKS.values()}
    colours = iter(OTHER_COLOURS * len(components))
    for name in components:
        if name not in looks:
            letter = next((c for c in name.upper() if c.isalpha() and c not in taken), "X")
            looks[name] = letter, next(colours)
            taken.add(letter)

    def listed(sizes: Mapping[str, int]) -> list[_Part]:
        return [_Part(name, num_bytes, *looks[name]) for name, num_bytes in sizes.items() if num_bytes]

    return listed(components), listed(overhead)


def _has_blocks(console: Console) -> bool:
    """Sixteen colours cannot tell eight components apart."""
    return console.color_system in ("256", "truecolor") and not console.no_color and not console.options.ascii_only


def _bar(forecast: Forecast, parts: Sequence[_Part], console: Console) -> Iterator[Text]:
    """A bar as wide as the card. If the plan does not fit, it is as wide as what the card would have to hold, with the
    card's edge marked and the rest paler or in lower case."""
    width, has_blocks = min(console.width, BAR_CELLS), _has_blocks(console)
    free_bytes = forecast.budget_bytes - forecast.peak_bytes
    is_over = free_bytes < 0
    *cells, num_free = layout.apportion([*(part.num_bytes for part in parts), max(free_bytes, 0)], width - is_over)
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


def _legend(components: Sequence[_Part], overhead: Sequence[_Part], console: Console) -> Iterator[Text]:
    """Components by size, column by column, with the overhead in the last column."""
    sizes = [part.num_bytes for part in (*components, *overhead)]
    shares = layout.apportion(sizes, round(sum(sizes) / 2**30 * 100))
    hundredths = dict(zip((*components, *overhead), shares, strict=True))
    for num_columns in (3, 2, 1):
        height = max(math.ceil(len(components) / num_columns), len(overhead))
        columns = [components[at : at + height] for at in range(0, len(components), height)] + [overhead]
        columns = [column for column in columns if column]
        names = [max(len(part.name) for part in column) for column in columns]
        if sum(width + FIGURE + 3 for width in names) + 3 * (len(names) - 1) <= console.width:
            break
    yield Text("GiB at the peak", style="dim")
    for row in zip_longest(*columns):
        cells = []
        for part, width in zip(row, names, strict=True):
            if part is None:
                cells.append(Text(" " * (width + FIGURE + 3)))
                continue
            mark = "█" if _has_blocks(console) else part.letter
            shown = f"{hundredths[part] / 100:.2f}" if hundredths[part] else "<0.01"
            cells.append(Text.assemble((mark, part.colour), f" {part.name:<{width}} {shown:>{FIGURE}}"))
        yield layout.trimmed(Text("   ").join(cells))


def _instants(forecast: Forecast, console: Console) -> Iterator[Text]:
    """Bars with half cells, or of # on consoles without colours. The place of the peak, such as ` in layers.27.mlp,
    log_softmax backward`, is behind its bar, or below all bars if the line would be too long."""
    operation = forecast.peak_operation.removeprefix("aten::").lstrip("_").partition(".")[0]
    operation = "" if operation in ALLOCATIONS else re.sub(r"_backward(_data)?$", " backward", operation)
    where = ", ".join(part for part in (_readable(forecast.peak_module), operation) if part)
    place = f" in {where}" if where else ""
    most = max(1, *forecast.instants.values())
    rows = {}
    for name in sorted(forecast.instants, key=lambda name: (*INSTANTS, name).index(name)):
        halves = round(2 * INSTANT_CELLS * forecast.instants[name] / most)
        bar = "━" * (halves // 2) + "╸" * (halves % 2) if _has_blocks(console) else "#" * round(halves / 2)
        figure = f"{forecast.instants[name] / 2**30:>{FIGURE + 1}.2f}"
        rows[name] = Text.assemble(f"{name:<10}{figure}  ", (bar, INSTANT_COLOUR))
    limit = console.width - layout.GUTTER - len(rows.get(forecast.peak_instant, "")) - len("  peak")
    for name, row in rows.items():
        if name == forecast.peak_instant:
            yield Text.assemble(row, "  peak", place if len(place) <= limit else "", style="bold")
        else:
            yield layout.trimmed(row)
    if len(place) > limit:
        yield from _wrapped(console, f"peak{place}", style="bold")


def _wrapped(console: Console, *lines: str, style: str = "") -> Iterator[Text]:
    for line in lines:
        text, width = Text(line, style=style), console.width - layout.GUTTER
        yield from layout.hanging(console, Text(), text, indent=0, width=width)


def _sections(forecast: Forecast, console: Console) -> Iterator[tuple[str, Iterable[Text]]]:
    wrapped = partial(_wrapped, console)
    yield "time", wrapped(*_time(forecast))
    yield "levers", _levers(forecast, console)
    if (engine := forecast.engine).kind != "single":
        name = f"deepspeed, ZeRO stage {engine.stage}" if isinstance(engine, DeepSpeed) else engine.kind
        processes = f"{forecast.devices:,} {'process' if forecast.devices == 1 else 'processes'}"
        yield "engine", wrapped(f"{name}, {processes}: {forecast.reasons.get('engine', 'requested')}")
    lengths = forecast.lengths
    what, of = ("pairs", " of a side") if lengths.sides > 1 else ("rows", "")
    count = "" if lengths.num_rows is None else f"{lengths.num_rows:,} {what}, "
    tokens = f"longest {lengths.longest:,} tokens{of}, mean {lengths.mean:,.0f}"
    supervised = f"supervised at most {lengths.supervised:,}, mean {lengths.mean_supervised:,.0f}"
    yield what, wrapped(f"{count}{tokens}; {supervised} ({lengths.source})")
    trained = f"{forecast.trainable_parameters:,} trained of {forecast.parameters:,}"
    share = forecast.trainable_parameters / max(forecast.parameters, 1)
    yield "parameters", wrapped(f"{trained} ({share * 100:.2f} %)")
    if forecast.towers:
        yield "towers", wrapped(*tower_lines(forecast.towers))
    host, disk = layout.gib(forecast.host_bytes), layout.gib(forecast.disk_bytes)
    yield "machine", wrapped(f"{host} of host memory, {disk} of disk")
    if forecast.eval_limits:
        yield "evaluation", wrapped(*(limit_words(label, limit) for label, limit in forecast.eval_limits.items()))
    reached, *missing = _gradients(forecast.gradients)
    yield "gradients", chain(wrapped(reached, style="bold red" if missing else ""), wrapped(*missing))
    if forecast.notes:
        yield "notes", wrapped(*forecast.notes)
    if forecast.uncertainty is not None:
        yield "certainty", wrapped(f"earlier forecasts on this card were within {forecast.uncertainty * 100:.1f} %")


def tower_lines(towers: Mapping[str, TowerSize]) -> Iterator[str]:
    for name, tower in ((name, towers[name]) for name in TOWERS if name in towers):
        missing = f", {tower.unreached:,} get no gradient" if tower.unreached else ""
        trained = f"{tower.trainable:,} trained in {tower.tensors:,} tensors{missing}" if tower.tensors else "frozen"
        yield f"{name}: {trained}, of {tower.parameters:,}"


def limit_words(label: str, limit: EvalBatchLimit) -> str:
    parts = [f"{label}: {limit.rows:,} answers at a time" if limit.rows > 1 else f"{label}: one answer at a time"]
    if limit.reserved_bytes is not None:
        parts.append(layout.gib(limit.reserved_bytes))
    if limit.batch_seconds is not None:
        parts.append(f"about {layout.duration(limit.batch_seconds)} for a batch of the longest")
    if limit.mlp_tiles > 1:
        parts.append(f"MLPs in {limit.mlp_tiles} pieces")
    if limit.devices > 1:
        spread, shared = f"one model spread over {limit.devices} cards", f"items shared over {limit.devices} processes"
        parts.append(spread if limit.is_split_over_cards else shared)
    return ", ".join(parts)


def _time(forecast: Forecast) -> Iterator[str]:
    steps = [] if forecast.total_steps is None else [f"{forecast.total_steps:,} steps"]
    tera_flops = layout.three_digits(forecast.flops_per_step / 1e12)
    work = f"{tera_flops} TFLOP and {forecast.tokens_per_step:,.0f} tokens a step"
    if forecast.step_seconds is None:
        yield f"no time: the rates of {card_name(forecast)} are not known"
        yield ", ".join((*steps, work))
        return
    rate = "" if forecast.tokens_per_second is None else f" ({forecast.tokens_per_second:,.0f} tokens/s)"
    total = [] if forecast.total_seconds is None else [layout.duration(forecast.total_seconds)]
    yield ", ".join((f"{layout.duration(forecast.step_seconds)} a step{rate}", *steps, *total))
    has_price = forecast.price_per_hour is not None and forecast.cost is not None
    yield f"costs {forecast.cost:,.2f} at {forecast.price_per_hour:.2f} an hour; {work}" if has_price else work


def _levers(forecast: Forecast, console: Console) -> Iterator[Text]:
    """Levers that are not at their neutral value, with their reasons; the others in one line."""
    levers = forecast.levers
    times = "not accumulated" if forecast.accumulation == 1 else f"accumulated {forecast.accumulation:,} times"
    if levers.packing and forecast.accumulation > 1:  # a pack holds more rows than micro_batch where they are short
        pack = f"{levers.micro_batch * forecast.lengths.longest:,} tokens"
        times = f"about {forecast.accumulation:,} packs of {pack} a step"
    words = {
        "micro_batch": f"micro_batch {levers.micro_batch:,}, {times}",
        "recompute": f"recompute {layout.plural(levers.recompute, 'layer')}" if levers.recompute else None,
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
    pulled = {lever: said for lever, said in words.items() if said is not None}
    width = console.width - layout.GUTTER
    indent = min(max(map(len, pulled.values())), width // 2) + layout.GAP
    for lever, said in pulled.items():
        reason = Text(forecast.reasons.get(lever, ""), style="dim")
        yield from layout.hanging(console, Text(said), reason, indent=indent, width=width)
    if neutral := [said for lever, said in NEUTRAL.items() if lever not in pulled]:
        yield from _wrapped(console, ", ".join(neutral), style="dim")


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
    """Shortens base_model.model.model.layers.0.q_proj.lora_A.default.weight to layers.0.q_proj.lora_A."""
    return re.sub(r"^(base_model\.model\.)?(model\.)*", "", name).replace(".default", "").removesuffix(".weight")


def suggestion_lines(suggestions: Sequence[Suggestion], console: Console, *, fits: bool) -> Iterator[Text]:
    """Suggestions, numbered from 1. `fits` says whether the plan fits without them."""
    first = next((number for number, suggestion in enumerate(suggestions, start=1) if suggestion.fits), None)
    effect = "need less memory" if fits else "make it fit, or bring it closer" if first else "bring it closer"
    yield Text(f"changes that {effect}", style="bold")
    rows = [
        {
            "#": Text(str(number)),
            "--set": Text("\n".join(suggestion.changes), style="bold"),
            "GiB": Text(f"{suggestion.peak_bytes / 2**30:.2f}"),
            "fits": yes_or_no(suggestion.fits),
            "a step": Text("" if suggestion.step_seconds is None else layout.duration(suggestion.step_seconds)),
            "gradient": Text("exact") if suggestion.is_exact else Text("lossy", style="yellow"),
            "price": Text(suggestion.price, style="dim"),
        }
        for number, suggestion in enumerate(suggestions, start=1)
    ]
    yield from layout.table(console, rows, right=("GiB", "a step"), below=())
    if first is not None and not fits:
        which = "the first" if first == 1 else f"number {first}"
        yield Text(f"finefit plan SPEC --apply {first} writes {which} into the spec")


def yes_or_no(fits: bool) -> Text:
    return Text("yes", style="green") if fits else Text("no", style="red")
