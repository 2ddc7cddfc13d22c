"""Records of data files, one at a time: every record comes out, as a value or as a bad row with its reason."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, dropwhile, groupby
from typing import Literal

from finefit.data import files
from finefit.data.columns import Value
from finefit.data.files import (
    HEAD,
    MAX_DOCUMENT,
    MAX_RECORD,
    READ_ERRORS,
    DataFile,
    Numbered,
    UnreadableFile,
    lines_of,
    open_text,
)
from finefit.data.json_records import read_json
from finefit.data.rows import BadRow, place_of
from finefit.data.tables import read_table
from finefit.errors import DataError

Unit = Literal["line", "paragraph", "document"]
"""The part of a text file that is one record."""

_FIELDS = 32
"""Characters of a row that a further column counts as: each is a string of its own in memory."""
_MAX_LINES = 4 << 20
"""Of a text that is one record."""
_SENTENCE = re.compile(r"^[ \t]*#[ \t]*::snt(?!\S)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DataRecord:
    source: str
    number: int
    """Its line in a file of lines, else its position in the file, from 1."""
    value: Value

    @property
    def place(self) -> str:
        return place_of(self.source, self.number)


def read_records(file: DataFile, *, unit: Unit | None = None) -> Iterator[DataRecord | BadRow]:
    """Yields the records in file order; `unit` applies to text files. A file that cannot be read to the end is a
    DataError."""
    number = 0
    try:
        match file.format:
            case "json" | "jsonl":
                found = read_json(file)
            case "csv":
                found = _read_csv(file)
            case "parquet" | "arrow":
                found = read_table(file)
            case "text":
                found = _read_text(file, unit)
        for number, value in found:
            yield BadRow(file.name, number, value) if isinstance(value, str) else DataRecord(file.name, number, value)
    except READ_ERRORS as error:
        raise files.unreadable(file, error, number) from None


def is_amr(file: DataFile) -> bool:
    """Returns whether a text file holds AMR graphs, each below its sentence."""
    if file.format != "text":
        return False
    try:
        with open_text(file) as handle:
            return _SENTENCE.search(handle.read(HEAD)) is not None
    except READ_ERRORS as error:
        raise files.unreadable(file, error, 0) from None


def _read_csv(file: DataFile) -> Numbered:
    csv.field_size_limit(MAX_RECORD)
    delimiter = _delimiter(file)
    with open_text(file, newline="") as handle:
        rows = _csv_rows(_from_header(lines_of(handle)), delimiter)
        header = next(rows, None)
        if header is None:
            raise files.holds_no_rows(file)
        if isinstance(header, str):
            raise DataError(f"{file.name} has a header that is not CSV: {header}", "fix its quotes")
        if unnamed := [at for at, name in enumerate(header, start=1) if not name.strip()]:
            problem = f"{file.name} has no name for column {unnamed[0]} of {len(header)}"
            raise DataError(problem, "name it in the first line; pandas omits its index with index=False")
        files.require_distinct(header)
        for number, row in enumerate(rows, start=1):
            if isinstance(row, str):
                yield number, f"is not CSV: {row}"
            elif len(row) != len(header):
                yield number, f"has {len(row)} columns, the header has {len(header)}"
            else:
                yield number, dict(zip(header, row, strict=True))


def _from_header(lines: Iterable[str]) -> Iterator[str]:
    return dropwhile(lambda line: not line.strip(), lines)


def _delimiter(file: DataFile) -> str:
    """Returns the delimiter that gives the header the most columns."""
    if ".tsv" in file.path.name.lower():
        return "\t"
    with open_text(file, newline="") as handle:
        head = io.StringIO(handle.read(HEAD), newline="")
    num_columns: dict[str, int] = {}
    for delimiter in ",\t;":
        try:
            head.seek(0)
            num_columns[delimiter] = len(next(csv.reader(_from_header(head), delimiter=delimiter, strict=True), []))
        except csv.Error:
            num_columns[delimiter] = 0
    return max(num_columns, key=num_columns.__getitem__)


def _csv_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str] | str]:
    held = num_fields = 0

    def counted() -> Iterator[str]:
        """A row may have many lines, and is in memory as a whole."""
        nonlocal held, num_fields
        for line in lines:
            held, num_fields = held + len(line), num_fields + line.count(delimiter)
            if max(held, num_fields * _FIELDS) > MAX_RECORD:
                reason = f"a row is longer than {MAX_RECORD:,} characters, or has more than {MAX_RECORD // _FIELDS:,}"
                raise UnreadableFile(f"{reason} columns", "look for a quote that is never closed")
            yield line

    reader = csv.reader(counted(), delimiter=delimiter, strict=True)
    while True:
        try:
            for row in reader:
                held = num_fields = 0
                if row:
                    yield row
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                remedy = "close it, or fetch the file again if it was cut off"
                raise UnreadableFile("a quote is opened there and never closed", remedy) from None
            held = num_fields = 0
            yield str(error)


def _read_text(file: DataFile, unit: Unit | None) -> Numbered:
    """Line breaks are returned as line feeds. A unit that the user names overrides detection."""
    if unit is None and is_amr(file):
        yield from _read_amr(file)
        return
    num_texts = 0
    for number, text in _texts(file, unit or "line"):
        num_texts += 1
        if unit is not None:
            yield number, {"text": text}
    if not num_texts:
        raise files.holds_no_rows(file)
    if unit is None:
        num_paragraphs = sum(1 for _ in _texts(file, "paragraph"))
        counts = f"{num_texts} records by line, {num_paragraphs} by paragraph, 1 as a document"
        remedy = "choose one with `fields: {text: line}`, `{text: paragraph}` or `{text: document}`"
        raise DataError(f"{file.name} is plain text: {counts}", remedy)


def _texts(file: DataFile, unit: Unit) -> Iterator[tuple[int, str]]:
    match unit:
        case "line":
            return ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
        case "paragraph":
            return ((number, "\n".join(lines)) for number, lines in enumerate(_blocks(file), start=1))
        case "document":
            return iter(_document(file))


def _document(file: DataFile) -> list[tuple[int, str]]:
    with open_text(file) as handle:
        text = handle.read(MAX_DOCUMENT + 1)
    files.require_length(len(text), "a text", MAX_DOCUMENT)
    text = text.replace("\r\n", "\n").removesuffix("\r").strip("\n")
    return [(1, text)] if text.strip() else []


def _lines(file: DataFile) -> Iterator[str]:
    with open_text(file) as handle:
        for line in lines_of(handle):
            yield line.removesuffix("\n").removesuffix("\r")


def _blocks(file: DataFile) -> Iterator[list[str]]:
    """Yields the lines between blank lines; a line of white space counts as blank."""
    for is_text, lines in groupby(_lines(file), key=lambda line: bool(line.strip())):
        if is_text:
            yield list(_held(lines))


def _held(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines that are held together as one text, and limits their total length."""
    length = 0
    for number, line in enumerate(lines, start=1):
        length += len(line) + 1
        files.require_length(length, "a text", MAX_DOCUMENT)
        if number > _MAX_LINES:
            raise UnreadableFile(f"a text has more than {_MAX_LINES:,} lines", "split it by blank lines")
        yield line


def _read_amr(file: DataFile) -> Numbered:
    number = 0
    for block in chain.from_iterable(map(_graphs, _blocks(file))):
        graph = "\n".join(line for line in block if not _is_comment(line))
        facts = [fact for line in block if _is_comment(line) for fact in _metadata(line)]
        sentences = [text for name, text in facts if name == "snt"]
        if not graph and not sentences:
            continue  # comments alone, such as the head of a release
        number += 1
        if not graph:
            yield number, "has a ::snt line but no graph"
        elif len(sentences) > 1:
            yield number, f"has one graph below {len(sentences)} ::snt lines"
        elif not any(sentences):
            yield number, "has a graph but no sentence in a ::snt line"
        elif any(name == "amr" for name, _ in facts):
            yield number, "has metadata named ::amr, which is the field of the graph"
        else:
            value: Value = {}
            for name, text in facts:  # a repeated name, such as the dates of annotation and alignment, keeps both
                value[name] = f"{value[name]}\n{text}" if name in value else text
            yield number, {**value, "amr": graph}


def _graphs(block: list[str]) -> Iterator[list[str]]:
    """Splits a block where a new graph's metadata follows without a blank line."""
    part: list[str] = []
    for line in block:
        if _metadata(line) and not all(map(_is_comment, part)):
            yield part
            part = []
        part.append(line)
    yield part


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _metadata(line: str) -> list[tuple[str, str]]:
    """Parses `# ::id x ::date y`; a sentence extends to the end of its line."""
    if not _is_comment(line):
        return []
    text = line.lstrip()[1:]
    mark = re.search(r"(?:^|(?<=\s))::snt(?!\S)", text)
    before = text[: mark.start()] if mark else text
    facts = [re.split(r"\s+", fact, maxsplit=1) for fact in re.split(r"(?:^|(?<=\s))::(?=\S)", before)[1:]]
    named = [(fact[0], "".join(fact[1:]).strip()) for fact in facts]
    return [*named, ("snt", text[mark.end() :].strip())] if mark else named
