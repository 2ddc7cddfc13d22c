from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.prepared import prepare, read_examples, read_items, write_examples, write_items
from finefit.data.render import Example, Renderer
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from tests.conftest import make_tokenizer

PLAIN = Renderer(make_tokenizer(chat=False), "plain")
CHAT = Renderer(make_tokenizer(), "chat")


def _row(number: int, length: int, *, source: str = "a.jsonl") -> Row:
    """Takes `length` tokens in plain."""
    return Row(source=source, number=number, messages=(Message("user", "q" * (length - 2)), Message("assistant", "a")))


ROWS = [_row(1, 5), _row(2, 9), _row(4, 6), _row(1, 20, source="b.jsonl"), _row(2, 6, source="b.jsonl"), _row(3, 7, source="b.jsonl")]


def test_rows_that_fit_are_all_used_in_their_order() -> None:
    prepared = prepare(ROWS, PLAIN, split="train", max_tokens=20, too_long="error")
    assert [len(e.tokens) for e in prepared.examples] == [5, 9, 6, 20, 6, 7]
    assert prepared.dropped == ()
    assert [(entry.source, entry.read, entry.used, entry.dropped) for entry in prepared.ledger] == [("a.jsonl", 3, 3, {}), ("b.jsonl", 3, 3, {})]
    assert [(entry.tokens, entry.supervised_tokens) for entry in prepared.ledger] == [(20, 6), (33, 6)]


def test_rows_that_are_too_long_are_named_and_nothing_is_cut() -> None:
    with pytest.raises(DataError) as caught:
        prepare(ROWS, PLAIN, split="train", max_tokens=8, too_long="error")
    assert caught.value.problem.splitlines() == [
        "a.jsonl:2 too long: 9 tokens, max_tokens is 8",
        "b.jsonl:1 too long: 20 tokens, max_tokens is 8",
    ]
    assert "data.too_long: drop" in caught.value.remedy


def test_of_many_rows_that_are_too_long_ten_are_named_and_the_rest_counted() -> None:
    with pytest.raises(DataError) as caught:
        prepare([_row(number, 9) for number in range(1, 14)], PLAIN, split="train", max_tokens=8, too_long="error")
    assert caught.value.problem.splitlines()[9:] == ["a.jsonl:10 too long: 9 tokens, max_tokens is 8", "and 3 more"]


def test_dropped_rows_are_counted_and_named() -> None:
    prepared = prepare(ROWS, PLAIN, split="train", max_tokens=8, too_long="drop")
    assert [(d.split, d.source, d.row) for d in prepared.dropped] == [("train", "a.jsonl", 2), ("train", "b.jsonl", 1)]
    assert [len(e.tokens) for e in prepared.examples] == [5, 6, 6, 7]


@given(lengths=st.lists(st.tuples(st.sampled_from("ab"), st.integers(3, 12)), min_size=1, max_size=20), max_tokens=st.integers(3, 12))
def test_used_and_dropped_make_what_was_read(lengths: list[tuple[str, int]], max_tokens: int) -> None:
    rows = [_row(number, length, source=source) for number, (source, length) in enumerate(lengths, start=1)]
    if all(length > max_tokens for _, length in lengths):
        with pytest.raises(DataError, match="rows are longer than max_tokens"):
            prepare(rows, PLAIN, split="train", max_tokens=max_tokens, too_long="drop")
        return
    prepared = prepare(rows, PLAIN, split="train", max_tokens=max_tokens, too_long="drop")
    assert all(entry.used + sum(entry.dropped.values()) == entry.read for entry in prepared.ledger)
    assert sum(entry.read for entry in prepared.ledger) == len(rows)
    assert sum(entry.used for entry in prepared.ledger) == len(prepared.examples)
    assert sum(entry.tokens for entry in prepared.ledger) == sum(len(e.tokens) for e in prepared.examples)
    assert len(prepared.dropped) == len(rows) - len(prepared.examples)


def test_a_row_that_cannot_be_rendered_is_named() -> None:
    row = Row(source="a.jsonl", number=7, messages=(Message("user", "x"), Message("assistant", "y"), Message("user", "x"), Message("assistant", "y")))
    with pytest.raises(DataError, match=r"^a.jsonl:7 the plain template takes one prompt"):
        prepare([row], PLAIN, split="train", max_tokens=8, too_long="error")


def test_answers_of_a_rows_prompt_are_not_supervised() -> None:
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
    (given_,) = prepare([Row(source="a", number=1, messages=messages, num_given=3)], CHAT, split="train", max_tokens=99, too_long="error").examples
    (whole,) = prepare([Row(source="a", number=1, messages=messages)], CHAT, split="train", max_tokens=99, too_long="error").examples
    assert (given_.tokens, sum(given_.supervised), sum(whole.supervised)) == (whole.tokens, 2, 4)


def test_examples_come_back_as_they_were_written(tmp_path: Path) -> None:
    examples = [Example((5,), (True,)), Example((2**31 - 1, 0, 7), (False, True, True)), Example((1, 2), (False, True))]
    write_examples(tmp_path / "train.safetensors", examples)
    assert read_examples(tmp_path / "train.safetensors") == examples


def test_equal_examples_are_equal_files(tmp_path: Path) -> None:
    examples = prepare(ROWS, PLAIN, split="train", max_tokens=20, too_long="error").examples
    for name in ("one", "two"):
        write_examples(tmp_path / name, examples)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_items_keep_their_text_to_the_letter(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "test.jsonl"
    rows = [Row(source="x", number=1, messages=(Message("user", f"{text}\u2028\r\n"), Message("assistant", text))) for text in texts]
    write_items(path, rows)
    assert [row.messages for row in read_items(path)] == [row.messages for row in rows]
