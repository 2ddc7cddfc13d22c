"""Run directories that are prepared and not started: they cost no training."""

from pathlib import Path

import pytest

from finefit.artifacts.rundir import RunDir
from finefit.run.create import create_run, read_request
from finefit.spec.load import load_pipeline


@pytest.fixture(autouse=True)
def _no_inhibitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.run.launch._command", lambda: None)


def prepared(spec_path: Path, *overrides: str, nodes: int | None = None) -> RunDir:
    folder, text, pipeline = spec_path.parent, spec_path.read_text("utf-8"), load_pipeline(spec_path, overrides)
    request = read_request(pipeline, folder, spec_text=text, overrides=overrides, nodes=nodes)
    return create_run(request, runs=folder / "runs")


@pytest.fixture
def run(project: Path) -> RunDir:
    return prepared(project)
