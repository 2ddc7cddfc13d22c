"""The result of a rehearsal: allocation events, what each allocation is and where it was made, and the cost of every
operation; and the part of it that one of several cards holds if state is sharded."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

OUTSIDE = -1
"""The layer of blocks that belong to no layer."""
WARM_UP, LOADED = "warm-up", "aten::empty_strided"
"""Operations of loading: all weights in one piece, which is freed at once, and each weight."""
WORKSPACE = "workspace"
"""The instant of what cuBLAS allocates at a thread's first product and keeps."""
_CATEGORIES = {"load": "weights", "forward": "activations", "loss": "loss", WORKSPACE: "workspace", "batch": "batch"}
"""The category of an allocation by its instant, unless its owner is known."""


class Cost(NamedTuple):
    """The cost of one kernel."""

    flops: float
    num_bytes: float
    """Bytes read and written."""
    is_half: bool
    """Whether it computes in 16 bits."""
    is_attention: bool = False


class Block(NamedTuple):
    """One allocation: the instant, module and operation that made it, and its layer."""

    num_bytes: int
    instant: str
    module: str
    operation: str
    unit: int


@dataclass(slots=True)
class Trace:
    blocks: list[Block] = field(default_factory=list)
    """Blocks by ident."""
    events: list[tuple[int, bool]] = field(default_factory=list)
    """(ident, whether it is allocated or freed)."""
    units: list[int] = field(default_factory=list)
    """For each event, the layer that was being executed."""
    instants: list[str] = field(default_factory=list)
    """For each event, its instant."""
    categories: dict[int, str] = field(default_factory=dict)
    """Categories of idents whose owner is known: gradients, optimizer state."""
    costs: dict[tuple[str, int], Counter[Cost]] = field(default_factory=dict)
    """Kernels by (instant, layer)."""
    operations: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)
    """Operations that the host dispatches, views included, by kind (`cost_model.HOST_SECONDS`) and (instant, layer)."""
    host_bytes: int = 0
    """Peak of pinned memory."""

    def allocate(self, block: Block, unit: int) -> int:
        self.blocks.append(block)
        self.note(len(self.blocks) - 1, True, unit, block.instant)
        return len(self.blocks) - 1

    def free(self, ident: int, unit: int, instant: str) -> None:
        self.note(ident, False, unit, instant)

    def note(self, ident: int, is_new: bool, unit: int, instant: str) -> None:
        self.events.append((ident, is_new))
        self.units.append(unit)
        self.instants.append(instant)

    def beyond(self, num_layers: int) -> "Trace":
        """Returns the trace with layers numbered beyond these assigned to no layer."""
        costs: dict[tuple[str, int], Counter[Cost]] = {}
        operations: dict[tuple[str, int], Counter[str]] = {}
        for (instant, unit), found in self.costs.items():
            costs.setdefault((instant, unit if unit < num_layers else OUTSIDE), Counter()).update(found)
        for (instant, unit), kinds in self.operations.items():
            operations.setdefault((instant, unit if unit < num_layers else OUTSIDE), Counter()).update(kinds)
        return replace(
            self,
            blocks=[block if block.unit < num_layers else block._replace(unit=OUTSIDE) for block in self.blocks],
            units=[unit if unit < num_layers else OUTSIDE for unit in self.units],
            costs=costs,
            operations=operations,
        )

    def with_workspaces(self, num_bytes: int) -> "Trace":
        """Returns the trace for a card whose libraries use workspaces of another size."""
        resized = (one._replace(num_bytes=num_bytes) if one.instant == WORKSPACE else one for one in self.blocks)
        return replace(self, blocks=list(resized))

    def num_operations(self) -> int:
        return sum(kinds.total() for kinds in self.operations.values())

    def loaded(self, unit: int) -> int:
        """Returns the bytes of a layer's weights and adapters, rounded like the allocator."""
        sizes = (block.num_bytes for block in self.blocks if block.unit == unit and block.operation == LOADED)
        return sum(-(-num_bytes // 512) * 512 for num_bytes in sizes)

    def stream(self) -> list[tuple[int, int]]:
        """Returns events for the allocator: (ident, bytes), with 0 bytes for a free."""
        sizes = [block.num_bytes for block in self.blocks]
        return [(ident, sizes[ident] if is_new else 0) for ident, is_new in self.events]

    def category(self, ident: int) -> str:
        return self.categories.get(ident) or _CATEGORIES.get(self.blocks[ident].instant, "temporary")

    def components(self, until: int) -> dict[str, int]:
        """Returns bytes by category after event `until`, rounded like the allocator."""
        events, total = self.events[: until + 1], Counter[str]()
        freed = {ident for ident, is_new in events if not is_new}
        for ident, is_new in events:
            if is_new and ident not in freed:
                total[self.category(ident)] += -(-self.blocks[ident].num_bytes // 512) * 512
        return dict(total.most_common())

    def peak_below(self, limit: int) -> int:
        """Returns the largest total of blocks smaller than `limit` at one time."""
        now = most = 0
        for ident, is_new in self.events:
            size = self.blocks[ident].num_bytes
            if size < limit:
                now += size if is_new else -size
                most = max(most, now)
        return most

    def peaks(self) -> dict[str, int]:
        """Returns the largest allocated total during each instant."""
        now = 0
        found: dict[str, int] = {}
        for ident, is_new in self.events:
            size = -(-self.blocks[ident].num_bytes // 512) * 512
            now += size if is_new else -size
            if is_new:
                instant = self.blocks[ident].instant
                found[instant] = max(found.get(instant, 0), now)
        return found


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
"""Bytes of gradients in transit between cards."""
_LIVE_VALUES = 250_000_000
"""Values of weights that ZeRO-3 leaves unsharded because they are reused soon."""
_WIDENED = "aten::_to_copy"


def sharded(trace: Trace, sharding: Sharding, count: int, *, gathers_halves: bool = False) -> Trace:
    """Returns what one of several cards holds: arithmetic on the rehearsed tensors, not measured on several cards.
    `gathers_halves`: fp32 weights are gathered in 16 bits, as fsdp2 does if products are computed in 16 bits.

    In addition to its shards each engine (`step.engine`, `step.deepspeed`) holds: ddp one bucket of gradients; fsdp2
    three layers (two in use, one being fetched), all weights outside the layers, and the gradients of two layers; zero2
    and zero3 two buckets, the largest gradient and a sharded fp32 copy of the trained weights; zero3 also unsharded
    weights up to a limit."""
    divided = _DIVIDED[sharding]
    blocks = [
        block._replace(num_bytes=-(-block.num_bytes // count))
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
    loaded = [(trace.category(at), block) for at, block in enumerate(trace.blocks) if block.operation == LOADED]
    held = [block for category, block in loaded if category in ("weights", "adapters")]
    adapters = [block for category, block in loaded if category == "adapters"]
    widened = [block for block in trace.blocks if block.operation == _WIDENED and block.instant == "load"]
    trained = adapters or widened or held  # adapters if there are any, else what was widened to be trained
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


def _largest_layer(blocks: list[Block]) -> int:
    held: Counter[int] = Counter()
    for block in blocks:
        held[block.unit] += block.num_bytes
    return max((size for unit, size in held.items() if unit != OUTSIDE), default=0)
