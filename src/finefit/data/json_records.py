"""Records of JSON files: an array, an object of records, or a value per line. They are streamed: a file is decoded
through a buffer that slides along it, so memory holds little more than one record, however large the file is."""

import codecs
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from finefit import bounded
from finefit.data import files
from finefit.data.columns import CONTEXTS, PROMPTS, Value, plain, printable
from finefit.data.files import HEAD, MAX_RECORD, DataFile, Numbered, UnreadableFile, lines_of, open_bytes, open_text
from finefit.errors import DataError

_CHUNK = 1 << 20
"""Characters that are read at a time."""
MAX_NAMES = 2 << 20
"""Of an object that holds its records by id: they are all kept, to find one that occurs twice."""
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


def _distinct(pairs: list[tuple[str, Any]]) -> Value:
    files.require_distinct([name for name, _ in pairs])
    return dict(pairs)


_STRICT = json.JSONDecoder(object_pairs_hook=_distinct)
"""Lines and arrays are not read with it: it would cost a third of their speed. In an object a name that occurs twice
may hide a whole record."""


class JsonStream:
    """Decodes one value after the other through the sliding buffer."""

    def __init__(self, handle: TextIO, decoder: json.JSONDecoder = _DECODER) -> None:
        self._handle, self._buffer, self._ended, self._decoder = handle, "", False, decoder
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
                value, end = self._decoder.raw_decode(self._buffer, self._at)
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

    def elements(self) -> Iterator[tuple[Any, str]]:
        """Of the array that begins at the next character, which the caller has seen; past its end."""
        follows = self.skip()
        while follows != "]":
            yield self.value()
            if (follows := self.peek()) not in {",", "]"}:
                raise self.broken("neither a comma nor ] follows")
            if follows == ",":
                self.skip()
        self.skip()

    def names(self) -> Iterator[tuple[str, str]]:
        """Of the object that begins at the next character, with their texts; after each, the caller reads its value."""
        follows = self.skip()
        while follows != "}":
            if self.peek() != '"':
                raise self.broken("a name in quotes should follow")
            name = self.value()
            if self.peek() != ":":
                raise self.broken("no colon follows")
            self.skip()
            yield name
            if (follows := self.peek()) not in {",", "}"}:
                raise self.broken("neither a comma nor } follows")
            if follows == ",":
                self.skip()
        self.skip()

    def broken(self, reason: str) -> UnreadableFile:
        """At the next character."""
        if not self.peek():
            return UnreadableFile("it is JSON without an end: the file may be cut off", "fetch the file again")
        problem = f"it is not JSON at character {self._passed + self._at}: {reason}"
        return UnreadableFile(problem, "fix it; `jq empty FILE` checks it")

    def _grow(self) -> None:
        """At least doubles what is left, so that a long value is not decoded again for every chunk."""
        left = len(self._buffer) - self._at
        files.require_length(left, "a JSON value")
        more = self._handle.read(min(max(_CHUNK, left), MAX_RECORD + 1 - left))
        self._buffer = self._buffer[self._at :] + more
        self._passed += self._at
        self._at = 0
        self._ended = not more
        files.require_room(self._buffer, "a JSON value")


def read_json(file: DataFile) -> Numbered:
    """An array, an object, or a value per line: the content decides which, not the extension."""
    with open_bytes(file) as handle:
        pieces = (piece.removeprefix(codecs.BOM_UTF8).strip() for piece in iter(lambda: handle.readline(HEAD), b""))
        first = next((piece[:1] for piece in pieces if piece), b"")
    if not first:
        raise files.holds_no_rows(file)
    if first != b"[":
        return _read_lines(file) if file.format == "jsonl" or _is_lines(file) else _read_document(file)
    with open_text(file) as text:
        head = text.read(HEAD).lstrip()
    try:
        _, end = _DECODER.raw_decode(head)
    except (ValueError, RecursionError):
        end = len(head)
    if not head[end:].strip():
        return _read_array(file)
    if "\n" in head[:end]:
        raise _several_values(file)
    return _read_lines(file)  # an array per line


def _several_values(file: DataFile) -> DataError:
    problem = f"{file.name} holds several JSON values that are not one per line"
    return DataError(problem, f"convert it: jq -c . {file.name} > rows.jsonl")


def _is_lines(file: DataFile) -> bool:
    """Whether the first line is a value of its own, and more follows."""
    with open_text(file) as handle:
        first = next((line for line in iter(lambda: handle.readline(MAX_RECORD + 1), "") if line.strip()), "").lstrip()
        if bounded.parsed_bytes(first) > bounded.MAX_PARSED_BYTES:
            return False
        try:
            _, end = _DECODER.raw_decode(first)
        except (ValueError, RecursionError):
            return False
        return bool(first[end:].strip()) or any(map(str.strip, iter(lambda: handle.read(_CHUNK), "")))


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
    files.require_room(line, "a line")
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
        stream = JsonStream(handle)
        stream.peek()
        for number, item in enumerate(stream.elements(), start=1):
            yield number, _checked(*item)
        if stream.peek():
            raise stream.broken("more follows after the array")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested too deep: at most about {sys.getrecursionlimit():,} levels are read"
    if isinstance(error, json.JSONDecodeError):  # "Unterminated string starting at", to which json adds the place
        return error.msg.removesuffix(" at").removesuffix(" starting")
    return str(error)


@dataclass(slots=True)
class _Outline:
    """What a JSON object holds, learned in a first pass, so that its records need not be in memory together."""

    is_record: bool = False
    """It has a name that only a record has."""
    holds_records: bool = True
    """Each value is an object, and none is a message."""
    lists: dict[str, bool] = field(default_factory=dict)
    """Its lists that hold an object, and whether they hold a message."""
    of_all: Value = field(default_factory=dict)

    @property
    def records(self) -> str | None:
        """The name of the one list that holds the records."""
        return next(iter(self.lists)) if len(self.lists) == 1 and not any(self.lists.values()) else None


def _outline(stream: JsonStream) -> _Outline:
    found, seen = _Outline(), set[str]()
    for name, _ in stream.names():
        if name in seen:
            raise files.repeated(name)
        seen.add(name)
        if len(seen) > MAX_NAMES:
            reason = f"it is one JSON object with more than {MAX_NAMES:,} names, and all are in memory at once"
            raise UnreadableFile(reason, "write its records one per line: jq -c '.[]' FILE > rows.jsonl")
        found.is_record |= plain(name) in _FIELD_NAMES
        if stream.peek() == "[":
            found.holds_records = False
            for item, _ in stream.elements():
                if isinstance(item, dict):
                    found.lists[name] = found.lists.get(name, False) or _is_message(item)
            continue
        value, _ = stream.value()
        found.holds_records &= isinstance(value, dict) and not _is_message(value)
        if name in _OF_ALL and isinstance(value, str):
            found.of_all[name] = value
    found.holds_records &= bool(seen)
    return found


def _read_document(file: DataFile) -> Numbered:
    """An object of records by id, or with one list of them, or a record itself. Its first pass finds every fault."""
    outline = _Outline(is_record=True)
    with open_text(file) as handle:
        stream = JsonStream(handle, _STRICT)
        if stream.peek() == "{":
            outline = _outline(stream)
        else:
            stream.value()
        if stream.peek():
            raise _several_values(file)
    with open_text(file) as handle:
        stream = JsonStream(handle)
        stream.peek()
        for number, item in enumerate(_entries(stream, outline), start=1):
            yield number, _checked(*item)


def _entries(stream: JsonStream, outline: _Outline) -> Iterator[tuple[Any, str]]:
    if outline.is_record or not (outline.holds_records or outline.records):
        yield stream.value()
        return
    beside = json.dumps(outline.of_all)
    for name, written in stream.names():
        if outline.holds_records:
            entry, text = stream.value()
            yield (entry if "id" in entry else {"id": name, **entry}), written + text
        elif stream.peek() != "[":
            stream.value()
        else:
            for entry, text in stream.elements():
                if name == outline.records:
                    yield (outline.of_all | entry if isinstance(entry, dict) else entry), beside + text


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
