"""The content of a data file: its bytes and characters, and what keeps it from being read on."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any, TextIO, cast

from finefit.data.cells import printable
from finefit.data.files import DataFile
from finefit.errors import DataError

Value = dict[str, Any]
Numbered = Iterator[tuple[int, Value | str]]
"""What a reader gives for each record: its number, and its value or the reason why it has none."""

HEAD = 1 << 18
"""Characters at the start of a file that tell what it holds."""
_CHUNK = 1 << 20
"""Bytes that are looked at together for one that is not UTF-8."""


class Broken(Exception):
    """A fault after which the rest of the file cannot be read."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


FAULTS = (Broken, UnicodeDecodeError, EOFError, zlib.error, OSError)
"""What reading may raise; `unreadable` says it to the user."""


def open_bytes(file: DataFile) -> IO[bytes]:
    is_gzip = file.path.name.lower().endswith(".gz")
    return cast("IO[bytes]", gzip.open(file.path)) if is_gzip else file.path.open("rb")


def open_text(file: DataFile, newline: str = "\n") -> TextIO:
    """Lines end at line feeds alone: strings may hold U+2028 and its like."""
    return io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline=newline)


def unreadable(file: DataFile, error: Exception, number: int) -> DataError:
    """`number`: of the last record before the fault, 0 for none."""
    place = f"{file.name} cannot be read" + (f" on after row {number}" if number else "")
    match error:
        case UnicodeDecodeError():
            return DataError(f"{file.name} is not UTF-8: {_first_bad_byte(file)}", "save the file as UTF-8")
        case Broken():
            return DataError(f"{place}: {error.reason}", error.remedy)
        case EOFError() | zlib.error() | gzip.BadGzipFile():
            return DataError(f"{place}: it is no whole gzip file: {error}", "bring the file again; `gzip -t` checks it")
        case _:
            return DataError(f"{place}: {error}", "check the file and its permissions")


def _first_bad_byte(file: DataFile) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    passed = 0
    with open_bytes(file) as handle:
        for chunk in chain(iter(lambda: handle.read(_CHUNK), b""), [b""]):
            start = passed - len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return f"byte {start + error.start} is {error.object[error.start]:#04x}"
            passed += len(chunk)
    return "it changed while it was read"


def require_distinct(names: list[str]) -> None:
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise Broken(
            f"it has {printable(repeated)} twice, and the value of one would be lost", "rename or remove one of them"
        )


def holds_no_rows(file: DataFile) -> DataError:
    return DataError(f"{file.name} holds no rows", "bring the file again, or take it out of the spec")
