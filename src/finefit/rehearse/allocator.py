"""Replays a stream of allocations as torch's CUDA caching allocator would, and returns what it reserves on a card with
enough memory.

The rules are those of torch 2.11 to 2.13 on one stream with default settings: requests up to 1 MiB come from the small
pool, the rest from the large one; the best fitting free block is taken and split; freed blocks merge with their
neighbours. An expandable pool is one address range that grows at its end by whole pages; otherwise a pool is a set of
segments of fixed size. The behaviour of a full card (cached memory is returned to it) is not needed: a plan compares
the peak of reserved memory with the card."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The allocator's answer to a stream of events."""

    allocated_bytes: int
    """Peak of the sum of live blocks, as counted by `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int
    """Peak of the memory held from the card, as counted by `torch.cuda.max_memory_reserved`."""
    peak_at: int
    """The first event at which allocated memory is at its peak."""


def replay(events: Iterable[Event], *, expandable: bool = True) -> Replay:
    small = _Pool(_SMALL_PAGE_BYTES, 0, is_expandable=expandable)
    large = _Pool(_LARGE_PAGE_BYTES, 0 if expandable else _SMALL_BYTES, is_expandable=expandable)
    live: dict[int, _Block] = {}
    allocated = peak = peak_at = 0
    for index, (ident, num_bytes) in enumerate(events):
        if num_bytes == 0:
            if ident not in live:
                raise ValueError(f"ident {ident} is freed while it is not live; allocate it first, free it once")
            block = live.pop(ident)
            allocated -= block.size
            (small if block.size <= _SMALL_BYTES else large).free(block)
            continue
        if num_bytes < 0 or ident in live:
            remedy = "give 1 byte or more, and an ident that is not live"
            raise ValueError(f"{num_bytes} bytes under ident {ident}: {remedy}")
        size = _round_up(num_bytes, _ROUND_BYTES)
        live[ident] = (small if size <= _SMALL_BYTES else large).allocate(size)
        allocated += live[ident].size
        if allocated > peak:
            peak, peak_at = allocated, index
    return Replay(allocated_bytes=peak, reserved_bytes=small.end + large.end, peak_at=peak_at)


class _Block:
    """A live or free range of addresses, between its neighbours."""

    __slots__ = ("address", "is_live", "next", "prev", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.is_live = address, size, False
        self.prev: _Block | None = None
        self.next: _Block | None = None


class _Pool:
    __slots__ = ("at", "end", "free_sizes", "is_expandable", "kept_bytes", "last", "page_bytes")

    def __init__(self, page_bytes: int, kept_bytes: int, *, is_expandable: bool) -> None:
        self.page_bytes, self.is_expandable = page_bytes, is_expandable
        self.kept_bytes = kept_bytes  # a remainder of at most this size stays with the block
        self.free_sizes: list[tuple[int, int]] = []  # (size, address) of the free blocks
        self.at: dict[int, _Block] = {}  # the same blocks by address
        self.end = 0  # all reserved bytes; on a card, addresses of fixed segments may order equal blocks otherwise
        self.last: _Block | None = None  # the end at which an expandable pool grows

    def allocate(self, size: int) -> _Block:
        index, count = bisect_left(self.free_sizes, (size, 0)), len(self.free_sizes)
        # a free tail counts with all that it can grow to, so the next larger block comes first
        if self.is_expandable and index + 1 < count and sum(self.free_sizes[index]) == self.end:
            index += 1
        if index < count:
            block = self.at[self.free_sizes[index][1]]
            self._remove(block)
        elif self.is_expandable:
            block = self._grow(size)
        else:
            segment = self.page_bytes if size < _OWN_SEGMENT_BYTES else _round_up(size, _SMALL_PAGE_BYTES)
            block = _Block(self.end, segment)
            self.end += segment
        block.is_live = True
        if block.size - size > self.kept_bytes:
            rest = _Block(block.address + size, block.size - size)
            rest.prev, rest.next = block, block.next
            self._link(rest, rest.next)
            block.next, block.size = rest, size
            self._add(rest)
        return block

    def _grow(self, size: int) -> _Block:
        """Grows by the pages that a free tail lacks; the returned block extends from that tail to the new end."""
        block = self.last
        if block is None or block.is_live:
            block = _Block(self.end, 0)
            block.prev = self.last
            if self.last is not None:
                self.last.next = block
            self.last = block
        else:
            self._remove(block)
        more = _round_up(size - block.size, self.page_bytes)
        block.size += more
        self.end += more
        return block

    def free(self, block: _Block) -> None:
        """Merges the block with its free neighbours."""
        block.is_live = False
        left, right = block.prev, block.next
        if left is not None and not left.is_live:
            self._remove(left)
            block.address, block.size, block.prev = left.address, block.size + left.size, left.prev
            if left.prev is not None:
                left.prev.next = block
        if right is not None and not right.is_live:
            self._remove(right)
            block.size, block.next = block.size + right.size, right.next
            self._link(block, block.next)
        self._add(block)

    def _link(self, block: _Block, after: _Block | None) -> None:
        """Links `block` before `after`, or as the last block."""
        if after is not None:
            after.prev = block
        elif self.is_expandable:
            self.last = block

    def _add(self, block: _Block) -> None:
        self.at[block.address] = block
        insort(self.free_sizes, (block.size, block.address))

    def _remove(self, block: _Block) -> None:
        del self.at[block.address]
        del self.free_sizes[bisect_left(self.free_sizes, (block.size, block.address))]


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
