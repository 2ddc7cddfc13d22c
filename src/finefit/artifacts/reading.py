"""Opens the files of a run directory (records, journals, locks and logs), whatever state they are in. What finefit
cannot have written is a RunError with the file, the reason and the remedy: a folder, link, pipe or device in a file's
place, another encoding, or JSON that is cut, too deep or too large. Nothing waits for a pipe, and nothing is read
before its size is known."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from finefit import bounded
from finefit.errors import RunError
from finefit.facts.files import sha256_of

T = TypeVar("T")

MAX_RECORD_BYTES = 64 << 20
"""Of a file that is read whole. A record that grows with the rows of an evaluation has a limit of its own."""
MAX_LINE_BYTES = 32 << 20
_ROOM = 4
"""Bytes of memory that the values of a record may take for each byte of its limit."""
RESTORE = "restore it from a copy, or start again with --new"

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # built once: pages read several records many times a second


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    return _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))


def is_there(path: Path) -> bool:
    """Whether anything has this name. `Path.exists` is false for a broken link, which would then pass for a missing
    file."""
    return os.path.lexists(path)


@contextmanager
def open_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The descriptor of a regular file, which the block may also close."""
    try:
        descriptor = bounded.open_descriptor(path, flags | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise RunError(f"{path} is missing", RESTORE) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _not_ours(path, error) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def require_regular_files(folder: Path) -> None:
    """Everything below the folder is copied into checkpoints later, so it must be readable before training starts."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            with open_file(path):
                pass


def _not_ours(path: Path, error: OSError) -> RunError:
    """Why a file cannot be opened. The system itself refuses links, and folders where a file is written."""
    if path.is_symlink():
        problem = f"{path} is a link to {path.readlink()}, and a run directory holds its files itself"
        return RunError(problem, f"put the file itself in its place, {RESTORE.removeprefix('restore it ')}")
    if path.exists() and not path.is_file():
        kind = bounded.kind_of(path.stat().st_mode)
        return RunError(f"{path} is {kind}, and a file should be there", f"remove it and {RESTORE}")
    return RunError(f"{path} cannot be opened: {error.strerror}", f"check that this user may read it, or {RESTORE}")


def open_to_append(path: Path) -> IO[bytes]:
    """An unbuffered file, so that closing it cannot fail on a full disk. It is created if it is missing."""
    with open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
        return os.fdopen(os.dup(descriptor), "a+b", buffering=0)


def read_bytes(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """No larger than `max_bytes`, and as JSON no larger in memory than a few times of it."""
    with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        try:
            content = bounded.read_whole(file, path, max_bytes)
            bounded.require_room(content, _ROOM * max_bytes)
        except bounded.TooLarge as error:
            raise RunError(f"{path}: {error.strerror}", RESTORE) from None
        except bounded.TooManyValues as error:
            raise RunError(f"{path} is damaged: {error}", RESTORE) from None
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}", RESTORE) from None
    return content


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{path} is damaged: byte 0x{error.object[error.start]:02x} at {error.start:,} is not UTF-8 text"
        raise RunError(problem, RESTORE) from None


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object with any keys."""
    try:
        document = from_json(read_bytes(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}", RESTORE) from None
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged: it holds a {type(document).__name__}, not an object", RESTORE)
    return document


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a journal with their line numbers; nothing if there is no file. A line that a kill or a power
    failure has cut short is skipped; any other line that is not a whole object is an error."""
    if not is_there(path):
        return
    with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                value = parse_object(line)
            except ValueError as error:
                raise damaged_line(path, number, str(error)) from None
            if value is not None:
                yield number, value


def lines_of(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Of a journal, one at a time; the last may lack its end."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            problem = f"line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes, and finefit writes none so long"
            raise RunError(problem, RESTORE)
        yield line


def num_lines(path: Path) -> int:
    """Of a journal, without a last line that is cut short; 0 if there is no file."""
    if not is_there(path):
        return 0
    with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        return bounded.count_lines(file)


def parse_object(line: bytes) -> dict[str, Any] | None:
    """None for a line that is blank or cut short; a line that is anything else but an object is a ValueError."""
    text = line.rstrip(b"\0\r\n \t")  # a power failure leaves zeros
    if not text:
        return None
    bounded.require_room(text)
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
    """Whether a file exists and has the recorded bytes. Only a regular file is read."""
    return path.is_file() and sha256_of(path) == sha256
