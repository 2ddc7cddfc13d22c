"""Writes that a kill cannot leave half done. A file or folder is filled under a hidden name beside its final place,
synced to disk and renamed. Lines are appended to journals, of which only the last line can be incomplete."""

import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import (
    Any,
    NotRequired,  # pydantic cannot take apart those of typing before Python 3.12
    TypeVar,
    cast,
    overload,
)

from pydantic import ConfigDict, ValidationError
from typing_extensions import TypedDict

from finefit.artifacts.reading import adapter_of, damaged_line, open_to_append, parse_object, read_objects
from finefit.errors import DiskFull, FinefitError, RunError
from finefit.facts.files import free_bytes

T = TypeVar("T")
Where = Callable[[dict[str, Any]], bool]

STAGING, REMOVING = ".staging-", ".removing-"
"""Prefixes of folders that are not visible yet or no longer visible."""
_REMEDY = "free some space, then give the same command again: it resumes where it stopped"


@contextmanager
def staged_file(path: Path, needed_bytes: int | None = None, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`. At the end of the block, what was written there replaces `path`: readers see the
    old file or the new one. `durable` keeps this true after a power failure."""
    temporary = _temporary(path)
    with report_disk_full(path, needed_bytes):
        try:
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(path)
        except IsADirectoryError:
            temporary.unlink(missing_ok=True)
            raise RunError(f"{path} is a folder, and a file is to be written there", "move the folder away") from None
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        sync(path.parent)


def _temporary(path: Path) -> Path:
    """Of this thread alone, since several may write the same file of a cache."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    with staged_file(path, len(text.encode()), durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def link(path: Path, target: str) -> None:
    """Atomically replaces `path` by a relative symbolic link."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    with report_disk_full(path, len(target.encode())):
        temporary.symlink_to(target)
    temporary.replace(path)
    sync(path.parent)


@contextmanager
def staged_folder(parent: Path, name: str = "", *, unique: bool = True) -> Iterator[Path]:
    """A hidden folder in `parent` for files that must become visible together. The block fills it and makes it visible
    with `publish`; otherwise the folder is deleted. With `unique`, other processes may fill folders of the same
    name."""
    parent.mkdir(parents=True, exist_ok=True)
    if unique:
        staging = Path(tempfile.mkdtemp(prefix=f"{STAGING}{name}-", dir=parent))
        staging.chmod(0o755)
    else:
        staging = parent / f"{STAGING}{name}"
        staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def claimed_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` for one process at a time: another one is refused, and what a killed one has left
    is removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f"{STAGING}{target.name}")
    staging.mkdir(exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_locked(descriptor) or not _is_at(descriptor, staging):
            raise RunError(f"another process makes {target} now", "wait for its end, or name another folder")
        try:
            for path in staging.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield staging
        finally:
            if _is_at(descriptor, staging):  # once it is published, the name may be that of a later one
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """By us, until the descriptor is closed. A file system that locks no folders refuses nobody."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def publish(staging: Path, target: Path) -> Path:
    """Renames a complete folder once all of its bytes are on disk. An existing target is an OSError."""
    sync_tree(staging)
    staging.rename(target)
    sync(target.parent)
    return target


def replace_folder(staging: Path, target: Path) -> None:
    """Like `publish`, but a folder at `target` is hidden first and deleted last."""
    sync_tree(staging)
    old = _hide(target) if target.exists() else None
    staging.rename(target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def remove_folder(folder: Path) -> None:
    """Hides the folder first, so that a half-deleted one is never visible. A missing folder is no error."""
    if folder.exists():
        shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    return folder.rename(folder.with_name(f"{REMOVING}{folder.name.lstrip('.')}-{time.time_ns()}"))


def sweep(folder: Path) -> None:
    """Removes what a killed process left half written or half deleted."""
    for path in folder.glob(".*"):
        if path.name.startswith((STAGING, REMOVING)):
            shutil.rmtree(path)
        elif path.name.endswith(".tmp"):
            path.unlink()


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            sync(path)
    sync(folder)


@contextmanager
def report_disk_full(path: Path, needed_bytes: int | None = None, *, remedy: str = _REMEDY) -> Iterator[None]:
    """Turns `no space left` from any writer inside into a DiskFull that names the path and the bytes. If several are
    nested, the outermost that knows the bytes raises it. safetensors and shutil.copytree raise types of their own."""
    try:
        yield
    except Exception as error:
        if not is_full(error) or (needed_bytes is None and isinstance(error, DiskFull)):
            raise
        raise disk_full(path, needed_bytes, free_bytes(path), remedy=remedy) from error


@contextmanager
def release_on_disk_full(folder: Path) -> Iterator[None]:
    """Deletes a half-made folder when the disk is full, so that the failure itself can be recorded."""
    try:
        yield
    except Exception as error:
        if is_full(error) and folder.exists():
            shutil.rmtree(folder)
        raise


def disk_full(path: Path, needed_bytes: int | None, free: int, *, remedy: str = _REMEDY) -> DiskFull:
    if needed_bytes is None:
        return DiskFull(f"the disk is full: {path} could not be written, {free:,} bytes are free now", remedy)
    return DiskFull(f"the disk is full: {path} needs {needed_bytes:,} bytes, {free:,} are free", remedy)


def is_full(error: Exception) -> bool:
    """finefit's own errors may quote an old log, so only their type counts."""
    if isinstance(error, FinefitError):
        return isinstance(error, DiskFull)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error) for words in ("No space left on device", "Disk quota exceeded"))


class Journal:
    """Append-only JSON lines: metrics, memory, ledger. The next writer ends an incomplete line; readers skip it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open_to_append(path)
        if self._file.seek(0, os.SEEK_END) > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append(b"\n")

    def write(self, **values: Any) -> None:
        self._append(json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        with report_disk_full(self._path, len(data)):
            while data:  # a nearly full disk takes only a part first
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@overload
def read_lines(path: Path) -> Iterator[dict[str, Any]]: ...
@overload
def read_lines(path: Path, kind: type[T], where: Where = ...) -> Iterator[T]: ...


def read_lines(path: Path, kind: type[Any] | None = None, where: Where = lambda _: True) -> Iterator[Any]:
    """The lines of a journal that `where` chooses, each validated as a `kind`. Incomplete lines are skipped; one that
    is damaged, or lacks what its kind needs, is a RunError."""
    for number, line in read_objects(path):
        if not where(line):
            continue
        try:
            yield line if kind is None else adapter_of(kind).validate_python(line)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise damaged_line(path, number, f"{place}: {first['msg']}") from None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """None for an incomplete or damaged line, for readers that show or send lines as they arrive."""
    try:
        return parse_object(line)
    except ValueError:
        return None


_REWINDS = ("started", "resumed", "rolled_back")


class _MetricsLine(TypedDict):
    """A line for a step, or for an event that belongs to one."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    step: int
    loss: NotRequired[float | None]
    seconds: NotRequired[float]
    tokens: NotRequired[int]
    wait_seconds: NotRequired[float]
    validation_loss: NotRequired[float]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """One line per optimizer step. Lines of a killed attempt beyond the checkpoint that the run resumed from are
    replaced."""
    steps: dict[int, dict[str, Any]] = {}
    for line in _read_metrics(path, lambda line: line.get("event") in _REWINDS or "loss" in line):
        if line.get("event") in _REWINDS:
            steps = {step: old for step, old in steps.items() if step <= line["step"]}
        else:
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]


def read_validations(path: Path) -> Iterator[dict[str, Any]]:
    return _read_metrics(path, lambda line: line.get("event") == "validated")


def _read_metrics(path: Path, where: Where) -> Iterator[dict[str, Any]]:
    return (cast("dict[str, Any]", line) for line in read_lines(path, _MetricsLine, where))
