import json
from dataclasses import replace

import pytest

from finefit.artifacts.stage_records import EvalItem
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.evaluate.score import score_item, summarise
from finefit.stats.intervals import wilson
from finefit.stats.metrics import interval_of, table
from finefit.tasks import Reply, Task
from finefit.tasks.short_answer import exact_match, json_match

EXACT_MATCH, JSON_MATCH = exact_match(), json_match()
REFERENCE = '{"a": 1, "b": 2}'
ANSWERS = {REFERENCE: 1.0, '{"a": 1, "b": 3}': 0.5, "no idea": 0.0, '{"a": 1}': 0.5}


def _row(reference: str) -> Row:
    return Row(source="test.jsonl", number=3, messages=(Message("user", "q"), Message("assistant", reference)))


def _item(task: Task, at: int, answer: str, *, reference: str = REFERENCE) -> EvalItem:
    return score_item(task, at, _row(reference), prompt="q", reply=Reply(text=answer))


def test_a_right_answer_scores_one_and_keeps_what_was_extracted() -> None:
    item = _item(JSON_MATCH, 5, ' {"b": 2, "a": 1}')
    assert (item.item, item.scores, item.extracted, item.failure) == (
        5,
        {"all_fields": 1.0, "fields": 1.0},
        {"a": 1, "b": 2},
        None,
    )


def test_an_answer_without_a_result_scores_zero_in_every_metric_and_says_why() -> None:
    item = _item(JSON_MATCH, 0, "four")
    assert item.scores == {"all_fields": 0.0, "fields": 0.0}
    assert item.extracted is None
    assert item.failure is not None
    assert "not JSON" in item.failure


def test_a_reference_that_the_task_cannot_read_is_an_error_at_its_row() -> None:
    with pytest.raises(
        DataError, match=r"^test.jsonl:3 has a reference that the task json_match cannot read: the answer is not JSON"
    ):
        _item(JSON_MATCH, 0, REFERENCE, reference="four")


def _score(task: Task, answer: str, *references: str) -> EvalItem:
    """The last reference is the one that was trained on."""
    return score_item(
        task, 0, replace(_row(references[-1]), references=references), prompt="q", reply=Reply(text=answer)
    )


@pytest.mark.parametrize("answer", ["4", "four", "IV"])
def test_an_answer_that_equals_any_reference_is_right(answer: str) -> None:
    item = _score(EXACT_MATCH, f" {answer}\n", "4", "four", "IV")
    assert (item.scores, item.reference) == ({"exact": 1.0}, answer)


@pytest.mark.parametrize("answer", ["five", " "])
def test_a_wrong_answer_is_shown_beside_the_reference_that_was_trained_on(answer: str) -> None:
    item = _score(EXACT_MATCH, answer, "4", "four", "IV")
    assert (item.scores, item.reference) == ({"exact": 0.0}, "IV")


def test_of_references_that_are_equally_missed_the_nearest_is_kept() -> None:
    item = _score(JSON_MATCH, '{"a": 1, "b": 3}', '{"a": 1, "b": 2}', '{"a": 2, "b": 2}')
    assert (item.scores, item.reference) == ({"all_fields": 0.0, "fields": 0.5}, '{"a": 1, "b": 2}')


def test_a_reference_that_cannot_be_read_is_passed_over_unless_none_can() -> None:
    item = _score(JSON_MATCH, '{"a": 1}', "one", '{"a": 1}', "un")
    assert (item.scores["all_fields"], item.reference) == (1.0, '{"a": 1}')
    assert _score(JSON_MATCH, "?", "one", '{"a": 1}').reference == '{"a": 1}'
    with pytest.raises(DataError, match=r"^test.jsonl:3 has a reference that the task json_match cannot read"):
        _score(JSON_MATCH, '{"a": 1}', "one", "un")


def test_failures_count_as_zero_and_lower_the_coverage() -> None:
    result = summarise(
        JSON_MATCH,
        "checkpoint-7",
        [_item(JSON_MATCH, at, answer) for at, answer in enumerate(ANSWERS)],
        available=12,
        seconds=1.0,
    )
    assert (result.n, result.coverage, result.checkpoint, result.task) == (4, 0.75, "checkpoint-7", "json_match")
    assert result.metrics["all_fields"].value == 0.25
    assert result.metrics["fields"].value == 0.5


def test_a_rate_has_wilsons_interval_and_a_mean_the_bootstraps() -> None:
    result = summarise(
        JSON_MATCH,
        "base",
        [_item(JSON_MATCH, at, answer) for at, answer in enumerate(ANSWERS)],
        available=12,
        seconds=1.0,
    )
    rate, mean = (
        wilson(1, 4),
        interval_of(JSON_MATCH.metrics[1], table(JSON_MATCH.metrics[1], [item.counts for item in result.items])),
    )
    assert (result.metrics["all_fields"].low, result.metrics["all_fields"].high) == (rate.low, rate.high)
    assert (result.metrics["fields"].low, result.metrics["fields"].high) == (mean.low, mean.high)
    assert 0 <= mean.low < 0.5 < mean.high <= 1


@pytest.mark.parametrize("answer", ["four", "five"])
def test_even_a_perfect_or_hopeless_rate_keeps_its_width(answer: str) -> None:
    score = summarise(
        EXACT_MATCH,
        "base",
        [_item(EXACT_MATCH, at, answer, reference="four") for at in range(10)],
        available=12,
        seconds=1.0,
    ).metrics["exact"]
    assert score.high - score.low > 0.2
    assert score.low <= score.value <= score.high


def test_a_single_mean_says_nothing() -> None:
    score = summarise(JSON_MATCH, "base", [_item(JSON_MATCH, 0, '{"a": 1}')], available=12, seconds=1.0).metrics[
        "fields"
    ]
    assert (score.value, score.low, score.high) == (0.5, 0.0, 1.0)


def test_items_are_in_their_own_order_whatever_order_they_were_answered_in() -> None:
    result = summarise(
        JSON_MATCH,
        "base",
        [_item(JSON_MATCH, at, json.dumps({"a": at})) for at in (2, 0, 1)],
        available=12,
        seconds=1.0,
    )
    assert [item.item for item in result.items] == [0, 1, 2]


def test_items_of_several_sources_are_scored_by_source_too() -> None:
    answers = [("charts", "four"), ("charts", "five"), ("charts", " "), ("text", "four")]
    rows = [replace(_row("four"), dataset=dataset) for dataset, _ in answers]
    items = [
        score_item(EXACT_MATCH, at, row, prompt="q", reply=Reply(text=answers[at][1])) for at, row in enumerate(rows)
    ]
    result = summarise(EXACT_MATCH, "base", items, available=4, seconds=1.0)
    assert {name: (part.n, part.metrics["exact"].value) for name, part in result.by_dataset.items()} == {
        "charts": (3, pytest.approx(1 / 3)),
        "text": (1, 1.0),
    }
    charts, own = result.by_dataset["charts"], wilson(1, 3)
    assert charts.coverage == pytest.approx(2 / 3)
    assert (charts.metrics["exact"].low, charts.metrics["exact"].high) == (own.low, own.high)
    assert (result.n, result.metrics["exact"].value) == (4, 0.5)
    assert summarise(EXACT_MATCH, "base", items[:3], available=3, seconds=1.0).by_dataset == {}
