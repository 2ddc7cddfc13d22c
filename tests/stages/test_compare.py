"""A stage compares what others have scored: a record that is read again, a page, tables, and a few lines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import StageJob, read_record
from finefit.compare.comparison import compare as compared
from finefit.compare.records import Comparison
from finefit.compare.sides import stored_comparisons
from finefit.errors import RunError, SpecError
from finefit.report.stage_summary import summary_lines
from finefit.spec.stages import CompareStage
from finefit.stages import compare
from finefit.stats.metrics import Metric
from tests.evaluations import make_evaluation, make_pipeline
from tests.runs import make_run

HITS = (1,) * 10
MISSES = (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
WRONG = Metric(name="hit", aggregate="rate", counts=("hit",), better="lower")


def _order(scores: Mapping[str, tuple[str, ...]], **settings: Any) -> StageJob:
    stage = CompareStage.model_validate({"kind": "compare", "of": tuple(scores), **settings})
    return StageJob(
        name="table",
        pipeline="medical",
        seed=7,
        device="cpu",
        precision="fp32",
        base="/",
        stage=stage,
        scores=dict(scores),
    )


def _made(order: StageJob, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    return dict(json.loads(json.dumps(compare.make(order, out))))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_pipeline(tmp_path / "medical-1", {"sft": "train", "scores": "evaluate", "table": "compare"}).path
    (folder / "stages/1-sft").rmdir()
    make_run(folder / "stages/1-sft", results={"base": MISSES, "checkpoint-6": HITS})
    make_evaluation(folder / "stages/2-scores", {"sft": MISSES, "dpo": HITS})
    return folder


def test_what_is_written_is_the_comparison_of_the_models_with_a_page_and_tables_beside_it(run: Path) -> None:
    models = tuple(str(run / "stages/2-scores" / name) for name in ("sft", "dpo"))
    out = run / "stages/3-table/output"
    summary = _made(_order({"scores": models}), out)
    assert read_record(out / "comparison.json", Comparison) == compared(models)
    assert (
        sorted(path.name for path in out.iterdir())
        == ["comparison.html", "comparison.json", "comparison.md"]
        == sorted(summary["files"])
    )
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "<h1>sft and dpo</h1>" in page
    assert page.index("Settings that differ") < page.index("exact_match")
    assert "| sft |" in (out / "comparison.md").read_text(encoding="utf-8")
    assert stored_comparisons([str(run)]) == stored_comparisons([f"{run}/table"]) == (compared(models),)


def test_a_line_tells_the_verdict_and_one_each_difference_with_its_interval_and_p(run: Path) -> None:
    summary = _made(
        _order({"scores": tuple(str(run / "stages/2-scores" / name) for name in ("sft", "dpo"))}), run / "out"
    )
    verdict, difference, *notes = summary_lines("compare", summary)
    assert verdict == summary["verdict"] == "only declared settings differ: model"
    assert difference.startswith("exact_match: dpo against sft: hit +90.0 points (")
    assert difference.endswith(f"p {summary['tasks']['exact_match'][0]['p']:.2g}, n 10: better")
    assert notes == ["note: exact_match: 10 items: the intervals may be too narrow"]


def test_more_of_what_should_be_less_is_told_as_worse(run: Path) -> None:
    place = make_evaluation(run / "stages/2-scores", {"old": MISSES, "new": HITS}, metrics=(WRONG,))
    summary = _made(_order({"scores": (str(place / "old"), str(place / "new"))}), run / "out")
    assert summary_lines("compare", summary)[1].endswith(": worse")


def test_checkpoints_of_a_training_stand_beside_models_and_settings_that_are_meant_to_differ_are_declared(
    run: Path,
) -> None:
    scores = {
        "sft:base": (f"{run}/stages/1-sft:base",),
        "sft": (f"{run}/stages/1-sft",),
        "scores:dpo": (f"{run}/stages/2-scores/dpo",),
    }
    summary = _made(_order(scores), run / "out")
    assert summary["sides"] == ["sft:base", "sft:final", "dpo"]
    assert [(found["first"], found["second"]) for found in summary["tasks"]["exact_match"]] == [
        ("sft:base", "sft:final"),
        ("sft:base", "dpo"),
    ]
    one_run = {part: scores[part] for part in ("sft:base", "sft")}
    assert (
        _made(_order(one_run, varies=("checkpoint",)), run / "out")["verdict"]
        == "only declared settings differ: checkpoint"
    )
    with pytest.raises(RunError, match="fewer than two of these were scored on rouge"):
        _made(_order(scores, task="rouge"), run / "out")


def test_a_model_that_an_evaluation_does_not_have_is_refused_by_name(run: Path) -> None:
    with pytest.raises(SpecError, match="of: scores:dpi is not a model of that evaluation"):
        _made(_order({"scores:dpi": ()}), run / "out")
