"""A stack from answers that were made elsewhere: rows with `prompt` and `answer`, or with `answer_a` and `answer_b`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finefit.errors import DataError
from finefit.review.stack import Said, Sheet, Stack, digest

_ONE = ("answer",)
_TWO = ("answer_a", "answer_b")
_REMEDY = "name the columns prompt and answer, or prompt, answer_a and answer_b; reference, source and id may stand beside them"


def stack_of_rows(rows: Iterable[tuple[str, Mapping[str, Any]]], *, file: str, name: str) -> Stack:
    """`rows`: each with its place. `file`: as the models are called by, with the column behind it."""
    found = list(rows)
    if not found:
        raise DataError(f"{file} holds no rows", _REMEDY)
    columns = _columns(found[0][1], file)
    sheets = tuple(_sheet(place, row, columns) for place, row in found)
    _require_distinct([(place, sheet.key) for (place, _), sheet in zip(found, sheets, strict=True)])
    return Stack(name=name, task=file, models=tuple(f"{file}:{column}" for column in columns), sheets=sheets)


def _columns(row: Mapping[str, Any], file: str) -> tuple[str, ...]:
    for columns in (_TWO, _ONE):
        if all(column in row for column in columns):
            return columns
    raise DataError(f"{file} has no column answer; its columns are {', '.join(map(str, row))}", _REMEDY)


def _sheet(place: str, row: Mapping[str, Any], columns: Sequence[str]) -> Sheet:
    prompt = _prompt(row, place)
    answers = tuple(_text(row, column, place) for column in columns)
    reference = row.get("reference")
    content = json.dumps([[said.role, said.text] for said in prompt] + ["" if reference is None else str(reference)])
    return Sheet(
        key=digest(content) if row.get("id") in (None, "") else str(row["id"]),
        prompt=prompt,
        answers=answers,
        reference=None if reference in (None, "") else str(reference),
        place="" if row.get("source") in (None, "") else str(row["source"]),
    )


def _prompt(row: Mapping[str, Any], place: str) -> tuple[Said, ...]:
    match row.get("prompt"):
        case str() as text if text.strip():
            return (Said(role="", text=text),)
        case [*messages] if messages and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            return tuple(Said(role=message["role"], text=message["content"]) for message in messages)
        case None | str():
            raise DataError(f"{place} has no prompt: an answer cannot be judged without what was asked", _REMEDY)
        case other:
            raise DataError(f"{place} has a prompt that is neither text nor messages: {str(other)[:60]}", _REMEDY)


def _text(row: Mapping[str, Any], column: str, place: str) -> str:
    """Empty is an answer too."""
    match row.get(column):
        case str() as text:
            return text
        case None if column in row:
            return ""
        case None:
            raise DataError(
                f"{place} has no {column}: all items count, so a missing answer is written as an empty one", _REMEDY
            )
        case other:
            return json.dumps(other, ensure_ascii=False)


def _require_distinct(keys: Sequence[tuple[str, str]]) -> None:
    first: dict[str, str] = {}
    for place, key in keys:
        if key in first:
            raise DataError(f"{place} is the same item as {first[key]}: {key}", "give each row an id of its own")
        first[key] = place
