"""What one of several cards holds when state is sharded over them: arithmetic on the rehearsed tensors, not yet measured on several cards."""

from dataclasses import replace
from typing import Literal

from finefit.rehearse.trace import LOADED, OUTSIDE, WARM_UP, Block, Trace

Sharding = Literal["none", "ddp", "zero2", "zero3"]
_DIVIDED: dict[Sharding, set[str]] = {
    "none": set(),
    "ddp": set(),
    "zero2": {"gradients", "optimizer"},
    "zero3": {"gradients", "optimizer", "weights", "adapters"},
}
_BUCKET_BYTES = 2 * (25 << 20)
"""Of gradients on their way between cards: one that is filled, one that is sent."""


def sharded(trace: Trace, sharding: Sharding, count: int) -> Trace:
    """Buckets beside what each card holds; under zero3 the weights of two layers are whole at any time, the next one while this one is used."""
    divided = _DIVIDED[sharding]
    blocks = [
        replace(block, num_bytes=-(-block.num_bytes // count))
        if trace.category(ident) in divided or (block.operation == WARM_UP and divided)
        else block
        for ident, block in enumerate(trace.blocks)
    ]
    extra = _BUCKET_BYTES + (_whole_bytes(trace) if sharding == "zero3" else 0)
    return replace(
        trace,
        blocks=[*blocks, Block(extra, "workspace", "", "buckets", OUTSIDE)],
        events=[(len(blocks), True), *trace.events],
        units=[OUTSIDE, *trace.units],
        instants=["load", *trace.instants],
    )


def _whole_bytes(trace: Trace) -> int:
    """Two layers, or the largest matrix outside of them: embedding and head are whole one after the other."""
    held: dict[int, int] = {}
    alone = 0
    for ident, block in enumerate(trace.blocks):
        if block.operation == LOADED and trace.category(ident) in ("weights", "adapters"):
            held[block.unit] = held.get(block.unit, 0) + block.num_bytes
            alone = max(alone, block.num_bytes if block.unit == OUTSIDE else 0)
    return max(2 * max((size for unit, size in held.items() if unit != OUTSIDE), default=0), alone)
