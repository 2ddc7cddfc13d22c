"""Data files -> records, one at a time: every record of a file comes out, as a value or as a bad row with its reason."""

from collections.abc import Iterator
from dataclasses import dataclass

from finefit.data.content import FAULTS, Numbered, Value, unreadable
from finefit.data.files import DataFile
from finefit.data.json_records import read_json
from finefit.data.rows import BadRow
from finefit.data.table_records import read_csv, read_table
from finefit.data.text_records import Unit, holds_graphs, read_text

__all__ = ["Record", "Unit", "Value", "is_amr", "read_records"]


@dataclass(frozen=True, slots=True)
class Record:
    source: str
    number: int
    """Its line in a file of lines, else its place in the file, from 1."""
    value: Value


def read_records(file: DataFile, *, unit: Unit | None = None) -> Iterator[Record | BadRow]:
    """Records in the order of the file; `unit` says what a record of a text file is. A file that cannot be read on is a DataError."""
    number = 0
    try:
        for number, found in _read(file, unit):
            yield BadRow(file.name, number, found) if isinstance(found, str) else Record(file.name, number, found)
    except FAULTS as error:
        raise unreadable(file, error, number) from None


def is_amr(file: DataFile) -> bool:
    """Whether a text file holds AMR graphs, each below its sentence."""
    try:
        return file.format == "text" and holds_graphs(file)
    except FAULTS as error:
        raise unreadable(file, error, 0) from None


def _read(file: DataFile, unit: Unit | None) -> Numbered:
    match file.format:
        case "json" | "jsonl":
            return read_json(file)
        case "csv":
            return read_csv(file)
        case "parquet" | "arrow":
            return read_table(file)
        case "text":
            return read_text(file, unit)
