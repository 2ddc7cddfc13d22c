"""A stage that scores, within a pipeline: what it loses it asks for again, and what people have said of it is kept."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.artifacts.records import FinishedStage, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.run.cache_inputs import tree_digest
from finefit.run.staleness import decide_all, is_finished, is_worth_keeping, open_stages
from tests.conftest import make_model_folder, write_jsonl
from tests.pairs import make_pairs
from tests.pipelines import Heard, carry_out, open_pipeline

SCORES = """\
name: asked
device: cpu
stages:
  scores:
    kind: evaluate
    models: {plain: {kind: folder, path: model}, other: {kind: folder, path: other}}
    data: {test: {path: test.jsonl}}
    evaluate: [{task: hallucination}]
"""


@pytest.fixture(scope="module")
def _first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run once; not to be changed."""
    folder = tmp_path_factory.mktemp("asked") / "project"
    make_model_folder(folder / "model")
    make_model_folder(folder / "other", seed=3)
    write_jsonl(folder / "test.jsonl", make_pairs(6, seed=2))
    (folder / "spec.yaml").write_text(SCORES, encoding="utf-8")
    run = open_pipeline(folder / "spec.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finefit.run.launch._command", lambda: None)
        carry_out(run)
    return folder


@pytest.fixture
def run(_first: Path, tmp_path: Path) -> RunDir:
    """Finished."""
    shutil.copytree(_first, tmp_path / "project", symlinks=True)
    return RunDir(tmp_path / "project" / "runs" / "asked-1")


def test_what_an_evaluation_held_is_recorded_with_its_model_loaded(run: RunDir) -> None:
    memory = read_record(run.stage(1, "scores").done, FinishedStage).memory
    assert memory is not None
    assert memory.loaded_bytes is not None
    assert memory.peak_bytes is not None
    assert 50 * 2**20 < memory.loaded_bytes <= memory.peak_bytes


def _lose_run(place: Path) -> None:
    shutil.rmtree(place / "other")


def _lose_result(place: Path) -> None:
    (place / "other/stages/1-eval/evals/hallucination/other.json").unlink()


def _lose_records(place: Path) -> None:
    shutil.rmtree(place / "other/stages")


@pytest.mark.parametrize("lose", [_lose_run, _lose_result, _lose_records])
def test_a_stage_that_lost_answers_is_not_done(run: RunDir, lose: Callable[[Path], None]) -> None:
    assert is_finished(run)
    lose(run.stage(1, "scores").path)
    (choice,) = decide_all(open_stages(run))
    assert (choice.action, choice.reason) == ("run", "some or all files of asked-1/stages/1-scores are gone")
    assert not is_finished(run)


def test_a_model_whose_answers_are_gone_is_asked_again_alone(run: RunDir) -> None:
    place = run.stage(1, "scores").path
    before = tree_digest(place / "plain")
    _lose_run(place)
    carry_out(run)
    assert (place / "other/stages/1-eval/evals/hallucination/other.json").exists()
    assert tree_digest(place / "plain") == before
    assert is_finished(run)


def test_what_people_have_said_of_answers_outlives_a_forced_stage(run: RunDir) -> None:
    place, heard = run.stage(1, "scores").path, Heard()
    reviews = place / "plain/reviews/me.jsonl"
    reviews.parent.mkdir()
    reviews.write_text("{}\n")
    carry_out(run, heard, forced={"scores"})
    (kept,) = place.parent.glob(".earlier-*-1-scores")
    assert (kept / "plain/reviews/me.jsonl").read_text() == "{}\n"
    assert any(str(kept) in line for line in heard.said)
    assert not reviews.exists()
    assert not is_worth_keeping(StageDir(place), open_stages(run).pipeline.stages["scores"])  # which nobody has judged
    carry_out(run, heard)
    assert kept.exists()
