"""DPO on two ranks is DPO on one: the same losses, measures and validation, wherever the reference comes from."""

from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.rundir import RunDir
from tests.cli.conftest import process
from tests.pairs import DPO, make_pairs_project

STILL = DPO.replace(", dropout: 0.1", "").replace("epochs: 3", "epochs: 1")
FULL = STILL.replace("{kind: lora, rank: 4, alpha: 8}", "{kind: full}").replace("lr: 1e-2", "lr: 1e-3")


Found = tuple[list[dict[str, Any]], dict[str, Any]]
"""The steps, and the last validation."""


def _found(folder: Path, spec: str) -> Found:
    make_pairs_project(folder, spec=spec, dropout=0.0)
    answer = process("run", "spec.yaml", cwd=folder)
    assert answer.code == 0, answer.out + answer.err
    (where,) = RunDir(folder / "runs" / "tiny-1").stages()
    (*_, validated) = (line for line in read_lines(where.metrics) if line.get("event") == "validated")
    return read_steps(where.metrics), validated


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """By spec, as one process finds it."""
    return {spec: _found(tmp_path_factory.mktemp("alone"), spec) for spec in (STILL, FULL)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "spec"),
    [("ddp", STILL), ("fsdp2", STILL), ("fsdp2", FULL)],
    ids=["copies", "divided", "divided, reference kept"],
)
def test_two_ranks_prefer_as_one_does(engine: str, spec: str, alone: dict[str, Found], tmp_path: Path) -> None:
    steps, validated = alone[spec]
    theirs, theirs_validated = _found(tmp_path / "two", spec + f"engine: {{kind: {engine}, devices: 2}}\n")
    for name in ("loss", "margin", "rewards_chosen", "rewards_rejected"):
        assert [line[name] for line in theirs] == pytest.approx([line[name] for line in steps], rel=1e-4, abs=1e-5)
    assert [line["accuracy"] for line in theirs[1:]] == [
        line["accuracy"] for line in steps[1:]
    ]  # the first has margins of rounding
    for name in ("validation_loss", "accuracy", "margin"):
        assert theirs_validated[name] == pytest.approx(validated[name], rel=1e-4, abs=1e-5)
    assert steps[-1]["margin"] > 0
