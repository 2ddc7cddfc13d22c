"""Predicts how long a rehearsed step takes on a card: a roofline for each kernel, and the host that launches them
all."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from finefit.rehearse.fake_kernels import GROUPED_MM
from finefit.rehearse.trace import Cost, Trace

INT8_MM = torch.ops.aten._int_mm.default
_MATRIX_SHARE = 0.88
"""Share of a card's best matrix rate that the products of a training step reach on average."""
_BANDWIDTH_SHARE = 0.80
"""Share of the published bandwidth; bench/kernel_probe.py measured 0.81 at 64 MiB and 0.89 at 512 MiB, elementwise."""
_ATTENTION_SHARE = 0.62
_KERNEL_SECONDS = 2e-6
"""Gap between two kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    half_flops: float
    """Rate of a large matrix product in 16 bits."""
    full_flops: float
    bytes_per_second: float
    launch_seconds: float
    """Host time of one operation."""


def phase_seconds(trace: Trace, rates: Rates) -> dict[str, float]:
    """Card and host work concurrently: the slower of the two determines the time of each phase."""
    phases = ("reference", "forward", "loss", "backward", "update")
    return {instant: instant_seconds(trace, instant, rates) for instant in phases}


def step_seconds(trace: Trace, rates: Rates) -> float:
    return sum(phase_seconds(trace, rates).values())


def instant_seconds(trace: Trace, instant: str, rates: Rates) -> float:
    kernels = sum(
        count * _kernel_seconds(cost, rates)
        for (at, _), costs in trace.costs.items()
        if at == instant
        for cost, count in costs.items()
    )
    launches = sum(count for (at, _), count in trace.operations.items() if at == instant)
    return max(kernels, launches * rates.launch_seconds)


def _kernel_seconds(cost: Cost, rates: Rates) -> float:
    share = _ATTENTION_SHARE if cost.is_attention else _MATRIX_SHARE
    compute = cost.flops / ((rates.half_flops if cost.is_half else rates.full_flops) * share)
    traffic = cost.num_bytes / (rates.bytes_per_second * _BANDWIDTH_SHARE)
    return max(compute, traffic) + _KERNEL_SECONDS


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
