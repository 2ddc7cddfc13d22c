"""The allocator against a slow oracle that derives its free blocks anew at every request, and against cases worked by
hand."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.rehearse.allocator import Event, Replay, replay

MIB = 1 << 20


class Oracle:
    """One expandable pool as a number of mapped pages and a list of live ranges: whatever lies between them is free."""

    def __init__(self, page: int) -> None:
        self.page, self.end, self.live = page, 0, dict[int, tuple[int, int]]()

    def place(self, size: int) -> int:
        """Best fit; the free tail counts as all that it can grow to, so the next larger block comes before it."""
        edges = [0, *(edge for span in sorted(self.live.values()) for edge in span), self.end]
        gaps = [(end - begin, begin) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
        fits = sorted(gap for gap in gaps if gap[0] >= size)
        if len(fits) > 1 and sum(fits[0]) == self.end:
            return fits[1][1]
        if fits:
            return fits[0][1]
        begin = next((begin for length, begin in gaps if begin + length == self.end), self.end)
        self.end = -(-(begin + size) // self.page) * self.page
        return begin


def oracle(events: list[Event]) -> tuple[int, int]:
    """Peak allocated, peak reserved."""
    small, large = Oracle(2 * MIB), Oracle(20 * MIB)
    allocated = 0
    for ident, num_bytes in events:
        if num_bytes == 0:
            small.live.pop(ident, None)
            large.live.pop(ident, None)
            continue
        size = (num_bytes + 511) // 512 * 512
        pool = small if size <= MIB else large
        begin = pool.place(size)
        pool.live[ident] = (begin, begin + size)
        allocated = max(allocated, sum(high - low for each in (small, large) for low, high in each.live.values()))
    return allocated, small.end + large.end


@st.composite
def streams(draw: st.DrawFn, most: int = 200) -> list[Event]:
    sizes = st.one_of(
        st.integers(1, 4096),
        st.integers(4096, 2 * MIB),
        st.integers(1, 30).map(lambda n: n * MIB),
        st.integers(1, 300 * MIB),
    )
    steps = draw(st.lists(st.one_of(sizes, st.integers(-8, -1)), min_size=1, max_size=most))
    events: list[Event] = []
    live: list[int] = []
    for ident, step in enumerate(steps):
        if step > 0:
            events.append((ident, step))
            live.append(ident)
        elif live:  # one of the youngest eight, as in a training step
            events.append((live.pop(max(step, -len(live))), 0))
    return events


def frees(events: list[Event]) -> list[Event]:
    freed = {ident for ident, num_bytes in events if num_bytes == 0}
    return [(ident, 0) for ident, num_bytes in events if num_bytes and ident not in freed]


def allocations(*sizes: int) -> list[Event]:
    return list(enumerate(sizes))


def answer(result: Replay) -> tuple[int, int]:
    return result.allocated_bytes, result.reserved_bytes


@given(streams())
@settings(max_examples=200)
def test_a_replay_equals_the_oracle(events: list[Event]) -> None:
    assert answer(replay(events)) == oracle(events)


# What holds for every stream


@given(streams(), st.booleans())
def test_reserved_is_never_less_than_allocated(events: list[Event], expandable: bool) -> None:
    result = replay(events, expandable=expandable)
    assert result.reserved_bytes >= result.allocated_bytes


@given(streams())
def test_allocated_is_the_peak_of_rounded_sizes_and_peak_at_is_where_it_is_first_reached(events: list[Event]) -> None:
    sizes = {ident: (num_bytes + 511) // 512 * 512 for ident, num_bytes in events if num_bytes}
    now, sums = 0, []
    for ident, num_bytes in events:
        now += sizes[ident] if num_bytes else -sizes[ident]
        sums.append(now)
    result = replay(events)
    assert (result.allocated_bytes, result.peak_at) == (max(sums, default=0), sums.index(max(sums)) if events else 0)


@given(streams(most=100))
def test_after_everything_is_freed_the_same_stream_needs_nothing_more(events: list[Event]) -> None:
    again = [(ident + 1000, num_bytes) for ident, num_bytes in events]
    assert answer(replay([*events, *frees(events), *again])) == answer(replay(events))


# One rule at a time


def test_no_events_need_nothing() -> None:
    assert replay([]) == Replay(allocated_bytes=0, reserved_bytes=0, peak_at=0)


@pytest.mark.parametrize(("num_bytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)])
def test_a_request_is_rounded_up_to_512_bytes(num_bytes: int, rounded: int) -> None:
    assert replay(allocations(num_bytes)).allocated_bytes == rounded


@pytest.mark.parametrize(("num_bytes", "page"), [(MIB - 511, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB)])
def test_one_mib_is_the_last_small_request(num_bytes: int, page: int) -> None:
    assert replay(allocations(num_bytes)).reserved_bytes == page


def test_growth_counts_the_free_tail() -> None:
    assert replay(allocations(15 * MIB, 25 * MIB)).reserved_bytes == 40 * MIB
    assert replay(allocations(15 * MIB, 25 * MIB + 512)).reserved_bytes == 60 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Free: 6 and 4 MiB, and 7 at the end; 4 goes into 4, so 6 and then 7 still have their places."""
    events = allocations(6 * MIB, MIB + 512, 4 * MIB, 2 * MIB - 512)
    events += [(0, 0), (2, 0), (4, 4 * MIB), (5, 6 * MIB), (6, 7 * MIB)]
    assert replay(events).reserved_bytes == 20 * MIB


def test_of_equal_blocks_the_lowest_is_taken() -> None:
    """[2 free][2][2 free][2][12 free]: the first is taken, so that the second, the block behind it and the tail can
    become 16."""
    events = allocations(2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB)
    events += [(0, 0), (2, 0), (4, 2 * MIB), (3, 0), (5, 16 * MIB)]
    assert replay(events).reserved_bytes == 20 * MIB


def test_the_free_tail_counts_as_endless() -> None:
    """A hole of 9 MiB is taken for 4 MiB although the tail of 5 fits better; the tail keeps its 5 for the next
    request."""
    events = allocations(9 * MIB, 6 * MIB)
    events += [(0, 0), (2, 4 * MIB), (3, 5 * MIB + 512)]
    assert replay(events).reserved_bytes == 40 * MIB
    assert replay([*events[:-1], (3, 5 * MIB), (4, 5 * MIB)]).reserved_bytes == 20 * MIB


def test_freed_neighbours_on_both_sides_become_one_block() -> None:
    events = [*allocations(6 * MIB, 7 * MIB, 5 * MIB, 2 * MIB), (0, 0), (2, 0), (1, 0), (4, 18 * MIB)]
    assert replay(events).reserved_bytes == 20 * MIB


def test_a_hole_that_is_too_small_forces_growth() -> None:
    """10 MiB are free before the block that stays, but 11 have to go behind it."""
    events = [*allocations(10 * MIB, 10 * MIB), (0, 0), (2, 11 * MIB)]
    assert replay(events) == Replay(allocated_bytes=21 * MIB, reserved_bytes=40 * MIB, peak_at=3)


# Without expandable segments


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_a_fixed_segment_has_the_size_of_its_class(num_bytes: int, segment: int) -> None:
    assert replay(allocations(num_bytes), expandable=False).reserved_bytes == segment


def test_fixed_segments_do_not_grow() -> None:
    assert replay(allocations(15 * MIB, 25 * MIB), expandable=False).reserved_bytes == 42 * MIB


def test_a_remainder_of_one_mib_stays_with_its_block_in_a_fixed_segment() -> None:
    """11 of 20 MiB are free; when 10 are asked for, the last one is counted as allocated too, as torch counts it."""
    assert replay(allocations(9 * MIB, 10 * MIB), expandable=False).allocated_bytes == 20 * MIB
    assert replay(allocations(9 * MIB, 10 * MIB - 512), expandable=False).allocated_bytes == 19 * MIB - 512
    assert replay(allocations(9 * MIB, 10 * MIB - 512, MIB + 512), expandable=False).reserved_bytes == 20 * MIB


# Wrong streams, size, weight


@pytest.mark.parametrize("events", [[(0, 0)], [(0, 1), (0, 0), (0, 0)], [(0, 1), (0, 1)], [(0, -1)]])
def test_a_stream_that_cannot_be_is_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="ident 0"):
        replay(events)


def test_200_000_events_are_replayed() -> None:
    rng = random.Random(0)
    events = allocations(*(rng.choice((4096, 128 << 10, 2 * MIB, 25 * MIB)) for _ in range(1000)))
    live: list[int] = []
    for ident in range(1000, 120_000):
        events.append((ident, rng.choice((512, 700_000, 3 * MIB, 14 * MIB, rng.randrange(1, 80 * MIB)))))
        live.append(ident)
        while len(live) > 500 or (len(live) > 8 and rng.random() < 0.45):
            events.append((live.pop(-rng.randrange(1, 8)), 0))
    assert len(events) > 200_000
    assert replay(events).reserved_bytes > 0


def test_the_allocator_loads_no_torch() -> None:
    code = "import sys, finefit.rehearse.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
