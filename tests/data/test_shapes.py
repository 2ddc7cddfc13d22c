import copy
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from finefit.data.records import DataRecord
from finefit.data.rows import BadRow, Image, Message, Row, ToolCall
from finefit.data.shapes import Shape, find_shape
from finefit.errors import DataError
from finefit.spec.data import Fields

Value = dict[str, Any]
USER, ANSWER = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
COMPLETED = {"prompt": "x", "completion": "y"}
WEATHER = {"name": "weather", "arguments": {"city": "Rome"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def _records(*values: Value) -> list[DataRecord]:
    return [DataRecord("rows.jsonl", number, value) for number, value in enumerate(values, start=1)]


def _shape(*values: Value, **fields: str) -> Shape:
    return find_shape(_records(*values), Fields(**fields), source="rows.jsonl")


def _rows(value: Value, **fields: str) -> list[Row | BadRow]:
    return _shape(value, **fields).rows(DataRecord("rows.jsonl", 1, value))


def _row(value: Value, **fields: str) -> Row:
    (row,) = _rows(value, **fields)
    assert isinstance(row, Row), row
    return row


def _fault(good: Value, bad: Value, **fields: str) -> str:
    """Of a record among good ones."""
    (row,) = _shape(*[good] * 3, **fields).rows(DataRecord("rows.jsonl", 4, bad))
    assert isinstance(row, BadRow), row
    assert row.place == "rows.jsonl:4"
    return row.reason


def _error(*values: Value, **fields: str) -> DataError:
    with pytest.raises(DataError) as caught:
        _shape(*values, **fields)
    assert caught.value.remedy
    return caught.value


def _talk(row: Row) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in row.messages]


def _said(asked: str, answered: str) -> list[tuple[str, str]]:
    return [("user", asked), ("assistant", answered)]


PLAIN = _said("2+2", "4")
SAID_BEFORE = [*_said("1+1", "2"), *PLAIN]


@pytest.mark.parametrize(
    ("value", "name", "talk", "num_given"),
    [
        ({"messages": [USER, ANSWER]}, "chat messages", PLAIN, 0),
        ({"conversation": [USER, ANSWER], "id": 3}, "chat messages", PLAIN, 0),
        ({"conversations": [HUMAN, GPT], "system": None}, "ShareGPT conversations", PLAIN, 0),
        (
            {"conversations": [HUMAN, GPT], "system": "Be brief."},
            "ShareGPT conversations",
            [("system", "Be brief."), *PLAIN],
            0,
        ),
        ({"instruction": "2+2", "input": "", "output": "4"}, "Alpaca", PLAIN, 1),
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, "Alpaca", _said("Add.\n2+2", "4"), 1),
        ({"instruction": "2+2", "output": "4", "text": "2+2 4"}, "Alpaca", PLAIN, 1),
        ({"instruction": "2+2", "input": None, "output": "4", "history": [["1+1", "2"]]}, "Alpaca", SAID_BEFORE, 1),
        ({"prompt": "2+2", "completion": "4"}, "prompt and completion", PLAIN, 1),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt and completion", PLAIN, 1),
        ({"prompt": [USER, ANSWER, USER], "completion": "4"}, "prompt and completion", [*PLAIN, *PLAIN], 3),
        ({"Question": "2+2", "Answer": "4"}, "question and answer", PLAIN, 1),
        ({"problem": "2+2", "solution": "4", "level": 1}, "question and answer", PLAIN, 1),
        (
            {"system_prompt": "Add.", "question": "2+2", "response": "4"},
            "question and answer",
            [("system", "Add."), *PLAIN],
            2,
        ),
        ({"query": "2+2", "label": 4}, "question and answer", PLAIN, 1),
        (
            {"question": "Right?", "passage": "It is.", "answer": True},
            "question and answer",
            _said("It is.\n\nRight?", "true"),
            1,
        ),
        (
            {"question": "q", "CONTEXTS": ["a", "b"], "LONG_ANSWER": "c"},
            "question and answer",
            _said("a\n\nb\n\nq", "c"),
            1,
        ),
        ({"instruction": "q", "context": "", "response": "c"}, "question and answer", _said("q", "c"), 1),
        ({"article": "Long.", "highlights": "L."}, "document and summary", _said("Long.", "L."), 1),
        ({"snt": "It rains .", "amr": "(r / rain-01)"}, "AMR", _said("It rains .", "(r / rain-01)"), 1),
    ],
)
def test_a_question_and_its_answer_are_found_under_many_names(
    value: Value, name: str, talk: list[tuple[str, str]], num_given: int
) -> None:
    row = _row(value)
    assert (_shape(value).name, _talk(row), row.num_given, row.kind, row.part) == (name, talk, num_given, "chat", 0)


def test_the_mapping_names_every_column_used_or_not() -> None:
    value = {"id": 7, "question": "q", "context": "c", "answers": ["a"], "image_id": 3, "imageURL": "http://x/y.jpg"}
    assert _shape(value).mapping == {
        "prompt": "question",
        "context": "context",
        "answer": "answers (the most frequent)",
        "images": "none: imageURL is a URL, and nothing is downloaded",
        "not used": "id, image_id, imageURL",
    }


@pytest.mark.parametrize(
    ("answers", "best", "references"),
    [
        (["a", "b", "b"], "b", ("a", "b")),
        (["A-1", "a-1"], "A-1", ("A-1", "a-1")),
        (
            [{"answer": "red", "answer_id": 1}, {"answer": "red", "answer_id": 2}, {"answer": "blue", "answer_id": 3}],
            "red",
            ("red", "blue"),
        ),
        ({"text": ["Rome"], "answer_start": [5]}, "Rome", ("Rome",)),
        ([42.5, 42.5, 3], "42.5", ("42.5", "3")),
    ],
)
def test_of_several_answers_the_most_frequent_is_trained_on_and_all_count_as_right(
    answers: Any, best: str, references: tuple[str, ...]
) -> None:
    row = _row({"question": "q", "answers": answers})
    assert (row.answer, row.references) == (best, references)


def test_several_questions_of_a_record_become_rows_of_their_own() -> None:
    value = {"imageURL": "http://x/y.jpg", "questions": ["Who?", "What?"], "answers": ["I", "A book"]}
    rows = _rows(value)
    assert [(row.part, _talk(row)) for row in rows if isinstance(row, Row)] == [
        (1, _said("Who?", "I")),
        (2, _said("What?", "A book")),
    ]
    assert _fault(value, value | {"answers": ["I"]}) == "has 2 questions and 1 answers"
    assert _fault(value, value | {"questions": [], "answers": []}) == "has no questions"
    second = _shape(value).rows(DataRecord("rows.jsonl", 9, value | {"answers": ["I", ""]}))[1]
    assert second == BadRow("rows.jsonl", 9, "answers is empty", 2)


def test_queries_about_a_meeting_become_rows_the_general_ones_first() -> None:
    value = {
        "topic_list": [],
        "general_query_list": [{"query": "Sum up.", "answer": "A test."}],
        "specific_query_list": [{"query": "Who spoke?", "answer": "Ann.", "relevant_text_span": [["0", "1"]]}],
        "meeting_transcripts": [{"speaker": "Ann", "content": "Hi ."}, {"speaker": "Bob", "content": "Yes ."}],
    }
    first, second = _rows(value)
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.place, second.place) == ("rows.jsonl:1 (1)", "rows.jsonl:1 (2)")
    assert _talk(first) == _said("Ann: Hi .\nBob: Yes .\n\nSum up.", "A test.")
    assert second.answer == "Ann."
    assert _fault(value, value | {"general_query_list": [], "specific_query_list": None}) == "has no queries"


@pytest.mark.parametrize("wrong", ["C; D", ["C", "D"]])
def test_truthful_qa_keeps_what_is_right_and_what_is_wrong(wrong: Any) -> None:
    value = {
        "Question": "q",
        "Best Answer": "A",
        "Best Incorrect Answer": "D",
        "Correct Answers": "B; A; ",
        "Incorrect Answers": wrong,
        "Source": "s",
    }
    row = _row(value)
    assert (_shape(value).name, row.answer, row.references, row.wrong) == ("TruthfulQA", "A", ("A", "B"), ("C", "D"))


OTHER = {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"instruction": "2+2", "input": "", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "2+2", "messages": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "score": 3},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}},
    ],
)
def test_a_preference_pair_is_a_prompt_with_two_endings(value: Value) -> None:
    row = _row(value)
    assert (row.kind, _talk(row), row.rejected, row.num_given) == ("pair", PLAIN, (Message("assistant", "5"),), 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "chosen and rejected are equal"),
        (
            {"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "3"}, OTHER]},
            "chosen does not continue the prompt with an answer",
        ),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "rejected does not continue the prompt with an answer"),
        ({"chosen": [USER, ANSWER]}, "has no rejected"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": " "}]}, "has an empty answer"),
    ],
)
def test_endings_that_are_no_pair_are_told(bad: Value, reason: str) -> None:
    assert _fault({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, bad) == reason


@pytest.mark.parametrize(
    ("value", "is_good"),
    [
        ({"prompt": "2+2", "completion": "4", "label": True}, True),
        ({"prompt": "2+2", "completion": "4", "label": "False"}, False),
        ({"prompt": [USER], "completion": [ANSWER], "label": False}, False),
        ({"question": "2+2", "response": "4", "kto_tag": True}, True),
        ({"conversations": [HUMAN, GPT], "kto_tag": False}, False),
        ({"conversations": [HUMAN, GPT], "kto_tag": 0}, False),
        ({"messages": [USER, ANSWER], "label": True}, True),
    ],
)
def test_a_judged_answer_keeps_its_verdict(value: Value, is_good: bool) -> None:
    row = _row(value)
    assert (row.kind, _talk(row), row.is_good, row.num_given) == ("judged", PLAIN, is_good, 1)
    verdict = "kto_tag" if "kto_tag" in value else "label"
    assert _fault(value, value | {verdict: "maybe"}) == f'{verdict} is "maybe", neither true nor false'


@pytest.mark.parametrize("value", [{"text": "Once."}, {"content": "Once.", "url": "u", "title": "t"}])
def test_text_alone_is_plain_text(value: Value) -> None:
    row = _row(value)
    assert (row.kind, row.text, row.messages) == ("text", "Once.", ())


@pytest.mark.parametrize(
    ("columns", "images", "used"),
    [
        ({"imgname": "a.png"}, (Image(path="a.png"),), "imgname"),
        ({"image": {"bytes": b"\x89PNG", "path": None}}, (Image(data=b"\x89PNG"),), "image"),
        ({"image": b"\x89PNG", "image_filename": "a.png"}, (Image(data=b"\x89PNG"),), "image"),
        ({"image_filename": "a.png", "image": "<PIL image>"}, (Image(path="a.png"),), "image_filename"),
        ({"image_filename": "b.png", "image": "a.png"}, (Image(path="a.png"),), "image"),
        ({"images": ["a.png", {"bytes": None, "path": "b.png"}]}, (Image(path="a.png"), Image(path="b.png")), "images"),
        (
            {"image_id": "0001", "image_url": "http://x/a.png"},
            (),
            "none: image_url is a URL, and nothing is downloaded",
        ),
    ],
)
def test_images_stand_beside_a_question(columns: Value, images: tuple[Image, ...], used: str) -> None:
    value = {"query": "q", "label": "a", **columns}
    assert (_row(value).images, _shape(value).mapping["images"]) == (images, used)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (None, "has no image"),
        (7, "image is 7, neither the path nor the bytes of an image (nothing is downloaded)"),
        (
            "https://x/a.png",
            'image is "https://x/a.png", neither the path nor the bytes of an image (nothing is downloaded)',
        ),
        ("data:image/png;base64,%%%", 'image is "data:image/png;base64,%%%", which is not a base64 image'),
    ],
)
def test_a_question_about_an_image_that_is_not_there_is_told(image: Any, reason: str) -> None:
    good = {"query": "q", "label": "a", "image": "a.png"}
    assert _fault(good, good | {"image": image}) == reason


def test_an_empty_list_of_images_says_that_there_are_none() -> None:
    """As exported pairs have it, where some are about images."""
    good: Value = {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["a.png"]}
    (row,) = _shape(good, good).rows(DataRecord("rows.jsonl", 3, good | {"images": []}))
    assert isinstance(row, Row)
    assert row.images == ()


def test_tool_calls_reasoning_and_tools_are_kept() -> None:
    call: Value = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    value: Value = {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "Rain?", "name": None, "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I need the weather.",
                "tool_calls": [call],
                "weight": 1,
            },
            {"role": "tool", "content": "dry", "tool_call_id": "c1", "name": "weather"},
            {"role": "assistant", "content": "No.", "thinking": None, "tool_calls": []},
        ],
    }
    row = _row(value)
    assert row.messages[1] == Message(
        "assistant", "", "I need the weather.", (ToolCall("weather", '{"city": "Rome"}'),)
    )
    assert row.messages[2:] == (Message("tool", "dry"), Message("assistant", "No."))
    assert json.loads(row.tools) == TOOLS
    swapped = copy.deepcopy(value)
    swapped["messages"][2]["tool_call_id"] = "c2"
    assert _fault(value, swapped) == "messages has tool results that are not in the order of the calls"


def test_sharegpt_calls_functions_and_observes() -> None:
    called = [
        HUMAN,
        {"from": "function_call", "value": json.dumps(WEATHER)},
        {"from": "observation", "value": "dry"},
        GPT,
    ]
    row = _row({"conversations": called, "tools": json.dumps(TOOLS)})
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1].tool_calls == (ToolCall("weather", '{"city": "Rome"}'),)
    assert json.loads(row.tools) == TOOLS
    two = _row({"conversations": [HUMAN, {"from": "function_call", "value": json.dumps([WEATHER, WEATHER])}]})
    assert len(two.messages[1].tool_calls) == 2


def test_arguments_lose_the_nulls_that_a_table_filled_in() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Rome", "unit": None}}}
    row = _row({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert row.messages[1].tool_calls[0].arguments == '{"city": "Rome"}'


def test_an_image_part_leaves_a_mark_at_its_place() -> None:
    parts = [{"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": "What is this?"}]
    row = _row({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert (row.messages[0].content, row.images) == ("<image>What is this?", (Image(path="a.png"),))
    beside = {"messages": [{"role": "user", "content": [{"type": "image"}, parts[1]]}, ANSWER], "images": ["a.png"]}
    assert _row(beside).images == (Image(path="a.png"),)
    assert _fault(beside, beside | {"images": []}) == "has 1 <image> placeholders and 0 images"
    assert _row({"messages": [USER, ANSWER], "images": []}).images == ()
    twice = {"messages": [{"role": "user", "content": parts}, ANSWER], "images": ["b.png"]}
    assert _fault(beside, twice) == "has images both in its messages and in images"


def test_a_system_column_that_repeats_the_system_message_adds_none() -> None:
    assert _talk(_row({"messages": [SYSTEM, USER, ANSWER], "system": "Be brief."})) == [("system", "Be brief."), *PLAIN]


def _answering(entry: Any) -> Value:
    return {"messages": [USER, entry]}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"other": 1}, "has no messages"),
        ({"messages": None}, "has no messages"),
        ({"messages": []}, "messages is [], not a list"),
        ({"messages": "x"}, 'messages is "x", not a list'),
        ({"messages": [USER]}, "has no answer"),
        ({"messages": [ANSWER]}, "has no answer"),
        ({"messages": [USER, USER]}, "has no answer"),
        ({"messages": [ANSWER, USER, ANSWER]}, "begins with an answer"),
        ({"messages": [{"role": "user", "content": " "}, ANSWER]}, "has an empty prompt"),
        (_answering({"role": "assistant", "content": " \n"}), "has an empty answer"),
        (_answering({"role": "assistant", "content": None}), "messages[1].content is null"),
        (_answering({"role": "assistant", "content": [{"type": "text"}]}), "messages[1].content[0].text is null"),
        (_answering({"role": "assistant", "content": [{"type": "audio"}]}), '{"type": "audio"}; only text and images'),
        (_answering({"role": "critic", "content": "x"}), '"critic"; known are system, user, assistant, tool'),
        (_answering({"role": ["user"], "content": "x"}), 'messages[1] has the role ["user"]'),
        (_answering("4"), 'messages[1] is "4"; a message has `role` and `content`'),
        (_answering(ANSWER | {"function_call": {"name": "f"}}), "messages[1] has the field function_call"),
        (_answering(ANSWER | {"name": "Ann"}), "messages[1] has the field name"),
        (_answering(ANSWER | {"weight": 0}), "messages[1] has the field weight"),
        (
            _answering(ANSWER | {"reasoning": "a", "thinking": "b"}),
            "two different reasonings, under reasoning, thinking",
        ),
        (_answering(ANSWER | {"tool_calls": "f()"}), 'messages[1].tool_calls is "f()"'),
        (_answering(ANSWER | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}), 'tool_calls[0].arguments is "[1]"'),
        (
            _answering({"role": "assistant", "content": "a\udc00"}),
            "messages[1].content holds half a character, \\udc00",
        ),
        ({"messages": [USER, ANSWER], "system": ["x"]}, 'system is ["x"], not text'),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "b"}, "has two system messages, one in system"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "tools is not JSON"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_told_with_its_reason(bad: Value, reason: str) -> None:
    assert reason in _fault({"messages": [USER, ANSWER], "system": None, "tools": None}, bad)


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (COMPLETED, {"completion": None}, "has no completion"),
        (COMPLETED, {"prompt": 3}, "prompt is 3, not text"),
        (COMPLETED, {"prompt": " "}, "prompt is empty"),
        (COMPLETED, {"completion": "\n"}, "completion is empty"),
        (COMPLETED, {"completion": {"a": 1}}, 'completion is {"a": 1}, not text'),
        (COMPLETED, {"prompt": [ANSWER]}, "begins with an answer"),
        (COMPLETED, {"prompt": "\ud83d"}, "prompt holds half a character, \\ud83d"),
        ({"question": "x", "answers": ["y"]}, {"answers": []}, "answers is an empty list"),
        ({"question": "x", "answers": ["y"]}, {"answers": ["y", None]}, "answers[1] is null, not text"),
        ({"question": "x", "answer": "y"}, {"answer": float("nan")}, "answer is NaN, not text"),
        ({"question": "x", "context": "c", "answer": "y"}, {"context": {"a": 1}}, 'context is {"a": 1}, not text'),
        ({"instruction": "x", "input": "", "output": "y"}, {"instruction": ""}, "instruction is empty"),
        ({"text": "x"}, {"text": ""}, "text is empty"),
        ({"text": "x"}, {"text": b"x"}, "text is of type bytes, not text"),
        ({"snt": "x", "amr": "(a / b)"}, {"amr": None}, "has no amr"),
    ],
)
def test_a_record_that_lacks_what_its_shape_needs_is_told_with_the_column(good: Value, bad: Value, reason: str) -> None:
    assert reason in _fault(good, good | bad)


def test_a_column_that_only_a_later_record_has_is_not_overlooked() -> None:
    shape = _shape({"instruction": "2+2", "output": "4"})
    later = {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief.", "note": "n"}
    (row,) = shape.rows(DataRecord("rows.jsonl", 101, later))
    assert isinstance(row, Row)
    assert _talk(row) == [("system", "Be brief."), ("user", "Add.\n2+2"), ("assistant", "4")]
    (pair,) = shape.rows(DataRecord("rows.jsonl", 102, {"instruction": "2+2", "chosen": "4", "rejected": "5"}))
    assert isinstance(pair, BadRow)
    assert pair.reason == "has chosen, rejected, which makes it preference pairs, while the first records are Alpaca"
    (double,) = shape.rows(DataRecord("rows.jsonl", 103, {"instruction": "2+2", "output": "4", "response": "5"}))
    assert isinstance(double, BadRow)
    assert double.reason.startswith(
        "has response, which the first records lack: rows.jsonl may have its prompt in instruction and its answer in"
    )


@pytest.mark.parametrize(
    ("fields", "value", "talk"),
    [
        ({"prompt": "note", "answer": "short"}, {"note": "x", "short": "y"}, _said("x", "y")),
        ({"prompt": "meta.Q", "answer": "meta.a"}, {"meta": {"q": "x", "a": 3}}, _said("x", "3")),
        ({"prompt": "a.b", "answer": "c"}, {"a.b": "exact", "a": {"b": "deeper"}, "c": "y"}, _said("exact", "y")),
        (
            {"prompt": "{c}\n\n{{{q}}}", "answer": "{l}: {n}"},
            {"c": ["1", "2"], "q": "x", "l": "y", "n": 5},
            _said("1\n\n2\n\n{x}", "y: 5"),
        ),
        (
            {"prompt": "question", "answer": "answer"},
            {"question": "x", "problem": "z", "answer": "y", "response": "n"},
            _said("x", "y"),
        ),
        ({"prompt": "q", "answer": "A"}, {"Q": "no", "q": "x", "a": "no", "A": "y"}, _said("x", "y")),
        ({"messages": "chat", "system": "role"}, {"chat": [HUMAN, GPT], "role": "Add."}, [("system", "Add."), *PLAIN]),
    ],
)
def test_declared_columns_win(fields: dict[str, str], value: Value, talk: list[tuple[str, str]]) -> None:
    assert _talk(_row(value, **fields)) == talk


def test_every_kind_of_row_can_be_declared() -> None:
    value = {"p": "2+2", "good": "4", "bad": "5", "ok": 1, "pic": "a.png"}
    pair = _row(value, prompt="p", chosen="good", rejected="bad", images="pic")
    assert (pair.kind, _talk(pair), pair.rejected[0].content, pair.images) == (
        "pair",
        PLAIN,
        "5",
        (Image(path="a.png"),),
    )
    judged = _row(value, prompt="p", answer="good", label="ok")
    assert (judged.kind, _talk(judged), judged.is_good) == ("judged", PLAIN, True)
    assert _row(value, text="{p} = {good}").text == "2+2 = 4"
    assert _shape(value, prompt="p", answer="{good}").mapping == {
        "prompt": "p",
        "answer": "{good}",
        "not used": "bad, ok, pic",
    }


def test_a_column_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    error = _error({"question": "x", "reply": "y"}, prompt="qestion", answer="reply")
    assert error.problem == "rows.jsonl has no column qestion, which fields.prompt names"
    assert error.remedy == "did you mean question? the columns are question, reply"
    assert (
        _error({"Best Answer": "x"}, text="bestanser").remedy == "did you mean Best Answer? the columns are Best Answer"
    )
    assert _error({"a": "x"}, text="{b} and {a}").problem == "rows.jsonl has no column b, which fields.text names"


@pytest.mark.parametrize(
    "names", ["prompt", "answer label", "messages prompt", "text system", "chosen", "text prompt answer"]
)
def test_fields_that_make_no_row_are_an_error(names: str) -> None:
    error = _error({"a": "x"}, **dict.fromkeys(names.split(), "a"))
    given = ", ".join(name for name in Fields.model_fields if name in names.split())
    assert error.problem == f"rows.jsonl: fields with {given} are not a known shape"


@pytest.mark.parametrize(
    ("value", "candidates", "lines"),
    [
        (
            {"question": "x", "answer": "y", "response": "z"},
            "question and its answer in answer or response",
            ("{prompt: question, answer: answer}", "{prompt: question, answer: response}"),
        ),
        (
            {"question": "x", "problem": "w", "answer": "y", "context": "c"},
            "question with context or problem with context",
            (f'{{prompt: "{{context}}\\n\\n{{{name}}}", answer: answer}}' for name in ("question", "problem")),
        ),
        (
            {"instruction": "x", "input": "w", "context": "c", "output": "y"},
            "instruction with context or input with context",
            (f'{{prompt: "{{context}}\\n\\n{{{name}}}", answer: output}}' for name in ("instruction", "input")),
        ),
        (
            {"question": "x", "answer": "y", "label": True},
            "question and its answer in answer or label",
            ("{prompt: question, answer: answer}", "{prompt: question, answer: label}"),
        ),
        (
            {"problem": "x", "solution": "y", "messages": [USER, ANSWER]},
            "chat messages (messages) or as question and answer (problem, solution)",
            ("{messages: messages}", "{prompt: problem, answer: solution}"),
        ),
        ({"text": "x", "label": 1}, "text, label", ("{text: text}", "{prompt: text, answer: label}")),
        (
            {"prompt": "x", "question": "w", "chosen": "y", "rejected": "z"},
            "prompt or question",
            (f"{{prompt: {name}, chosen: chosen, rejected: rejected}}" for name in ("prompt", "question")),
        ),
        (
            {"messages": [USER, ANSWER], "conversations": [HUMAN, GPT]},
            "messages or conversations",
            ("{messages: messages}", "{messages: conversations}"),
        ),
    ],
)
def test_what_can_be_read_in_two_ways_is_an_error_with_the_lines_to_write(
    value: Value, candidates: str, lines: Iterable[str]
) -> None:
    error = _error(value)
    assert candidates in error.problem
    assert error.remedy == "say which: " + " or ".join(f"fields: {line}" for line in lines)


def _written(line: str) -> dict[str, str]:
    fields: dict[str, str] = YAML(typ="safe").load(line)["fields"]
    return fields


ABC = {"label": ["A", "B"], "text": ["red", "blue"]}


@pytest.mark.parametrize(
    ("value", "named", "asked"),
    [
        ({"question": "q", "choices": ["x", 5], "answer": 1}, "choices beside question", "q\nx\n\n5"),
        ({"question": "q", "choices": ABC, "answer": "B"}, "choices beside question", "q\nA. red\nB. blue"),
        (
            {"question": "q", "Options": {"A": "red", "B": 4, "C": None}, "answer": "B"},
            "Options beside question",
            "q\nA. red\nB. 4",
        ),
        (
            {"passage": "p", "query": "q", "options": "(a) x (b) y", "answer": "a"},
            "options beside query",
            "p\n\nq\n(a) x (b) y",
        ),
        (
            {"instruction": "i", "input": "w", "choices": ["x"], "output": "x", "system": "s"},
            "choices beside instruction",
            "i\nw\nx",
        ),
    ],
)
def test_choices_are_never_left_out_of_a_question_unasked(value: Value, named: str, asked: str) -> None:
    error = _error(value)
    assert named in error.problem
    row = _row(value, **_written(error.remedy.removeprefix("say which: ").split(" or ")[0]))
    assert row.prompt[-1].content == asked
    assert [message.content for message in row.prompt[:-1]] == ([value["system"]] if "system" in value else [])


def test_a_question_may_be_asked_without_its_choices_where_a_user_says_so() -> None:
    value = {"question": "2+2", "choices": ["3", "4"], "answer": "4"}
    *_, without = _error(value).remedy.split(" or ")
    assert without == "fields: {prompt: question, answer: answer}"
    assert _talk(_row(value, **_written(without))) == PLAIN


NO_CHOICES: list[Any] = [None, "", [], {}, 4, True, [None], [{"message": "x"}], {"temperature": None}, {"a": "x"}]


@pytest.mark.parametrize("choices", [*NO_CHOICES, {"label": ["A"], "text": []}])
def test_choices_that_hold_none_are_no_choices(choices: Any) -> None:
    assert _talk(_row({"question": "2+2", "answer": "4", "choices": choices})) == PLAIN


def test_choices_that_only_a_later_record_has_are_told() -> None:
    reason = _fault({"question": "2+2", "answer": "4"}, {"question": "2+2", "answer": "4", "choices": ["3", "4"]})
    assert reason.startswith("has choices, which the first records lack: ")


def test_labels_that_do_not_match_their_texts_are_told() -> None:
    good, bad = (
        {"question": "q", "answer": "A", "choices": {"label": labels, "text": ["x", "y"]}}
        for labels in (["A", "B"], ["A"])
    )
    assert _fault(good, bad, prompt="{question}\n{choices}", answer="answer") == "choices has 1 labels and 2 texts"


def test_of_two_candidates_an_empty_column_is_none() -> None:
    assert _talk(_row({"question": "2+2", "problem": None, "answer": "4", "response": ""})) == PLAIN


def test_of_very_many_columns_some_are_named_and_the_rest_counted() -> None:
    assert _error({f"c{at}": "x" for at in range(100)}).problem.endswith(", c38, c39 and 60 more")


@pytest.mark.parametrize(
    "value", [{"a": "x", "b": "y"}, {}, {"prompt": "x"}, {"messages": "x"}, {"chosen": "x", "rejected": "y"}]
)
def test_a_shape_that_is_not_recognised_is_an_error_with_the_columns(value: Value) -> None:
    error = _error(value)
    assert ", ".join(value) in error.problem
    assert "fields: {" in error.remedy


def test_a_source_without_records_is_an_error() -> None:
    assert _error().problem == "rows.jsonl holds no records"


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=6) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "text", "answer", "type"]), inner)
    ),
    max_leaves=8,
)
NAMES = ["messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question", "answer"]
NAMES += ["answers", "context", "chosen", "rejected", "label", "kto_tag", "text", "image", "tools", "system", "history"]
NAMES += ["questions", "choices", "id"]


@settings(max_examples=150)
@given(
    first=st.dictionaries(st.sampled_from(NAMES), NESTED, max_size=5),
    second=st.dictionaries(st.sampled_from(NAMES) | st.text(), NESTED, max_size=5),
)
def test_any_record_gives_a_row_or_its_reason(first: Value, second: Value) -> None:
    try:
        shape = _shape(first)
    except DataError as error:
        str(error).encode()
        return
    for record in _records(first, second):
        _check_told(shape.rows(record))


def _check_told(rows: list[Row | BadRow]) -> None:
    assert rows
    for row in rows:
        if isinstance(row, BadRow):
            row.reason.encode()
            assert row.reason
        else:
            assert row.text or (row.messages and row.messages[-1].role == "assistant")
            "".join(message.content for message in row.messages + row.rejected).encode()


def test_metadata_of_messages_is_not_used_and_named() -> None:
    chat = [USER | {"language": "English", "turn": 1}, ANSWER | {"language": "English", "toxic": None}]
    value: Value = {"messages": chat, "model": "m"}
    assert _shape(value).mapping == {"messages": "messages", "not used": "model, messages[].language, messages[].turn"}
    assert _talk(_row(value)) == _said("2+2", "4")


def test_a_dialogue_as_text_with_its_summary_is_a_document() -> None:
    row = _row({"id": "1", "dialogue": "Ann: Hi\nBob: Hello", "summary": "They greet."})
    assert _talk(row) == _said("Ann: Hi\nBob: Hello", "They greet.")


@pytest.mark.parametrize(
    ("column", "value", "medium"),
    [
        ("audios", ["a.wav"], "audio"),
        ("videos", ["a.mp4"], "video"),
        ("audio", {"path": "a.wav", "bytes": b"RIFF"}, "audio"),
        ("video_path", "a.mp4", "video"),
        ("speech", {"array": [0.0, 0.1], "sampling_rate": 16000}, "audio"),
        ("clip", {"path": "a.MP4", "bytes": b"0"}, "video"),
        ("spoken", [{"path": "a.flac", "bytes": None}], "audio"),
    ],
)
@pytest.mark.parametrize("beside", [{"messages": [USER, ANSWER]}, {"question": "q", "answer": "a"}, {"text": "t"}])
def test_rows_with_audio_or_video_are_refused_by_name_unless_their_text_is_declared(
    column: str, value: Any, medium: str, beside: Value
) -> None:
    row = beside | {column: value}
    error = _error(row)
    assert f"holds {medium} (column {column})" in error.problem
    declared = YAML(typ="safe").load(error.remedy[error.remedy.index("fields:") :])["fields"]
    assert isinstance(_row(row, **declared), Row)
    assert f"has {medium} in {column}" in _fault(beside | {column: []}, row)
    assert f"has {medium} in {column}" in _fault(beside, row)


def _parts(role: str, *parts: tuple[str, Any]) -> Value:
    values = [{"type": kind, "value": value} for kind, value in parts]
    return {"role": role, "content": values, "loss_weight": float(role == "assistant")}


def test_llama_factorys_typed_values_are_read_with_reasoning_calls_and_images() -> None:
    asked = _parts("user", ("image_url", "a.png"), ("text", "Is it "), ("text", "odd?"))
    called = _parts("assistant", ("reasoning", "I look."), ("text", "So."), ("tool_call", json.dumps(WEATHER)))
    row = _row({"messages": [asked, called, _parts("tool", ("text", "rain")), _parts("assistant", ("text", "Yes."))]})
    assert _talk(row) == [
        ("user", "<image>Is it odd?"),
        ("assistant", "So."),
        ("tool", "rain"),
        ("assistant", "Yes."),
    ]
    assert row.messages[1].reasoning == "I look."
    assert row.messages[1].tool_calls == (ToolCall("weather", json.dumps(WEATHER["arguments"])),)
    assert row.images == (Image(path="a.png"),)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (_parts("assistant", ("text", "4")) | {"loss_weight": 0.0}, "has the field loss_weight, which would be lost"),
        (_parts("assistant", ("text", None)), "content[0].text is null"),
        (_parts("assistant", ("video_url", "a.mp4")), "only text and images are trained on"),
        (
            _parts("assistant", ("reasoning", "a")) | {"thinking": "b"},
            "two different reasonings, under thinking, content",
        ),
        (_parts("user", ("reasoning", "a")), "which only an assistant may have"),
        (_parts("assistant", ("tool_call", "{")), "is not JSON"),
    ],
)
def test_typed_values_that_would_be_lost_are_told(message: Value, reason: str) -> None:
    assert reason in _fault({"messages": [USER, ANSWER]}, {"messages": [USER, message]})


def test_llama_factorys_pairs_are_read_unless_others_are_named_plainly() -> None:
    sides = {"chosen_messages": [USER, ANSWER], "rejected_messages": [USER, ANSWER | {"content": "5"}]}
    row = _row(sides)
    assert (row.kind, row.answer, row.rejected[0].content) == ("pair", "4", "5")
    both = _row(sides | {"prompt": "2+2", "chosen": "four", "rejected": "five"})
    assert (both.answer, both.rejected[0].content) == ("four", "five")
