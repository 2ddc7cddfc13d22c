"""Reviewed terminal output: `tests/snapshots/<verb>.txt` holds what a verb prints, so other tests need not assert
wording.

A test records its commands in a `Transcript` and compares it with the file. `python -m tests.renew_snapshots` rewrites
the files; read `git diff tests/snapshots` afterwards, as a user would."""

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

RENEW = "FINEFIT_RENEW_SNAPSHOTS"
FOLDER = Path(__file__).resolve().with_name("snapshots")
_NORMAL = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d|Z)?"), "<date>"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


class Transcript:
    """Commands with their output and exit code. `hidden` maps patterns of machine-dependent text to placeholders."""

    def __init__(self, *, folder: Path, hidden: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._hidden = [(re.compile(pattern), word) for pattern, word in (hidden or {}).items()]
        self._parts: list[str] = []

    def add(self, command: Sequence[str | Path], code: int, output: str) -> None:
        lines = (f"$ finefit {shlex.join(map(str, command))}", self._normalised(output).rstrip("\n"), f"[exit {code}]")
        self._parts.append("\n".join(filter(None, lines)))

    def note(self, title: str, text: str) -> None:
        self._parts.append(f"{title}\n    {self._normalised(text)}")

    def check(self, verb: str) -> None:
        """Fails with a diff, or rewrites the file where the environment asks for it."""
        path, found = FOLDER / f"{verb}.txt", "\n\n".join(self._parts) + "\n"
        if os.environ.get(RENEW):
            path.write_text(found, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), str(path), "printed now", lineterm="")
        assert found == expected, "\n".join([*diff, "to accept it: python -m tests.renew_snapshots"])

    def _normalised(self, text: str) -> str:
        text = text.replace(str(self._folder.resolve()), "<folder>").replace(str(self._folder), "<folder>")
        for pattern, word in (*_NORMAL, *self._hidden):
            text = pattern.sub(word, text)
        return text
