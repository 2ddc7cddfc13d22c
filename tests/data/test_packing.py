import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.packing import Capacity, best_fit, capacity_of, fill

ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda row: (row[0], min(row))), min_size=1, max_size=60
)
"""(tokens, supervised tokens)"""


def _exhaustive(rows: list[tuple[int, int]], capacity: Capacity) -> list[list[int]]:
    """Best fit decreasing as it is defined: every open pack is looked at for every row."""
    packs: list[list[int]] = []
    left: list[tuple[int, int, int]] = []
    for row in sorted(range(len(rows)), key=lambda at: -rows[at][0]):
        length, count = rows[row]
        holding = [
            at
            for at, (tokens, supervised, free) in enumerate(left)
            if tokens >= length and supervised >= count and free
        ]
        if not holding:
            packs.append([])
            left.append((capacity.tokens, capacity.supervised, capacity.rows))
            holding = [len(packs) - 1]
        best = min(holding, key=lambda at: (left[at][0], -left[at][1], at))
        packs[best].append(row)
        left[best] = (left[best][0] - length, left[best][1] - count, left[best][2] - 1)
    return packs


@given(ROWS, st.integers(1, 5), st.integers(1, 60))
def test_packs_are_those_of_a_search_through_all_open_packs(
    rows: list[tuple[int, int]], micro_batch: int, rows_per_step: int
) -> None:
    longest, most = (max(column) for column in zip(*rows, strict=True))
    capacity = capacity_of(micro_batch=micro_batch, longest=longest, supervised=most, rows_per_step=rows_per_step)
    lengths, supervised = zip(*rows, strict=True)
    packs = best_fit(
        lengths, supervised, max_tokens=capacity.tokens, max_supervised=capacity.supervised, max_rows=capacity.rows
    )
    assert packs == _exhaustive(rows, capacity)


@given(ROWS, st.integers(1, 5), st.integers(1, 60))
def test_every_row_is_in_one_pack_no_pack_overflows_and_none_is_more_than_padded_rows_need(
    rows: list[tuple[int, int]], micro_batch: int, rows_per_step: int
) -> None:
    lengths, supervised = (np.array(column) for column in zip(*rows, strict=True))
    capacity = capacity_of(
        micro_batch=micro_batch,
        longest=int(lengths.max()),
        supervised=int(supervised.max()),
        rows_per_step=rows_per_step,
    )
    packs = best_fit(
        lengths, supervised, max_tokens=capacity.tokens, max_supervised=capacity.supervised, max_rows=capacity.rows
    )
    assert sorted(row for pack in packs for row in pack) == list(range(len(rows)))
    assert all(
        lengths[pack].sum() <= capacity.tokens and supervised[pack].sum() <= capacity.supervised for pack in packs
    )
    assert all(len(pack) <= capacity.rows for pack in packs)
    assert len(packs) <= -(-len(rows) // micro_batch)
    assert fill(lengths, packs, max_tokens=capacity.tokens) <= 1


def test_a_row_larger_than_a_pack_is_an_error_and_not_a_row_less() -> None:
    with pytest.raises(ValueError, match="larger than a pack"):
        best_fit([3, 9], [1, 1], max_tokens=8, max_supervised=8)


def test_the_cost_is_that_of_the_rows_and_not_of_the_capacity() -> None:
    rows = list(range(1, 11))
    assert best_fit(rows, rows, max_tokens=10**9, max_supervised=10**9, max_rows=5) == [
        [9, 8, 7, 6, 5],
        [4, 3, 2, 1, 0],
    ]
    assert best_fit([10**9, 1, 1], [1, 1, 1], max_tokens=10**9, max_supervised=1) == [[0], [1], [2]]


def test_a_hundred_thousand_rows_fill_their_packs_within_seconds() -> None:
    chance = np.random.RandomState(0)
    lengths = np.clip(chance.lognormal(5.3, 0.7, 100_000).astype(int), 8, 2048)
    supervised = np.maximum(1, (lengths * chance.uniform(0.1, 0.9, len(lengths))).astype(int))
    began = time.perf_counter()
    packs = best_fit(lengths, supervised, max_tokens=2048, max_supervised=int(supervised.max()))
    assert time.perf_counter() - began < 10  # every pack looked at for every row would take minutes
    assert fill(lengths, packs, max_tokens=2048) > 0.99
