"""Append-only JSON lines: metrics, memory, ledger. A kill can tear the last line only; the next writer closes it and readers pass over it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from finefit.artifacts.atomic import full_disk_named


class Journal:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._path = path
        self._file = path.open("ab", buffering=0)  # nothing is held back, so closing cannot fail for want of room
        if torn:
            self._append(b"\n")

    def write(self, **values: Any) -> None:
        self._append(json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        with full_disk_named(self._path, len(data)):
            while data:  # a nearly full disk takes a part first
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a torn one was being written when the process was killed."""
    if not path.exists():
        return
    with path.open("rb") as file:  # bytes, for a line can be torn within a character
        for line in file:
            if (value := whole(line)) is not None:
                yield value


def whole(line: bytes) -> dict[str, Any] | None:
    """None for a line that a kill tore."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """One line per optimizer step as it finally happened: what a killed attempt wrote beyond the checkpoint it resumed from is superseded."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if line.get("event") in ("started", "resumed", "rolled_back"):
            steps = {step: old for step, old in steps.items() if step <= line["step"]}
        elif "loss" in line:
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]
