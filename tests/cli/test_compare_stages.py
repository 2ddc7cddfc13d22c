"""`finefit compare`, `review` and `eval` of what a pipeline has made."""

import json
from pathlib import Path

import pytest

from finefit.artifacts.records import write_record
from finefit.compare.comparing import compare
from tests.cli.conftest import Finefit
from tests.evaluations import make_evaluation, make_pipeline
from tests.runs import make_run

HITS = (1,) * 10
MISSES = (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
RUN = "runs/medical-1"


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sft -> dpo -> scores -> table; the working directory is above."""
    kinds = {"sft": "train", "dpo": "train", "scores": "evaluate", "table": "compare"}
    run = make_pipeline(tmp_path / RUN, kinds).path
    for name, hits, rank in (("1-sft", MISSES, 4), ("2-dpo", HITS, 16)):
        (run / "stages" / name).rmdir()
        make_run(run / "stages" / name, results={"checkpoint-6": hits}, overrides=[f"tuning.rank={rank}"])
    place = make_evaluation(run / "stages/3-scores", {"sft": MISSES, "dpo": HITS})
    (run / "stages/4-table/output").mkdir()
    write_record(
        run / "stages/4-table/output/comparison.json", compare([str(place / model) for model in ("sft", "dpo")])
    )
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.usefixtures("pipeline")
def test_an_evaluation_named_alone_compares_all_its_models(finefit: Finefit) -> None:
    found = finefit("compare", f"{RUN}/scores", "--json")
    assert found.code == 0, found.err
    assert [side["name"] for side in found.document["sides"]] == ["sft", "dpo"]
    assert found.document["tasks"][0]["pairings"][0]["n"] == 10


def test_a_pipeline_shows_what_it_has_compared_as_it_stands(pipeline: Path, finefit: Finefit, tmp_path: Path) -> None:
    kept = json.loads((pipeline / "stages/4-table/output/comparison.json").read_text(encoding="utf-8"))
    (pipeline / "stages/3-scores").rename(tmp_path / "gone")
    for named in (RUN, f"{RUN}/table"):
        assert finefit("compare", named, "--json").document == kept
    shown = finefit("compare", RUN, "--html", "page.html")
    assert "only what was declared differs: model" in shown.out + shown.err
    assert "sft and dpo" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_several_comparisons_are_all_shown_and_one_is_to_be_named_for_a_file(pipeline: Path, finefit: Finefit) -> None:
    state = json.loads((pipeline / "stages.json").read_text(encoding="utf-8"))
    again = {**state["stages"][-1], "name": "again"}
    (pipeline / "stages.json").write_text(json.dumps({**state, "stages": [*state["stages"], again]}), encoding="utf-8")
    assert finefit("compare", RUN).out.count("only what was declared differs") == 2
    refused = finefit("compare", RUN, "--json")
    assert refused.code == 2
    assert f"{RUN} has 2 comparisons" in refused.err


@pytest.mark.usefixtures("pipeline")
def test_two_trainings_of_a_pipeline_are_compared_by_the_settings_that_differ(finefit: Finefit) -> None:
    found = finefit("compare", f"{RUN}/sft", f"{RUN}/dpo", "--json").document
    assert [side["name"] for side in found["sides"]] == ["sft", "dpo"]
    assert found["verdict"] == "one setting differs: tuning.rank"


@pytest.mark.usefixtures("pipeline")
def test_answers_of_two_stages_are_judged_by_their_short_names(finefit: Finefit) -> None:
    found = finefit("review", f"{RUN}/sft", f"{RUN}/dpo", "--results", "--json")
    assert found.code == 0, found.err
    assert found.document["models"] == ["sft:checkpoint-6", "dpo:checkpoint-6"]
    refused = finefit("review", RUN, "--results")
    assert refused.code == 2
    assert f"name one of its stages: {RUN}/sft, {RUN}/dpo" in refused.err


@pytest.mark.usefixtures("pipeline")
def test_eval_takes_one_model_of_an_evaluation_and_names_them_where_several_are_meant(finefit: Finefit) -> None:
    refused = finefit("eval", f"{RUN}/scores", "--json")
    assert refused.code == 2
    assert f"name one of them: {RUN}/scores/dpo, {RUN}/scores/sft" in refused.err
    unknown = finefit("eval", f"{RUN}/scorse/sft", "--json")
    assert unknown.code == 2
    assert "has no stage scorse" in unknown.err
