import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from finefit.data.order import epoch_order, part_of_rank, rows_of_rank, rows_of_step, steps_per_epoch

SEEDS = st.integers(0, 2**32 - 1)


@given(num_rows=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 50))
def test_an_epoch_is_a_permutation_and_depends_on_seed_and_epoch_alone(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch)
    assert sorted(order) == list(range(num_rows))
    assert epoch_order(num_rows, seed, epoch) == order


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in (0, 1, 42) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert epoch_order(10, 42, 0) == [5, 0, 6, 4, 2, 7, 3, 1, 8, 9]


@given(num_rows=st.integers(1, 120), global_batch=st.integers(1, 150), seed=SEEDS, epoch=st.integers(0, 3))
def test_every_row_is_used_exactly_once_per_epoch(num_rows: int, global_batch: int, seed: int, epoch: int) -> None:
    steps = steps_per_epoch(num_rows, global_batch)
    parts = [
        rows_of_step(step, num_rows=num_rows, global_batch=global_batch, seed=seed)
        for step in range(epoch * steps, (epoch + 1) * steps)
    ]
    assert [row for part in parts for row in part] == epoch_order(num_rows, seed, epoch)
    assert all(len(part) == global_batch for part in parts[:-1])
    assert 0 < len(parts[-1]) <= global_batch


@given(num_rows=st.integers(1, 60), global_batch=st.integers(1, 70), epochs=st.integers(1, 4))
def test_after_n_epochs_every_row_was_seen_n_times(num_rows: int, global_batch: int, epochs: int) -> None:
    steps = epochs * steps_per_epoch(num_rows, global_batch)
    seen = Counter(
        row for step in range(steps) for row in rows_of_step(step, num_rows=num_rows, global_batch=global_batch, seed=7)
    )
    assert seen == dict.fromkeys(range(num_rows), epochs)


def test_the_rows_of_a_step_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert [rows_of_step(step, num_rows=10, global_batch=4, seed=42) for step in range(4)] == [
        [5, 0, 6, 4],
        [2, 7, 3, 1],
        [8, 9],
        [3, 1, 2, 9],
    ]


@given(
    num_rows=st.integers(1, 120),
    global_batch=st.integers(1, 150),
    num_ranks=st.integers(1, 9),
    seed=SEEDS,
    epoch=st.integers(0, 3),
)
def test_any_number_of_ranks_covers_an_epoch_exactly_once(
    num_rows: int, global_batch: int, num_ranks: int, seed: int, epoch: int
) -> None:
    steps = steps_per_epoch(num_rows, global_batch)
    seen: list[int] = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        parts = [
            rows_of_rank(step, rank=rank, num_ranks=num_ranks, num_rows=num_rows, global_batch=global_batch, seed=seed)
            for rank in range(num_ranks)
        ]
        whole = rows_of_step(step, num_rows=num_rows, global_batch=global_batch, seed=seed)
        assert sorted(row for part in parts for row in part) == sorted(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen += [row for part in parts for row in part]
    assert sorted(seen) == list(range(num_rows))


def test_steps_of_a_million_rows_are_found_without_a_new_order_for_each() -> None:
    rows_of_step(0, num_rows=1_000_000, global_batch=16, seed=1)
    began = time.perf_counter()
    for step in range(200):
        rows_of_step(step, num_rows=1_000_000, global_batch=16, seed=1)
    assert time.perf_counter() - began < 0.5  # 200 orders take more than a second


@given(num_pieces=st.integers(1, 40), num_ranks=st.integers(1, 9))
def test_every_rank_does_equally_many_pieces_and_every_piece_counts_once(num_pieces: int, num_ranks: int) -> None:
    parts = [part_of_rank(range(num_pieces), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(piece for part in parts for piece, counts in part if counts) == list(range(num_pieces))
    assert sum(len(part) for part in parts) - num_pieces < num_ranks
