"""A task builds the prompt of an item and extracts the result from an answer. Training rows and evaluation items go through the same renderer."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finefit.data.rows import Message, Row


class NoResult(Exception):
    """The answer holds no result; the item scores zero and this is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    prompt: Callable[[Row], Sequence[Message]]
    extract: Callable[[str], Any]
    """From an answer or a reference; raises NoResult."""
    scores: Callable[[Any, Any], dict[str, float]]
    """(extracted, reference) -> each metric in 0..1."""
    metrics: tuple[str, ...]
    """The first one is the task's own score."""


def _before_the_answer(row: Row) -> Sequence[Message]:
    return row.prompt


def _stripped(answer: str) -> str:
    if not answer.strip():
        raise NoResult("the answer is empty")
    return answer.strip()


def _json_object(answer: str) -> dict[str, Any]:
    try:
        value = json.loads(answer)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # Python reads NaN, infinities and half characters; a record holds none
    except (ValueError, RecursionError) as error:
        raise NoResult(f"the answer is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise NoResult(f"the answer is a JSON {type(value).__name__}, not an object")
    return value


def _fields(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    keys = found.keys() | reference.keys()
    right = sum(key in found and key in reference and _same(found[key], reference[key]) for key in keys)
    return {"all_fields": float(right == len(keys)), "fields": right / len(keys) if keys else 1.0}


def _same(left: Any, right: Any) -> bool:
    """As they are written: Python takes true for 1, and 7.0 for 7."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


EXACT_MATCH = Task(
    name="exact_match",
    prompt=_before_the_answer,
    extract=_stripped,
    scores=lambda found, reference: {"exact": float(found == reference)},
    metrics=("exact",),
)
JSON_MATCH = Task(name="json_match", prompt=_before_the_answer, extract=_json_object, scores=_fields, metrics=("all_fields", "fields"))

TASKS: dict[str, Task] = {task.name: task for task in (EXACT_MATCH, JSON_MATCH)}
