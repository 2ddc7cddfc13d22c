"""Made pairs as the lines of a file that objective dpo reads: prompt, chosen, rejected, and beside them what was changed in which row."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.data.falsify.make import MadePair
from finefit.data.falsify.scored import ScoredPair
from finefit.data.rows import Message, Row


def write_pairs(path: Path, pairs: Iterable[MadePair | ScoredPair]) -> None:
    write_text(path, "".join(f"{json.dumps(pair_record(pair), ensure_ascii=False)}\n" for pair in pairs))


def pair_record(pair: MadePair | ScoredPair) -> dict[str, Any]:
    return _made(pair) if isinstance(pair, MadePair) else _scored(pair)


def _made(pair: MadePair) -> dict[str, Any]:
    change = pair.change
    return {
        "prompt": messages_record(pair.row.prompt),
        "chosen": change.answer,
        "rejected": change.text,
        **tools_record(pair.row),
        "rule": change.rule,
        "change": {"before": change.before, "after": change.after, "at": change.at},
        "row": pair.row.place,
    }


def _scored(pair: ScoredPair) -> dict[str, Any]:
    return {
        "prompt": messages_record(pair.row.prompt),
        "chosen": pair.chosen.answer,
        "rejected": pair.rejected.answer,
        **tools_record(pair.row),
        "rule": "scored",
        "scores": {"chosen": pair.chosen.score, "rejected": pair.rejected.score},
        "row": pair.row.place,
    }


def tools_record(row: Row) -> dict[str, Any]:
    """What the prompt offers, where it does."""
    return {"tools": json.loads(row.tools)} if row.tools else {}


def messages_record(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    """With what an assistant thought and called, as the reader of conversations knows it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return written
