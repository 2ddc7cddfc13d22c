"""Run directories that finefit 0.1.0 made, before a flat spec was a pipeline with one stage: they are refused by name
and version, and never touched."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import newest_with_digest, open_any_run
from finefit.cli.run import open_place
from finefit.errors import RunError
from finefit.run.command import RunArgs, read_command
from tests.cli.conftest import files_with_times
from tests.conftest import make_project
from tests.run.conftest import prepared

OLD = Path(__file__).parent / "old_runs"


@pytest.mark.parametrize("name", ["tiny-1", "staged-1", "staged-1/sft"])
def test_a_run_of_another_version_is_refused_with_its_version_and_what_to_do(name: str) -> None:
    with pytest.raises(RunError) as caught:
        open_any_run(OLD / name)
    assert "version 1, made by finefit" in caught.value.problem
    assert "this finefit reads version 2" in caught.value.problem
    assert "start again from its spec file" in caught.value.remedy


def test_a_new_run_is_started_beside_an_old_one_and_says_so(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    runs, said = project.parent / "runs", io.StringIO()
    shutil.copytree(OLD / "tiny-1", runs / "tiny-1", symlinks=True)
    before = files_with_times(runs / "tiny-1")
    command = read_command(RunArgs(target=project, runs=runs))
    assert open_place(command, Console(file=said, width=400)).path.name == "tiny-2"
    assert "tiny-1 has version 1, made by finefit 0.1.0: it is not resumed" in said.getvalue()
    assert files_with_times(runs / "tiny-1") == before


def test_a_run_with_the_same_digest_and_another_version_is_another_run(project: Path) -> None:
    run = prepared(project)
    digest = read_record(run.run, Run).digest
    assert newest_with_digest(run.path.parent, "tiny", digest) == run
    run.run.write_text(run.run.read_text().replace('"version": 2', '"version": 1'))
    assert newest_with_digest(run.path.parent, "tiny", digest) is None
