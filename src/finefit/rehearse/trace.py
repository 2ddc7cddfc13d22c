"""What a rehearsal leaves: allocation events, what each allocation is and where it was made, and the cost of every operation. No torch here."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

OUTSIDE = -1
"""The layer of what belongs to none."""
WARM_UP, LOADED = "warm-up", "aten::empty_strided"
"""Operations of loading: all weights in one piece, given back at once, and each of them."""
_CATEGORIES = {"load": "weights", "forward": "activations", "loss": "loss", "workspace": "workspace", "batch": "batch"}
"""What an allocation is by when it was made, unless it is known by what holds it."""


class Cost(NamedTuple):
    """Of one kernel."""

    flops: float
    num_bytes: float
    """Read and written."""
    is_half: bool
    """In 16 bits."""
    is_attention: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation: when, in which module and by which operation it was made, and for which layer."""

    num_bytes: int
    instant: str
    module: str
    operation: str
    unit: int


@dataclass(slots=True)
class Trace:
    blocks: list[Block] = field(default_factory=list)
    """By ident."""
    events: list[tuple[int, bool]] = field(default_factory=list)
    """(ident, whether it is allocated or freed)."""
    units: list[int] = field(default_factory=list)
    """By event: the layer that was being worked on."""
    instants: list[str] = field(default_factory=list)
    """By event: the instant."""
    categories: dict[int, str] = field(default_factory=dict)
    """Of those idents that are known by what holds them: gradients, optimizer state."""
    costs: dict[tuple[str, int], Counter[Cost]] = field(default_factory=dict)
    """Kernels by (instant, layer)."""
    operations: dict[tuple[str, int], int] = field(default_factory=dict)
    """Operations that the host dispatches, views included, by (instant, layer)."""
    marks: dict[str, int] = field(default_factory=dict)
    """Event index at which a part of the rehearsal begins."""
    host_bytes: int = 0
    """Of pinned memory, at its peak."""

    def allocate(self, block: Block, unit: int) -> int:
        ident = len(self.blocks)
        self.blocks.append(block)
        self.events.append((ident, True))
        self.units.append(unit)
        self.instants.append(block.instant)
        return ident

    def free(self, ident: int, unit: int, instant: str) -> None:
        self.events.append((ident, False))
        self.units.append(unit)
        self.instants.append(instant)

    def beyond(self, num_layers: int) -> "Trace":
        """The same with what is numbered beyond these layers in none."""
        costs: dict[tuple[str, int], Counter[Cost]] = {}
        operations: Counter[tuple[str, int]] = Counter()
        for (instant, unit), found in self.costs.items():
            costs.setdefault((instant, unit if unit < num_layers else OUTSIDE), Counter()).update(found)
        for (instant, unit), count in self.operations.items():
            operations[instant, unit if unit < num_layers else OUTSIDE] += count
        return replace(
            self,
            blocks=[block if block.unit < num_layers else replace(block, unit=OUTSIDE) for block in self.blocks],
            units=[unit if unit < num_layers else OUTSIDE for unit in self.units],
            costs=costs,
            operations=dict(operations),
        )

    def loaded(self, unit: int) -> int:
        """Bytes of a layer's weights and adapters, rounded as the allocator rounds."""
        return sum(
            -(-block.num_bytes // 512) * 512
            for block in self.blocks
            if block.unit == unit and block.operation == LOADED
        )

    def stream(self) -> list[tuple[int, int]]:
        """For the allocator: (ident, bytes), 0 bytes for a free."""
        return [(ident, self.blocks[ident].num_bytes if is_new else 0) for ident, is_new in self.events]

    def category(self, ident: int) -> str:
        return self.categories.get(ident) or _CATEGORIES.get(self.blocks[ident].instant, "temporary")

    def components(self, until: int) -> dict[str, int]:
        """Bytes by category after event `until`, rounded as the allocator rounds."""
        alive: dict[int, int] = {}
        for ident, is_new in self.events[: until + 1]:
            if is_new:
                alive[ident] = -(-self.blocks[ident].num_bytes // 512) * 512
            else:
                del alive[ident]
        total: Counter[str] = Counter()
        for ident, num_bytes in alive.items():
            total[self.category(ident)] += num_bytes
        return dict(total.most_common())

    def peaks(self) -> dict[str, int]:
        """The most that was allocated during each instant."""
        now = 0
        found: dict[str, int] = {}
        for ident, is_new in self.events:
            size = -(-self.blocks[ident].num_bytes // 512) * 512
            now += size if is_new else -size
            if is_new:
                instant = self.blocks[ident].instant
                found[instant] = max(found.get(instant, 0), now)
        return found
