"""Answers made elsewhere: each beside the item that it answers, and every item with one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.checkpoint import step_named
from finefit.data.rows import Message, Row, key_of
from finefit.errors import DataError
from finefit.run.eval_rows import ExternalAnswer, align_answers, answers_name, read_answers, write_answers
from tests.conftest import write_jsonl
from tests.evals import make_request


def _row(number: int, question: str, answer: str = "1", system: str = "") -> Row:
    given = (*((Message("system", system),) if system else ()), Message("user", question))
    return Row(source="test.jsonl", number=number, messages=(*given, Message("assistant", answer)))


ROWS = [_row(1, "add 1 and 2"), _row(2, "add 3\n  and 4", system="You add."), _row(3, "add 1 and 2", answer="3")]


def _given(*names: dict[str, str]) -> list[ExternalAnswer]:
    return [ExternalAnswer(place=f"theirs.jsonl:{at}", text=str(at), **name) for at, name in enumerate(names, 1)]


def test_answers_are_put_beside_their_items_whatever_their_order() -> None:
    rows = [*ROWS[:2], _row(3, "add 1 and 2")]  # the first once more
    assert align_answers(
        _given({"prompt": "add 3 and 4"}, {"prompt": "add 1 and 2"}, {"prompt": "add 1 and 2"}), rows
    ) == [
        "2",
        "1",
        "3",
    ]


def test_prompts_that_are_figures_are_no_numbers_of_rows() -> None:
    rows = [_row(1, "2"), _row(2, "1")]
    assert align_answers(_given({"prompt": "1"}, {"prompt": "2"}), rows) == ["2", "1"]
    assert align_answers(_given({"id": "1"}, {"id": "2"}), rows) == ["1", "2"]


def test_an_id_and_a_prompt_of_different_items_are_refused() -> None:
    rows = [_row(1, "add 1 and 2"), _row(2, "add 3 and 4")]
    with pytest.raises(
        DataError, match=r"theirs\.jsonl:1 has the id 2 of test\.jsonl:2 and the prompt of test\.jsonl:1"
    ):
        align_answers(_given({"id": "2", "prompt": "add 1 and 2"}, {"id": "1", "prompt": "add 3 and 4"}), rows)
    assert align_answers(
        _given({"id": "q-2", "prompt": "add 3 and 4"}, {"id": "q-1", "prompt": "add 1 and 2"}), rows
    ) == [
        "2",
        "1",
    ]  # ids of their own


def _talk(number: int, first: str) -> Row:
    talk = (
        Message("user", first),
        Message("assistant", "Well?"),
        Message("user", "Go on."),
        Message("assistant", first),
    )
    return Row(source="test.jsonl", number=number, messages=talk)


TALKS = [_talk(1, "Of cats."), _talk(2, "Of dogs.")]
TWO_FILES = [_row(1, "add 1 and 2"), replace(_row(1, "add 3 and 4"), source="more.jsonl")]


@pytest.mark.parametrize(
    ("rows", "name"),
    [(TALKS, {"prompt": "Go on."}), (TWO_FILES, {"id": "1"}), ([ROWS[0], ROWS[2]], {"prompt": "add 1 and 2"})],
    ids=["last message", "number", "prompt with other references"],
)
def test_what_names_several_different_items_names_none(rows: list[Row], name: dict[str, str]) -> None:
    with pytest.raises(DataError, match="two different items") as caught:
        align_answers(_given(name, name), rows)
    assert caught.value.remedy == f"name each by its place: id {rows[0].place}"
    assert align_answers(_given(*(name | {"id": row.place} for row in reversed(rows))), rows) == ["2", "1"]


def test_a_whole_prompt_is_not_taken_for_the_end_of_another() -> None:
    rows = [_row(1, "add 1 and 2", system="You add."), _row(2, "add 1 and 2")]
    assert align_answers(_given({"prompt": "add 1 and 2"}, {"prompt": "You add. add 1 and 2"}), rows) == ["2", "1"]


@pytest.mark.parametrize("name", [lambda row: row.place, lambda row: str(row.number), key_of])
def test_an_item_can_be_named_by_its_place_its_number_and_its_key(name: Any) -> None:
    assert align_answers(
        [ExternalAnswer(place="a:1", id=name(row), text=str(row.number)) for row in reversed(ROWS)], ROWS
    ) == [
        "1",
        "2",
        "3",
    ]


def test_the_whole_prompt_names_an_item_too() -> None:
    given = [ExternalAnswer(place="a:1", prompt="You add.\n\nadd 3 and 4", text="7")]
    assert align_answers(given, ROWS[1:2]) == ["7"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([{"prompt": "add 3 and 4"}, {"id": "1"}], "test.jsonl:3 has no answer"),
        (
            [{"prompt": "add 3 and 4"}, {"id": "1"}, {"id": "3"}, {"id": "2"}],
            "theirs.jsonl:4 answers test.jsonl:2, which theirs.jsonl:1 answers already",
        ),
        ([{"prompt": "add 9 and 9"}], "theirs.jsonl:1 answers `add 9 and 9`, which matches none of the 3 items"),
        ([], "test.jsonl:1 has no answer, and 2 more"),
    ],
)
def test_a_missing_a_doubled_and_a_foreign_answer_are_errors_that_name_it(
    given: list[dict[str, str]], problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        align_answers(_given(*given), ROWS)
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_answers_are_read_from_json_lines_and_tables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "add 1 and 2", "answer": "3"}])
    (tmp_path / "b.csv").write_text('id,response\n2,"{""sum"": 7}"\n')
    assert [(one.id, one.prompt, one.text) for one in read_answers(tmp_path / "a.jsonl", None)] == [
        ("", "add 1 and 2", "3")
    ]
    assert [(one.id, one.text, one.place) for one in read_answers(tmp_path / "b.csv", None)] == [
        ("2", '{"sum": 7}', "record 1 of b.csv")
    ]


def test_graphs_answer_the_sentences_above_them(tmp_path: Path) -> None:
    path = tmp_path / "theirs.amr"
    path.write_text("# ::snt The boy sleeps.\n(s / sleep-01 :ARG0 (b / boy))\n\n# ::snt It rains.\n(r / rain-01)\n")
    found = read_answers(path, None)
    assert [one.prompt for one in found] == ["The boy sleeps.", "It rains."]
    assert found[1].text.strip() == "(r / rain-01)"


@pytest.mark.parametrize("record", [{"prompt": "add"}, {"answer": "3"}, {"prompt": "add", "answer": 3}])
def test_a_record_without_answer_or_question_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1 has"):
        read_answers(write_jsonl(tmp_path / "a.jsonl", [record]), None)


def test_other_answers_of_the_same_file_name_are_filed_apart(tmp_path: Path) -> None:
    path = tmp_path / "their answers.jsonl"
    path.write_text("a")
    first = answers_name(path)
    path.write_text("b")
    assert first.startswith("their-answers-")
    assert answers_name(path) != first


def test_answers_of_a_file_called_as_a_checkpoint_are_no_checkpoint(tmp_path: Path) -> None:
    for text in map(str, range(99)):
        (tmp_path / "checkpoint.jsonl").write_text(text)
        assert step_named(answers_name(tmp_path / "checkpoint.jsonl")) is None
    (tmp_path / "checkpoint-500.jsonl").write_text("a")
    assert step_named(answers_name(tmp_path / "checkpoint-500.jsonl")) is None


def test_a_task_that_asks_for_likelihoods_cannot_be_scored_from_answers(tmp_path: Path) -> None:
    from finefit.artifacts.rundir import EvalPaths
    from finefit.tasks.make import make_task

    request = make_request("theirs", task="perplexity")
    with pytest.raises(DataError, match="needs a model's likelihoods"):
        write_answers(make_task(request.evaluation), request, EvalPaths(tmp_path, "theirs", None), ["x"] * 3, ROWS)


def test_given_answers_become_items_with_their_scores(tmp_path: Path) -> None:
    from finefit.artifacts.rundir import EvalPaths
    from finefit.tasks.make import make_task

    request, paths = make_request("theirs", task="exact_match"), EvalPaths(tmp_path / "exact_match", "theirs", None)
    write_answers(make_task(request.evaluation), request, paths, ["1", "", "4"], ROWS)
    items = [json.loads(line) for line in paths.items.read_text().splitlines()]
    assert [(item["item"], item["scores"]["exact"], item["failure"]) for item in items] == [
        (0, 1.0, None),
        (1, 0.0, "the answer is empty"),
        (2, 0.0, None),
    ]
    assert items[1]["prompt"] == "You add.\n\nadd 3\n  and 4"
