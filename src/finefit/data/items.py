"""Test rows on disk. They keep their text: a task builds its prompt and reads its reference from them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finefit.data.rows import Message, Row, ToolCall


def item_line(row: Row) -> str:
    """What an evaluation needs of a row; its place goes with it, so that an item can be found again."""
    item = {
        "source": row.source,
        "number": row.number,
        "part": row.part,
        "messages": [asdict(message) for message in row.messages],
        "tools": row.tools,
        "references": row.references,
        "wrong": row.wrong,
    }
    return json.dumps(item, ensure_ascii=False) + "\n"


def read_items(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [_row(json.loads(line)) for line in file]


def _row(item: dict[str, Any]) -> Row:
    messages = tuple(Message(**m | {"tool_calls": tuple(ToolCall(**call) for call in m["tool_calls"])}) for m in item.pop("messages"))
    return Row(messages=messages, references=tuple(item.pop("references")), wrong=tuple(item.pop("wrong")), **item)
