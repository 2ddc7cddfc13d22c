"""The twin of shirg as it ships, in two processes on a CPU: a random tower and a random diffusion model learn to read
ink, then chalk by SHIRG's adapters alone. Minutes (`make e2e`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from finefit.recipes import copy_recipe, find_recipe
from tests.cli.conftest import COMMAND

pytestmark = [pytest.mark.twin, pytest.mark.timeout(1800)]
NUM_TENSORS = 36
"""Two for each of the 18 adapted layers."""


@pytest.fixture(scope="module")
def chalk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the stage that has learnt chalk."""
    folder = tmp_path_factory.mktemp("shirg")
    copy_recipe(find_recipe("shirg/twin"), folder / "twin")
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*COMMAND, "run", "twin/twin.yaml"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "shirg-twin-1" / "stages" / "2-chalk"


def exact(run: Path, checkpoint: str) -> dict[str, float]:
    record = json.loads(
        (run / "stages" / "1-sft" / "evals" / "exact_match" / f"{checkpoint}.json").read_text(encoding="utf-8")
    )
    assert (record["n"], record["coverage"]) == (100, 1.0)
    found: dict[str, float] = record["metrics"]["exact"]
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("place", ["stages/1-sft/metrics.jsonl", "logs/rank-1.metrics.jsonl"])
def test_every_adapter_has_a_gradient_on_both_ranks(chalk: Path, place: str) -> None:
    audits = [line for line in lines(chalk / place) if line.get("event") == "audited"]
    assert [(audit["step"], audit["tensors"], audit["reached"]) for audit in audits] == [
        (1, NUM_TENSORS, NUM_TENSORS),
        (2, NUM_TENSORS, NUM_TENSORS),
    ]
    assert all(".lora_A." in name for name in audits[0]["waiting"])  # lora_B starts at zero, and so does their gradient
    assert not audits[1].get("waiting")


def test_the_effective_batch_is_counted_in_rows(chalk: Path) -> None:
    steps = [line for line in lines(chalk / "stages/1-sft/metrics.jsonl") if "loss" in line]
    assert len(steps) == 140
    assert sum(step["rows"] for step in steps) == 14 * 300


def test_chalk_is_read_well_above_chance_by_the_adapters_and_not_without_them(chalk: Path) -> None:
    assert exact(chalk, "base")["high"] < 0.1
    assert exact(chalk, "checkpoint-140")["low"] > 0.2
