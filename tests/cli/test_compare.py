"""`finefit compare` on real runs of the tiny model, and on what is none."""

import json
import shutil
from pathlib import Path

import pytest

from finefit.artifacts.records import write_record
from finefit.compare.comparison import compare
from tests.cli.conftest import STAGE, Finefit, process, rewrite
from tests.evaluations import make_evaluation, make_pipeline
from tests.runs import make_run

RUN = "runs/tiny-1"


@pytest.mark.usefixtures("finished")
def test_a_run_alone_is_compared_with_what_it_started_from(finefit: Finefit) -> None:
    answer = finefit("compare", RUN, "--json")
    assert answer.code == 0, answer.err
    found = answer.document
    assert [side["name"] for side in found["sides"]] == ["tiny-1:base", "tiny-1:final"]
    assert found["verdict"] == "one setting differs: checkpoint"
    (task,) = found["tasks"]
    assert (task["task"], task["pairings"][0]["n"]) == ("json_match", 5)
    assert [change["metric"] for change in task["pairings"][0]["changes"]] == ["all_fields", "fields"]
    assert {row["quantity"] for row in found["predictions"]} >= {"peak memory", "time per step", "training time"}


@pytest.mark.slow
def test_two_real_runs_give_a_page_a_table_and_a_document(finished: Path, finefit: Finefit) -> None:
    done = process(
        "run", "spec.yaml", "--new", "--set", "tuning.rank=2", "--set", "save.every=4 steps", "--json", cwd=finished
    )
    assert done.code == 0, done.err
    answer = finefit(
        "compare", RUN, "runs/tiny-2", "--varies", "tuning.rank", "--html", "page.html", "--markdown", "table.md"
    )
    assert answer.code == 0, answer.err
    assert "only declared settings differ: tuning.rank" in answer.out
    assert "differs, without effect on scores: save.every" in answer.out
    assert "page     page.html" in answer.out
    assert (finished / "page.html").read_text(encoding="utf-8").count("<svg") == 5
    assert "| tuning.rank | 4 | 2 |" in (finished / "table.md").read_text(encoding="utf-8")
    found = finefit("compare", RUN, "runs/tiny-2", "--json").document
    assert [row["key"] for row in found["differing"]] == ["tuning.rank"]


def test_a_copied_run_is_compared_where_it_lies(finished: Path, finefit: Finefit) -> None:
    shutil.copytree(finished / RUN, finished / "elsewhere" / "tiny-1", symlinks=True)
    assert (
        finefit("compare", RUN, "elsewhere/tiny-1", "--json").document["verdict"]
        == "nothing that can change a score differs except chance"
    )


@pytest.mark.usefixtures("finished")
def test_mistakes_are_the_users_to_mend(finefit: Finefit) -> None:
    for arguments, words in (
        ((".", RUN), "is not a run directory"),
        ((RUN, RUN), "named twice"),
        ((RUN, "--task", "rouge"), "fewer than two of these were scored on rouge"),
        ((f"{RUN}:7",), f"{RUN} has no checkpoint 7"),
        ((RUN, "--html", "no/such/page.html"), "there is no folder"),
    ):
        answer = finefit("compare", *arguments)
        assert (answer.code, answer.out) == (2, ""), arguments
        assert words in answer.err


def test_an_error_is_a_document_too(tmp_path: Path, finefit: Finefit) -> None:
    answer = finefit("compare", tmp_path, "--json")
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "RunError"


def test_a_damaged_record_is_named(finished: Path, finefit: Finefit) -> None:
    rewrite(finished / RUN / STAGE / "stage.json", ('"version": 2', '"version": 99'))
    answer = finefit("compare", RUN)
    assert answer.code == 2
    assert "Stage record of version 99" in answer.err


def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    """Nor does it write anything into the runs."""
    runs = [make_run(tmp_path / name, results={"checkpoint-6": (1, 0, 1)}) for name in ("a-1", "b-1")]
    before = {path: path.lstat().st_mtime_ns for run in runs for path in run.path.rglob("*")}
    code = (
        "import sys\nfrom finefit.cli import app\n"
        f"app(['compare', {str(runs[0].path)!r}, {str(runs[1].path)!r}, '--html', 'p.html', '--json'], "
        "standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 2
    assert {path: path.lstat().st_mtime_ns for run in runs for path in run.path.rglob("*")} == before


# `finefit compare`, `review` and `eval` of what a pipeline has made.

HITS = (1,) * 10
MISSES = (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
PIPELINE = "runs/medical-1"


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sft -> dpo -> scores -> table; the working directory is above."""
    kinds = {"sft": "train", "dpo": "train", "scores": "evaluate", "table": "compare"}
    run = make_pipeline(tmp_path / PIPELINE, kinds).path
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
    found = finefit("compare", f"{PIPELINE}/scores", "--json")
    assert found.code == 0, found.err
    assert [side["name"] for side in found.document["sides"]] == ["sft", "dpo"]
    assert found.document["tasks"][0]["pairings"][0]["n"] == 10


def test_a_pipeline_shows_what_it_has_compared_as_it_stands(pipeline: Path, finefit: Finefit, tmp_path: Path) -> None:
    kept = json.loads((pipeline / "stages/4-table/output/comparison.json").read_text(encoding="utf-8"))
    (pipeline / "stages/3-scores").rename(tmp_path / "gone")
    for named in (PIPELINE, f"{PIPELINE}/table"):
        assert finefit("compare", named, "--json").document == kept
    shown = finefit("compare", PIPELINE, "--html", "page.html")
    assert "only declared settings differ: model" in shown.out + shown.err
    assert "sft and dpo" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_several_comparisons_are_all_shown_and_one_is_to_be_named_for_a_file(pipeline: Path, finefit: Finefit) -> None:
    state = json.loads((pipeline / "stages.json").read_text(encoding="utf-8"))
    again = {**state["stages"][-1], "name": "again"}
    (pipeline / "stages.json").write_text(json.dumps({**state, "stages": [*state["stages"], again]}), encoding="utf-8")
    assert finefit("compare", PIPELINE).out.count("only declared settings differ") == 2
    refused = finefit("compare", PIPELINE, "--json")
    assert refused.code == 2
    assert f"{PIPELINE} has 2 comparisons" in refused.err


@pytest.mark.usefixtures("pipeline")
def test_two_trainings_of_a_pipeline_are_compared_by_the_settings_that_differ(finefit: Finefit) -> None:
    found = finefit("compare", f"{PIPELINE}/sft", f"{PIPELINE}/dpo", "--json").document
    assert [side["name"] for side in found["sides"]] == ["sft", "dpo"]
    assert found["verdict"] == "one setting differs: tuning.rank"


@pytest.mark.usefixtures("pipeline")
def test_answers_of_two_stages_are_judged_by_their_short_names(finefit: Finefit) -> None:
    found = finefit("review", f"{PIPELINE}/sft", f"{PIPELINE}/dpo", "--results", "--json")
    assert found.code == 0, found.err
    assert found.document["models"] == ["sft:checkpoint-6", "dpo:checkpoint-6"]
    refused = finefit("review", PIPELINE, "--results")
    assert refused.code == 2
    assert f"name one of its stages: {PIPELINE}/sft, {PIPELINE}/dpo" in refused.err


@pytest.mark.usefixtures("pipeline")
def test_eval_takes_one_model_of_an_evaluation_and_names_them_where_several_are_meant(finefit: Finefit) -> None:
    refused = finefit("eval", f"{PIPELINE}/scores", "--json")
    assert refused.code == 2
    assert f"name one of them: {PIPELINE}/scores/dpo, {PIPELINE}/scores/sft" in refused.err
    unknown = finefit("eval", f"{PIPELINE}/scorse/sft", "--json")
    assert unknown.code == 2
    assert "has no stage scorse" in unknown.err
