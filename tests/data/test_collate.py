import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.collate import collate, lengths_of, micro_batches, pack, supervised_counts_of
from finefit.data.examples import Example
from finefit.data.packing import Capacity, capacity_of
from finefit.objective.batch import Batch

PAD = 9
SHORT = Example((3, 4, 0), (False, True, True))
LONG = Example((5, 6, 7, 8, 0), (False, False, True, False, True))


@st.composite
def _example(draw: st.DrawFn) -> Example:
    flags = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    tokens = draw(st.lists(st.integers(0, 99), min_size=len(flags) + 2, max_size=len(flags) + 2))
    return Example(tuple(tokens), (False, *flags, True))


def test_rows_are_padded_on_the_right_and_counted_without_padding() -> None:
    batch = collate([SHORT, LONG], pad=PAD)
    assert batch.input_ids_BT.tolist() == [[3, 4, 0, PAD, PAD], [5, 6, 7, 8, 0]]
    assert (batch.num_supervised, batch.num_tokens) == (4, 8)


def test_a_position_stands_before_the_token_that_it_predicts() -> None:
    batch = collate([SHORT, LONG], pad=PAD)
    assert batch.positions_N.tolist() == [0, 1, 6, 8]
    assert batch.targets_N.tolist() == [4, 0, 7, 0]


def test_a_supervised_first_token_has_nothing_before_it_and_is_not_counted() -> None:
    batch = collate([Example((5, 0), (True, True))], pad=PAD)
    assert (batch.num_supervised, batch.positions_N.tolist(), batch.targets_N.tolist()) == (1, [0], [0])


def _capacity(examples: list[Example], micro_batch: int) -> Capacity:
    longest, supervised = int(lengths_of(examples).max()), int(supervised_counts_of(examples).max())
    return capacity_of(micro_batch=micro_batch, longest=longest, supervised=supervised, rows_per_step=len(examples))


def _assert_whole(batches: list[Batch], examples: list[Example]) -> None:
    """Every row, and every supervised token behind the one that stands before it, exactly once."""
    assert sum(b.num_rows for b in batches) == len(examples)
    assert sum(b.num_tokens for b in batches) == sum(len(e.tokens) for e in examples)
    pairs = sorted(
        (int(b.input_ids_BT.flatten()[at]), int(target))
        for b in batches
        for at, target in zip(b.positions_N, b.targets_N, strict=True)
    )
    wanted = sorted((e.tokens[at - 1], e.tokens[at]) for e in examples for at, flag in enumerate(e.supervised) if flag)
    assert pairs == wanted
    assert sum(b.num_supervised for b in batches) == len(wanted)


@given(st.lists(_example(), min_size=1, max_size=9), st.integers(1, 10))
def test_micro_batches_hold_every_supervised_token_once_whatever_the_cut(
    examples: list[Example], micro_batch: int
) -> None:
    batches = micro_batches(examples, micro_batch=micro_batch, pad=PAD)
    assert [len(b.input_ids_BT) for b in batches[:-1]] == [micro_batch] * (len(batches) - 1)
    _assert_whole(batches, examples)


@given(st.lists(_example(), min_size=1, max_size=30), st.integers(1, 6))
def test_packs_hold_every_supervised_token_once_and_never_more_than_a_padded_micro_batch(
    examples: list[Example], micro_batch: int
) -> None:
    capacity = _capacity(examples, micro_batch)
    batches = micro_batches(examples, micro_batch=micro_batch, pad=PAD, capacity=capacity)
    _assert_whole(batches, examples)
    assert all(b.input_ids_BT.shape == (1, b.num_tokens) for b in batches)
    assert all(b.num_tokens <= capacity.tokens and b.num_supervised <= capacity.supervised for b in batches)
    assert len(batches) <= len(micro_batches(examples, micro_batch=micro_batch, pad=PAD))


def test_packed_rows_stand_behind_one_another_and_count_their_positions_from_zero() -> None:
    batch = pack([SHORT, LONG])
    assert batch.input_ids_BT.tolist() == [[3, 4, 0, 5, 6, 7, 8, 0]]
    assert (batch.positions_N.tolist(), batch.targets_N.tolist()) == ([0, 1, 4, 6], [4, 0, 7, 0])
    assert batch.packed is not None
    assert batch.packed.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert (batch.packed.boundaries_R1.tolist(), str(batch.packed.boundaries_R1.dtype)) == ([0, 3, 8], "torch.int32")
    assert (batch.packed.lengths, batch.num_rows) == ((3, 5), 2)


def test_lengths_that_a_store_knows_are_taken_from_it() -> None:
    class Store(list[Example]):
        lengths = np.array([70, 80])
        supervised_counts = np.array([7, 8])

    assert lengths_of(Store([SHORT, LONG])).tolist() == [70, 80]
    assert supervised_counts_of(Store([SHORT, LONG])).tolist() == [7, 8]
    assert lengths_of([SHORT, LONG]).tolist() == [3, 5]
    assert supervised_counts_of([SHORT, Example((5, 0), (True, True))]).tolist() == [2, 1]


def test_the_longest_rows_come_first_and_share_a_micro_batch() -> None:
    batches = micro_batches([SHORT, LONG, SHORT, LONG], micro_batch=2, pad=PAD)
    assert [b.input_ids_BT.shape[1] for b in batches] == [5, 3]
