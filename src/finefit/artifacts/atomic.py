"""Writing that a kill cannot tear: a temporary name in the same folder, fsync, rename, fsync of the folder."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finefit.errors import DiskFull, FinefitError
from finefit.facts.files import free_bytes

_REMEDY = "free some space, then give the same command again: it goes on where it was"


def write_text(path: Path, text: str) -> None:
    """Replaces `path` in one instant: a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with full_disk_named(path, len(text.encode())):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def link(path: Path, target: str) -> None:
    """A relative symbolic link, replaced in one instant."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with full_disk_named(path, len(target.encode())):
        temporary.symlink_to(target)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file


@contextmanager
def full_disk_named(path: Path, needed_bytes: int | None = None, *, remedy: str = _REMEDY) -> Iterator[None]:
    """Turns `no space left` from any writer below into an error that names the place and the bytes. Of several around one another the outermost that
    knows the bytes is the one that is told.

    safetensors and shutil.copytree report it as exceptions of their own types, with the system's text in them and no number.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error) or (needed_bytes is None and isinstance(error, DiskFull)):
            raise
        raise disk_full(path, needed_bytes, free_bytes(path), remedy=remedy) from error


@contextmanager
def given_back_when_full(folder: Path) -> Iterator[None]:
    """What is half made there makes room for what has to be said of it."""
    try:
        yield
    except Exception as error:
        if is_full(error) and folder.exists():
            shutil.rmtree(folder)
        raise


def disk_full(path: Path, needed_bytes: int | None, free: int, *, remedy: str = _REMEDY) -> DiskFull:
    if needed_bytes is None:
        return DiskFull(f"the disk is full: {path} found no room, {free:,} bytes are free now", remedy)
    return DiskFull(f"the disk is full: {path} needs {needed_bytes:,} bytes, {free:,} are free", remedy)


def is_full(error: Exception) -> bool:
    """Whether it tells of a full disk. Our own errors may quote an old log, so their type alone counts."""
    if isinstance(error, FinefitError):
        return isinstance(error, DiskFull)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = str(error)
    return "No space left on device" in text or "Disk quota exceeded" in text
