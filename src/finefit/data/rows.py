"""JSONL files -> conversations. Two shapes: {"messages": [...]} and {"prompt": ..., "completion": ...}, strings or messages."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from finefit.errors import DataError

Role = Literal["system", "user", "assistant"]
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    source: str
    number: int
    """Line in the file, from 1."""
    messages: tuple[Message, ...]
    """Ends with the answer."""
    num_given: int = 0
    """So many messages at the start are never supervised, whoever speaks: those of a row's `prompt`."""

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        return self.messages[-1].content


class _BadRow(Exception):
    pass


def read_rows(path: Path, source: str) -> list[Row]:
    """Every record of the file, or one error that lists the rows that cannot be used."""
    rows: list[Row] = []
    faults: list[str] = []
    for number, line in _lines(path, source):
        try:
            record = _record(line)
            messages = _conversation(record)
            rows.append(Row(source=source, number=number, messages=messages, num_given=_num_given(record)))
        except _BadRow as fault:
            faults.append(f"{source}:{number} {fault}")
    if faults:
        more = f"\nand {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DataError("\n".join(faults[:_SHOWN]) + more, "mend or remove these rows; nothing is dropped unseen")
    if not rows:
        raise DataError(f"{source} holds no rows", "one JSON object per line is expected")
    return rows


def _lines(path: Path, source: str) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{source} does not exist (looked for {path})", "paths are relative to the spec file") from None
    except IsADirectoryError:
        raise DataError(f"{source} is a folder", "name a JSONL file in it") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}", "save the file as UTF-8") from None
    if text.lstrip().startswith("["):
        raise DataError(f"{source} is one JSON array, not a JSON object per line", f"convert it: jq -c '.[]' {source} > rows.jsonl")
    # split at line feeds alone: JSON strings may hold U+2028 and its like
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _record(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _BadRow(f"is a {type(value).__name__}, not an object")
    return value


def _conversation(record: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" in record:
        messages = _messages(record["messages"], "messages")
    elif "prompt" in record and "completion" in record:
        messages = _side(record["prompt"], "prompt", "user") + _side(record["completion"], "completion", "assistant")
    else:
        raise _BadRow(f"has the fields {', '.join(record) or '(none)'}; expected are `messages`, or `prompt` and `completion`")
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise _BadRow("has no answer: its last message is not the assistant's, or nothing stands before it")
    if messages[0].role == "assistant":
        raise _BadRow("begins with an answer: nothing stands before it")
    if any(m.role == "assistant" and not m.content.strip() for m in messages):
        raise _BadRow("has an empty answer")
    return messages


def _num_given(record: dict[str, Any]) -> int:
    prompt = [] if "messages" in record else record["prompt"]
    return len(prompt) if isinstance(prompt, list) else 1


def _side(value: Any, field: str, role: Role) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role, _text(value, field)),)
    return _messages(value, field)


def _messages(value: Any, field: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _BadRow(f"{field} is {_shown(value)}, not a list of messages")
    return tuple(_message(entry, f"{field}[{at}]") for at, entry in enumerate(value))


def _message(entry: Any, place: str) -> Message:
    if not isinstance(entry, dict) or not {"role", "content"} <= entry.keys():
        raise _BadRow(f"{place} is {_shown(entry)}; a message has `role` and `content`")
    if entry["role"] not in get_args(Role):
        raise _BadRow(f"{place} has the role {_shown(entry['role'])}; known are {', '.join(get_args(Role))}")
    if extra := entry.keys() - {"role", "content"}:
        raise _BadRow(f"{place} has the unknown field {', '.join(sorted(extra))}, which would be lost")
    return Message(entry["role"], _text(entry["content"], place))


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _BadRow(f"{place} has {_shown(value)} as content, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape what UTF-8 cannot hold
        raise _BadRow(f"{place} holds half a character, \\u{ord(value[error.start]):04x}, which no tokenizer takes") from None
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
