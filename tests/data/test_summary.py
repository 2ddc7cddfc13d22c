from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rouge_score.rouge_scorer import RougeScorer

from finefit.data.rows import Message, Row
from finefit.data.tasks import NoResult, Reply, Task, make_task
from finefit.data.tasks.summary import _passages
from finefit.spec.schema import Evaluation
from tests.data.task_rows import counts_of, make_row, metrics_of

SOURCE = "The court of appeal dismissed the case on Monday because the papers came too late."


def _task(**settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": "summary", **settings}}))


def test_rouge_lsum_is_that_of_rouge_score() -> None:
    answer, reference = (
        "The case was dismissed.\nPapers were late.",
        "Papers came late.\nThe case was dismissed on Monday.",
    )
    expected = RougeScorer(["rougeLsum"], use_stemmer=True).score(reference, answer)["rougeLsum"].fmeasure
    assert metrics_of(_task(), [make_row(reference, prompt=SOURCE)], [answer])["rougeLsum"] == pytest.approx(
        expected, abs=1e-12
    )


def test_the_length_ratio_is_of_all_words_and_a_missing_answer_has_none() -> None:
    rows = [make_row("one two three four", prompt=SOURCE), make_row("one two", prompt=SOURCE)]
    assert metrics_of(_task(), rows, ["one two three", "one two three"])["length_ratio"] == pytest.approx(6 / 6)
    assert metrics_of(_task(), rows, ["one two three", ""])["length_ratio"] == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("## Facts\nx\n## Holding\ny", 1.0),
        ("**Facts:** x\n\n1. Holding", 1.0),
        ("FACTS: the man left\n- holding -", 1.0),
        ("The facts are these.\nHolding back", 0.0),
        ("Facts and more\nHoldings", 0.0),
        ("Facts", 0.5),
    ],
)
def test_a_section_is_a_line_that_is_its_heading_or_begins_with_it_and_a_colon(answer: str, share: float) -> None:
    assert (
        metrics_of(_task(sections=("Facts", "2. Holding")), [make_row("x y", prompt=SOURCE)], [answer])["sections"]
        == share
    )


def test_what_is_copied_is_told_by_4_grams_and_by_passages() -> None:
    row = make_row("reference words", prompt=SOURCE)
    copied = metrics_of(_task(), [row], ["the court of appeal dismissed the case"])
    assert (copied["copied"], copied["density"]) == (1.0, 7.0)
    own = metrics_of(_task(), [row], ["judges threw it out, late, on some Monday"])
    assert (own["copied"], own["density"]) == (0.0, 3 / 8)  # late, on and monday stand in it one by one
    half = metrics_of(_task(), [row], ["the court of appeal said nothing"])
    assert half["copied"] == pytest.approx(1 / 3)
    assert half["density"] == pytest.approx(4**2 / 6)


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=30))
def test_passages_are_the_longest_shared_ones_from_left_to_right(answer: list[str], source: list[str]) -> None:
    text, expected, at = "".join(source), [], 0
    while at < len(answer):
        length = max((n for n in range(len(answer) - at + 1) if "".join(answer[at : at + n]) in text), default=0)
        expected += [length] if length else []
        at += max(1, length)
    assert _passages(answer, source) == expected


def test_the_source_is_what_the_user_gave_and_not_the_system() -> None:
    messages = (
        Message("system", "the court of appeal"),
        Message("user", "other words stand here"),
        Message("assistant", "reference"),
    )
    row = Row(source="t", number=1, messages=messages)
    assert metrics_of(_task(), [row], ["the court of appeal"])["copied"] == 0.0
    with pytest.raises(NoResult, match="no text that could be summarised"):
        _task().require(Row(source="t", number=1, messages=(Message("user", "..."), Message("assistant", "reference"))))


def test_an_empty_answer_counts_as_nothing_found() -> None:
    task, row = _task(sections=("Facts",)), make_row("one two", prompt=SOURCE)
    counts = counts_of(task, row, Reply(text=" "))
    assert {name for name, count in counts.items() if count} == {"reference_words"}
    assert set(counts) >= {count for metric in task.metrics for count in metric.counts}


def test_what_only_describes_is_neither_better_higher_nor_lower() -> None:
    assert {metric.name for metric in _task().metrics if metric.better == "neither"} == {
        "length_ratio",
        "copied",
        "density",
    }
    assert _task().finish is None


def test_a_list_of_sections_in_a_spec_is_read() -> None:
    task = make_task(Evaluation.model_validate_json('{"task": {"kind": "summary", "sections": ["Facts", "Holding"]}}'))
    assert task.signature["sections"] == "Facts, Holding"
    with pytest.raises(ValidationError, match="sections"):
        Evaluation.model_validate_json('{"task": {"kind": "summary", "sections": "Facts"}}')
