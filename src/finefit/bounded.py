"""Opening and reading files, whatever has become of them: regular files alone, no more bytes than a limit, and no JSON
whose values would fill the memory. What is refused is an OSError or a ValueError with the reason; who reads knows what
the file is for, and says what to do."""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Final

MAX_PARSED_BYTES: Final = 512 << 20
"""That the values of a JSON text may take in memory, by `parsed_bytes`."""
MAX_SETTINGS_BYTES: Final = 4 << 20
"""Of a file of settings: a config, a template, lists of words. Published ones have less than 1 MB."""
MAX_SOURCE_BYTES: Final = 16 << 20
"""Of a file of Python."""
_OBJECT_BYTES, _LIST_BYTES, _ENTRY_BYTES = 240, 90, 60
"""Of CPython, at least: an object with its first key, a list, and each further entry."""
_CHUNK: Final = 1 << 20
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISBLK(mode) or stat.S_ISCHR(mode), "a device"),
)


class NotRegular(OSError):
    """What has the name of a file is something else, which might never end."""

    def __init__(self, path: Path, mode: int) -> None:
        self.kind = kind_of(mode)
        super().__init__(errno.EINVAL, f"it is {self.kind}, not a file", str(path))


class TooLarge(OSError):
    def __init__(self, path: Path, num_bytes: int, at_most: int) -> None:
        reason = f"it has {num_bytes:,} bytes, and at most {at_most:,} are read of such a file"
        super().__init__(errno.EFBIG, reason, str(path))


class TooManyValues(ValueError):
    pass


def kind_of(mode: int) -> str:
    """Of a path that is not a regular file, in words."""
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "not a regular file")


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Of a regular file, which the caller closes. Nothing waits for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            raise NotRegular(path, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_binary(path: Path) -> BufferedReader:
    """To read a file piece by piece."""
    return os.fdopen(open_descriptor(path), "rb")


def read_bytes(path: Path, at_most: int) -> bytes:
    with open_binary(path) as file:
        return read_whole(file, path, at_most)


def read_whole(file: IO[bytes], path: Path, at_most: int) -> bytes:
    """A file that has been opened. No more is allocated than its size, so that a limit costs nothing."""
    size = os.fstat(file.fileno()).st_size
    if size > at_most:
        raise TooLarge(path, size, at_most)
    content = file.read(size + 1)
    if len(content) > size:
        raise OSError(errno.EAGAIN, "it grew while it was read", str(path))
    return content


def read_text(path: Path, at_most: int) -> str:
    """A UnicodeDecodeError is a ValueError too."""
    return read_bytes(path, at_most).decode("utf-8")


def read_json(path: Path, at_most: int = MAX_SETTINGS_BYTES) -> Any:
    return parse_json(read_bytes(path, at_most))


def parse_json(text: str | bytes, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Whatever is wrong with it is a ValueError."""
    require_room(text)
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parsed_bytes(text: str | bytes) -> int:
    """About what the values of a JSON text take in memory beside its strings; never much less."""
    if isinstance(text, str):
        objects, lists, commas = text.count("{"), text.count("["), text.count(",")
    else:
        objects, lists, commas = text.count(b"{"), text.count(b"["), text.count(b",")
    return _OBJECT_BYTES * objects + _LIST_BYTES * lists + _ENTRY_BYTES * commas


def require_room(text: str | bytes, at_most: int = MAX_PARSED_BYTES) -> None:
    if len(text) * _OBJECT_BYTES <= at_most:
        return
    if (num_bytes := parsed_bytes(text)) > at_most:
        raise TooManyValues(
            f"its values would take about {num_bytes >> 20:,} MiB of memory, and at most {at_most >> 20:,} are allowed"
        )


def tail_of(path: Path, at_most: int) -> bytes:
    """The end of a file that may be of any size, such as a log."""
    with open_binary(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - at_most))
        return file.read(at_most)


def count_lines(file: IO[bytes]) -> int:
    """Of a file of any size, without its last line where that is cut short."""
    return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
