"""The allocator against a slow oracle that derives its free blocks anew at every request, and against cases worked by
hand."""

import random
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.rehearse.allocator import Event, Replay, replay

MIB = 1 << 20
ENDLESS = 1 << 60
Region = tuple[int, int, bool]  # begin, end, is it mapped


class Oracle:
    """One expandable pool as a set of mapped pages and a list of live ranges: whatever lies between the ranges is free
    or a hole."""

    def __init__(self, page: int) -> None:
        self.page, self.mapped, self.live = page, set[int](), dict[int, tuple[int, int]]()

    def regions(self) -> list[Region]:
        edges = [0, *(edge for span in sorted(self.live.values()) for edge in span), ENDLESS]
        return [region for begin, end in zip(edges[::2], edges[1::2], strict=True) for region in self._cut(begin, end)]

    def _cut(self, begin: int, end: int) -> list[Region]:
        """The mapped and unmapped stretches of a gap between live ranges."""
        last = max(self.mapped, default=-1) + 1
        cuts = [
            begin,
            *(page * self.page for page in range(begin // self.page + 1, last + 1) if begin < page * self.page < end),
            end,
        ]
        stretches: list[Region] = []
        for low, high in pairwise(cuts):
            is_mapped = low // self.page in self.mapped
            if stretches and stretches[-1][2] == is_mapped:
                stretches[-1] = (stretches[-1][0], high, is_mapped)
            elif low < high:
                stretches.append((low, high, is_mapped))
        return stretches

    def cached(self, size: int) -> int | None:
        """Best fit; a block before a hole counts as all that it can grow to, so the next larger block may come
        first."""
        regions = self.regions()
        hole_after = {begin: end - begin for begin, end, is_mapped in regions if not is_mapped}
        fits = sorted((end - begin, begin) for begin, end, is_mapped in regions if is_mapped and end - begin >= size)
        reach = [length + hole_after.get(begin + length, 0) for length, begin in fits]
        for at, (_, begin) in enumerate(fits):
            if at + 1 == len(fits) or reach[at + 1] >= reach[at]:
                return begin
        return None

    def run(self, size: int) -> list[Region]:
        """The lowest hole, with what is free before it and after it, that has room."""
        regions = self.regions()
        for at, (begin, _, is_mapped) in enumerate(regions):
            if is_mapped:
                continue
            run = [regions[at - 1]] if at and regions[at - 1][1] == begin else []
            for region in regions[at:]:
                if run and region[0] != run[-1][1]:
                    break
                run.append(region)
            if run[-1][1] - run[0][0] >= size:
                return run
        raise AssertionError("the last hole is endless")


def oracle(events: list[Event], limit: int = ENDLESS) -> tuple[int, int, int | None]:
    """Peak allocated, peak reserved, and the event that failed."""
    small, large = Oracle(2 * MIB), Oracle(20 * MIB)
    allocated = reserved = 0

    def mapped() -> int:
        return sum(len(pool.mapped) * pool.page for pool in (small, large))

    def grown(pool: Oracle, size: int) -> int | None:
        nonlocal reserved
        run = pool.run(size)
        for begin, end, is_mapped in run:
            if is_mapped or begin >= run[0][0] + size:
                continue
            end = min(end, run[0][0] + size)
            pages = range(begin // pool.page, -(-end // pool.page))
            if mapped() + len(pages) * pool.page > limit:
                return None
            pool.mapped.update(pages)
            reserved = max(reserved, mapped())
        return run[0][0]

    for index, (ident, num_bytes) in enumerate(events):
        if num_bytes == 0:
            small.live.pop(ident, None)
            large.live.pop(ident, None)
            continue
        size = (num_bytes + 511) // 512 * 512
        pool = small if size <= MIB else large
        begin = pool.cached(size)
        if begin is None:
            begin = grown(pool, size)
        if begin is None:
            for each in (small, large):
                for low, high, is_mapped in each.regions():
                    if is_mapped:
                        each.mapped -= set(range(-(-low // each.page), high // each.page))
            begin = grown(pool, size)
        if begin is None:
            return allocated, reserved, index
        pool.live[ident] = (begin, begin + size)
        allocated = max(allocated, sum(high - low for each in (small, large) for low, high in each.live.values()))
    return allocated, reserved, None


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


def answer(result: Replay) -> tuple[int, int, int | None]:
    return result.allocated_bytes, result.reserved_bytes, result.failed_at


# Against the oracle


@given(streams())
def test_an_unlimited_replay_equals_the_oracle(events: list[Event]) -> None:
    assert answer(replay(events)) == oracle(events)


@given(streams(), st.floats(0.3, 1.0))
@settings(max_examples=200)
def test_a_limited_replay_equals_the_oracle(events: list[Event], share: float) -> None:
    limit = int(replay(events).reserved_bytes * share)
    assert answer(replay(events, limit_bytes=limit)) == oracle(events, limit)


# What holds for every stream


@given(streams(), st.booleans())
def test_reserved_is_never_less_than_allocated(events: list[Event], expandable: bool) -> None:
    result = replay(events, expandable=expandable)
    assert result.reserved_bytes >= result.allocated_bytes
    assert result.fits
    assert result.failed_at is None


@given(streams())
def test_allocated_is_the_peak_of_rounded_sizes_and_peak_at_is_where_it_is_first_reached(events: list[Event]) -> None:
    sizes = {ident: (num_bytes + 511) // 512 * 512 for ident, num_bytes in events if num_bytes}
    now, sums = 0, []
    for ident, num_bytes in events:
        now += sizes[ident] if num_bytes else -sizes[ident]
        sums.append(now)
    result = replay(events)
    assert (result.allocated_bytes, result.peak_at) == (max(sums, default=0), sums.index(max(sums)) if events else 0)


@given(streams())
def test_reserved_at_is_the_event_that_completes_the_peak(events: list[Event]) -> None:
    result = replay(events)
    assert replay(events[: result.reserved_at + 1]).reserved_bytes == result.reserved_bytes
    assert not events or replay(events[: result.reserved_at]).reserved_bytes < result.reserved_bytes


@given(streams(most=100))
def test_after_everything_is_freed_the_same_stream_needs_nothing_more(events: list[Event]) -> None:
    again = [(ident + 1000, num_bytes) for ident, num_bytes in events]
    assert answer(replay([*events, *frees(events), *again])) == answer(replay(events))


@given(streams(), st.booleans(), st.integers(0, 100 * MIB))
def test_a_limit_of_what_is_reserved_without_one_changes_nothing(
    events: list[Event], expandable: bool, more: int
) -> None:
    free = replay(events, expandable=expandable)
    assert replay(events, limit_bytes=free.reserved_bytes + more, expandable=expandable) == free


@given(streams(), st.booleans(), st.integers(0, 600 * MIB))
def test_a_limit_is_never_passed(events: list[Event], expandable: bool, limit: int) -> None:
    result = replay(events, limit_bytes=limit, expandable=expandable)
    assert result.allocated_bytes <= result.reserved_bytes <= limit
    assert result.fits == (result.failed_at is None)


# One rule at a time


def test_no_events_need_nothing() -> None:
    assert replay([]) == Replay(
        allocated_bytes=0, reserved_bytes=0, peak_at=0, reserved_at=0, fits=True, failed_at=None
    )


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
    result = replay(events)
    assert (result.allocated_bytes, result.reserved_bytes) == (21 * MIB, 40 * MIB)
    assert (result.peak_at, result.reserved_at) == (3, 3)


def test_free_pages_of_one_place_serve_another_under_a_limit() -> None:
    """[40 free][20]: 60 MiB do not fit into the hole, but its two pages can be mapped behind the block that stays."""
    events = [*allocations(40 * MIB, 20 * MIB), (0, 0), (2, 60 * MIB)]
    assert replay(events).reserved_bytes == 120 * MIB
    assert replay(events, limit_bytes=80 * MIB) == Replay(
        allocated_bytes=80 * MIB, reserved_bytes=80 * MIB, peak_at=3, reserved_at=3, fits=True, failed_at=None
    )
    assert replay(events, limit_bytes=80 * MIB - 1).failed_at == 3


def test_free_pages_of_one_pool_serve_the_other_under_a_limit() -> None:
    events = [*allocations(20 * MIB), (0, 0), (1, MIB)]
    assert replay(events, limit_bytes=20 * MIB).fits


def test_a_page_that_a_live_block_touches_stays_mapped() -> None:
    """The 2 MiB in the middle hold both pages of the 40: nothing can be unmapped, and nothing fits."""
    events = [*allocations(19 * MIB, 2 * MIB, 19 * MIB), (0, 0), (2, 0), (3, 20 * MIB)]
    assert replay(events, limit_bytes=59 * MIB).failed_at == 5
    assert replay(events, limit_bytes=60 * MIB).fits


def test_an_unmapped_hole_is_mapped_again_before_the_end_grows() -> None:
    """The 75 MiB push out the free 60, [60 hole][20][75]; the 15 go into that hole: behind the 75 they would pin a
    page, and 100 would not fit."""
    events = [*allocations(60 * MIB, 20 * MIB), (0, 0), (2, 75 * MIB), (3, 15 * MIB), (2, 0), (4, 100 * MIB)]
    assert answer(replay(events, limit_bytes=140 * MIB)) == (135 * MIB, 140 * MIB, None)
    assert replay(events, limit_bytes=140 * MIB - 1).failed_at == 6


def test_the_event_that_fails_is_named_and_the_rest_is_not_replayed() -> None:
    events = [*allocations(20 * MIB, 40 * MIB, 20 * MIB), (3, 400 * MIB)]
    assert replay(events, limit_bytes=60 * MIB) == Replay(
        allocated_bytes=60 * MIB, reserved_bytes=60 * MIB, peak_at=1, reserved_at=1, fits=False, failed_at=2
    )


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


def test_free_segments_are_released_before_a_request_fails() -> None:
    events = [*allocations(20 * MIB, 20 * MIB), (0, 0), (2, 30 * MIB)]
    assert replay(events, expandable=False).reserved_bytes == 70 * MIB
    assert replay(events, limit_bytes=50 * MIB, expandable=False).fits
    assert replay(events, limit_bytes=50 * MIB - 1, expandable=False).failed_at == 3


def test_a_segment_in_use_is_not_released() -> None:
    """The 2 MiB block holds its 20 MiB segment, which an expandable pool would have given back in part."""
    events = [*allocations(9 * MIB, 2 * MIB), (0, 0), (2, 20 * MIB)]
    assert replay(events, limit_bytes=39 * MIB, expandable=False).failed_at == 3
    assert replay(events, limit_bytes=40 * MIB, expandable=False).fits


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
    assert replay(events).fits


def test_the_allocator_loads_no_torch() -> None:
    code = "import sys, finefit.rehearse.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
