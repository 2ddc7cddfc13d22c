"""What one of several cards holds when state is divided over them: arithmetic on the rehearsed tensors, not measured on several cards.

What each engine holds beside its part is read off the engines themselves (`step.engines`):

| sharding | whole for a while | buckets | copies |
|---|---|---|---|
| ddp | | one, filled for the exchange | |
| fsdp2 | two layers and one on its way; all that lies outside of the layers; the gradients of two layers, in fp32 to be summed | | |
| zero2 | the largest gradient | two | the trained weights in fp32, divided |
| zero3 | weights up to a limit, the largest gradient | two | the trained weights in fp32, divided |
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from finefit.rehearse.trace import LOADED, OUTSIDE, WARM_UP, Block, Trace

Sharding = Literal["none", "ddp", "fsdp2", "zero2", "zero3"]
_STATE = {"gradients", "optimizer"}
_DIVIDED: dict[Sharding, set[str]] = {
    "none": set(),
    "ddp": set(),
    "fsdp2": _STATE | {"weights", "adapters"},
    "zero2": _STATE,
    "zero3": _STATE | {"weights", "adapters"},
}
_BUCKET_BYTES = 25 << 20
"""Of gradients on their way between cards."""
_LIVE_VALUES = 250_000_000
"""Of weights that ZeRO-3 leaves whole because they are needed again soon."""
_WIDENED = "aten::_to_copy"


def sharded(trace: Trace, sharding: Sharding, count: int, *, gathers_halves: bool = False) -> Trace:
    """`gathers_halves`: fp32 weights are put together in 16 bits, as fsdp2 does where products are taken in them."""
    divided = _DIVIDED[sharding]
    blocks = [
        replace(block, num_bytes=-(-block.num_bytes // count))
        if trace.category(ident) in divided or (block.operation == WARM_UP and divided)
        else block
        for ident, block in enumerate(trace.blocks)
    ]
    extra = _extra_bytes(trace, sharding, count, gathers_halves=gathers_halves)
    return replace(
        trace,
        blocks=[*blocks, Block(extra, "workspace", "", "buckets", OUTSIDE)],
        events=[(len(blocks), True), *trace.events],
        units=[OUTSIDE, *trace.units],
        instants=["load", *trace.instants],
    )


def _extra_bytes(trace: Trace, sharding: Sharding, count: int, *, gathers_halves: bool) -> int:
    held, trained = list(_held(trace)), list(_trained(trace))
    match sharding:
        case "none":
            return 0
        case "ddp":
            return _BUCKET_BYTES
        case "fsdp2":
            weights = 3 * _largest_layer(held) + sum(block.num_bytes for block in held if block.unit == OUTSIDE)
            return (weights // 2 if gathers_halves else weights) + 2 * _largest_layer(trained)
        case "zero2" | "zero3":
            copies = sum(block.num_bytes for block in trained) // count
            largest = max((block.num_bytes for block in trained), default=0)
            live = min(sum(block.num_bytes for block in held), 4 * _LIVE_VALUES) if sharding == "zero3" else 0
            return 2 * _BUCKET_BYTES + copies + largest + live


def _held(trace: Trace) -> Iterator[Block]:
    """The weights and adapters, each once."""
    for ident, block in enumerate(trace.blocks):
        if block.operation == LOADED and trace.category(ident) in ("weights", "adapters"):
            yield block


def _trained(trace: Trace) -> list[Block]:
    """Of those what is trained: adapters where there are some, or what was widened for it, or all."""
    adapters = [
        block
        for ident, block in enumerate(trace.blocks)
        if block.operation == LOADED and trace.category(ident) == "adapters"
    ]
    widened = [block for block in trace.blocks if block.operation == _WIDENED and block.instant == "load"]
    return adapters or widened or list(_held(trace))


def _largest_layer(blocks: list[Block]) -> int:
    held: dict[int, int] = {}
    for block in blocks:
        held[block.unit] = held.get(block.unit, 0) + block.num_bytes
    return max((size for unit, size in held.items() if unit != OUTSIDE), default=0)
