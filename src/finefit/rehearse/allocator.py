"""What torch's CUDA caching allocator reserves for a stream of allocations, and whether they fit into a limit.

The rules are those of torch 2.11 to 2.13 on one stream with default settings: requests up to 1 MiB come from the small
pool, the rest from the large one; the best fitting free block is taken and split; freed blocks join their neighbours.
An expandable pool is one address range whose pages are mapped on demand and unmapped when the card is full; otherwise a
pool is a set of segments of fixed size.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

Event = tuple[int, int]
"""(ident, bytes): more than 0 bytes allocates under that ident, each ident once; 0 bytes frees it."""

_MIB = 1 << 20
_ROUND_BYTES = 512
_SMALL_BYTES = _MIB  # the largest request of the small pool
_SMALL_PAGE_BYTES = 2 * _MIB
_LARGE_PAGE_BYTES = 20 * _MIB
_OWN_SEGMENT_BYTES = 10 * _MIB  # the smallest request that gets a segment of its own
_ENDLESS_BYTES = 1 << 60  # torch reserves 1 1/8 of the card's memory as addresses; never the bound in practice


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The allocator's answer to a stream of events, up to the one that failed if one did."""

    allocated_bytes: int
    """Peak of the sum of live blocks, as `torch.cuda.max_memory_allocated` counts it."""
    reserved_bytes: int
    """Peak of the memory held from the card, as `torch.cuda.max_memory_reserved` counts it."""
    peak_at: int
    """The first event at which allocated stood at its peak."""
    reserved_at: int
    """The event at which reserved last rose to a new peak."""
    fits: bool
    failed_at: int | None
    """The allocation that could not be served within the limit."""


def replay(events: Iterable[Event], *, limit_bytes: int | None = None, expandable: bool = True) -> Replay:
    """Replays `events`; `limit_bytes` is what the card has for the allocator, so without the CUDA context.

    A cap by `set_per_process_memory_fraction` is another rule: it counts each request that the cache cannot serve as a
    new segment.
    """
    allocator = _Allocator(limit_bytes, expandable)
    allocated = reserved = peak_at = reserved_at = 0
    failed_at = None
    for index, (ident, num_bytes) in enumerate(events):
        if num_bytes == 0:
            allocator.free(ident)
        elif not allocator.allocate(ident, num_bytes):
            failed_at = index
        if allocator.allocated_bytes > allocated:
            allocated, peak_at = allocator.allocated_bytes, index
        if allocator.card.peak_bytes > reserved:
            reserved, reserved_at = allocator.card.peak_bytes, index
        if failed_at is not None:
            break
    return Replay(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_at=peak_at,
        reserved_at=reserved_at,
        fits=failed_at is None,
        failed_at=failed_at,
    )


class _Card:
    """The memory that the pools share."""

    __slots__ = ("limit_bytes", "mapped_bytes", "peak_bytes")

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes, self.mapped_bytes, self.peak_bytes = limit_bytes, 0, 0

    def take(self, num_bytes: int) -> bool:
        if self.limit_bytes is not None and self.mapped_bytes + num_bytes > self.limit_bytes:
            return False
        self.mapped_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.mapped_bytes)
        return True


class _Block:
    """A range of addresses that is live, free, or (in an expandable pool) a hole: not mapped to memory."""

    __slots__ = ("address", "is_live", "is_mapped", "next", "prev", "size")

    def __init__(self, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.address, self.size, self.is_live, self.is_mapped = address, size, False, is_mapped
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> "_Block":
        """Keeps the first `size` bytes and returns the rest as the next block."""
        rest = _Block(self.address + size, self.size - size, is_mapped=self.is_mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def reach(self) -> int:
        """The size that best fit compares: a free block before a hole counts as all that it can grow to."""
        after = self.next
        return self.size if after is None or after.is_mapped else self.size + after.size


class _Pool:
    """The blocks of one pool that are not live: the free ones by size, the holes by address."""

    __slots__ = ("at", "card", "end", "free", "holes", "kept_bytes", "page_bytes")

    def __init__(self, card: _Card, page_bytes: int, kept_bytes: int) -> None:
        self.card, self.page_bytes = card, page_bytes
        self.kept_bytes = kept_bytes  # a remainder up to this stays with the block
        self.free: list[tuple[int, int]] = []  # (size, address)
        self.holes: list[int] = []  # addresses
        self.at: dict[int, _Block] = {}
        self.end = 0  # where the next segment of fixed size starts; a card's addresses may order equal blocks otherwise

    def add(self, block: _Block) -> None:
        self.at[block.address] = block
        if block.is_mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.holes, block.address)

    def remove(self, block: _Block) -> None:
        del self.at[block.address]
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.holes[bisect_left(self.holes, block.address)]

    def join(self, block: _Block) -> None:
        """Adds a block after it has swallowed its neighbours of the same kind."""
        left, right = block.prev, block.next
        if left is not None and not left.is_live and left.is_mapped == block.is_mapped:
            self.remove(left)
            block.address, block.size, block.prev = left.address, block.size + left.size, left.prev
            if left.prev is not None:
                left.prev.next = block
        if right is not None and not right.is_live and right.is_mapped == block.is_mapped:
            self.remove(right)
            block.size, block.next = block.size + right.size, right.next
            if right.next is not None:
                right.next.prev = block
        self.add(block)

    def take_best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        block = self.at[self.free[index][1]]
        while (index := index + 1) < len(self.free):
            larger = self.at[self.free[index][1]]
            if larger.reach() >= block.reach():
                break
            block = larger
        self.remove(block)
        return block

    def split(self, block: _Block, size: int) -> _Block:
        if block.size - size > self.kept_bytes:
            self.add(block.cut(size))
        block.is_live = True
        return block


class _Allocator:
    """Two pools on one card, and the live blocks by their idents."""

    def __init__(self, limit_bytes: int | None, expandable: bool) -> None:
        self.card, self.allocated_bytes = _Card(limit_bytes), 0
        self.small = _Pool(self.card, _SMALL_PAGE_BYTES, 0)
        self.large = _Pool(self.card, _LARGE_PAGE_BYTES, 0 if expandable else _SMALL_BYTES)
        self.live: dict[int, _Block] = {}
        grow = (_map_room, _unmap_free_pages) if expandable else (_add_segment, _drop_free_segments)
        self.extend, self.release = grow
        if expandable:
            for pool in (self.small, self.large):
                pool.add(_Block(0, _ENDLESS_BYTES, is_mapped=False))

    def allocate(self, ident: int, num_bytes: int) -> bool:
        """Cached memory first, then more from the card, then more after everything free went back to it."""
        if num_bytes < 0 or ident in self.live:
            problem = f"{num_bytes} bytes under ident {ident}"
            raise ValueError(f"{problem}: give 1 byte or more, and an ident that is not live")
        size = _round_up(num_bytes, _ROUND_BYTES)
        pool = self._pool_of(size)
        block = pool.take_best_fit(size) or self.extend(pool, size)
        if block is None:
            self.release(self.large)
            self.release(self.small)
            block = self.extend(pool, size)
        if block is None:
            return False
        self.live[ident] = pool.split(block, size)
        self.allocated_bytes += block.size
        return True

    def free(self, ident: int) -> None:
        block = self.live.pop(ident, None)
        if block is None:
            raise ValueError(f"ident {ident} is freed while it is not live; allocate it first, free it once")
        block.is_live = False
        self.allocated_bytes -= block.size
        self._pool_of(block.size).join(block)

    def _pool_of(self, size: int) -> _Pool:
        return self.small if size <= _SMALL_BYTES else self.large


def _map_room(pool: _Pool, size: int) -> _Block | None:
    """Maps pages until the lowest run of holes and free blocks that has room for `size` is one free block."""
    holes = (pool.at[address] for address in pool.holes)
    runs = (hole if hole.prev is None or hole.prev.is_live else hole.prev for hole in holes)
    block = next(first for first in runs if _has_room(first, size))
    if not block.is_mapped and not _map(pool, block, min(block.size, size)):
        return None
    while block.size < size:
        hole = block.next
        assert hole is not None  # the last hole is endless
        if not _map(pool, hole, min(size - block.size, hole.size)):
            return None
        block = hole
    pool.remove(block)
    return block


def _has_room(first: _Block, size: int) -> bool:
    free = 0
    block: _Block | None = first
    while free < size and block is not None and not block.is_live:
        free, block = free + block.size, block.next
    return free >= size


def _map(pool: _Pool, hole: _Block, size: int) -> bool:
    """Maps whole pages from the start of a hole; they join the free blocks around them. All or nothing."""
    mapped_bytes = _round_up(size, pool.page_bytes)
    if not pool.card.take(mapped_bytes):
        return False
    pool.remove(hole)
    if mapped_bytes < hole.size:
        pool.add(hole.cut(mapped_bytes))
    hole.is_mapped = True
    pool.join(hole)
    return True


def _unmap_free_pages(pool: _Pool) -> None:
    """Makes holes of the pages that no live block touches."""
    for size, address in list(pool.free):
        before_bytes = -address % pool.page_bytes
        unmapped_bytes = (size - before_bytes) // pool.page_bytes * pool.page_bytes
        if unmapped_bytes > 0:
            _unmap(pool, pool.at[address], before_bytes, unmapped_bytes)


def _unmap(pool: _Pool, hole: _Block, before_bytes: int, unmapped_bytes: int) -> None:
    pool.remove(hole)
    if before_bytes > 0:
        before, hole = hole, hole.cut(before_bytes)
        pool.add(before)
    if hole.size > unmapped_bytes:
        pool.add(hole.cut(unmapped_bytes))
    hole.is_mapped = False
    pool.join(hole)
    pool.card.mapped_bytes -= unmapped_bytes


def _add_segment(pool: _Pool, size: int) -> _Block | None:
    segment_bytes = pool.page_bytes if size < _OWN_SEGMENT_BYTES else _round_up(size, _SMALL_PAGE_BYTES)
    if not pool.card.take(segment_bytes):
        return None
    block = _Block(pool.end, segment_bytes)
    pool.end += segment_bytes
    return block


def _drop_free_segments(pool: _Pool) -> None:
    for size, address in list(pool.free):
        block = pool.at[address]
        if block.prev is None and block.next is None:
            pool.remove(block)
            pool.card.mapped_bytes -= size


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
