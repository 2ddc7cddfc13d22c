"""Where a value stands in a record: in a column, deeper in one, or in a text that names several in braces."""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from finefit.data.cells import Fault, inserted, is_given, printable
from finefit.data.content import Value
from finefit.errors import DataError

# names as `plain` gives them
PROMPTS: Final = frozenset({"question", "query", "problem", "instruction", "input", "prompt"})
CONTEXTS: Final = frozenset({"context", "contexts", "passage", "document", "article", "dialogue", "transcript"})

_SHOWN = 40
"""Columns that a message names: objects with an id for a key have as many as they have records."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """As written, for the user."""
    keys: tuple[str, ...] = ()
    pieces: "tuple[str | Column, ...]" = ()
    """Of a text with names in braces: what stands between them, and they."""
    digits: int = 0
    """In such a text: with zeros in front up to so many, as `{image_id:012}` asks for."""

    @property
    def roots(self) -> frozenset[str]:
        """The columns that are read for it."""
        return frozenset(self.keys[:1]).union(*(piece.roots for piece in self.pieces if isinstance(piece, Column)))

    def value(self, record: Value) -> Any:
        found = self.get(record)
        if found is None:
            raise Fault(f"has no {self.name}")
        return found

    def get(self, record: Value) -> Any:
        """None where the record has no such column, or nothing in it."""
        if self.pieces:
            return "".join(piece if isinstance(piece, str) else piece._inserted(record) for piece in self.pieces)
        found: Any = record
        for key in self.keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _inserted(self, record: Value) -> str:
        return inserted(self.value(record), self.name).zfill(self.digits)


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """What a column is recognised by: `Best Answer`, `best_answer` and `bestAnswer` are one name."""
    return re.sub(r"[\s_-]", "", name.casefold())


def listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return printable(", ".join(islice(names, _SHOWN))) + more if names else "(none)"


@dataclass(frozen=True, slots=True)
class Sample:
    """The columns of the first records of a source."""

    source: str
    records: tuple[Value, ...]
    values: dict[str, list[Any]]
    """By column, in the records' own order: the values that say something."""

    @staticmethod
    def of(records: Sequence[Value], source: str) -> "Sample":
        values: dict[str, list[Any]] = {}
        for record in records:
            for name, value in record.items():
                values.setdefault(name, []).extend([value] if is_given(value) else [])
        return Sample(source, tuple(records), values)

    def named(self, names: Collection[str]) -> list[str]:
        """The columns with one of these plain names; of several, those that hold anything."""
        found = [column for column in self.values if plain(column) in names]
        return [column for column in found if self.values[column]] or found

    def column(self, written: str, field: str) -> Column:
        """What a user wrote in `fields:`."""
        if keys := _keys(written, self.records):
            return Column(written, keys)
        if "{" in written and "}" in written:
            return Column(written, pieces=tuple(self._pieces(written, field)))
        raise self._missing(written, field)

    def _pieces(self, written: str, field: str) -> list[str | Column]:
        pieces: list[str | Column] = []
        for found in re.finditer(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+|[{}])", written):
            brace, name, between = found.groups()
            pieces.append(self._named(name, field) if name else brace[0] if brace else between)
        return pieces

    def _named(self, written: str, field: str) -> Column:
        if keys := _keys(written.strip(), self.records):
            return Column(written, keys)
        name, _, width = written.rpartition(":")
        if re.fullmatch(r"0\d{1,2}", width) and (keys := _keys(name.strip(), self.records)):
            return Column(name, keys, digits=int(width))
        raise self._missing(written, field)

    def _missing(self, name: str, field: str) -> DataError:
        known = {plain(column): column for column in self.values}
        close = difflib.get_close_matches(plain(name), known, n=1)
        hint = f"did you mean {known[close[0]]}? " if close else ""
        return DataError(
            f"{self.source} has no column {name}, which fields.{field} names",
            f"{hint}the columns are {listed(self.values)}",
        )


def _keys(written: str, values: Sequence[Value]) -> tuple[str, ...]:
    """The way to a column that at least one of the values has; empty where none has it."""
    if name := _match(written, values):
        return (name,)
    for dot in (at for at, character in enumerate(written) if character == "."):
        head = _match(written[:dot], values)
        inner = [value[head] for value in values if head and isinstance(value.get(head), dict)]
        if head and inner and (deeper := _keys(written[dot + 1 :], inner)):
            return (head, *deeper)
    return ()


def _match(written: str, values: Sequence[Value]) -> str:
    """The name itself, else the only one that differs by case alone."""
    names = {name for value in values for name in value}
    alike = [name for name in names if name.casefold() == written.casefold()]
    return written if written in names else alike[0] if len(alike) == 1 else ""
