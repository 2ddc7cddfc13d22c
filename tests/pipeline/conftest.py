"""Run directories that are prepared and not started: they cost no training."""

from pathlib import Path

import pytest

from finefit.artifacts.rundir import RunDir
from finefit.pipeline.create import create_run
from finefit.pipeline.inputs import open_inputs
from finefit.spec.load import load_spec


def prepared(spec_path: Path, *overrides: str) -> RunDir:
    spec, folder = load_spec(spec_path, overrides), spec_path.parent
    opened = open_inputs(spec, folder, folder / "runs" / spec.name)
    text = spec_path.read_text(encoding="utf-8")
    return create_run(opened, spec_text=text, overrides=overrides, base=folder, runs=folder / "runs")


@pytest.fixture
def run(project: Path) -> RunDir:
    return prepared(project)
