"""Verdicts leave as JSON lines, CSV, and as pairs that finefit's own reader takes for preference pairs."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from finefit.data.read import open_source
from finefit.data.rows import Row
from finefit.errors import UserError
from finefit.review.export import export_pairs, export_verdicts, preference_pairs
from finefit.review.stack import Said, Sheet, Stack
from finefit.review.verdicts import Entry, Revealed, Undone
from finefit.spec.rows import Source
from tests.reviews import MODELS, OPENED, make_single, make_stack, make_verdict


def _judged(stack: Stack) -> list[Entry]:
    return [
        OPENED,
        make_verdict(stack, 1, 0, "first", shown=(1, 0), reasons=[[], ["fabricated", "other"]]),
        make_verdict(stack, 2, 1, "second"),
        make_verdict(stack, 3, 2, "tie"),
        Undone(at=OPENED.at, rater="ann", number=2),
        Revealed(at=OPENED.at, rater="ann", open=1),
        replace(make_verdict(stack, 4, 1, "second"), note='a "quoted", note\nof two lines'),
    ]


def test_json_lines_hold_every_standing_verdict_with_its_texts(tmp_path: Path) -> None:
    stack = make_stack(4)
    assert export_verdicts(tmp_path / "out.jsonl", stack, _judged(stack)) == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["choice"], row["preferred"], row["is_blind"]) for row in rows] == [
        ("item-0", "first", MODELS[0], True),
        ("item-2", "tie", None, True),
        ("item-1", "second", MODELS[1], False),
    ]
    assert rows[0]["stood_first"] == MODELS[1]
    assert rows[0]["answers"][1] == {
        "model": MODELS[1],
        "answer": f"{MODELS[1]} answers 0",
        "reasons": ["fabricated", "other"],
    }


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    stack = make_stack(4)
    export_verdicts(tmp_path / "out.csv", stack, _judged(stack))
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["answer_b"] == f"{MODELS[1]} answers 0"
    assert rows[0]["reasons_b"] == "fabricated; other"
    assert rows[0]["prompt"] == "user: question 0"
    assert rows[2]["note"] == 'a "quoted", note\nof two lines'


@pytest.mark.parametrize("name", ["out.xlsx", "out"])
def test_another_extension_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="says no format"):
        export_verdicts(tmp_path / name, make_stack(1), [OPENED])
    with pytest.raises(UserError, match=r"no \.jsonl file"):
        export_pairs(tmp_path / name, make_stack(1), [OPENED])


def _read_pairs(path: Path) -> Sequence[Row]:
    reading = open_source(Source(path=path.name), path.parent, split="train")
    assert reading.shape.name == "preference pairs"
    rows = list(reading.rows())
    assert all(isinstance(row, Row) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


@pytest.mark.parametrize("is_text", [False, True])
def test_pairs_are_read_as_preference_pairs(tmp_path: Path, is_text: bool) -> None:
    stack = make_stack(4)
    if is_text:
        stack = replace(
            stack,
            sheets=tuple(replace(sheet, prompt=(Said(role="", text=sheet.prompt[0].text),)) for sheet in stack.sheets),
        )
    export_pairs(tmp_path / "pairs.jsonl", stack, _judged(stack))
    first, second = _read_pairs(tmp_path / "pairs.jsonl")
    assert [message.content for message in first.messages] == ["question 0", f"{MODELS[0]} answers 0"]
    assert [message.content for message in first.rejected] == [f"{MODELS[1]} answers 0"]
    assert second.answer == f"{MODELS[1]} answers 1"
    assert [message.content for message in second.rejected] == [f"{MODELS[0]} answers 1"]


def test_what_is_no_pair_is_counted_by_its_reason() -> None:
    stack = make_stack(7)
    same = replace(stack.sheets[4], answers=("alike", "alike"))
    empty = replace(stack.sheets[5], answers=("something", " "))
    stack = replace(stack, sheets=(*stack.sheets[:4], same, empty, stack.sheets[6]))
    entries: list[Entry] = [
        OPENED,
        make_verdict(stack, 1, 0, "first"),
        make_verdict(stack, 2, 1, "tie"),
        make_verdict(stack, 3, 2, "skip"),
        make_verdict(stack, 4, 3, "first"),
        make_verdict(stack, 5, 3, "second", rater="bob"),
        make_verdict(stack, 6, 4, "first"),
        make_verdict(stack, 7, 5, "first"),
    ]
    pairs = preference_pairs(stack, entries)
    assert len(pairs.rows) == 1
    assert pairs.left_out == {
        "tie": 1,
        "skipped": 1,
        "raters disagree": 1,
        "both answers are the same": 1,
        "an empty answer": 1,
        "not judged": 1,
    }


def test_a_prompt_that_a_template_has_made_is_in_no_pair(tmp_path: Path) -> None:
    stack = make_stack(2)
    rendered = replace(stack.sheets[0], prompt=(Said(role="", text="<|user|>question 0<|end|>"),), is_rendered=True)
    stack = replace(stack, sheets=(rendered, stack.sheets[1]))
    entries: list[Entry] = [OPENED, make_verdict(stack, 1, 0, "first"), make_verdict(stack, 2, 1, "first")]
    pairs = export_pairs(tmp_path / "pairs.jsonl", stack, entries)
    assert "<|user|>" not in (tmp_path / "pairs.jsonl").read_text()
    assert len(pairs.rows) == 1
    assert pairs.left_out == {"with a prompt that is only known as its template made it": 1}


def test_a_prompt_takes_its_tools_along(tmp_path: Path) -> None:
    """Also where the first rows have none."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    stack = make_stack(120)
    stack = replace(stack, sheets=(*stack.sheets[:-1], replace(stack.sheets[-1], tools=json.dumps(tools))))
    export_pairs(
        tmp_path / "pairs.jsonl", stack, [OPENED, *(make_verdict(stack, at + 1, at, "first") for at in range(120))]
    )
    pairs = _read_pairs(tmp_path / "pairs.jsonl")
    assert [json.loads(pair.tools or "[]") for pair in pairs] == [[]] * 119 + [tools]


def test_a_reference_without_its_tool_calls_is_not_preferred() -> None:
    stack = make_single(1)
    stack = replace(stack, sheets=(replace(stack.sheets[0], is_reference_whole=False),))
    pairs = preference_pairs(stack, [OPENED, make_verdict(stack, 1, 0, "bad")])
    assert pairs.rows == ()
    assert pairs.left_out == {"bad, and a reference with tool calls or reasoning, which a pair does not carry": 1}


def test_of_one_model_the_reference_is_preferred_to_a_bad_answer() -> None:
    stack = make_single(3)
    without = Sheet(key="item-2", prompt=stack.sheets[2].prompt, answers=stack.sheets[2].answers)
    stack = replace(stack, sheets=(*stack.sheets[:2], without))
    entries: list[Entry] = [
        OPENED,
        make_verdict(stack, 1, 0, "bad"),
        make_verdict(stack, 2, 1, "good"),
        make_verdict(stack, 3, 2, "bad"),
    ]
    pairs = preference_pairs(stack, entries)
    assert pairs.rows == (
        {
            "prompt": [{"role": "user", "content": "question 0"}],
            "chosen": "reference 0",
            "rejected": f"{MODELS[0]} answers 0",
        },
    )
    assert pairs.left_out == {"good": 1, "bad, and no reference to prefer": 1}
