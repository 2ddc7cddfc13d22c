"""Values of records: what a cell may hold (text, several answers, images, a verdict), and where it is found: in a
column, in a nested field, or in a text that names several columns in braces. Anything else is a RecordError."""

import base64
import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from finefit.data.rows import Image
from finefit.errors import DataError

Value = dict[str, Any]
"""The fields of a record by name."""

# names as normalised by `plain`
PROMPTS: Final = frozenset({"question", "query", "problem", "instruction", "input", "prompt"})
CONTEXTS: Final = frozenset({"context", "contexts", "passage", "document", "article", "dialogue", "transcript"})


class RecordError(Exception):
    """Why a record, or one row of it, cannot be used."""


def is_given(value: object) -> bool:
    """Parquet fills absent fields with null and CSV with empty text; neither is a value."""
    return value is not None and value != "" and value != [] and value != {}


def shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # bytes, dates, objects that are nested too deep for JSON
        return f"of type {type(value).__name__}"
    text = printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """Escapes lone surrogates, which JSON can contain but which no stream can print."""
    return text.encode(errors="backslashreplace").decode()


def text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{place} is {shown(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape characters that UTF-8 cannot encode
        half = f"\\u{ord(value[error.start]):04x}"
        raise RecordError(f"{place} holds half a character, {half}, which no tokenizer accepts") from None
    return value


def filled(value: object, place: str) -> str:
    found = text(value, place)
    if not found.strip():
        raise RecordError(f"{place} is empty")
    return found


def scalar(value: object, place: str) -> str:
    """Accepts text, and numbers and booleans as JSON writes them."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    return text(value, place)


def passages(value: object, place: str) -> str:
    """Accepts text, or a list of texts, which are joined by blank lines."""
    if isinstance(value, list):
        return "\n\n".join(scalar(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    return scalar(value, place)


def inserted(value: object, place: str) -> str:
    """Returns the text that replaces a name in braces: passages, or labelled choices with one per line."""
    labels: list[object] = []
    texts: list[object] = []
    if isinstance(value, dict) and value.keys() == {"label", "text"} and {*map(type, value.values())} == {list}:
        labels, texts = value["label"], value["text"]  # as ARC has it
    elif isinstance(value, dict):
        given = {label: entry for label, entry in value.items() if entry is not None}  # tables add others' labels
        if len(given) > 1 and all(len(str(label)) == 1 and str(label).isalnum() for label in given):
            labels, texts = list(given), list(given.values())
    if len(labels) != len(texts):
        raise RecordError(f"{place} has {len(labels)} labels and {len(texts)} texts")
    if not labels:
        return passages(value, place)
    pairs = zip(labels, texts, strict=True)
    return "\n".join(f"{scalar(label, place)}. {scalar(entry, f'{place}.{label}')}" for label, entry in pairs)


def answers(value: object, place: str) -> tuple[str, dict[str, int]]:
    """Returns the answer to train on (the most frequent of a list, the first of equals), and how often a list holds
    each."""
    if isinstance(value, dict) and "text" in value:  # SQuAD keeps a list of texts beside a list of positions
        value, place = value["text"], f"{place}.text"
    if not isinstance(value, list):
        return filled(scalar(value, place), place), {}
    if not value:
        raise RecordError(f"{place} is an empty list, so there is no answer")
    # VQA's entries say who gave the answer and how sure they were
    entries = [(e["answer"], ".answer") if isinstance(e, dict) and "answer" in e else (e, "") for e in value]
    counts = Counter(scalar(entry, f"{place}[{at}]{deeper}") for at, (entry, deeper) in enumerate(entries))
    return filled(counts.most_common(1)[0][0], place), counts


def several(value: object, place: str) -> tuple[str, ...]:
    """Accepts a list of texts, or one text with semicolons between them (TruthfulQA's CSV)."""
    if isinstance(value, str):
        return tuple(part.strip() for part in text(value, place).split(";") if part.strip())
    if not isinstance(value, list):
        raise RecordError(f"{place} is {shown(value)}, not a list of texts")
    return tuple(text(entry, f"{place}[{at}]") for at, entry in enumerate(value))


VERDICTS: Final = (
    ("true", "false"),
    ("1", "0"),
    ("1", "-1"),
    ("good", "bad"),
    ("desirable", "undesirable"),
    ("chosen", "rejected"),
)
"""The (good, bad) spellings that data sets use to judge an answer."""


def verdict(value: object, place: str) -> bool:
    written = scalar(value, place).strip().lower().removesuffix(".0")
    if all(written not in pair for pair in VERDICTS):
        raise RecordError(f"{place} is {shown(value)}, neither true nor false")
    return any(written == good for good, _ in VERDICTS)


def images(value: object, place: str) -> tuple[Image, ...]:
    if isinstance(value, list):
        return tuple(image(entry, f"{place}[{at}]") for at, entry in enumerate(value))
    return (image(value, place),)


def image(value: object, place: str) -> Image:
    """A path is stored unchanged; nothing is downloaded."""
    held = held_image(value)
    if isinstance(held, bytes):
        return Image(data=held)
    if held is None:
        kinds = "neither the path nor the bytes of an image (nothing is downloaded)"
        raise RecordError(f"{place} is {shown(value)}, {kinds}")
    if not held.startswith("data:"):
        return Image(path=text(held, place))
    head, _, data = held.partition(",")
    with suppress(ValueError):
        if head.endswith(";base64") and data:
            return Image(data=base64.b64decode(data, validate=True))
    raise RecordError(f"{place} is {shown(held)}, which is not a base64 image")


def held_image(value: object) -> str | bytes | None:
    """Returns a path or bytes; None for an id, a URL or the printed form of an object."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "url") if is_given(value.get(key))), None)
    if isinstance(value, bytes):
        return value or None
    if not isinstance(value, str) or not value.strip() or "://" in value[:16]:
        return None
    return None if value.startswith("<") and value.endswith(">") else value


_RECORDINGS: Final = {
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".wma"),
    "video": (".mp4", ".mkv", ".avi", ".mov", ".webm", ".mpg", ".mpeg"),
}


def recording(value: object) -> str | None:
    """What a value is by its form: samples with their rate, or bytes beside the name of a file, as `datasets` keeps
    audio and video. Several are a list."""
    if isinstance(value, list):
        value = next(iter(value), None)
    if not isinstance(value, dict):
        return None
    if value.keys() >= {"array", "sampling_rate"}:
        return "audio"
    path = value.get("path")
    endings = _RECORDINGS.items() if "bytes" in value and isinstance(path, str) else ()
    return next((medium for medium, known in endings if str(path).lower().endswith(known)), None)


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """The name as the user wrote it."""
    keys: tuple[str, ...] = ()
    pieces: "tuple[str | Column, ...]" = ()
    """For a text with names in braces: the named columns and the text between them."""
    digits: int = 0
    """Width to which a value in such a text is padded with zeros, such as 12 for `{image_id:012}`."""

    @property
    def roots(self) -> frozenset[str]:
        return frozenset(self.keys[:1]).union(*(piece.roots for piece in self.pieces if isinstance(piece, Column)))

    def value(self, record: Value) -> Any:
        found = self.get(record)
        if found is None:
            raise RecordError(f"has no {self.name}")
        return found

    def get(self, record: Value) -> Any:
        """Returns None if the record lacks the column or its value is empty."""
        if self.pieces:
            texts = (
                p if isinstance(p, str) else inserted(p.value(record), p.name).zfill(p.digits) for p in self.pieces
            )
            return "".join(texts)
        found: Any = record
        for key in self.keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Normalises a column name for comparison: `Best Answer`, `best_answer` and `bestAnswer` are one name."""
    return re.sub(r"[\s_-]", "", name.casefold())


def listed(names: Collection[str], most: int = 40) -> str:
    """`most` limits the list, because an object keyed by ids has as many columns as records."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return printable(", ".join(islice(names, most))) + more if names else "(none)"


@dataclass(frozen=True, slots=True)
class SampleColumns:
    source: str
    records: tuple[Value, ...]
    values: dict[str, list[Any]]
    """The given values of each column, in the order of the records."""

    @staticmethod
    def of(records: Sequence[Value], source: str) -> "SampleColumns":
        values: dict[str, list[Any]] = {}
        for record in records:
            for name, value in record.items():
                values.setdefault(name, []).extend([value] if is_given(value) else [])
        return SampleColumns(source, tuple(records), values)

    def named(self, names: Collection[str]) -> list[str]:
        """Returns the columns that have one of these normalised names; if there are several, those that hold values."""
        found = [column for column in self.values if plain(column) in names]
        return [column for column in found if self.values[column]] or found

    def column(self, written: str, field: str) -> Column:
        """Finds the column that a user named in `fields:`."""
        if keys := _keys(written, self.records):
            return Column(written, keys)
        if "{" not in written or "}" not in written:
            raise self._missing(written, field)
        pieces: list[str | Column] = []
        for found in re.finditer(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+|[{}])", written):
            brace, name, between = found.groups()
            if not name:
                pieces.append(brace[0] if brace else between)
                continue
            padded, _, width = name.rpartition(":")
            if keys := _keys(name.strip(), self.records):
                pieces.append(Column(name, keys))
            elif re.fullmatch(r"0\d{1,2}", width) and (keys := _keys(padded.strip(), self.records)):
                pieces.append(Column(padded, keys, digits=int(width)))
            else:
                raise self._missing(name, field)
        return Column(written, pieces=tuple(pieces))

    def _missing(self, name: str, field: str) -> DataError:
        known = {plain(column): column for column in self.values}
        close = difflib.get_close_matches(plain(name), known, n=1)
        hint = f"did you mean {known[close[0]]}? " if close else ""
        problem = f"{self.source} has no column {name}, which fields.{field} names"
        return DataError(problem, f"{hint}the columns are {listed(self.values)}")


def _keys(written: str, values: Sequence[Value]) -> tuple[str, ...]:
    """Returns the path of keys to a column that at least one of the values has; empty if none has it."""
    if name := _match(written, values):
        return (name,)
    for dot in (at for at, character in enumerate(written) if character == "."):
        head = _match(written[:dot], values)
        inner = [value[head] for value in values if head and isinstance(value.get(head), dict)]
        if head and inner and (deeper := _keys(written[dot + 1 :], inner)):
            return (head, *deeper)
    return ()


def _match(written: str, values: Sequence[Value]) -> str:
    """Returns the name itself, or the only name that differs just by case."""
    names = {name for value in values for name in value}
    alike = [name for name in names if name.casefold() == written.casefold()]
    return written if written in names else alike[0] if len(alike) == 1 else ""
