"""How long a rehearsed step takes on a card: a roofline for each kernel, and the host that has to launch them all."""

from dataclasses import dataclass

from finefit.rehearse.trace import Cost, Trace

_MATRIX_SHARE = 0.88
"""Of a card's best matrix rate, what the products of a training step reach in the middle."""
_BANDWIDTH_SHARE = 0.80
"""Of the published bandwidth, what an elementwise kernel reaches (bench/kernel_probe.py: 0.81 at 64 MiB, 0.89 at 512 MiB)."""
_ATTENTION_SHARE = 0.62
_KERNEL_SECONDS = 2e-6
"""Between two kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    half_flops: float
    """Best matrix rate in 16 bits, as a large product reaches it."""
    full_flops: float
    bytes_per_second: float
    launch_seconds: float
    """Of host time for one operation."""


def phase_seconds(trace: Trace, rates: Rates) -> dict[str, float]:
    """The card and the host work side by side: the slower of the two sets the pace of each phase."""
    return {
        instant: instant_seconds(trace, instant, rates)
        for instant in ("reference", "forward", "loss", "backward", "update")
    }


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
