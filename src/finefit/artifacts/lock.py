"""One process at a time works in a run directory. The operating system holds the lock, so it ends with its holder, however that one ends;
the file beside it says who the holder is."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from finefit.artifacts.atomic import full_disk_named
from finefit.errors import RunError

_ORPHAN_SECONDS = 60.0
_NAMING_SECONDS = 2.0
_RETRY_SECONDS = 0.1


@contextmanager
def run_lock(path: Path) -> Iterator[int]:
    """Yields the descriptor that holds the lock; a child that inherits it keeps the lock alive."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, path)
        with full_disk_named(path):
            _write_holder(descriptor)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pid, host = _read_holder(path)
            if time.monotonic() - began > _patience(pid, host):
                raise RunError(
                    f"{path.parent.name} is already being worked on by process {pid} on {host}",
                    f"follow it with `finefit watch {path.parent}`, or stop it with `kill {pid}`: it saves first",
                ) from None
            time.sleep(_RETRY_SECONDS)


def _patience(pid: int | None, host: str) -> float:
    """How many seconds a held lock is worth waiting for."""
    if pid is None:  # taken this instant, the holder's name not written yet
        return _NAMING_SECONDS
    orphaned = host == socket.gethostname() and not psutil.pid_exists(pid)  # the worker is saving its last checkpoint
    return _ORPHAN_SECONDS if orphaned else 0.0


def _write_holder(descriptor: int) -> None:
    holder = {"version": 1, "pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read_holder(path: Path) -> tuple[int | None, str]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return int(holder["pid"]), str(holder["host"])
    except (ValueError, KeyError, TypeError):
        return None, "an unknown host"


def holder_of(path: Path) -> int | None:
    """The pid that holds the lock now; None when nobody does."""
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path)[0]
    else:
        return None
    finally:
        os.close(descriptor)
