"""Records of data files, one at a time: every record comes out, as a value or as a bad row with its reason.

JSON is an array, an object of records, or a value per line, and is streamed as far as the form allows: arrays are
decoded through a buffer that slides along the file, so memory holds little more than one value."""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, dropwhile, groupby
from typing import Any, Literal, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from finefit.data import files
from finefit.data.columns import CONTEXTS, PROMPTS, Value, plain, printable
from finefit.data.files import (
    HEAD,
    MAX_DOCUMENT,
    MAX_RECORD,
    READ_ERRORS,
    DataFile,
    Numbered,
    UnreadableFile,
    lines_of,
    open_bytes,
    open_text,
)
from finefit.data.rows import BadRow, place_of
from finefit.errors import DataError

Unit = Literal["line", "paragraph", "document"]
"""What a record of a text file is."""

_BATCH = 256
"""Rows of a table that are converted to Python at a time; rows may hold images."""
_CHUNK = 1 << 20
"""Characters that are read at a time."""
_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
_OPEN_NUMBERS = frozenset(("", ".", "e", "E", "e+", "e-", "E+", "E-"))
"""What may come between a number and the end of the buffer while the number goes on."""
_FIELD_NAMES = frozenset("text system tools completion answer answers response output".split())  # noqa: SIM905
_FIELD_NAMES |= PROMPTS | CONTEXTS | {"chosen", "rejected", "messages", "conversations"}
"""An object with one of these, as `plain` gives it, is itself a record, whatever list it holds besides."""
_OF_ALL = ("data_subtype",)
"""What a file of VQA states once for all records: which of COCO's folders their images lie in."""
_KINDS: dict[type, str] = {type(None): "null", bool: "a truth value", int: "a number", float: "a number"}
_KINDS |= {str: "a string", list: "a list"}
_SENTENCE = re.compile(r"^[ \t]*#[ \t]*::snt(?!\S)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DataRecord:
    source: str
    number: int
    """Its line in a file of lines, else its place in the file, from 1."""
    value: Value

    @property
    def place(self) -> str:
        return place_of(self.source, self.number)


def read_records(file: DataFile, *, unit: Unit | None = None) -> Iterator[DataRecord | BadRow]:
    """In the order of the file; `unit` is for text files. A file that cannot be read to the end is a DataError."""
    number = 0
    try:
        match file.format:
            case "json" | "jsonl":
                found = _read_json(file)
            case "csv":
                found = _read_csv(file)
            case "parquet" | "arrow":
                found = _read_table(file)
            case "text":
                found = _read_text(file, unit)
        for number, value in found:
            yield BadRow(file.name, number, value) if isinstance(value, str) else DataRecord(file.name, number, value)
    except READ_ERRORS as error:
        raise files.unreadable(file, error, number) from None


def is_amr(file: DataFile) -> bool:
    """Whether a text file holds AMR graphs, each below its sentence."""
    if file.format != "text":
        return False
    try:
        with open_text(file) as handle:
            return _SENTENCE.search(handle.read(HEAD)) is not None
    except READ_ERRORS as error:
        raise files.unreadable(file, error, 0) from None


class JsonStream:
    """Decodes one value after the other through the sliding buffer."""

    def __init__(self, handle: TextIO, max_value: int = MAX_RECORD) -> None:
        self._handle, self._buffer, self._ended, self._max_value = handle, "", False, max_value
        self._at = self._passed = 0

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._grow()

    def skip(self) -> str:
        """Past the next character, to the one after it that is not blank."""
        self._at += 1
        return self.peek()

    def value(self) -> tuple[Any, str]:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                # A string that reaches to the end of the text: the error's place is where it begins.
                is_open_string = error.msg.startswith("Unterminated string")
                # More text cannot repair an earlier fault, and asking for it would read the whole file into memory.
                is_at_end = error.pos >= len(self._buffer) - len(r"\ud83d\ude00")  # the longest token
                if self._ended or not (is_open_string or is_at_end):
                    self._at = len(self._buffer) if is_open_string else error.pos
                    raise self.broken(_reason(error)) from None
            except (ValueError, RecursionError) as error:
                raise self.broken(_reason(error)) from None
            else:
                if self._ended or self._buffer[end : end + 3] not in _OPEN_NUMBERS:
                    text = self._buffer[self._at : end]
                    self._at = end
                    return value, text
            self._grow()

    def broken(self, reason: str) -> UnreadableFile:
        """At the next character."""
        if not self.peek():
            return UnreadableFile("it is JSON without an end: the file may be cut off", "fetch the file again")
        problem = f"it is not JSON at character {self._passed + self._at}: {reason}"
        return UnreadableFile(problem, "fix it; `jq empty FILE` checks it")

    def _grow(self) -> None:
        """At least doubles what is left, so that a long value is not decoded again for every chunk."""
        files.require_length(len(self._buffer) - self._at, "a JSON value", self._max_value)
        more = self._handle.read(max(_CHUNK, len(self._buffer) - self._at))
        self._buffer = self._buffer[self._at :] + more
        self._passed += self._at
        self._at = 0
        self._ended = not more


def _read_json(file: DataFile) -> Numbered:
    """An array, an object, or a value per line: the content decides which, not the extension."""
    with open_bytes(file) as handle:
        pieces = (piece.removeprefix(codecs.BOM_UTF8).strip() for piece in iter(lambda: handle.readline(HEAD), b""))
        first = next((piece[:1] for piece in pieces if piece), b"")
    if not first:
        raise files.holds_no_rows(file)
    if first != b"[":
        return _read_lines(file) if file.format == "jsonl" else _read_document(file)
    with open_text(file) as text:
        head = text.read(HEAD).lstrip()
    try:
        _, end = _DECODER.raw_decode(head)
    except (ValueError, RecursionError):
        end = len(head)
    if not head[end:].strip():
        return _read_array(file)
    _require_one_line(file, head[:end])  # an array per line
    return _read_lines(file)


def _require_one_line(file: DataFile, text: str) -> None:
    if "\n" in text:
        problem = f"{file.name} holds several JSON values that are not one per line"
        raise DataError(problem, f"convert it: jq -c . {file.name} > rows.jsonl")


def _read_lines(file: DataFile) -> Numbered:
    """Values of a `.json` file are numbered as records, because no name of such a file says that it holds lines."""
    num_records = 0
    with open_bytes(file) as handle:
        for number, line in enumerate(lines_of(handle), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line and not line.isspace():
                num_records += 1
                yield number if file.format == "jsonl" else num_records, _line_value(line)


def _line_value(line: bytes) -> Value | str:
    cut = "" if line.endswith(b"\n") else "; it is the last line and has no line break: the file may be cut off"
    try:
        text = line.decode().strip(" \t\r\n")
        value, end = _DECODER.raw_decode(text)
    except UnicodeDecodeError as error:
        if cut and error.reason == "unexpected end of data":
            return f"is not JSON: it ends within a character{cut}"
        raise
    except (ValueError, RecursionError) as error:
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"is not JSON: {_reason(error)}{column}{cut}"
    if end != len(text):
        return f"is not JSON: more follows at column {end + 1}{cut}"
    return _checked(value, text)


def _read_array(file: DataFile) -> Numbered:
    with open_text(file) as handle:
        stream, number = JsonStream(handle), 0
        stream.peek()
        follows = stream.skip()
        while follows != "]":
            number += 1
            yield number, _checked(*stream.value())
            if (follows := stream.peek()) not in {",", "]"}:
                raise stream.broken("neither a comma nor ] follows")
            if follows == ",":
                stream.skip()
        if stream.skip():
            raise stream.broken("more follows after the array")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested too deep: at most about {sys.getrecursionlimit():,} levels are read"
    if isinstance(error, json.JSONDecodeError):  # "Unterminated string starting at", to which json adds the place
        return error.msg.removesuffix(" at").removesuffix(" starting")
    return str(error)


def _read_document(file: DataFile) -> Numbered:
    with open_text(file) as handle:
        stream = JsonStream(handle, MAX_DOCUMENT)
        stream.peek()
        document, text = stream.value()
        is_followed = bool(stream.peek())
    if is_followed:
        _require_one_line(file, text)
        yield from _read_lines(file)
        return
    # Lines and arrays are not checked for this: it would cost a third of their speed. Here it may hide a whole record.
    try:
        json.loads(text, object_pairs_hook=lambda pairs: files.require_distinct([name for name, _ in pairs]))
    except RecursionError as error:
        raise UnreadableFile(_reason(error), "make it flatter") from None
    for number, value in enumerate(_entries(document), start=1):
        yield number, _checked(value, text)


def _entries(document: Any) -> list[Any]:
    """The records of a JSON object: its values by id, its one list, or itself."""
    if not isinstance(document, dict) or any(plain(name) in _FIELD_NAMES for name in document):
        return [document]
    if document and all(isinstance(entry, dict) and not _is_message(entry) for entry in document.values()):
        return [entry if "id" in entry else {"id": name, **entry} for name, entry in document.items()]
    lists = [value for value in document.values() if isinstance(value, list)]
    lists = [entries for entries in lists if any(isinstance(entry, dict) for entry in entries)]
    if len(lists) == 1 and not any(_is_message(entry) for entry in lists[0]):
        of_all = {name: document[name] for name in _OF_ALL if isinstance(document.get(name), str)}
        return [of_all | entry if isinstance(entry, dict) else entry for entry in lists[0]] if of_all else lists[0]
    return [document]


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and any(keys <= entry.keys() for keys in ({"role", "content"}, {"from", "value"}))


def _checked(value: Any, text: str) -> Value | str:
    """The value, or why it is not a record."""
    if not isinstance(value, dict):
        return f"is {_KINDS[type(value)]}, not an object"
    # only an escape can hold what UTF-8 cannot; Python would fail on it much later
    for name, entry in value.items() if "\\ud" in text or "\\uD" in text else ():
        try:
            json.dumps({name: entry}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            return f"{printable(name)} holds half a character, {half}, which no tokenizer takes"
        except RecursionError:
            return f"{printable(name)} is nested too deep"
    return value


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
            raise DataError(problem, "name it in the first line; pandas leaves its index out with index=False")
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
    """The one that gives the header the most columns."""
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
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            yield from filter(None, reader)
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                remedy = "close it, or fetch the file again if it was cut off"
                raise UnreadableFile("a quote is opened there and never closed", remedy) from None
            if "field limit" in str(error):
                reason = f"a column is longer than {MAX_RECORD:,} characters"
                raise UnreadableFile(reason, "look for a quote that is never closed") from None
            yield str(error)


def _read_table(file: DataFile) -> Numbered:
    if not file.path.stat().st_size:
        raise files.holds_no_rows(file)
    try:
        yield from enumerate(chain.from_iterable(map(_python_rows, _batches(file))), start=1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableFile(f"it is not a whole {file.format} file: {error}", "fetch the file again") from None


def _batches(file: DataFile) -> Iterator[Any]:
    """Of Parquet, or of Arrow in its file form or in its stream form, which `datasets` writes."""
    if file.format == "parquet":
        with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            files.require_distinct(table.schema_arrow.names)
            groups = (table.metadata.row_group(at) for at in range(table.num_row_groups))
            _require_expansion(file, sum(group.total_byte_size for group in groups))
            yield from table.iter_batches(batch_size=_BATCH)
        return
    with file.path.open("rb") as handle:
        is_stream = handle.read(6) != b"ARROW1"
    with pa.memory_map(str(file.path)) as source:
        table = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        files.require_distinct(table.schema.names)
        for batch in table if is_stream else (table.get_batch(at) for at in range(table.num_record_batches)):
            _require_expansion(file, batch.nbytes)
            batch.validate(full=True)  # nothing else keeps broken offsets from being read beyond the file's end
            yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def _require_expansion(file: DataFile, num_bytes: int) -> None:
    files.require_expansion(num_bytes, file.path.stat().st_size, "write them without compression")


def _python_rows(batch: Any) -> list[Value | str]:
    """Rows as plain Python; for one that Python cannot hold, such as a date in the year 20000, the reason."""
    try:
        rows: list[Value | str] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [f"has a value that Python cannot hold: {error}"]
        return [_python_rows(batch.slice(at, 1))[0] for at in range(batch.num_rows)]
    return rows


def _read_text(file: DataFile, unit: Unit | None) -> Numbered:
    """Line breaks come back as line feeds. A unit that the user names wins over what the file looks like."""
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
        remedy = "say which is meant with `fields: {text: line}`, `{text: paragraph}` or `{text: document}`"
        raise DataError(f"{file.name} is plain text: {counts}", remedy)


def _texts(file: DataFile, unit: Unit) -> Iterator[tuple[int, str]]:
    match unit:
        case "line":
            return ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
        case "paragraph":
            return ((number, "\n".join(lines)) for number, lines in enumerate(_blocks(file), start=1))
        case "document":
            text = "\n".join(_held(_lines(file))).strip("\n")
            return iter([(1, text)] if text.strip() else [])


def _lines(file: DataFile) -> Iterator[str]:
    with open_text(file) as handle:
        for line in lines_of(handle):
            yield line.removesuffix("\n").removesuffix("\r")


def _blocks(file: DataFile) -> Iterator[list[str]]:
    """Lines between blank lines; a line with a tab alone is blank too."""
    for is_text, lines in groupby(_lines(file), key=lambda line: bool(line.strip())):
        if is_text:
            yield list(_held(lines))


def _held(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are kept together as one text."""
    length = 0
    for line in lines:
        length += len(line) + 1
        files.require_length(length, "a text", MAX_DOCUMENT)
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
            for name, text in facts:  # a name that occurs twice, as the date of annotation and of alignment, keeps both
                value[name] = f"{value[name]}\n{text}" if name in value else text
            yield number, {**value, "amr": graph}


def _graphs(block: list[str]) -> Iterator[list[str]]:
    """A block, or its parts where no blank line comes before the next sentence: metadata begins a part."""
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
