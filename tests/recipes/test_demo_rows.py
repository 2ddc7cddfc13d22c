"""The rows of `finefit demo` are strict, grounded, disjoint, and reproducible byte for byte."""

import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "src" / "finefit" / "recipes" / "demo"
NUM_ROWS = {"train": 272, "validation": 24, "test": 40}
KEYS = ["customer", "item", "quantity", "day", "urgent"]
DAYS = {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"}
NUMBER_WORDS = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    roles: tuple[str, ...]
    system: str
    request: str
    message: str
    answer: str

    @property
    def order(self) -> dict[str, str | int | bool | None]:
        order: dict[str, str | int | bool | None] = json.loads(self.answer)
        return order

    @property
    def words(self) -> tuple[str, ...]:
        """The message after normalisation: no case, no punctuation, no runs of spaces."""
        return tuple(re.findall(r"\w+", self.message.lower()))


def parse(line: str) -> Row:
    turns = json.loads(line)["messages"]
    system, user, answer = (turn["content"] for turn in turns)
    request, message = user.split("\n")
    return Row(
        roles=tuple(turn["role"] for turn in turns), system=system, request=request, message=message, answer=answer
    )


@cache
def rows(split: str) -> tuple[Row, ...]:
    return tuple(parse(line) for line in (ROWS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())


def fivegrams(row: Row) -> set[tuple[str, ...]]:
    return {row.words[start : start + 5] for start in range(len(row.words) - 4)}


def overlap(one: Row, other: Row) -> float:
    """Jaccard similarity of the word 5-grams of two messages."""
    mine, theirs = fivegrams(one), fivegrams(other)
    return len(mine & theirs) / max(1, len(mine | theirs))


@pytest.mark.parametrize("split", NUM_ROWS)
def test_every_row_is_the_same_short_conversation(split: str) -> None:
    assert len(rows(split)) == NUM_ROWS[split]
    assert {row.roles for row in rows(split)} == {("system", "user", "assistant")}
    assert {(row.system, row.request) for row in rows(split)} == {(rows("train")[0].system, rows("train")[0].request)}
    assert max(len(row.message.split()) for row in rows(split)) <= 36


@pytest.mark.parametrize("split", NUM_ROWS)
def test_every_answer_is_compact_strict_json_with_exactly_the_keys_and_types(split: str) -> None:
    for row in rows(split):
        order = row.order
        assert list(order) == KEYS
        assert row.answer == json.dumps(order, ensure_ascii=False, separators=(",", ":"))
        assert [type(order[key]) for key in ("customer", "item", "quantity", "urgent")] == [str, str, int, bool]
        assert order["day"] is None or order["day"] in DAYS


@pytest.mark.parametrize("split", NUM_ROWS)
def test_every_value_is_grounded_in_the_message(split: str) -> None:
    for row in rows(split):
        order, message = row.order, row.message.lower()
        assert str(order["customer"]).lower() in message
        assert str(order["item"]) in message
        assert order["quantity"] == 1 or {str(order["quantity"]), *spelled(order["quantity"])} & set(row.words)
        assert ("any day" in message) == (order["day"] is None)
        assert order["day"] is None or any(
            str(order["day"]).lower().startswith(word) for word in row.words if len(word) > 2
        )


def spelled(quantity: object) -> list[str]:
    return [NUMBER_WORDS[quantity]] if isinstance(quantity, int) and quantity < len(NUMBER_WORDS) else []


def test_the_splits_share_no_message_even_without_case_and_punctuation() -> None:
    for one, other in combinations(NUM_ROWS, 2):
        assert not {row.words for row in rows(one)} & {row.words for row in rows(other)}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_no_held_out_message_is_a_near_duplicate_of_a_training_message(split: str) -> None:
    assert max(overlap(held_out, trained) for held_out in rows(split) for trained in rows("train")) < 0.25


def test_most_customers_and_items_of_the_test_rows_never_occur_in_training() -> None:
    trained = " ".join(row.message.lower() for row in rows("train"))
    for key, expected in (("customer", 35), ("item", 30)):  # the README's figures
        unseen = [row for row in rows("test") if str(row.order[key]).lower() not in trained]
        assert len(unseen) == expected, f"{len(unseen)} of {len(rows('test'))} test rows have an unseen {key}"


def test_no_test_row_repeats_the_customer_and_item_of_a_training_row() -> None:
    trained = {(row.order["customer"], row.order["item"]) for row in rows("train")}
    assert not trained & {(row.order["customer"], row.order["item"]) for row in rows("test")}


@pytest.mark.parametrize("split", NUM_ROWS)
def test_no_constant_answer_is_right_often(split: str) -> None:
    for key, most in (("customer", 0.2), ("item", 0.25), ("quantity", 0.4), ("day", 0.55), ("urgent", 0.7)):
        values = [row.order[key] for row in rows(split)]
        assert max(values.count(value) for value in values) <= most * len(values), key
