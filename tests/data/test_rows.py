import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.rows import Message, Row, read_rows
from finefit.errors import DataError

GOOD = '{"prompt": "2+2", "completion": "4"}'
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}


def _read(folder: Path, content: str | bytes) -> list[Row]:
    path = folder / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows(path, "data/rows.jsonl")


def _fault(folder: Path, content: str | bytes) -> str:
    with pytest.raises(DataError) as caught:
        _read(folder, content)
    assert caught.value.remedy
    return caught.value.problem


def _answering(entry: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "2+2"}, entry]})


def test_a_chat_row_keeps_its_messages(tmp_path: Path) -> None:
    (row,) = _read(tmp_path, json.dumps(CHAT))
    assert row.messages == (Message("system", "Be brief."), Message("user", "2+2"), Message("assistant", "4"))
    assert (row.place, row.answer, row.prompt, row.num_given) == ("data/rows.jsonl:1", "4", row.messages[:2], 0)


def test_a_prompt_and_a_completion_are_a_question_and_its_answer(tmp_path: Path) -> None:
    (row,) = _read(tmp_path, GOOD)
    assert row.messages == (Message("user", "2+2"), Message("assistant", "4"))
    assert row.num_given == 1


def test_prompt_and_completion_may_be_messages(tmp_path: Path) -> None:
    entry = {"prompt": CHAT["messages"][:2], "completion": CHAT["messages"][2:]}
    (row,) = _read(tmp_path, json.dumps(entry))
    assert row.messages == (Message("system", "Be brief."), Message("user", "2+2"), Message("assistant", "4"))
    assert row.num_given == 2


def test_byte_order_mark_crlf_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    rows = _read(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}\r\n  \n".encode())
    assert [row.place for row in rows] == ["data/rows.jsonl:1", "data/rows.jsonl:3"]
    assert {row.messages for row in rows} == {(Message("user", "2+2"), Message("assistant", "4"))}


def test_line_separators_inside_a_string_do_not_end_a_row(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    (row,) = _read(tmp_path, json.dumps({"prompt": text, "completion": text}, ensure_ascii=False))
    assert row.answer == text


@given(prompt=st.text(), answer=st.text(min_size=1).filter(lambda text: text.strip()), ensure_ascii=st.booleans())
def test_any_text_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, prompt: str, answer: str, ensure_ascii: bool) -> None:
    line = json.dumps({"prompt": prompt, "completion": answer}, ensure_ascii=ensure_ascii)
    (row,) = _read(tmp_path_factory.getbasetemp(), line)
    assert [m.content for m in row.messages] == [prompt, answer]


def test_bytes_that_are_not_utf_8_are_named_with_their_place(tmp_path: Path) -> None:
    assert _fault(tmp_path, b'{"prompt": "caf\xe9", "completion": "x"}') == "data/rows.jsonl is not UTF-8: byte 15 is 0xe9"


def test_a_last_line_that_was_cut_off_is_an_error_at_its_line(tmp_path: Path) -> None:
    assert _fault(tmp_path, f'{GOOD}\n{{"prompt": "2+').startswith("data/rows.jsonl:2 is no JSON: ")


def test_a_json_array_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    assert _fault(tmp_path, f"\n[{GOOD},\n{GOOD}]") == "data/rows.jsonl is one JSON array, not a JSON object per line"


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff", "  \r\n"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: str) -> None:
    assert _fault(tmp_path, content) == "data/rows.jsonl holds no rows"


def test_a_missing_file_is_named_with_the_path_that_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^train.jsonl does not exist \(looked for .*/train.jsonl\)"):
        read_rows(tmp_path / "train.jsonl", "train.jsonl")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data is a folder"):
        read_rows(tmp_path, "data")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "x"}', "has the fields text; expected are `messages`, or `prompt` and `completion`"),
        ("{}", "has the fields (none); expected are `messages`, or `prompt` and `completion`"),
        ('{"prompt": "x"}', "has the fields prompt; expected are `messages`, or `prompt` and `completion`"),
        ("[1]", "is a list, not an object"),
        ("null", "is a NoneType, not an object"),
        ('{"messages": []}', "messages is [], not a list of messages"),
        ('{"messages": "x"}', 'messages is "x", not a list of messages'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no answer: its last message is not the assistant's, or nothing stands before it"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "has no answer: its last message is not the assistant's, or nothing stands before it",
        ),
        (_answering({"role": "user", "content": "x"}), "has no answer: its last message is not the assistant's, or nothing stands before it"),
        ('{"prompt": [{"role": "assistant", "content": "hi"}], "completion": "x"}', "begins with an answer: nothing stands before it"),
        ('{"prompt": "x", "completion": ""}', "has an empty answer"),
        ('{"prompt": "x", "completion": " \\n "}', "has an empty answer"),
        ('{"prompt": "x", "completion": null}', "completion is null, not a list of messages"),
        ('{"prompt": 3, "completion": "x"}', "prompt is 3, not a list of messages"),
        (_answering({"role": "tool", "content": "x"}), 'messages[1] has the role "tool"; known are system, user, assistant'),
        (_answering({"role": ["user"], "content": "x"}), 'messages[1] has the role ["user"]; known are system, user, assistant'),
        (_answering({"role": "assistant", "content": None}), "messages[1] has null as content, not text"),
        (_answering({"role": "assistant", "content": [{"type": "text"}]}), 'messages[1] has [{"type": "text"}] as content, not text'),
        (_answering({"role": "assistant"}), 'messages[1] is {"role": "assistant"}; a message has `role` and `content`'),
        (_answering("4"), 'messages[1] is "4"; a message has `role` and `content`'),
        (_answering({"role": "assistant", "content": "x", "tool_calls": []}), "messages[1] has the unknown field tool_calls, which would be lost"),
        ('{"prompt": "\\ud83d", "completion": "x"}', "prompt holds half a character, \\ud83d, which no tokenizer takes"),
        (_answering({"role": "assistant", "content": "a\udc00"}), "messages[1] holds half a character, \\udc00, which no tokenizer takes"),
    ],
)
def test_a_row_that_cannot_be_used_is_told_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    assert _fault(tmp_path, f"{GOOD}\n{line}\n") == f"data/rows.jsonl:2 {reason}"


def test_json_nested_beyond_reading_is_an_error_and_no_crash(tmp_path: Path) -> None:
    assert _fault(tmp_path, '{"messages": ' + "[" * 100_000).startswith("data/rows.jsonl:1 is no JSON: ")


def test_all_bad_rows_are_listed_at_once(tmp_path: Path) -> None:
    problem = _fault(tmp_path, "\n".join([GOOD, "{}", GOOD, "[]", "{", '{"prompt": "x", "completion": ""}']))
    assert [line.split()[0] for line in problem.splitlines()] == [f"data/rows.jsonl:{number}" for number in (2, 4, 5, 6)]


def test_beyond_ten_bad_rows_the_rest_is_counted(tmp_path: Path) -> None:
    lines = _fault(tmp_path, "\n".join(["{}"] * 25)).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 15 more"
