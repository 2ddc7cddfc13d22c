import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.rows import Message, Row, item_line, key_of, read_items
from finefit.spec.schema import Evaluation
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task
from finefit.tasks.short_answer import exact_match, json_match, normalise_answer
from tests.tasks.task_rows import counts_of, make_row, metrics_of

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
        ("", "is not JSON"),
        ("the sum is 4", "is not JSON"),
        ('{"a": 1} as you asked', "is not JSON"),
        ('{"a": 1}{"a": 1}', "is not JSON"),
        ('```json\n{"a": 1}\n```', "is not JSON"),
        ('{"a": 1', "is not JSON"),
        ("[1]", "is a JSON list, not an object"),
        ("4", "is a JSON int, not an object"),
        ("null", "is a JSON NoneType, not an object"),
        ('{"a": NaN}', "is not JSON"),
        ('{"a": 1e999}', "is not JSON"),
        ('{"a": "\\ud800"}', "is not JSON"),
        ("[" * 5000, "is not JSON"),
        ('{"a":' * 5000, "is not JSON"),
    ],
)
def test_an_answer_that_is_no_json_object_has_no_result(answer: str, reason: str) -> None:
    with pytest.raises(NoResult, match=reason):
        _scores(JSON_MATCH, answer, "{}")


def test_exact_match_ignores_space_around_the_answer_and_nothing_else() -> None:
    assert _scores(EXACT_MATCH, " four\n", "four ") == {"exact": 1.0}
    assert all(_scores(EXACT_MATCH, answer, "four ") == {"exact": 0.0} for answer in ("Four", "fo ur", "four."))


@pytest.mark.parametrize("answer", ["", " \n\t"])
def test_an_empty_answer_has_no_result(answer: str) -> None:
    with pytest.raises(NoResult, match="the answer is empty"):
        _scores(EXACT_MATCH, answer, "four")


# Metrics of questions about images, against their published definitions.


def _task(kind: str, **settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": kind, **settings}}))


def _score(task: Task, answer: str, *references: str) -> float:
    (found,) = counts_of(task, make_row(*references), Reply(text=answer)).values()
    return found


RELAXED, ANLS, VQA = _task("relaxed_accuracy"), _task("anls"), _task("vqa_accuracy")


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("105", "100", True),
        ("95", "100", True),
        ("105.01", "100", False),
        ("94.9", "100", False),
        ("-97", "-100", True),
        ("100", "-100", False),
        ("0.40", "0.42", True),
        ("1e2", "100", True),
        ("2018", "2019", True),  # a year is a number as any other
        ("7%", "7%", True),
        ("7.3%", "7%", True),
        ("7.4%", "7%", False),
        ("0.07", "7%", True),  # a per cent sign makes hundredths
        ("7", "7%", False),
        ("7 %", "7%", True),
        ("1000", "1,000", False),  # a separator makes no number: compared as it is written
        ("1,000", "1,000", True),
        ("1,010", "1,000", False),
        ("0", "0", True),
        ("0.0", "0", False),  # nothing is a share of zero: compared as it is written
        ("0.001", "0", False),
        ("Tea", "tea", True),
        ("the tea", "tea", False),
        ("tea.", "tea", False),
        (" Tea\n", "tea", True),
        ("$5", "5", False),
        ("5", "five", False),
        ("nan", "5", False),
        ("inf", "5", False),
        ("%", "5", False),
    ],
)
def test_a_number_may_be_off_by_five_per_cent_and_anything_else_only_by_case(
    answer: str, reference: str, is_right: bool
) -> None:
    assert _score(RELAXED, answer, reference) == float(is_right)


def test_the_tolerance_is_a_setting_and_stands_in_the_signature() -> None:
    wide = _task("relaxed_accuracy", tolerance=0.2)
    assert (_score(wide, "119", "100"), _score(wide, "121", "100"), _score(RELAXED, "119", "100")) == (1.0, 0.0, 0.0)
    assert "0.2" in wide.signature["relaxed"]


def test_any_reference_may_be_the_one_that_is_near() -> None:
    assert _score(RELAXED, "51", "blue", "50") == 1.0
    assert metrics_of(
        RELAXED, [make_row("50"), make_row("red"), make_row("x"), make_row("4")], ["51", "RED", "", "5"]
    ) == {"relaxed": 0.5}


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("A-113", ["A-113"], 1.0),
        ("a-113", ["A-113"], 1.0),
        ("  A-113 \n", ["A-113"], 1.0),
        ("A-114", ["A-113"], 0.8),
        ("A-13", ["A-113"], 0.8),
        ("A-1133", ["A-113"], 5 / 6),
        ("abcd", ["abxy"], 0.5),  # just the threshold counts
        ("abc", ["axy"], 0.0),  # one in three agrees
        ("new  york", ["new york"], 1.0),
        ("new\nyork", ["New York"], 1.0),
        ("newyork", ["new york"], 7 / 8),
        ("12 %", ["12%", "12 percent"], 3 / 4),
        ("12 percent", ["12%", "12 percent"], 1.0),
        ("coffee", ["tea", "toffee", "covfefe"], 5 / 6),
        ("the answer to the question is 12", ["12"], 0.0),
        ("été", ["ete"], 0.0),  # two letters of three differ
        ("1", ["2"], 0.0),
    ],
)
def test_anls_is_one_less_the_edits_by_length_to_the_nearest_reference(
    answer: str, references: list[str], score: float
) -> None:
    assert _score(ANLS, answer, *references) == pytest.approx(score)


def _edits(left: str, right: str) -> int:
    """Levenshtein's recursion, row by row."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        above, row = row, [i]
        for j, b in enumerate(right, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


@given(
    answer=st.text("abc 1", min_size=1, max_size=12),
    references=st.lists(st.text("abcB 1", min_size=1, max_size=12), min_size=1, max_size=3),
)
def test_anls_follows_its_definition(answer: str, references: list[str]) -> None:
    answer, references = answer.strip(), [reference.strip() for reference in references]
    if not answer or not all(references):
        return
    near = [
        1
        - _edits(" ".join(answer.lower().split()), " ".join(reference.lower().split()))
        / max(len(answer), len(reference))
        for reference in references
    ]
    assert _score(ANLS, answer, *references) == pytest.approx(max(near) if max(near) >= 0.5 else 0.0)


def test_a_long_answer_is_not_compared_letter_by_letter() -> None:
    assert _score(ANLS, "word " * 200_000, "word") == 0.0


def test_anls_is_a_mean_over_all_items_and_an_empty_answer_is_nothing() -> None:
    assert metrics_of(ANLS, [make_row("A-113"), make_row("tea"), make_row("tea")], ["A-114", "tea", " "]) == {
        "anls": pytest.approx(0.6)
    }


def _people(**votes: int) -> Row:
    answers = tuple(votes)
    messages = (Message("user", "q"), Message("assistant", answers[0]))
    return Row(source="t.json", number=1, messages=messages, references=answers, votes=tuple(votes.values()))


def _left_out(answer: str, given: list[str]) -> float:
    """As it is published: each of ten people is left out, and three of the other nine are enough."""
    return sum(
        min(1.0, sum(other == answer for at, other in enumerate(given) if at != out) / 3) for out in range(len(given))
    ) / len(given)


@pytest.mark.parametrize("agreeing", range(11))
def test_vqa_accuracy_leaves_each_person_out_in_turn(agreeing: int) -> None:
    given = ["red"] * agreeing + ["blue"] * (10 - agreeing)
    row = _people(**{word: given.count(word) for word in dict.fromkeys(given)})
    assert counts_of(VQA, row, Reply(text="red"))["vqa"] == pytest.approx(_left_out("red", given))


def test_people_who_wrote_the_same_in_other_ways_agree() -> None:
    row = _people(**{"Two": 1, "2": 1, "two.": 1, "the two": 1, "dog": 6})
    assert counts_of(VQA, row, Reply(text="2"))["vqa"] == 1.0
    assert VQA.read(Reply(text="The two!"), row).extracted == "2"


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("A red bus", "red bus"),
        ("the THE an a", ""),
        ("none", "0"),
        ("two dogs and ten cats", "2 dogs and 10 cats"),
        ("eleven", "eleven"),
        ("dont know", "don't know"),
        ("don't know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("oclock 'twas twas", "o'clock 'twas 'twas"),
        ("shed", "shed"),  # a word of its own
        ("yes.", "yes"),
        ("3.5", "3.5"),
        (".5", ".5"),
        ("5.", "5"),
        ("u.s.a.", "usa"),
        ("1,000", "1000"),
        ("1,000-2", "10002"),  # with a thousands separator every mark is taken out
        ("red,white", "red white"),
        ("red, white", "red white"),
        ("t-shirt", "t shirt"),
        ("t - shirt", "t shirt"),
        ("yes/no", "yes no"),
        ("a/b / c", "ab c"),
        ("men's", "men's"),
        ("what?!", "what"),
        ("tab\tand\nline", "tab and line"),
        ("50%", "50%"),
        ("10:30", "10:30"),
        ("$5", "$5"),
    ],
)
def test_answers_are_made_alike_by_the_published_rules(answer: str, plain: str) -> None:
    assert normalise_answer(answer) == plain


@given(st.text(st.sampled_from("ab 1.,'/-?!"), max_size=12))
def test_what_was_made_alike_has_no_case_and_no_spare_space(answer: str) -> None:
    found = normalise_answer(answer.upper())
    assert found == found.lower() == " ".join(found.split())


@pytest.mark.parametrize("votes", [{}, {"red": 1}, {"red": 2, "blue": 1}])
def test_rows_without_the_answers_of_several_people_are_refused(votes: dict[str, int]) -> None:
    row = _people(**votes) if votes else make_row("red")
    with pytest.raises(NoResult, match=f"it has the answers of {sum(votes.values())} people"):
        VQA.require(row)
    VQA.require(_people(red=3, blue=1))


def test_an_empty_answer_agrees_with_nobody() -> None:
    row = _people(a=10)
    assert (counts_of(VQA, row, Reply(text="  "))["vqa"], counts_of(VQA, row, Reply(text="an"))["vqa"]) == (0.0, 1.0)


def test_votes_are_kept_with_an_item(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(item_line(_people(red=7, blue=3)))
    (item,) = read_items(tmp_path / "test.jsonl")
    assert (item.references, item.votes, key_of(item)) == (("red", "blue"), (7, 3), key_of(_people(red=7, blue=3)))
