"""Opening the files of a run directory, whatever has become of them: records, journals, locks and logs are opened here.
What finefit cannot have written (a folder, a link, a pipe or a device in its place, another encoding, JSON that is cut,
too deep or too large) is a RunError with the file, the reason and the remedy. Nothing waits for a pipe, and nothing is
read before its size is known."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from finefit.errors import RunError
from finefit.facts.files import sha256_of

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 30
"""Of a file that is read whole; the largest hold the answers of an evaluation, of about 5 kB each."""
MAX_LINE_BYTES = 64 << 20
RESTORE = "restore it from a copy, or start again with --new"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISBLK(mode) or stat.S_ISCHR(mode), "a device"),
)


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # built once: pages read several records many times a second


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    return _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))


def is_there(path: Path) -> bool:
    """Whether anything has this name. `Path.exists` denies a link that leads nowhere, which would pass for no file."""
    return os.path.lexists(path)


@contextmanager
def open_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The descriptor of a regular file, which the block may also close."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise RunError(f"{path} is missing", RESTORE) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _not_ours(path, error) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _not_regular(path, mode)
        yield descriptor
    finally:
        os.close(descriptor)


def _not_ours(path: Path, error: OSError) -> RunError:
    """Why a file cannot be opened: links, and folders where a file is written, are refused by the system itself."""
    if path.is_symlink():
        problem = f"{path} is a link to {path.readlink()}, and a run directory holds its files itself"
        return RunError(problem, f"put the file itself in its place, {RESTORE.removeprefix('restore it ')}")
    if path.exists() and not path.is_file():
        return _not_regular(path, path.stat().st_mode)
    return RunError(f"{path} cannot be opened: {error.strerror}", f"check that this user may read it, or {RESTORE}")


def _not_regular(path: Path, mode: int) -> RunError:
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "not a regular file")
    return RunError(f"{path} is {kind}, and a file should be there", f"remove it and {RESTORE}")


def open_to_append(path: Path) -> IO[bytes]:
    """Unbuffered, so that closing cannot fail on a full disk; made where it is missing."""
    with open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
        return os.fdopen(os.dup(descriptor), "a+b", buffering=0)


def read_bytes(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        if (size := os.fstat(descriptor).st_size) > max_bytes:
            problem = f"{path} has {size:,} bytes, and finefit writes none of more than {max_bytes:,} there"
            raise RunError(problem, RESTORE)
        return file.read(max_bytes)


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{path} is damaged: byte 0x{error.object[error.start]:02x} at {error.start:,} is not UTF-8 text"
        raise RunError(problem, RESTORE) from None


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object of whatever keys."""
    try:
        document = from_json(read_bytes(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}", RESTORE) from None
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged: it holds a {type(document).__name__}, not an object", RESTORE)
    return document


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a journal with the numbers of their lines; nothing if there is no file. A line that a kill or
    a power failure has cut short is skipped; any other that is not a whole object is an error."""
    if not is_there(path):
        return
    with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                problem = (
                    f"line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes, and finefit writes none so long"
                )
                raise RunError(problem, RESTORE)
            try:
                value = parse_object(line)
            except ValueError as error:
                raise damaged_line(path, number, str(error)) from None
            if value is not None:
                yield number, value


def parse_object(line: bytes) -> dict[str, Any] | None:
    """None for a line that is blank or cut short; a line that is anything else but an object is a ValueError."""
    text = line.rstrip(b"\0\r\n \t")  # a power failure leaves zeros
    if not text:
        return None
    try:
        value = from_json(text)
    except ValueError as error:
        if text.startswith(b"{") and str(error).startswith("EOF while parsing"):
            return None
        raise
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def damaged_line(path: Path, number: int, reason: str) -> RunError:
    problem = f"line {number} of {path} is damaged: {reason}"
    return RunError(problem, "delete that line, or restore the file from a copy")


def has_content(path: Path, sha256: str) -> bool:
    """Whether a file is there with the bytes that were recorded. Only a regular file is read."""
    return path.is_file() and sha256_of(path) == sha256
