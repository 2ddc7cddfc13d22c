"""Records of JSON and JSON lines: an array, an object of records, or a value per line, streamed as far as the form
allows. Arrays are decoded through a buffer that slides along the file, so memory holds little more than one value."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from finefit.data.columns import CONTEXTS, PROMPTS, Value, plain, printable
from finefit.data.files import (
    HEAD,
    DataFile,
    Numbered,
    UnreadableFile,
    holds_no_rows,
    open_bytes,
    open_text,
    require_distinct,
)
from finefit.errors import DataError

_CHUNK = 1 << 20
"""Characters that are read at a time."""
_DECODER = json.JSONDecoder()
_OPEN_NUMBERS = frozenset(("", ".", "e", "E", "e+", "e-", "E+", "E-"))
"""What may come between a number and the end of the buffer while the number goes on."""
_BLANK = re.compile(r"[ \t\r\n]*")
_FIELD_NAMES = frozenset("text system tools completion answer answers response output".split())  # noqa: SIM905
_FIELD_NAMES |= PROMPTS | CONTEXTS | {"chosen", "rejected", "messages", "conversations"}
"""An object with one of these, as `plain` gives it, is itself a record, whatever list it holds besides."""
_OF_ALL = ("data_subtype",)
"""What a file of VQA states once for all records: which of COCO's folders their images lie in."""
_MESSAGE_KEYS = ({"role", "content"}, {"from", "value"})


class JsonStream:
    """Decodes one value after the other through the sliding buffer."""

    def __init__(self, handle: TextIO) -> None:
        self._handle = handle
        self._buffer = ""
        self._at = 0
        self._passed = 0
        self._ended = False

    @property
    def position(self) -> int:
        """In characters, from 0."""
        return self._passed + self._at

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._grow()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> tuple[Any, str]:
        """The next value, and its text."""
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
                    raise
            else:
                if self._ended or self._buffer[end : end + 3] not in _OPEN_NUMBERS:
                    text = self._buffer[self._at : end]
                    self._at = end
                    return value, text
            self._grow()

    def _grow(self) -> None:
        """At least doubles what is left, so that a long value is not decoded again for every chunk."""
        more = self._handle.read(max(_CHUNK, len(self._buffer) - self._at))
        self._buffer = self._buffer[self._at :] + more
        self._passed += self._at
        self._at = 0
        self._ended = not more


def read_json(file: DataFile) -> Numbered:
    """An array, an object, or a value per line: the content decides which, not the extension."""
    first = _first_byte(file)
    if not first:
        raise holds_no_rows(file)
    if first == b"[":
        return _read_lines(file) if _goes_on_after_an_array(file) else _read_array(file)
    return _read_lines(file) if file.format == "jsonl" else _read_document(file)


def _first_byte(file: DataFile) -> bytes:
    """The first that is not blank; empty where there is none."""
    with open_bytes(file) as handle:
        pieces = (piece.removeprefix(codecs.BOM_UTF8).strip() for piece in iter(lambda: handle.readline(HEAD), b""))
        return next((piece[:1] for piece in pieces if piece), b"")


def _goes_on_after_an_array(file: DataFile) -> bool:
    with open_text(file) as handle:
        head = handle.read(HEAD).lstrip()
    try:
        _, end = _DECODER.raw_decode(head)
    except (ValueError, RecursionError):
        return False
    if is_followed := bool(head[end:].strip()):
        _require_one_line(file, head[:end])
    return is_followed


def _require_one_line(file: DataFile, text: str) -> None:
    if "\n" in text:
        problem = f"{file.name} holds several JSON values that are not one per line"
        raise DataError(problem, f"convert it: jq -c . {file.name} > rows.jsonl")


def _read_lines(file: DataFile) -> Numbered:
    with open_bytes(file) as handle:
        for number, line in enumerate(handle, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line and not line.isspace():
                yield number, _line_value(line)


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
        stream = JsonStream(handle)
        for number, (value, text) in enumerate(_elements(stream), start=1):
            yield number, _checked(value, text)


def _elements(stream: JsonStream) -> Iterator[tuple[Any, str]]:
    stream.peek()
    stream.skip()
    closed = stream.peek() == "]"
    while not closed:
        yield _value(stream)
        if (follows := stream.peek()) not in {",", "]"}:
            raise _broken_json(stream, "neither a comma nor ] follows")
        closed = follows == "]"
        if not closed:
            stream.skip()
            stream.peek()
    stream.skip()
    if stream.peek():
        raise _broken_json(stream, "more follows after the array")


def _value(stream: JsonStream) -> tuple[Any, str]:
    try:
        return stream.value()
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise _broken_json(stream, _reason(error)) from None


def _broken_json(stream: JsonStream, reason: str) -> UnreadableFile:
    if not stream.peek():
        return UnreadableFile("it is JSON without an end: the file may be cut off", "fetch the file again")
    problem = f"it is not JSON at character {stream.position}: {reason}"
    return UnreadableFile(problem, "fix it; `jq empty FILE` checks it")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _read_document(file: DataFile) -> Numbered:
    with open_text(file) as handle:
        stream = JsonStream(handle)
        stream.peek()
        document, text = _value(stream)
        is_followed = bool(stream.peek())
    if is_followed:
        _require_one_line(file, text)
        yield from _read_lines(file)
        return
    # Lines and arrays are not checked for this: it would cost a third of their speed. Here it may hide a whole record.
    try:
        json.loads(text, object_pairs_hook=lambda pairs: require_distinct([name for name, _ in pairs]))
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
    lists = [
        entries
        for entries in document.values()
        if isinstance(entries, list) and any(isinstance(entry, dict) for entry in entries)
    ]
    if len(lists) == 1 and not any(_is_message(entry) for entry in lists[0]):
        of_all = {name: document[name] for name in _OF_ALL if isinstance(document.get(name), str)}
        return [of_all | entry if isinstance(entry, dict) else entry for entry in lists[0]] if of_all else lists[0]
    return [document]


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and any(keys <= entry.keys() for keys in _MESSAGE_KEYS)


def _checked(value: Any, text: str) -> Value | str:
    """The value, or why it is not a record."""
    if not isinstance(value, dict):
        return f"is {_kind(value)}, not an object"
    # only an escape can hold what UTF-8 cannot; Python would fail on it much later
    if ("\\ud" in text or "\\uD" in text) and (half := _half_character(value)):
        return half
    return value


def _half_character(value: Value) -> str | None:
    for name, entry in value.items():
        try:
            json.dumps({name: entry}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            return f"{printable(name)} holds half a character, {half}, which no tokenizer takes"
        except RecursionError:
            return f"{printable(name)} is nested too deep"
    return None


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "a list"
