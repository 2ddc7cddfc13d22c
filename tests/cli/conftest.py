"""The command line as a user meets it: in this process where only words, exit codes and files matter (torch is loaded
already), as a process where streams, signals and imports do. One run is finished once; each test gets a copy of it."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.cli import main
from tests.conftest import make_project
from tests.forecasts import make_forecast

COMMAND = [sys.executable, "-m", "finefit"]
STAGE = "stages/1-sft"


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Of a stdout that holds one JSON document and nothing else."""
        return json.loads(self.out)


Finefit = Callable[..., Answer]


@pytest.fixture
def finefit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Finefit]:
    """`finefit("run", "spec.yaml")` in this process. Variables that a command sets are gone afterwards."""
    before = dict(os.environ)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["finefit", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Answer(code, said.out, said.err)

    yield call
    os.environ.clear()
    os.environ.update(before)


def processor_seconds() -> float:
    """Of all processes that were waited for: what they took, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def process(*arguments: str | Path, cwd: Path) -> Answer:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def started(*arguments: str | Path, cwd: Path) -> "Iterator[subprocess.Popen[str]]":
    """A command that goes on as it would in a terminal; it never outlives the test."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


@dataclass(frozen=True, slots=True)
class Finished:
    folder: Path
    answer: Answer


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`finefit run spec.yaml --json`, carried out once; not to be changed."""
    folder = make_project(tmp_path_factory.mktemp("first") / "project").parent
    return Finished(folder, process("run", "spec.yaml", "--json", cwd=folder))


@pytest.fixture
def finished(first_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with its finished run runs/tiny-1; the working directory."""
    folder = tmp_path / "project"
    shutil.copytree(first_run.folder, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder without runs; the working directory."""
    monkeypatch.chdir(project.parent)
    return project.parent


@pytest.fixture
def without_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `finefit check` where the data is the matter: nothing is rehearsed."""

    def forecast_here(_spec: object, _base: object, lengths: Lengths, _machine: object, **_: object) -> Forecast:
        return make_forecast(lengths=lengths, total_steps=12, host_bytes=1, disk_bytes=1)

    monkeypatch.setattr("finefit.preflight.training.forecast_here", forecast_here)


def rewrite(path: Path, *replaced: tuple[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def files_with_times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.lstat().st_mtime_ns for p in sorted(folder.rglob("*")) if not p.is_dir()}
