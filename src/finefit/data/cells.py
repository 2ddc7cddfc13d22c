"""What a cell of a record may hold: text, several answers, images, a verdict. Anything else is a fault of its record."""

import base64
import binascii
import json
import math
from collections import Counter
from collections.abc import Iterable

from finefit.data.rows import Image


class Fault(Exception):
    """Why a record, or one row of it, cannot be used."""


def is_given(value: object) -> bool:
    """Parquet fills absent fields with null and CSV with empty text; neither says anything."""
    return value is not None and value != "" and value != [] and value != {}


def shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # bytes, dates, objects beyond what JSON nests
        return f"of type {type(value).__name__}"
    text = printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """Half a character, which JSON can escape, breaks every print."""
    return text.encode(errors="backslashreplace").decode()


def text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise Fault(f"{place} is {shown(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape what UTF-8 cannot hold
        raise Fault(
            f"{place} holds half a character, \\u{ord(value[error.start]):04x}, which no tokenizer takes"
        ) from None
    return value


def filled(value: object, place: str) -> str:
    found = text(value, place)
    if not found.strip():
        raise Fault(f"{place} is empty")
    return found


def scalar(value: object, place: str) -> str:
    """Text, or a number or boolean as JSON writes it."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    return text(value, place)


def passages(value: object, place: str) -> str:
    """Text, or a list of texts with blank lines between them."""
    if isinstance(value, list):
        return "\n\n".join(scalar(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    return scalar(value, place)


def inserted(value: object, place: str) -> str:
    """What a name in braces stands for: passages, or labelled choices with a line for each."""
    labels, texts = _labelled(value)
    if len(labels) != len(texts):
        raise Fault(f"{place} has {len(labels)} labels and {len(texts)} texts")
    if not labels:
        return passages(value, place)
    return "\n".join(
        f"{scalar(label, place)}. {scalar(entry, f'{place}.{label}')}"
        for label, entry in zip(labels, texts, strict=True)
    )


def _labelled(value: object) -> tuple[list[object], list[object]]:
    """Labels and texts: of {"label": ["A", "B"], "text": [...]} as ARC has it, or {"A": ..., "B": ...}; none of anything else."""
    if not isinstance(value, dict):
        return [], []
    if value.keys() == {"label", "text"} and isinstance(value["label"], list) and isinstance(value["text"], list):
        return value["label"], value["text"]
    given = {
        label: entry for label, entry in value.items() if entry is not None
    }  # a table fills in the labels that other records have
    are_labels = len(given) > 1 and all(len(str(label)) == 1 and str(label).isalnum() for label in given)
    return (list(given), list(given.values())) if are_labels else ([], [])


def answers(value: object, place: str) -> tuple[str, dict[str, int]]:
    """The answer to train on and, of a list, all that count as right, with how often each stands there: the most frequent entry wins, the first of
    equals."""
    if isinstance(value, dict) and "text" in value:  # SQuAD keeps a list of texts beside a list of positions
        value, place = value["text"], f"{place}.text"
    if not isinstance(value, list):
        return filled(scalar(value, place), place), {}
    if not value:
        raise Fault(f"{place} is an empty list, so there is no answer")
    counts = Counter(_entry(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    return filled(counts.most_common(1)[0][0], place), counts


def _entry(value: object, place: str) -> str:
    if isinstance(value, dict) and "answer" in value:  # VQA: each with who gave it and how sure
        return scalar(value["answer"], f"{place}.answer")
    return scalar(value, place)


def several(value: object, place: str) -> tuple[str, ...]:
    """A list of texts, or one text with semicolons between them (TruthfulQA's CSV)."""
    if isinstance(value, str):
        return tuple(part.strip() for part in text(value, place).split(";") if part.strip())
    if not isinstance(value, list):
        raise Fault(f"{place} is {shown(value)}, not a list of texts")
    return tuple(text(entry, f"{place}[{at}]") for at, entry in enumerate(value))


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


_VERDICTS = {"true": True, "false": False, "1": True, "0": False}


def verdict(value: object, place: str) -> bool:
    found = _VERDICTS.get(scalar(value, place).strip().lower())
    if found is None:
        raise Fault(f"{place} is {shown(value)}, neither true nor false")
    return found


def images(value: object, place: str) -> tuple[Image, ...]:
    if isinstance(value, list):
        return tuple(image(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    return (image(value, place),)


def image(value: object, place: str) -> Image:
    """A path is kept as it stands; nothing is fetched."""
    held = held_image(value)
    if isinstance(held, bytes):
        return Image(data=held)
    if held is None:
        raise Fault(f"{place} is {shown(value)}, neither the path nor the bytes of an image (nothing is downloaded)")
    return _inline(held, place) if held.startswith("data:") else Image(path=text(held, place))


def held_image(value: object) -> str | bytes | None:
    """A path or bytes; an id, a URL or the print of an object are neither."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if is_given(value.get(key))), None)
    if isinstance(value, bytes):
        return value or None
    is_path = (
        isinstance(value, str)
        and value.strip()
        and "://" not in value[:16]
        and not (value.startswith("<") and value.endswith(">"))
    )
    return value if isinstance(value, str) and is_path else None


def _inline(url: str, place: str) -> Image:
    head, _, data = url.partition(",")
    try:
        if not (head.endswith(";base64") and data):
            raise ValueError
        return Image(data=base64.b64decode(data, validate=True))
    except (ValueError, binascii.Error):
        raise Fault(f"{place} is {shown(url)}, which is no base64 image") from None
