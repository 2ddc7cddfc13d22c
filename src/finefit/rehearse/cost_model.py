"""Predicts how long a rehearsed step takes on a card: a roofline for each kernel, and the host that launches them
all.

The host's work is counted by kind of operation. `bench/time_model.py fit` calibrates the seconds of each kind, and the
shares of the card's rates, on measured steps; `host_speed` measures how much slower or faster another host is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from finefit.rehearse.fake_kernels import GROUPED_MM
from finefit.rehearse.trace import Cost, Trace

INT8_MM = torch.ops.aten._int_mm.default
HOST_KINDS = {torch.ops.aten.zeros.default: "unpack", INT8_MM: "int8"}
"""Operations that stand for what bitsandbytes does in Python."""
MATRIX_SHARE = 0.87
"""Share of a card's best matrix rate that the products of a training step reach on average."""
BANDWIDTH_SHARE = 0.75
"""Share of the published bandwidth; bench/kernel_probe.py measured 0.81 at 64 MiB and 0.89 at 512 MiB, elementwise."""
ATTENTION_SHARE = 0.65
KERNEL_SECONDS = 6.2e-6
"""Gap between two kernels, and what the start and the end of a kernel leave idle."""
HOST_SECONDS = {
    "kernel": 29e-6,
    "view": 3e-6,
    "kernel back": 19e-6,
    "view back": 4e-6,
    "kernel again": 58e-6,
    "view again": 4.3e-6,
    "function": 29e-6,
    "triton": 220e-6,
    "unpack": 100e-6,
    "int8": 580e-6,
    "selective": 57e-6,
    "listed": 1.5e-6,
}
"""Seconds of the reference host by kind of operation: one with a kernel, or a view; `back` in backward, `again` in a
layer that is recomputed; the call of an autograd node in Python; a Triton launch; bitsandbytes' unpacking and 8-bit
products; what selective checkpointing intercepts; and a tensor in a list that one operation takes."""
STEP_SECONDS = 2.7e-3
"""Seconds of the reference host in a step beside its operations."""
_PHASES = ("reference", "forward", "loss", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    half_flops: float
    """Rate of a large matrix product in 16 bits."""
    full_flops: float
    bytes_per_second: float
    host_factor: float = 1.0
    """Host time as a multiple of the reference host's; 0 on a CPU, whose rates include it."""


def phase_seconds(trace: Trace, rates: Rates) -> dict[str, float]:
    """The host runs ahead of the card until it reads whether the gradient is finite, before the update. A phase ends
    when both are done: the card starts a kernel after its launch and after the kernels before it."""
    found, host, card = {}, 0.0, 0.0
    for phase in _PHASES:
        ended = max(host, card)
        if phase == "update":
            host = ended + STEP_SECONDS * rates.host_factor
        host += _host_seconds(trace, phase, rates)
        card = max(ended + _card_seconds(trace, phase, rates), host)
        found[phase] = card - ended
    return found


def step_seconds(trace: Trace, rates: Rates) -> float:
    return sum(phase_seconds(trace, rates).values())


def instant_seconds(trace: Trace, instant: str, rates: Rates) -> float:
    """Of a single instant: card and host work concurrently, and the slower determines the time."""
    return max(_card_seconds(trace, instant, rates), _host_seconds(trace, instant, rates))


def _card_seconds(trace: Trace, instant: str, rates: Rates) -> float:
    return sum(
        count * _kernel_seconds(cost, rates)
        for (at, _), costs in trace.costs.items()
        if at == instant
        for cost, count in costs.items()
    )


def _host_seconds(trace: Trace, instant: str, rates: Rates) -> float:
    counts = (
        (kind, count) for (at, _), kinds in trace.operations.items() if at == instant for kind, count in kinds.items()
    )
    return rates.host_factor * sum(count * HOST_SECONDS[kind] for kind, count in counts)


def _kernel_seconds(cost: Cost, rates: Rates) -> float:
    share = ATTENTION_SHARE if cost.is_attention else MATRIX_SHARE
    compute = cost.flops / ((rates.half_flops if cost.is_half else rates.full_flops) * share)
    traffic = cost.num_bytes / (rates.bytes_per_second * BANDWIDTH_SHARE)
    return max(compute, traffic) + KERNEL_SECONDS


def total_flops(trace: Trace) -> float:
    return sum(count * cost.flops for costs in trace.costs.values() for cost, count in costs.items())


def grouped_bytes(left: Tensor, right: Tensor, out: list[Tensor]) -> float:
    """Reads at most as many experts as there are tokens: a decode step reads few of many."""
    share = min(1.0, left.shape[0] / right.shape[0]) if right.ndim == 3 else 1.0
    return left.nbytes + share * right.nbytes + sum(tensor.nbytes for tensor in out)


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if func in (GROUPED_MM, INT8_MM):
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    name = func._overloadpacket.__name__
    is_backward = name.endswith("_backward")
    products = 5 if is_backward else 2
    if name.startswith("_flash_attention"):
        query, longest = (args[1], args[8]) if is_backward else (args[0], args[5])
        tokens, heads, width = query.shape  # assumes that every row is as long as the longest
        return int(products * 2 * heads * (tokens * longest // 2) * width * _sides(func, args, kwargs))
    if is_attention(name):
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, tokens, width = query.shape
        pairs = tokens * key.shape[2] // (2 if tokens > 1 else 1)  # causality halves these for several queries
        return int(products * 2 * batch * heads * pairs * width * _sides(func, args, kwargs))
    counted = flop_registry.get(func._overloadpacket)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))


def is_attention(name: str) -> bool:
    return "dot_product" in name or "flash_attention" in name


def _sides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns 2 if attention is not causal, as between the patches of an image, and otherwise 1."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, mask = given["query"], given.get("attn_bias", given.get("attn_mask"))
    return 1 if given.get("is_causal") or mask is not None or (query.ndim == 4 and query.shape[2] == 1) else 2
