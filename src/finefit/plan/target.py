"""What a plan is made for: a card that is named, or the one that is here, or the processor, as a budget of bytes and a set of rates."""

import importlib.util
import re
import time
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from finefit.errors import SpecError, UserError
from finefit.facts.cards import CardKind, CardRequest, find_kind, read_card_processes
from finefit.facts.machine import Card, Machine
from finefit.rehearse.clock import Rates

CONTEXT_BYTES = 816 << 20
"""Of CUDA and its libraries: 767 to 815 MiB were measured on an H200, the only card that it was measured on."""
NCCL_BYTES = 512 << 20
"""Of what several cards exchange their gradients through. Not measured here: it depends on their number and their links."""
MARGIN = 0.0125
"""Share of the reserved memory that is added, beside MARGIN_BYTES: forecasts of reserved memory fell short by 1.0 % at worst (docs/memory.md)."""
MARGIN_BYTES = 80 << 20
"""Four pages of the allocator: of small models a few pages are more than a per cent."""
CPU_MARGIN = 0.03
USABLE = 0.98
"""Of what a driver reports, what CUDA programs are given: 98 to 99.5 % on the cards whose own figures are known."""
LAUNCH_SECONDS = 12.5e-6
"""Of host time per operation where small batches leave the card waiting: 10 to 18 us were measured beside two H200s, so such steps are the least
certain."""
_PROBE = 1024
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Precision
    budget_bytes: int
    """Of one card, or of one process on the processor."""
    count: int
    """Of cards, or of processes on the processor."""
    rates: Rates | None
    host_bytes_per_second: float
    price_per_hour: float | None
    context_bytes: int
    margin: float
    margin_bytes: int
    notes: tuple[str, ...]
    expandable: bool = True
    """Whether the allocator's segments grow, as a worker sets it; not where the user's own setting is another one."""
    has_liger: bool = True
    """Assumed of a card that is elsewhere."""


def find_target(
    request: CardRequest,
    machine: Machine,
    asked_precision: str,
    *,
    devices: int | None = None,
    nodes: int = 1,
    allocator: str | None = None,
) -> Target:
    """`devices`: of an engine that names them, on each of `nodes`; `allocator`: a setting of the user's own, of this machine and no other."""
    if request.is_auto and machine.cards:
        found = _with_allocator(_here(machine.cards[0], request), allocator)
    elif request.is_auto or request.is_cpu:
        found = _processor(request, machine)
    else:
        found = _named(request)
    found = _for_devices(found, request, machine, devices)
    if nodes > 1:
        found = _on_nodes(found, nodes)
    if found.device == "cuda" and found.count > 1:
        found = replace(found, context_bytes=found.context_bytes + NCCL_BYTES)
    return _with_precision(found, asked_precision)


def _on_nodes(target: Target, nodes: int) -> Target:
    count = target.count * nodes
    name = target.name if target.device == "cpu" else f"{count}x{target.name.removeprefix(f'{target.count}x')}"
    return replace(target, count=count, name=name, notes=(*target.notes, f"{nodes} nodes with {target.count} each"))


def _with_allocator(target: Target, setting: str | None) -> Target:
    """Of the other settings none is rehearsed; without growing segments more memory lies in pieces that are too small."""
    if setting is None or re.search(r"expandable_segments\s*:\s*true", setting, re.IGNORECASE):
        return target
    words = f"your PYTORCH_CUDA_ALLOC_CONF ({setting}) is kept, so segments do not grow: more is held by the allocator"
    return replace(target, expandable=False, notes=(*target.notes, words))


def _for_devices(target: Target, request: CardRequest, machine: Machine, devices: int | None) -> Target:
    """On a processor each process has a part of the memory; of the cards here the fullest sets the budget."""
    if devices is None or devices == target.count:
        return target
    if target.count > 1:
        raise SpecError(
            f"card: {request.text} and engine.devices: {devices} contradict each other",
            "name the same number in both, or in one of them",
        )
    if target.device == "cpu":
        words = f"{devices} processes share the memory and the cores of this machine"
        return replace(
            target,
            count=devices,
            budget_bytes=target.budget_bytes // devices,
            rates=_shared(target.rates, devices),
            notes=(*target.notes, words),
        )
    if request.is_auto:
        if devices > len(machine.cards):
            raise SpecError(
                f"engine.devices is {devices}, this machine has {len(machine.cards)}",
                "lower it, or plan for other cards with --card",
            )
        free = [card.free_bytes for card in machine.cards[:devices] if card.free_bytes is not None]
        target = replace(target, budget_bytes=int(min(free) * USABLE))
    return replace(target, count=devices, name=f"{devices}x{target.name}")


def _shared(rates: Rates | None, devices: int) -> Rates | None:
    """Between processes that compute at the same time."""
    if rates is None:
        return None
    parts = {name: getattr(rates, name) / devices for name in ("half_flops", "full_flops", "bytes_per_second")}
    return replace(rates, **parts)


def _named(request: CardRequest) -> Target:
    kind = request.kind
    assert request.memory_bytes is not None or kind is not None
    budget = int(kind.memory_bytes * USABLE) if kind else int(request.memory_bytes or 0)
    return Target(
        name=f"{request.count}x{kind.name}"
        if kind and request.count > 1
        else kind.name
        if kind
        else request.text.split("@")[0].strip(),
        device="cuda",
        capability=kind.compute_capability if kind else (8, 0),
        precision="bf16",
        budget_bytes=budget,
        count=request.count,
        rates=rates_of(kind) if kind else None,
        host_bytes_per_second=kind.host_bytes_per_second if kind else 12e9,
        price_per_hour=request.price_per_hour,
        context_bytes=CONTEXT_BYTES,
        margin=MARGIN,
        margin_bytes=MARGIN_BYTES,
        notes=()
        if kind
        else ("a bare size says nothing of a card's generation: bf16 and flash attention are assumed",),
    )


def _here(card: Card, request: CardRequest) -> Target:
    """What is free now is the budget; who has the rest is named."""
    if card.free_bytes is None or card.memory_bytes is None:
        raise UserError(f"the driver does not say how much memory {card.name} has free", "name a budget: --card 24GiB")
    kind = find_kind(card.name, card.memory_bytes)
    others = [f"{p.name} (pid {p.pid}) holds {_size(p.memory_bytes)} of the card" for p in read_card_processes()]
    bare = _named(replace(request, text=card.name, kind=kind, memory_bytes=card.memory_bytes, count=1))
    major, _, minor = (card.compute_capability or "").partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else bare.capability
    unknown = () if kind else (f"{card.name} is not in the table of cards: no time is foretold",)
    notes = (*(bare.notes if kind else ()), *unknown, *others)
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    return replace(
        bare, budget_bytes=int(card.free_bytes * USABLE), capability=capability, notes=notes, has_liger=has_liger
    )


def _size(num_bytes: int | None) -> str:
    return f"{num_bytes:,} bytes" if num_bytes is not None else "some"


def _processor(request: CardRequest, machine: Machine) -> Target:
    return Target(
        name="cpu",
        device="cpu",
        capability=(0, 0),
        precision="fp32",
        budget_bytes=machine.memory_bytes,
        count=1,
        rates=measure_processor(),
        host_bytes_per_second=1e12,
        price_per_hour=request.price_per_hour,
        context_bytes=psutil.Process().memory_info().rss,  # torch and transformers, as in a worker
        margin=CPU_MARGIN,
        margin_bytes=0,
        notes=(f"{machine.cpu_model}, {machine.num_cores} cores; rates measured on it",),
    )


def measure_processor() -> Rates:
    """A product and a copy, each large enough to leave the caches."""
    a = torch.randn(_PROBE, _PROBE)
    flops = 2 * _PROBE**3 / _best(lambda: a @ a)
    b = torch.randn(16 << 20)
    return Rates(
        half_flops=flops,
        full_flops=flops,
        bytes_per_second=2 * b.numel() * 4 / _best(b.clone) / 0.8,
        launch_seconds=0.0,
    )


def _best(run: object, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()  # type: ignore[operator]
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def rates_of(kind: CardKind) -> Rates:
    half = kind.bf16_flops if kind.bf16_flops is not None else kind.fp16_flops
    return Rates(
        half_flops=half * kind.matrix_efficiency,
        full_flops=kind.fp32_flops * kind.matrix_efficiency,
        bytes_per_second=kind.bandwidth_bytes_per_second,
        launch_seconds=LAUNCH_SECONDS,
    )


def _with_precision(target: Target, asked: str) -> Target:
    has_bf16 = target.device == "cpu" or target.capability >= (8, 0)
    if asked == "bf16" and not has_bf16:
        raise SpecError(
            f"precision: bf16 is asked for, but {target.name} has none", "set precision: fp16, fp32 or auto"
        )
    match asked:
        case "bf16" | "fp16" | "fp32":
            precision: Precision = asked
        case _:
            precision = "fp32" if target.device == "cpu" else "bf16" if has_bf16 else "fp16"
    return replace(target, precision=precision, notes=(*_generation_notes(target, precision), *target.notes))


def _generation_notes(target: Target, precision: Precision) -> tuple[str, ...]:
    if target.device == "cpu":
        return ("a processor computes fp16 more slowly than fp32",) if precision == "fp16" else ()
    if target.capability >= (8, 0):
        return ()
    generation = f"{target.name} (compute capability {target.capability[0]}.{target.capability[1]})"
    products = (
        "weights and products are fp32" if precision == "fp32" else "products are taken in fp16, with loss scaling"
    )
    return (
        f"{generation} has no bf16: {products}",
        f"{generation} has no flash attention: torch's memory-efficient kernel takes its place, with key and value heads repeated",
    )
