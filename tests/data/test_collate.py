from hypothesis import given
from hypothesis import strategies as st

from finefit.data.collate import collate, micro_batches
from finefit.data.render import Example

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


@given(st.lists(_example(), min_size=1, max_size=9), st.integers(1, 10))
def test_micro_batches_hold_every_supervised_token_once_whatever_the_cut(examples: list[Example], micro_batch: int) -> None:
    batches = micro_batches(examples, micro_batch=micro_batch, pad=PAD)
    assert [len(b.input_ids_BT) for b in batches[:-1]] == [micro_batch] * (len(batches) - 1)
    assert sum(len(b.input_ids_BT) for b in batches) == len(examples)
    assert sum(b.num_tokens for b in batches) == sum(len(e.tokens) for e in examples)
    pairs = sorted((int(b.input_ids_BT.flatten()[at]), int(target)) for b in batches for at, target in zip(b.positions_N, b.targets_N, strict=True))
    wanted = sorted((e.tokens[at - 1], e.tokens[at]) for e in examples for at, flag in enumerate(e.supervised) if flag)
    assert pairs == wanted
    assert sum(b.num_supervised for b in batches) == len(wanted)


def test_the_longest_rows_come_first_and_share_a_micro_batch() -> None:
    batches = micro_batches([SHORT, LONG, SHORT, LONG], micro_batch=2, pad=PAD)
    assert [b.input_ids_BT.shape[1] for b in batches] == [5, 3]
