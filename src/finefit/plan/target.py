"""The target of a plan: a named card, the one in this machine, or the CPU, as a budget of bytes and a set of rates; and
the engine that divides the work between several of them."""

import importlib.util
import re
import timeit
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from finefit.errors import SpecError, UserError
from finefit.facts.cards import CardKind, CardRequest, find_kind
from finefit.facts.machine import Machine
from finefit.facts.nvml import Card, read_card_processes
from finefit.rehearse.cost_model import Rates
from finefit.rehearse.trace import Sharding
from finefit.spec.schema import AutoEngine, Ddp, DeepSpeed, Engine, Fsdp2, Launcher, Single, SlurmLauncher

CONTEXT_BYTES = 816 << 20
"""Memory of CUDA and its libraries: 767 to 815 MiB, measured only on an H200."""
NCCL_BYTES = 512 << 20
"""Memory of the buffers for gradients between cards. Not measured: it depends on their number and their links."""
MARGIN = 0.0125
"""Share of the reserved memory, added to MARGIN_BYTES: predictions were at most 1.0 % too low (docs/memory.md)."""
MARGIN_BYTES = 80 << 20
"""Four pages of the allocator, which are more than one per cent of a small model."""
CPU_MARGIN = 0.03
CPU_LEAST_BYTES, CPU_SHARE = 27 << 20, 0.5
"""Memory of threads and of kernels' scratch space; and, as a share of small blocks, of holes that the C library leaves
between them. Larger blocks return to the system when they are freed (bench/cpu_memory.py)."""
CPU_EVAL_BYTES = 72 << 20
"""Memory of the packages that an evaluation imports in addition to those of training."""
USABLE = 0.98
"""Share of the memory reported by a driver that CUDA programs can use: 98 to 99.5 % on the cards that publish both."""
_PROBE = 1024
_SAME_NUMBER = "give the same number in both, or only one of them"
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    budget_bytes: int
    """Bytes of one card, or of one CPU process."""
    rates: Rates | None
    host_bytes_per_second: float
    price_per_hour: float | None
    notes: tuple[str, ...]
    precision: Precision = "bf16"
    count: int = 1
    """Number of cards, or of CPU processes."""
    context_bytes: int = CONTEXT_BYTES
    margin: float = MARGIN
    margin_bytes: int = MARGIN_BYTES
    expandable: bool = True
    """Whether the allocator's segments grow, which a worker enables unless the user's own setting differs."""
    has_liger: bool = True
    """Assumed to be true for a card in another machine."""

    def margin_of(self, reserved: int, small: int = 0) -> int:
        """Returns the bytes to add to those of tensors: on a CPU the amount measured for small models, or a share of
        large ones. `small`: the largest total of small blocks at one time."""
        share = int(reserved * self.margin) + self.margin_bytes
        if self.device == "cuda":
            return share
        return max(share, CPU_LEAST_BYTES + int(small * CPU_SHARE))


def find_target(
    request: CardRequest,
    machine: Machine,
    asked_precision: str,
    *,
    devices: int | None = None,
    nodes: int = 1,
    allocator: str | None = None,
    host_factor: float = 1.0,
) -> Target:
    """`devices`: the number that the engine names for each of `nodes`; `allocator`: the user's own setting, for this
    machine; `host_factor`: this host's time as a multiple of the reference host's, for a card in it."""
    if request.is_auto and machine.cards:
        found = _on_host(_here(machine.cards[0], request, allocator), host_factor)
    elif request.is_auto or request.is_cpu:
        found = _processor(request, machine)
    elif request.kind is None and machine.cards:
        found = _on_host(_part_of(machine.cards[0], request), host_factor)
    else:
        found = _named(request)
    found = for_devices(found, request, machine, devices)
    if nodes > 1:
        count = found.count * nodes
        name = found.name if found.device == "cpu" else f"{count}x{found.name.removeprefix(f'{found.count}x')}"
        notes = (*found.notes, f"{nodes} nodes with {found.count} each")
        found = replace(found, count=count, name=name, notes=notes)
    if found.device == "cuda" and found.count > 1:
        found = replace(found, context_bytes=found.context_bytes + NCCL_BYTES)
    return _with_precision(found, asked_precision)


def for_devices(target: Target, request: CardRequest, machine: Machine, devices: int | None) -> Target:
    """Processes on a CPU share its memory; the card here with the least free memory sets the budget."""
    if devices is None or devices == target.count:
        return target
    if target.count > 1:
        problem = f"card: {request.text} and engine.devices: {devices} contradict each other"
        raise SpecError(problem, _SAME_NUMBER)
    if target.device == "cpu":
        notes = (*target.notes, f"{devices} processes share the memory and the cores of this machine")
        shared = ("half_flops", "full_flops", "bytes_per_second")  # shared by processes that compute at the same time
        each = {name: getattr(target.rates, name) / devices for name in shared} if target.rates else {}
        rates, budget = target.rates and replace(target.rates, **each), target.budget_bytes // devices
        return replace(target, count=devices, budget_bytes=budget, rates=rates, notes=notes)
    if request.is_auto:
        if devices > len(machine.cards):
            problem = f"engine.devices is {devices}, but this machine has {len(machine.cards)}"
            raise SpecError(problem, "lower it, or plan for other cards with --card")
        free = [card.free_bytes for card in machine.cards[:devices] if card.free_bytes is not None]
        target = replace(target, budget_bytes=int(min(free) * USABLE))
    return replace(target, count=devices, name=f"{devices}x{target.name}")


def _named(request: CardRequest) -> Target:
    kind = request.kind
    assert request.memory_bytes is not None or kind is not None
    name = kind.name if kind else request.text.split("@")[0].strip()
    return Target(
        name=f"{request.count}x{name}" if kind and request.count > 1 else name,
        device="cuda",
        capability=kind.compute_capability if kind else (8, 0),
        budget_bytes=int(kind.memory_bytes * USABLE) if kind else int(request.memory_bytes or 0),
        count=request.count,
        rates=rates_of(kind) if kind else None,
        host_bytes_per_second=kind.host_bytes_per_second if kind else 12e9,
        price_per_hour=request.price_per_hour,
        notes=() if kind else ("a size alone names no generation of cards: bf16 and flash attention are assumed",),
    )


def _part_of(card: Card, request: CardRequest) -> Target:
    """A size alone, where a card is in this machine: a run trains on that one, so its rates tell which candidate is the
    fastest."""
    found, kind = _named(request), find_kind(card.name, card.memory_bytes)
    if kind is None:
        return found
    note = f"times are those of a budget of {found.name} on the {kind.name} of this machine"
    return replace(found, rates=rates_of(kind), notes=(*found.notes, note))


def _on_host(target: Target, factor: float) -> Target:
    return replace(target, rates=target.rates and replace(target.rates, host_factor=factor))


def _here(card: Card, request: CardRequest, allocator: str | None) -> Target:
    """The memory that is free now is the budget; the processes that hold the rest are named. If segments do not grow,
    more memory is lost to fragments; no other allocator setting is rehearsed."""
    if card.free_bytes is None or card.memory_bytes is None:
        problem = f"the driver does not report how much memory {card.name} has free"
        raise UserError(problem, "name a budget: --card 24GiB")
    kind = find_kind(card.name, card.memory_bytes)
    others = [
        f"{p.name} (pid {p.pid}) holds {'some' if p.memory_bytes is None else f'{p.memory_bytes:,} bytes'} of the card"
        for p in read_card_processes()
    ]
    named = _named(replace(request, text=card.name, kind=kind, memory_bytes=card.memory_bytes, count=1))
    major, _, minor = (card.compute_capability or "").partition(".")
    notes = named.notes if kind else (f"{card.name} is not in the table of cards: no time is predicted",)
    expandable = allocator is None or bool(re.search(r"expandable_segments\s*:\s*true", allocator, re.IGNORECASE))
    kept = f"your PYTORCH_CUDA_ALLOC_CONF ({allocator}) is kept, so segments do not grow: the allocator holds more"
    return replace(
        named,
        budget_bytes=int(card.free_bytes * USABLE),
        capability=(int(major), int(minor)) if major.isdigit() and minor.isdigit() else named.capability,
        notes=(*notes, *others, *(() if expandable else (kept,))),
        expandable=expandable,
        has_liger=importlib.util.find_spec("liger_kernel") is not None,
    )


def _processor(request: CardRequest, machine: Machine) -> Target:
    """Measures rates with a product and a copy, both too large for the caches."""
    resident = psutil.Process().memory_info().rss  # torch and transformers, as in a worker; read before the probes
    a, b = torch.randn(_PROBE, _PROBE), torch.randn(16 << 20)
    flops = 2 * _PROBE**3 / min(timeit.repeat(lambda: a @ a, number=1))
    notes = [f"{machine.cpu_model}, {machine.num_cores} cores; rates measured on it"]
    if machine.has_apple_gpu:
        notes.append("finefit does not use Apple's GPU (MPS): this is a plan for the CPU")
    copied = 2 * b.numel() * 4 / min(timeit.repeat(b.clone, number=1)) / 0.8
    return Target(
        name="cpu",
        device="cpu",
        capability=(0, 0),
        precision="fp32",
        budget_bytes=machine.memory_bytes,
        rates=Rates(half_flops=flops, full_flops=flops, bytes_per_second=copied, host_factor=0.0),
        host_bytes_per_second=1e12,
        price_per_hour=request.price_per_hour,
        context_bytes=resident,
        margin=CPU_MARGIN,
        margin_bytes=0,
        notes=tuple(notes),
    )


def rates_of(kind: CardKind) -> Rates:
    half = kind.bf16_flops if kind.bf16_flops is not None else kind.fp16_flops
    return Rates(
        half_flops=half * kind.matrix_efficiency,
        full_flops=kind.fp32_flops * kind.matrix_efficiency,
        bytes_per_second=kind.bandwidth_bytes_per_second,
    )


def _with_precision(target: Target, asked: str) -> Target:
    is_cpu = target.device == "cpu"
    is_old = not is_cpu and target.capability < (8, 0)  # before Ampere
    if asked == "bf16" and is_old:
        problem = f"precision: bf16 is requested, but {target.name} does not support it"
        raise SpecError(problem, "set precision: fp16, fp32 or auto")
    match asked:
        case "bf16" | "fp16" | "fp32":
            precision: Precision = asked
        case _:
            precision = "fp32" if is_cpu else "fp16" if is_old else "bf16"
    notes = target.notes
    if is_cpu and precision == "fp16":
        notes = ("a CPU computes fp16 more slowly than fp32", *notes)
    elif is_old:
        generation = f"{target.name} (compute capability {target.capability[0]}.{target.capability[1]})"
        fp32, fp16 = "weights and products are fp32", "products are computed in fp16, with loss scaling"
        kernel = "torch's memory-efficient kernel is used instead, with key and value heads repeated"
        notes = (
            f"{generation} has no bf16: {fp32 if precision == 'fp32' else fp16}",
            f"{generation} has no flash attention: {kernel}",
            *notes,
        )
    return replace(target, precision=precision, notes=notes)


def devices_of(engine: Engine) -> int | None:
    """Returns the devices of one node; None if the card decides."""
    return 1 if isinstance(engine, Single) else engine.devices


def require_same_count(request: CardRequest, engine: Engine) -> None:
    devices = devices_of(engine)
    if request.count == 1 or devices in (None, request.count):
        return
    if isinstance(engine, Single):
        words, remedy = "engine.kind: single", "name one card, or an engine for several cards"
    else:
        words, remedy = f"engine.devices: {devices}", _SAME_NUMBER
    raise SpecError(f"card: {request.text} and {words} contradict each other", remedy)


def nodes_of(launcher: Launcher) -> int:
    return launcher.nodes if isinstance(launcher, SlurmLauncher) else 1


def shardings_of(engine: Engine, count: int, *, can_divide: bool = True) -> tuple[Sharding, ...]:
    """Returns the mildest sharding first; only one if the spec has decided. `can_divide`: nothing is quantised or in
    blocks."""
    match engine:
        case AutoEngine():
            return ("none",) if count == 1 else ("ddp", "fsdp2") if can_divide else ("ddp",)
        case Single():
            return ("none",)
        case DeepSpeed():
            return ("zero2",) if engine.stage == 2 else ("zero3",)
    return (engine.kind,)


def require_several(engine: Engine, count: int) -> None:
    """`count`: the number of devices on all nodes."""
    if count == 1 and isinstance(engine, Fsdp2 | DeepSpeed):
        raise SpecError(f"engine.kind {engine.kind} shards over devices, but there is one", "set engine.kind: single")


def engine_of(sharding: Sharding, devices: int) -> Engine:
    match sharding:
        case "none":
            return Single(kind="single")
        case "ddp":
            return Ddp(kind="ddp", devices=devices)
        case "fsdp2":
            return Fsdp2(kind="fsdp2", devices=devices)
    return DeepSpeed(kind="deepspeed", devices=devices, stage=2 if sharding == "zero2" else 3)


def decide_engine(asked: Engine, sharding: Sharding, devices: int, *, fits: bool) -> tuple[Engine, str]:
    """Returns the engine that will run, and why. `devices`: those of one node."""
    if not isinstance(asked, AutoEngine):
        return asked, "requested"
    if sharding == "none":
        why = "one device"
    elif sharding == "ddp":
        why = f"a whole copy fits on each of {devices} devices" if fits else "quantised weights cannot be sharded"
    else:
        why = "a whole copy does not fit on one" if fits else "it needs the least, since nothing fits"
    return engine_of(sharding, devices), why
