"""Records of data files, one at a time: every record comes out, as a value or as a bad row with its reason. JSON is
read by `json_records`; CSV, Parquet, Arrow, plain text and AMR are read here."""

import csv
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, dropwhile, groupby, islice
from typing import Any, Literal

from finefit.data.columns import Value
from finefit.data.files import (
    HEAD,
    READ_ERRORS,
    DataFile,
    Numbered,
    UnreadableFile,
    holds_no_rows,
    open_text,
    require_distinct,
    unreadable,
)
from finefit.data.json_records import read_json
from finefit.data.rows import BadRow
from finefit.errors import DataError

Unit = Literal["line", "paragraph", "document"]
"""What a record of a text file is."""

_HEADER_LINES = 100
"""More than the line breaks inside the column names of any CSV file."""
_BATCH = 256
"""Rows of a table that are converted to Python at a time; rows may hold images."""
_BUFFER = 1 << 20
"""Bytes of a Parquet column that are read at a time."""
_SENTENCE = re.compile(r"^[ \t]*#[ \t]*::snt(?!\S)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Record:
    source: str
    number: int
    """Its line in a file of lines, else its place in the file, from 1."""
    value: Value


def read_records(file: DataFile, *, unit: Unit | None = None) -> Iterator[Record | BadRow]:
    """Records in the order of the file; `unit` is for text files. A file that cannot be read to the end is a
    DataError."""
    number = 0
    try:
        for number, found in _read(file, unit):
            yield BadRow(file.name, number, found) if isinstance(found, str) else Record(file.name, number, found)
    except READ_ERRORS as error:
        raise unreadable(file, error, number) from None


def is_amr(file: DataFile) -> bool:
    """Whether a text file holds AMR graphs, each below its sentence."""
    try:
        return file.format == "text" and _holds_graphs(file)
    except READ_ERRORS as error:
        raise unreadable(file, error, 0) from None


def _read(file: DataFile, unit: Unit | None) -> Numbered:
    match file.format:
        case "json" | "jsonl":
            return read_json(file)
        case "csv":
            return _read_csv(file)
        case "parquet" | "arrow":
            return _read_table(file)
        case "text":
            return _read_text(file, unit)


def _read_csv(file: DataFile) -> Numbered:
    csv.field_size_limit(sys.maxsize)
    delimiter = _delimiter(file)
    with open_text(file, newline="") as handle:
        rows = _csv_rows(_from_header(handle), delimiter)
        header = next(rows, None)
        if header is None:
            raise holds_no_rows(file)
        if isinstance(header, str):
            raise DataError(f"{file.name} has a header that is not CSV: {header}", "fix its quotes")
        if unnamed := [at for at, name in enumerate(header, start=1) if not name.strip()]:
            raise DataError(
                f"{file.name} has no name for column {unnamed[0]} of {len(header)}",
                "name it in the first line; pandas leaves its index out with index=False",
            )
        require_distinct(header)
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
    """The one that gives the header the most columns."""
    if ".tsv" in file.path.name.lower():
        return "\t"
    with open_text(file, newline="") as handle:
        head = list(islice(_from_header(handle), _HEADER_LINES))
    return max(",\t;", key=lambda delimiter: _num_columns(head, delimiter))


def _num_columns(lines: list[str], delimiter: str) -> int:
    try:
        return len(next(csv.reader(lines, delimiter=delimiter, strict=True), []))
    except csv.Error:
        return 0


def _csv_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str] | str]:
    """Rows, or what is wrong with one."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                remedy = "close it, or fetch the file again if it was cut off"
                raise UnreadableFile("a quote is opened there and never closed", remedy) from None
            yield str(error)
        else:
            if row:
                yield row


def _read_table(file: DataFile) -> Numbered:
    if not file.path.stat().st_size:
        raise holds_no_rows(file)
    try:
        import pyarrow as pa
    except ImportError:
        remedy = "install pyarrow, or convert the file to JSONL"
        raise DataError(f"{file.name} needs pyarrow, which is not installed", remedy) from None
    try:
        number = 0
        for batch in _parquet_batches(file) if file.format == "parquet" else _arrow_batches(file):
            for value in _python_rows(batch):
                number += 1
                yield number, value
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableFile(f"it is not a whole {file.format} file: {error}", "fetch the file again") from None


def _parquet_batches(file: DataFile) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=_BUFFER) as table:
        require_distinct(table.schema_arrow.names)
        yield from table.iter_batches(batch_size=_BATCH)


def _arrow_batches(file: DataFile) -> Iterator[Any]:
    """Of the file form or of the stream form, which `datasets` writes."""
    import pyarrow as pa

    with file.path.open("rb") as handle:
        is_stream = handle.read(6) != b"ARROW1"
    with pa.memory_map(str(file.path)) as source:
        table = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        require_distinct(table.schema.names)
        for batch in table if is_stream else (table.get_batch(at) for at in range(table.num_record_batches)):
            batch.validate(full=True)  # nothing else keeps broken offsets from being read beyond the file's end
            yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def _python_rows(batch: Any) -> list[Value | str]:
    """Rows as plain Python; for one that Python cannot hold, such as a date in the year 20000, the reason."""
    try:
        rows: list[Value | str] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [f"has a value that Python cannot hold: {error}"]
        return [_python_rows(batch.slice(at, 1))[0] for at in range(batch.num_rows)]
    return rows


def _holds_graphs(file: DataFile) -> bool:
    with open_text(file) as handle:
        return _SENTENCE.search(handle.read(HEAD)) is not None


def _read_text(file: DataFile, unit: Unit | None) -> Numbered:
    """Line breaks come back as line feeds. A unit that the user names wins over what the file looks like."""
    if unit is None and _holds_graphs(file):
        yield from _read_amr(file)
        return
    found = False
    for number, text in _texts(file, unit or _require_unit(file)):
        found = True
        yield number, {"text": text}
    if not found:
        raise holds_no_rows(file)


def _require_unit(file: DataFile) -> Unit:
    num_lines = sum(1 for _ in _texts(file, "line"))
    if not num_lines:
        raise holds_no_rows(file)
    num_paragraphs = sum(1 for _ in _texts(file, "paragraph"))
    raise DataError(
        f"{file.name} is plain text: {num_lines} records by line, {num_paragraphs} by paragraph, 1 as a document",
        "say which is meant with `fields: {text: line}`, `{text: paragraph}` or `{text: document}`",
    )


def _texts(file: DataFile, unit: Unit) -> Iterator[tuple[int, str]]:
    match unit:
        case "line":
            return ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
        case "paragraph":
            return ((number, "\n".join(lines)) for number, lines in enumerate(_blocks(file), start=1))
        case "document":
            text = "\n".join(_lines(file)).strip("\n")
            return iter([(1, text)] if text.strip() else [])


def _lines(file: DataFile) -> Iterator[str]:
    with open_text(file) as handle:
        for line in handle:
            yield line.removesuffix("\n").removesuffix("\r")


def _blocks(file: DataFile) -> Iterator[list[str]]:
    """Lines between blank lines; a line with a tab alone is blank too."""
    for is_text, lines in groupby(_lines(file), key=lambda line: bool(line.strip())):
        if is_text:
            yield list(lines)


def _read_amr(file: DataFile) -> Numbered:
    number = 0
    for block in chain.from_iterable(map(_graphs, _blocks(file))):
        graph = "\n".join(line for line in block if not _is_comment(line))
        facts = [fact for line in block if _is_comment(line) for fact in _metadata(line)]
        sentences = [text for name, text in facts if name == "snt"]
        if not graph and not sentences:
            continue  # comments alone, such as the head of a release
        number += 1
        if fault := _amr_fault(graph, sentences, {name for name, _ in facts}):
            yield number, fault
            continue
        value: Value = {}
        for name, text in facts:  # a name that occurs twice, as the date of annotation and of alignment, keeps both
            value[name] = f"{value[name]}\n{text}" if name in value else text
        yield number, {**value, "amr": graph}


def _graphs(block: list[str]) -> Iterator[list[str]]:
    """A block, or its parts where the blank line before the next sentence is missing: metadata below a graph belongs to
    the next one."""
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
    """`# ::id x ::date y`; a sentence reaches to the end of its line."""
    if not _is_comment(line):
        return []
    text = line.lstrip()[1:]
    mark = re.search(r"(?:^|(?<=\s))::snt(?!\S)", text)
    before = text[: mark.start()] if mark else text
    facts = [re.split(r"\s+", fact, maxsplit=1) for fact in re.split(r"(?:^|(?<=\s))::(?=\S)", before)[1:]]
    named = [(fact[0], "".join(fact[1:]).strip()) for fact in facts]
    return [*named, ("snt", text[mark.end() :].strip())] if mark else named


def _amr_fault(graph: str, sentences: list[str], names: set[str]) -> str | None:
    if not graph:
        return "has a ::snt line but no graph"
    if len(sentences) > 1:
        return f"has one graph below {len(sentences)} ::snt lines"
    if not any(sentences):
        return "has a graph but no sentence in a ::snt line"
    return "has metadata named ::amr, which is the field of the graph" if "amr" in names else None
