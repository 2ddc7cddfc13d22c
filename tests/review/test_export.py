"""Verdicts leave as JSON lines, CSV, and as pairs that finefit's own reader takes for preference pairs."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from finefit.data.rows import Row
from finefit.data.sources import open_source
from finefit.errors import UserError
from finefit.review.export import export_pairs, export_verdicts, preference_pairs
from finefit.review.items import PromptMessage, ReviewItem, ReviewSet
from finefit.review.verdicts import JournalEntry, ResultsRevealed, VerdictUndone
from finefit.spec.data import Source
from tests.reviews import MODELS, OPENED, make_review_set, make_single, make_verdict


def _judged(review_set: ReviewSet) -> list[JournalEntry]:
    return [
        OPENED,
        make_verdict(review_set, 1, 0, "first", shown=(1, 0), reasons=[[], ["fabricated", "other"]]),
        make_verdict(review_set, 2, 1, "second"),
        make_verdict(review_set, 3, 2, "tie"),
        VerdictUndone(at=OPENED.at, rater="ann", number=2),
        ResultsRevealed(at=OPENED.at, rater="ann", open=1),
        replace(make_verdict(review_set, 4, 1, "second"), note='a "quoted", note\nof two lines'),
    ]


def test_json_lines_hold_every_standing_verdict_with_its_texts(tmp_path: Path) -> None:
    review_set = make_review_set(4)
    assert export_verdicts(tmp_path / "out.jsonl", review_set, _judged(review_set)) == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["choice"], row["preferred"], row["is_blind"]) for row in rows] == [
        ("item-0", "first", MODELS[0], True),
        ("item-2", "tie", None, True),
        ("item-1", "second", MODELS[1], False),
    ]
    assert rows[0]["shown_first"] == MODELS[1]
    assert rows[0]["answers"][1] == {
        "model": MODELS[1],
        "answer": f"{MODELS[1]} answers 0",
        "reasons": ["fabricated", "other"],
    }


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    review_set = make_review_set(4)
    export_verdicts(tmp_path / "out.csv", review_set, _judged(review_set))
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["answer_b"] == f"{MODELS[1]} answers 0"
    assert rows[0]["reasons_b"] == "fabricated; other"
    assert rows[0]["prompt"] == "user: question 0"
    assert rows[2]["note"] == 'a "quoted", note\nof two lines'


@pytest.mark.parametrize("name", ["out.xlsx", "out"])
def test_another_extension_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.jsonl or \.csv"):
        export_verdicts(tmp_path / name, make_review_set(1), [OPENED])
    with pytest.raises(UserError, match=r"name it out.jsonl"):
        export_pairs(tmp_path / name, make_review_set(1), [OPENED])


def _read_pairs(path: Path) -> Sequence[Row]:
    reading = open_source(Source(path=path.name), path.parent, split="train")
    assert [shape.name for shape in reading.shapes] == ["preference pairs"]
    rows = list(reading.rows())
    assert all(isinstance(row, Row) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


@pytest.mark.parametrize("is_text", [False, True])
def test_pairs_are_read_as_preference_pairs(tmp_path: Path, is_text: bool) -> None:
    review_set = make_review_set(4)
    if is_text:
        review_set = replace(
            review_set,
            items=tuple(
                replace(item, prompt=(PromptMessage(role="", text=item.prompt[0].text),)) for item in review_set.items
            ),
        )
    export_pairs(tmp_path / "pairs.jsonl", review_set, _judged(review_set))
    first, second = _read_pairs(tmp_path / "pairs.jsonl")
    assert [message.content for message in first.messages] == ["question 0", f"{MODELS[0]} answers 0"]
    assert [message.content for message in first.rejected] == [f"{MODELS[1]} answers 0"]
    assert second.answer == f"{MODELS[1]} answers 1"
    assert [message.content for message in second.rejected] == [f"{MODELS[0]} answers 1"]


def test_what_is_no_pair_is_counted_by_its_reason() -> None:
    review_set = make_review_set(7)
    same = replace(review_set.items[4], answers=("alike", "alike"))
    empty = replace(review_set.items[5], answers=("something", " "))
    review_set = replace(review_set, items=(*review_set.items[:4], same, empty, review_set.items[6]))
    entries: list[JournalEntry] = [
        OPENED,
        make_verdict(review_set, 1, 0, "first"),
        make_verdict(review_set, 2, 1, "tie"),
        make_verdict(review_set, 3, 2, "skip"),
        make_verdict(review_set, 4, 3, "first"),
        make_verdict(review_set, 5, 3, "second", rater="bob"),
        make_verdict(review_set, 6, 4, "first"),
        make_verdict(review_set, 7, 5, "first"),
    ]
    pairs = preference_pairs(review_set, entries)
    assert len(pairs.rows) == 1
    reasons = ("tie", "skipped", "raters disagree", "equal answers", "empty answer", "not judged")
    assert pairs.left_out == dict.fromkeys(reasons, 1)


def test_a_prompt_that_a_template_has_made_is_in_no_pair(tmp_path: Path) -> None:
    review_set = make_review_set(2)
    rendered = replace(
        review_set.items[0], prompt=(PromptMessage(role="", text="<|user|>question 0<|end|>"),), is_rendered=True
    )
    review_set = replace(review_set, items=(rendered, review_set.items[1]))
    entries: list[JournalEntry] = [
        OPENED,
        make_verdict(review_set, 1, 0, "first"),
        make_verdict(review_set, 2, 1, "first"),
    ]
    pairs = export_pairs(tmp_path / "pairs.jsonl", review_set, entries)
    assert "<|user|>" not in (tmp_path / "pairs.jsonl").read_text()
    assert len(pairs.rows) == 1
    assert list(pairs.left_out.values()) == [1]


def test_a_prompt_takes_its_tools_along(tmp_path: Path) -> None:
    """Also where the first rows have none."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    review_set = make_review_set(120)
    review_set = replace(
        review_set, items=(*review_set.items[:-1], replace(review_set.items[-1], tools=json.dumps(tools)))
    )
    export_pairs(
        tmp_path / "pairs.jsonl",
        review_set,
        [OPENED, *(make_verdict(review_set, at + 1, at, "first") for at in range(120))],
    )
    pairs = _read_pairs(tmp_path / "pairs.jsonl")
    assert [json.loads(pair.tools or "[]") for pair in pairs] == [[]] * 119 + [tools]


def test_a_reference_without_its_tool_calls_is_not_preferred() -> None:
    review_set = make_single(1)
    review_set = replace(review_set, items=(replace(review_set.items[0], is_reference_whole=False),))
    pairs = preference_pairs(review_set, [OPENED, make_verdict(review_set, 1, 0, "bad")])
    assert pairs.rows == ()
    assert list(pairs.left_out.values()) == [1]


def test_of_one_model_the_reference_is_preferred_to_a_bad_answer() -> None:
    review_set = make_single(3)
    without = ReviewItem(key="item-2", prompt=review_set.items[2].prompt, answers=review_set.items[2].answers)
    review_set = replace(review_set, items=(*review_set.items[:2], without))
    entries: list[JournalEntry] = [
        OPENED,
        make_verdict(review_set, 1, 0, "bad"),
        make_verdict(review_set, 2, 1, "good"),
        make_verdict(review_set, 3, 2, "bad"),
    ]
    pairs = preference_pairs(review_set, entries)
    assert pairs.rows == (
        {
            "prompt": [{"role": "user", "content": "question 0"}],
            "chosen": "reference 0",
            "rejected": f"{MODELS[0]} answers 0",
        },
    )
    assert (pairs.left_out["good"], sum(pairs.left_out.values())) == (1, 2)
