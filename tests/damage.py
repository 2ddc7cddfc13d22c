"""Run directories that something has gone wrong with, and every verb that reads one, in the test's own process."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.reading import MAX_RECORD_BYTES
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir
from finefit.cli import FAULT, main
from tests.conftest import make_project
from tests.runs import spoil

RUN = Path("runs/tiny-1")
READERS = (
    ("watch", RUN, "--json"),
    ("watch", RUN),
    ("compare", RUN, "--json"),
    ("review", RUN, "--results", "--json"),
    ("run", RUN, "--dry-run", "--json"),
    ("run", "spec.yaml", "--dry-run", "--json"),
)
"""They change nothing."""
WRITERS = (("eval", RUN, "--json"), ("run", RUN, "--json"))
_LONGEST_SECONDS = 120
_UNEQUAL = ("seconds", "peak_bytes", "loaded_bytes", "predicted_bytes", "wait_seconds", "waited_share", "at")
"""Of two equal runs."""


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def content(self) -> Any:
        """What it says, without the time and memory that it took."""
        try:
            return _without_costs(json.loads(self.out))
        except ValueError:
            return self.out


def _without_costs(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_costs(one) for key, one in value.items() if key not in _UNEQUAL}
    return [_without_costs(one) for one in value] if isinstance(value, list) else value


def finefit(*words: object) -> Answer:
    """A command that may neither hang nor end as a fault of ours."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"finefit {' '.join(map(str, words))} hangs")

    before, out, err = signal.signal(signal.SIGALRM, hangs), io.StringIO(), io.StringIO()
    signal.alarm(_LONGEST_SECONDS)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setattr(sys, "argv", ["finefit", *map(str, words)])
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("COLUMNS", "200")
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    answer = Answer(code, out.getvalue(), err.getvalue())
    assert code != FAULT, f"finefit {' '.join(map(str, words))}:\n{answer.err}"
    assert "Traceback" not in answer.out + answer.err
    return answer


def make_finished(folder: Path) -> Path:
    """A project with its finished run."""
    make_project(folder)
    with contextlib.chdir(folder):
        assert finefit("run", "spec.yaml", "--json").code == 0
        assert finefit("eval", RUN, "--json").code == 0
    return folder


def make_interrupted(finished: Path, folder: Path) -> Path:
    """The same as a kill leaves it after the last but one checkpoint."""
    shutil.copytree(finished, folder, symlinks=True)
    run = RunDir(folder / RUN)
    (where,) = run.stages()
    *_, newest = sorted(where.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.rmtree(newest)
    shutil.rmtree(where.path / "evals")
    for path in (where.result, where.evals, *where.checkpoints.iterdir()):
        if path.is_symlink() or path.is_file():
            path.unlink()
    record = read_record(run.run, Run)
    write_record(run.run, Run(**{**record.__dict__, "status": "running"}))
    return folder


def files_of(run: Path) -> list[Path]:
    """Relative to the run."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def digests(folder: Path) -> dict[str, str]:
    """Of every file of every checkpoint."""
    found = (path for path in folder.rglob("checkpoints/checkpoint-*/**/*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _outside(path: Path) -> None:
    """A link to the same content elsewhere."""
    other = path.parents[len(path.parts) - 2] / "tmp" / f"outside-{os.getpid()}"
    shutil.move(path, other)
    path.symlink_to(other)


def _newer(path: Path) -> None:
    try:
        spoil(path, version=99)
    except (ValueError, TypeError):  # no record with a version
        path.write_bytes(b'{"version": 99}\n')


def _sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, MAX_RECORD_BYTES + 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": _cut,
    "a folder": _replaced(Path.mkdir),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link outside": _outside,
    "a pipe": _replaced(os.mkfifo),
    "not UTF-8": lambda path: path.write_bytes(b'{"version": 1, "name": "caf\xe9"}\n'),
    "nested deeply": lambda path: path.write_bytes(b'{"a":' * 100_000 + b"\n"),
    "of another program": lambda path: path.write_bytes(b'{"hello": "world", "steps": [1, 2]}\n'),
    "of a newer version": _newer,
    "too large": _sparse,
}


@contextlib.contextmanager
def copied(project: Path, folder: Path) -> Iterator[Path]:
    """A copy to be damaged; the working directory."""
    shutil.copytree(project, folder, symlinks=True)
    try:
        with contextlib.chdir(folder):
            yield folder / RUN
    finally:
        shutil.rmtree(folder)


def commands(project: Path, folder: Path, verbs: Sequence[Sequence[object]]) -> dict[str, Answer]:
    """What each says where nothing is wrong."""
    with copied(project, folder):
        return {" ".join(map(str, words)): finefit(*words) for words in verbs}
