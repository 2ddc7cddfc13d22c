"""An answer that is the reference, and an answer that is JSON with the fields of the reference."""

import json
from typing import Any

from finefit.data.tasks.task import NoResult, Task, against_references
from finefit.stats.metrics import mean, rate


def stripped(answer: str) -> str:
    if not answer.strip():
        raise NoResult("the answer is empty")
    return answer.strip()


def _json_object(answer: str) -> dict[str, Any]:
    try:
        value = json.loads(answer)
        json.dumps(
            value, ensure_ascii=False, allow_nan=False
        ).encode()  # Python reads NaN, infinities and half characters; a record holds none
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


def exact_match(name: str = "exact_match") -> Task:
    return against_references(
        name,
        metrics=(rate("exact"),),
        extract=stripped,
        compare=lambda found, reference: {"exact": float(found == reference)},
    )


def json_match(name: str = "json_match") -> Task:
    return against_references(name, metrics=(rate("all_fields"), mean("fields")), extract=_json_object, compare=_fields)
