"""Test rows on disk. They keep their text: a task builds its prompt and reads its reference from them."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from finefit.data.pictures import as_json, from_json
from finefit.data.rows import Message, Row, ToolCall
from finefit.errors import DataError, FinefitError


def as_item(row: Row) -> Row:
    """What an evaluation is given of a row: of a preference pair the rejected answer is a wrong one; plain text is an answer to nothing."""
    match row.kind:
        case "text":
            return replace(row, messages=(Message("assistant", row.text),))
        case "pair":
            if len(row.rejected) != 1 or len(row.messages) != row.num_given + 1:
                raise DataError(
                    "is a pair whose sides differ in more than their last answer",
                    "give test pairs that share all but the last answer",
                )
            return replace(row, rejected=(), wrong=(row.rejected[0].content,))
        case "chat" | "judged":
            return row


def is_asked(row: Row, sources: tuple[str, ...]) -> bool:
    """Whether an evaluation of these sources asks for it; of none that are named, of all."""
    return not sources or not row.dataset or row.dataset in sources


def item_line(row: Row) -> str:
    """What an evaluation needs of a row; its place goes with it, so that an item can be found again."""
    item = {
        "source": row.source,
        "number": row.number,
        "dataset": row.dataset,
        "part": row.part,
        "messages": [] if row.text else [asdict(message) for message in row.messages],
        "tools": row.tools,
        "references": row.references,
        "votes": row.votes,
        "wrong": row.wrong,
        "text": row.text,
        "key": key_of(row) if row.images else row.key,
        "repairs": row.repairs,
        "pictures": [as_json(picture) for picture in row.pictures],
    }
    return json.dumps(item, ensure_ascii=False) + "\n"


def key_of(row: Row) -> str:
    """The same item has the same key in every run: what is asked, and what is right, before anything was built from it. An image is half of the
    question, by content: one that was not looked at yet gives no key."""
    if not row.images:  # also of a row that was read back, whose key says what it shows
        return text_key(row)
    if len(row.pictures) != len(row.images):
        raise FinefitError(f"{row.place} has images that nobody has looked at")
    return _hashed([text_key(row), *(picture.sha256 for picture in row.pictures)])


def text_key(row: Row) -> str:
    """Of all but its images."""
    answer = row.text or row.answer
    return row.key or _hashed(
        [[asdict(message) for message in row.prompt], row.tools, answer, sorted(row.references), sorted(row.wrong)]
    )


def _hashed(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_items(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [_row(json.loads(line), path.parent) for line in file]


def _row(item: dict[str, Any], folder: Path) -> Row:
    messages = tuple(
        Message(**m | {"tool_calls": tuple(ToolCall(**call) for call in m["tool_calls"])}) for m in item.pop("messages")
    )
    lists: dict[str, Any] = {name: tuple(item.pop(name, ())) for name in ("references", "votes", "wrong", "repairs")}
    pictures = tuple(from_json(values, folder) for values in item.pop("pictures", ()))
    return as_item(Row(messages=messages, pictures=pictures, **lists, **item))
