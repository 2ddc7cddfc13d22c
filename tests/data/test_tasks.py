import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.rows import Message, Row
from finefit.data.tasks import NoResult, Reply, Task
from finefit.data.tasks.match import exact_match, json_match

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


EXACT_MATCH, JSON_MATCH = exact_match(), json_match()


def _scores(task: Task, answer: str, reference: str) -> dict[str, float]:
    row = Row(source="x", number=1, messages=(Message("user", "q"), Message("assistant", reference)))
    return dict(task.read(Reply(text=answer), row).counts)


def _json_scores(answer: str, reference: dict[str, Any]) -> dict[str, float]:
    return _scores(JSON_MATCH, answer, json.dumps(reference))


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_json_answer_matches_itself_however_it_is_laid_out(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    for text in (json.dumps(value), json.dumps(turned, indent=3, ensure_ascii=False), f" \n{json.dumps(value)}\n "):
        assert _json_scores(text, value) == {"all_fields": 1.0, "fields": 1.0}


@pytest.mark.parametrize(
    ("answer", "reference", "fields"),
    [
        ('{"a": true}', {"a": 1}, 0.0),
        ('{"a": 0}', {"a": False}, 0.0),
        ('{"a": "1"}', {"a": 1}, 0.0),
        ('{"a": null}', {}, 0.0),
        ('{"a": 1}', {"a": 1, "b": 2}, 0.5),
        ('{"a": 1, "b": 2, "c": 3}', {"a": 1, "b": 2}, 2 / 3),
        ('{"a": {"x": [1, {"y": 2}]}}', {"a": {"x": [1, {"y": 2}]}}, 1.0),
        ('{"a": {"x": [1, {"y": true}]}}', {"a": {"x": [1, {"y": 1}]}}, 0.0),
        ('{"a": [1, 2]}', {"a": [2, 1]}, 0.0),
        ('{"a": {"y": 1, "x": 2}}', {"a": {"x": 2, "y": 1}}, 1.0),
        ("{}", {}, 1.0),
    ],
)
def test_json_fields_count_when_they_are_equal_as_json(answer: str, reference: dict[str, Any], fields: float) -> None:
    assert _json_scores(answer, reference) == {"all_fields": float(fields == 1.0), "fields": pytest.approx(fields)}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "is no JSON"),
        ("the sum is 4", "is no JSON"),
        ('{"a": 1} as you asked', "is no JSON"),
        ('{"a": 1}{"a": 1}', "is no JSON"),
        ('```json\n{"a": 1}\n```', "is no JSON"),
        ('{"a": 1', "is no JSON"),
        ("[1]", "is a JSON list, not an object"),
        ("4", "is a JSON int, not an object"),
        ("null", "is a JSON NoneType, not an object"),
        ('{"a": NaN}', "is no JSON"),
        ('{"a": 1e999}', "is no JSON"),
        ('{"a": "\\ud800"}', "is no JSON"),
        ("[" * 5000, "is no JSON"),
        ('{"a":' * 5000, "is no JSON"),
    ],
)
def test_an_answer_that_is_no_json_object_has_no_result(answer: str, reason: str) -> None:
    with pytest.raises(NoResult, match=reason):
        _scores(JSON_MATCH, answer, "{}")


def test_exact_match_ignores_space_around_the_answer_and_nothing_else() -> None:
    found = {answer: _scores(EXACT_MATCH, answer, "four ") for answer in (" four\n", "Four", "fo ur", "four.")}
    assert {answer: scores["exact"] for answer, scores in found.items()} == {
        " four\n": 1.0,
        "Four": 0.0,
        "fo ur": 0.0,
        "four.": 0.0,
    }


@pytest.mark.parametrize("answer", ["", " \n\t"])
def test_an_empty_answer_has_no_result(answer: str) -> None:
    with pytest.raises(NoResult, match="the answer is empty"):
        _scores(EXACT_MATCH, answer, "four")
