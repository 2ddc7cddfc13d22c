from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Preparation
from finefit.data.collate import collate, largest_row, lengths_of, pack, supervised_counts_of
from finefit.data.examples import Example, ExamplePairs, ExampleWriter, Pair, open_examples
from finefit.data.order import Capacity, capacity_of, efficiency
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message, Row
from finefit.data.tokenizer_pool import ChunkRenderer
from finefit.errors import DataError
from finefit.objective.batch import Batch
from tests.conftest import make_tokenizer, write_jsonl
from tests.data.conftest import WIDE, prepared
from tests.micro_batches import micro_batches
from tests.pairs import make_pairs

PAD = 9
SHORT = Example((3, 4, 0), (False, True, True))
LONG = Example((5, 6, 7, 8, 0), (False, False, True, False, True))


@st.composite
def _example(draw: st.DrawFn) -> Example:
    flags = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    tokens = draw(st.lists(st.integers(0, 99), min_size=len(flags) + 2, max_size=len(flags) + 2))
    return Example(tuple(tokens), (False, *flags, True))


def test_rows_are_padded_on_the_right_and_a_position_stands_before_the_token_that_it_predicts() -> None:
    batch = collate([SHORT, LONG], pad=PAD)
    assert batch.input_ids_BT.tolist() == [[3, 4, 0, PAD, PAD], [5, 6, 7, 8, 0]]
    assert (batch.num_supervised, batch.num_tokens) == (4, 8)
    assert (batch.positions_N.tolist(), batch.targets_N.tolist()) == ([0, 1, 6, 8], [4, 0, 7, 0])


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


# Preference pairs from file to batch: one row of the order, two sequences that never part.

SMALL = Pair(Example((3, 4, 0), (False, True, True)), Example((3, 5, 6, 0), (False, True, True, True)))
LARGE = Pair(Example((7, 7, 8, 8, 0), (False, False, True, False, True)), Example((7, 0), (False, True)))


def _prepared(folder: Path, tokenizer: Path, data: dict[str, Any]) -> tuple[Preparation, Path]:
    return prepared(folder, tokenizer, data, pairs=True)


# on disk

_SIDE = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9)


def _pair_example(side: list[tuple[int, bool]]) -> Example:
    return Example(tuple(token for token, _ in side), tuple(flag for _, flag in side))


@settings(max_examples=50)
@given(sides=st.lists(st.tuples(_SIDE, _SIDE), min_size=1, max_size=9), data=st.data())
def test_every_pair_of_the_table_comes_back_with_its_twin(
    sides: list[tuple[list[tuple[int, bool]], list[tuple[int, bool]]]],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pairs = [Pair(_pair_example(chosen), _pair_example(rejected)) for chosen, rejected in sides]
    table = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=20))
    path = tmp_path_factory.mktemp("store") / "train.safetensors"
    sequences = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    with ExampleWriter(path, sides=2) as writer:
        tokens, flags = (np.concatenate([getattr(e, name) for e in sequences]) for name in ("tokens", "supervised"))
        writer.add(
            tokens.astype(np.int32), flags.astype(np.uint8), np.array([len(e.tokens) for e in sequences], np.int32)
        )
        assert writer.num_examples == len(pairs)
        writer.close(np.array(table))
    read = open_examples(path)
    assert isinstance(read, ExamplePairs)
    assert list(read) == [pairs[at] for at in table]
    assert read.lengths.tolist() == lengths_of([pairs[at] for at in table]).tolist()
    assert read.supervised_counts.tolist() == supervised_counts_of([pairs[at] for at in table]).tolist()
    rows, places = read.distinct()
    assert [read[int(row)] for row in rows] == [pairs[at] for at in sorted(set(table))]
    assert [read[int(rows[place])] for place in places] == list(read)


# in batches


def test_preferred_sides_come_first_and_their_twins_in_the_same_order() -> None:
    batch = collate([SMALL, LARGE], pad=PAD)
    assert batch.input_ids_BT.tolist() == [
        [3, 4, 0, PAD, PAD],
        [7, 7, 8, 8, 0],
        [3, 5, 6, 0, PAD],
        [7, 0, PAD, PAD, PAD],
    ]
    assert batch.targets_N.tolist() == [4, 0, 8, 0, 5, 6, 0, 0]
    assert batch.paired is not None
    assert (batch.paired.supervised, batch.paired.num_pairs, batch.paired.reference_R) == ((2, 2, 3, 1), 2, None)
    assert (batch.num_rows, batch.num_sequences, batch.num_tokens, batch.num_supervised) == (2, 4, 14, 8)


def test_packed_sides_stand_in_the_same_order_and_count_their_positions_from_zero() -> None:
    batch = pack([SMALL, LARGE])
    assert batch.input_ids_BT.tolist() == [[3, 4, 0, 7, 7, 8, 8, 0, 3, 5, 6, 0, 7, 0]]
    assert batch.packed is not None
    assert batch.paired is not None
    assert (batch.packed.lengths, batch.packed.boundaries_R1.tolist()) == ((3, 5, 4, 2), [0, 3, 8, 12, 14])
    assert batch.paired.supervised == (2, 2, 3, 1)
    assert (batch.num_rows, batch.num_sequences) == (2, 4)


def test_a_reference_that_was_kept_stands_beside_its_side() -> None:
    batch = collate(
        [Pair(SMALL.chosen, SMALL.rejected, (-1.0, -2.0)), Pair(LARGE.chosen, LARGE.rejected, (-3.0, -4.0))], pad=PAD
    )
    assert batch.paired is not None
    assert batch.paired.reference_R is not None
    assert batch.paired.reference_R.tolist() == [-1.0, -3.0, -2.0, -4.0]


_DRAWN = st.lists(st.booleans(), min_size=1, max_size=12).map(
    lambda flags: Example(tuple(range(len(flags) + 2)), (False, *flags, True))
)
_PAIRS = st.lists(st.builds(Pair, _DRAWN, _DRAWN), min_size=1, max_size=20)


@given(_PAIRS, st.integers(1, 6), st.booleans())
def test_both_sides_of_every_pair_are_in_one_batch_and_no_batch_holds_more_than_was_rehearsed(
    pairs: list[Pair], micro_batch: int, packs: bool
) -> None:
    longest, supervised = int(lengths_of(pairs).max()), int(supervised_counts_of(pairs).max())
    capacity = capacity_of(
        micro_batch=micro_batch, longest=longest, supervised=supervised, rows_per_step=len(pairs), sides=2
    )
    batches = micro_batches(pairs, micro_batch=micro_batch, pad=PAD, capacity=capacity if packs else None)
    assert sum(batch.num_rows for batch in batches) == len(pairs)
    assert all(batch.paired is not None and 2 * batch.num_rows == batch.num_sequences for batch in batches)
    assert all(
        batch.input_ids_BT.numel() <= 2 * micro_batch * longest and batch.num_supervised <= 2 * micro_batch * supervised
        for batch in batches
    )
    assert sum(batch.num_tokens for batch in batches) == int(lengths_of(pairs).sum())
    counts = sorted(
        (a, b)
        for batch in batches
        if batch.paired
        for a, b in zip(*np.split(np.array(batch.paired.supervised), 2), strict=True)
    )
    assert counts == sorted(map(tuple, supervised_counts_of(pairs).tolist()))


def test_a_pack_of_pairs_has_no_more_sequences_than_one_of_single_rows() -> None:
    single = capacity_of(micro_batch=1, longest=64, supervised=10, rows_per_step=1000)
    double = capacity_of(micro_batch=1, longest=64, supervised=10, rows_per_step=1000, sides=2)
    assert (single.tokens, single.supervised, single.rows) == (64, 10, 64)
    assert (double.tokens, double.supervised, double.rows) == (128, 20, 32)


def test_rows_are_grouped_by_length_the_longest_first_and_pairs_by_their_longer_side() -> None:
    single = micro_batches([SHORT, LONG, SHORT, LONG], micro_batch=2, pad=PAD)
    paired = micro_batches([SMALL, LARGE, SMALL, LARGE], micro_batch=2, pad=PAD)
    assert [batch.input_ids_BT.shape for batch in (*single, *paired)] == [(2, 5), (2, 3), (4, 5), (4, 4)]


def test_the_worst_row_is_as_long_as_any_and_as_much_supervised_as_any_on_both_sides() -> None:
    worst = largest_row([SMALL, LARGE])
    assert isinstance(worst, Pair)
    for side in (worst.chosen, worst.rejected):
        assert (len(side.tokens), sum(side.supervised[1:])) == (5, 3)
    single = largest_row([SMALL.chosen, LARGE.chosen, SMALL.rejected])
    assert isinstance(single, Example)
    assert (len(single.tokens), sum(single.supervised[1:])) == (5, 3)


def test_padding_is_counted_over_both_sides() -> None:
    lengths, supervised = lengths_of([SMALL, LARGE]), supervised_counts_of([SMALL, LARGE])
    levers = Levers(micro_batch=1)
    padded = efficiency(lengths, supervised, levers, global_batch=2, seed=0)
    assert (padded.own, padded.batches_per_step) == (14 / (2 * 4 + 2 * 5), 2)
    packed = efficiency(lengths, supervised, Levers(micro_batch=2, packing=True), global_batch=2, seed=0)
    assert (packed.own, packed.batches_per_step) == (1, 1)


# from files


def test_pairs_are_prepared_with_both_sides_and_counted_as_rows(tmp_path: Path, tokenizer: Path) -> None:
    rows = make_pairs(5)
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "held.jsonl", make_pairs(2, seed=9))
    data = {"train": [{"path": "a.jsonl", "weight": 2.0}], "validation": {"path": "held.jsonl"}, "overlap": "warn"}
    found, out = _prepared(tmp_path, tokenizer, data)
    pairs = open_examples(out / "train.safetensors")
    assert isinstance(pairs, ExamplePairs)
    renderer = open_renderer(tokenizer, "chat")
    for pair, row in zip(pairs[:5], rows, strict=True):
        for side, name in ((pair.chosen, "chosen"), (pair.rejected, "rejected")):
            assert (
                renderer.tokenizer.decode(side.tokens)
                == f"<|user|>{row['prompt']}<|end|>\n<|assistant|>{row[name]}<|end|>"
            )
            supervised = [token for token, flag in zip(side.tokens, side.supervised, strict=True) if flag]
            assert renderer.tokenizer.decode(supervised) == f"{row[name]}<|end|>"
    ledger = next(source for source in found.sources if source.split == "train")
    assert (ledger.read, ledger.used, ledger.examples, ledger.repeated) == (5, 5, 5, 5)
    assert (ledger.tokens, ledger.supervised_tokens) == (
        int(pairs.lengths[:5].sum()),
        int(pairs.supervised_counts[:5].sum()),
    )
    lengths = found.lengths
    assert lengths is not None
    assert (lengths.sides, lengths.num_rows, lengths.longest, lengths.supervised) == (
        2,
        10,
        int(pairs.lengths.max()),
        int(pairs.supervised_counts.max()),
    )
    assert lengths.mean == float(pairs.lengths.mean())
    held = open_examples(out / "validation.safetensors")
    assert lengths.validation == (int(held.lengths.max()), int(held.supervised_counts.max()))


def test_rows_that_are_no_pairs_are_refused_with_the_fields_to_name(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [{"question": "q", "answer": "a"}])
    write_jsonl(tmp_path / "judged.jsonl", [{"prompt": "q", "completion": "a", "label": True}])
    with pytest.raises(
        DataError,
        match=r"chat.jsonl holds single answers, and objective dpo(.|\n)*judged.jsonl holds answers with a verdict",
    ) as caught:
        _prepared(tmp_path, tokenizer, {"train": [{"path": "chat.jsonl"}, {"path": "judged.jsonl"}]})
    assert "fields: {prompt: ..., chosen: ..., rejected: ...}" in caught.value.remedy
    assert "objective: {kind: sft}" in caught.value.remedy


def test_test_rows_are_answered_and_need_be_no_pairs(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_pairs(3))
    write_jsonl(tmp_path / "test.jsonl", [{"question": "something else?", "answer": "a"}])
    found, _ = _prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "test": {"path": "test.jsonl"}})
    assert [(source.split, source.used) for source in found.sources] == [("train", 3), ("test", 1)]


def test_pairs_with_nothing_to_prefer_stand_in_the_ledger_with_their_place(tmp_path: Path, tokenizer: Path) -> None:
    rows = make_pairs(4)
    rows[1]["rejected"] = rows[1]["chosen"]
    rows[2] |= {"prompt": "x" * 200, "chosen": "y" * 200}
    write_jsonl(tmp_path / "a.jsonl", rows)
    found, out = _prepared(
        tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "max_tokens": 100, "too_long": "cut_prompt"}
    )
    assert len(open_examples(out / "train.safetensors")) == 2
    dropped = [
        (line["row"], line["reason"].split(":")[0])
        for line in read_lines(out / "ledger.jsonl")
        if line.get("what") == "dropped"
    ]
    assert dropped == [(2, "unusable"), (3, "too long")]
    (fault,) = (fault for fault in found.problems if fault.kind == "unusable")
    assert fault.lines == ("a.jsonl:2 chosen and rejected are equal",)


def test_several_pairs_of_one_prompt_are_no_repetition_and_the_same_pair_is(tmp_path: Path, tokenizer: Path) -> None:
    asked = {"prompt": "which number is it?", "chosen": "7"}
    rows = [asked | {"rejected": "2"}, asked | {"rejected": "3"}, asked | {"rejected": "2"}, *make_pairs(3)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found, _ = _prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}]})
    assert [(fault.kind, fault.count, fault.lines) for fault in found.problems] == [
        ("duplicate", 1, ("a.jsonl:3 is a.jsonl:1: the same row",))
    ]


def test_both_sides_keep_the_same_prompt_when_it_is_cut(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p" * 150, "chosen": "7", "rejected": "2" * 30}])
    found, out = _prepared(
        tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "max_tokens": 80, "too_long": "cut_prompt"}
    )
    pair = open_examples(out / "train.safetensors")[0]
    assert isinstance(pair, Pair)
    prompts = [side.tokens[: side.supervised.index(True)] for side in (pair.chosen, pair.rejected)]
    assert prompts[0] == prompts[1]
    assert max(len(pair.chosen.tokens), len(pair.rejected.tokens)) == 80
    assert found.sources[0].cut == 1


def _pair(chosen: str, rejected: str) -> Row:
    messages = (Message("user", "q"), Message("assistant", chosen))
    return Row(source="a.jsonl", number=1, messages=messages, num_given=1, rejected=(Message("assistant", rejected),))


def test_a_row_of_the_other_kind_is_no_use_wherever_it_stands() -> None:
    renderer, single = (
        Renderer(make_tokenizer(), "chat"),
        Row(source="a.jsonl", number=2, messages=(Message("user", "q"), Message("assistant", "a"))),
    )
    both = ChunkRenderer(renderer, WIDE, pairs=True).render([_pair("a", "b"), single])
    assert (both.examples, both.sides, len(both.lengths), list(both.problems)) == ([1, 0], 2, 2, [1])
    assert "not a preference pair" in both.problems[1][0]
    one = ChunkRenderer(renderer, WIDE).render([_pair("a", "b"), single])
    assert (one.examples, one.sides, len(one.lengths), list(one.problems)) == ([0, 1], 1, 1, [0])


def test_sides_that_differ_in_text_and_not_in_tokens_are_no_pair() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    piece = ChunkRenderer(Renderer(tokenizer, "chat"), WIDE, pairs=True).render(
        [_pair("Same", "same"), _pair("Same", "other")]
    )
    assert piece.examples == [0, 1]
    assert "the same tokens, so there is nothing to prefer" in piece.problems[0][0]


def test_a_side_that_nothing_can_be_learnt_from_is_no_pair() -> None:
    """Without a prompt the end of an empty answer has nothing before it."""
    row = Row(
        source="a.jsonl",
        number=1,
        messages=(Message("user", ""), Message("assistant", "a")),
        num_given=1,
        rejected=(Message("assistant", ""),),
    )
    piece = ChunkRenderer(Renderer(make_tokenizer(chat=False), "plain"), WIDE, pairs=True).render([row])
    assert piece.examples == [0]
    assert "without supervised tokens" in piece.problems[0][0]
