"""Rows that are trained on are found among those that are asked, whatever becomes of them later."""

from pathlib import Path
from typing import Any

from finefit.pipeline.leaks import leaks
from finefit.spec.rows import Source
from finefit.spec.tasks import OwnTask
from tests.conftest import write_jsonl

FORM = """\
def build(prompt, answer):
    return prompt.split("|")[1], answer
"""
TRAIN, TEST = Source(path="train.jsonl"), Source(path="test.jsonl")


def found(
    base: Path,
    train: list[dict[str, Any]],
    test: list[dict[str, Any]],
    sources: tuple[Source, ...] = (TRAIN,),
    **more: Any,
) -> list[str]:
    write_jsonl(base / "train.jsonl", train)
    write_jsonl(base / "test.jsonl", test)
    return [f"{one.row} is {one.other}: {one.how}" for one in leaks(sources, TEST, base=base, seed=0, **more)]


def _asked(prompt: str) -> dict[str, str]:
    return {"prompt": prompt, "answer": "four"}


def test_a_row_that_no_budget_holds_is_compared_too(tmp_path: Path) -> None:
    long = _asked(" ".join(f"word{at}" for at in range(5000)))
    rows = [_asked(f"what is {at}?") for at in range(4)]
    assert found(tmp_path, [*rows, long], [_asked("how much?"), long]) == [
        "train.jsonl:5 is test.jsonl:2: the same row"
    ]


def test_each_question_is_told_once_and_by_the_first_row_that_holds_it(tmp_path: Path) -> None:
    rows = [_asked("What is 2?"), _asked("what is 2"), _asked("what is 3?")]
    assert found(tmp_path, rows, [_asked("what is 2?"), _asked("what is 5?")]) == [
        "train.jsonl:1 is test.jsonl:1: the same but for case and punctuation"
    ]


def test_rows_that_a_limit_leaves_out_are_trained_on_by_nobody(tmp_path: Path) -> None:
    rows = [_asked(f"what is {at}?") for at in range(40)]
    limited = (Source(path="train.jsonl", limit=10),)
    assert len(found(tmp_path, rows, rows)) == 40
    assert len(found(tmp_path, rows, rows, limited)) == 10


def test_rows_are_compared_as_they_are_built(tmp_path: Path) -> None:
    (tmp_path / "form.py").write_text(FORM, encoding="utf-8")
    train, test = [_asked("17|what is 2?")], [_asked("18|what is 2?")]
    assert found(tmp_path, train, test) == []
    form = OwnTask(kind="python", path="form.py")
    assert found(tmp_path, train, test, form=form) == ["train.jsonl:1 is test.jsonl:1: the same row"]
