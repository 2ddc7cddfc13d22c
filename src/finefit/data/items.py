"""Test rows on disk. They keep their text: a task builds its prompt and reads its reference from them."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from finefit.data.rows import Message, Row, ToolCall
from finefit.errors import DataError


def as_item(row: Row) -> Row:
    """What an evaluation is given of a row: of a preference pair the rejected answer is a wrong one; plain text is an answer to nothing."""
    match row.kind:
        case "text":
            return replace(row, messages=(Message("assistant", row.text),))
        case "pair":
            if len(row.rejected) != 1 or len(row.messages) != row.num_given + 1:
                raise DataError("is a pair whose sides differ in more than their last answer", "give test pairs that share all but the last answer")
            return replace(row, rejected=(), wrong=(row.rejected[0].content,))
        case "chat" | "judged":
            return row


def item_line(row: Row) -> str:
    """What an evaluation needs of a row; its place goes with it, so that an item can be found again."""
    item = {
        "source": row.source,
        "number": row.number,
        "part": row.part,
        "messages": [] if row.text else [asdict(message) for message in row.messages],
        "tools": row.tools,
        "references": row.references,
        "wrong": row.wrong,
        "text": row.text,
        "key": row.key,
        "repairs": row.repairs,
    }
    return json.dumps(item, ensure_ascii=False) + "\n"


def key_of(row: Row) -> str:
    """The same item has the same key in every run: what is asked, and what is right, before anything was built from it."""
    if row.key:
        return row.key
    answer = row.text or row.answer
    content = json.dumps([[asdict(message) for message in row.prompt], row.tools, answer, sorted(row.references), sorted(row.wrong)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_items(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [_row(json.loads(line)) for line in file]


def _row(item: dict[str, Any]) -> Row:
    messages = tuple(Message(**m | {"tool_calls": tuple(ToolCall(**call) for call in m["tool_calls"])}) for m in item.pop("messages"))
    lists: dict[str, Any] = {name: tuple(item.pop(name, ())) for name in ("references", "wrong", "repairs")}
    return as_item(Row(messages=messages, **lists, **item))
