"""A run that is prepared and not started, and the lines that its workers would write."""

from pathlib import Path

import pytest

from finefit.artifacts.atomic import Journal
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import RunDir, stage_of
from tests.evals import make_request
from tests.run.conftest import prepared


@pytest.fixture
def run(project: Path) -> RunDir:
    return prepared(project)


def note(run: RunDir, **line: object) -> None:
    with Journal(stage_of(run).metrics) as metrics:
        metrics.write(**line)


def step(run: RunDir, number: int, loss: float = 5.0) -> None:
    note(run, step=number, loss=loss, seconds=0.5, tokens=100)


def ask(run: RunDir, checkpoint: str, limit: int | None = None) -> Path:
    path = stage_of(run).evaluation("json_match", checkpoint, limit).request
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, make_request(checkpoint, limit=limit))
    return path


def answer(run: RunDir, checkpoint: str, count: int) -> None:
    with Journal(stage_of(run).evaluation("json_match", checkpoint).items) as items:
        for at in range(count):
            items.write(item=at)
