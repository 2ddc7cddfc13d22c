"""What a stage leaves to others: where it lies, and how it is put into their specs."""

from pathlib import Path

import pytest

from finefit.artifacts.records import output_of, wired_model, wired_spec
from finefit.spec.load import parse_any
from finefit.spec.models import FolderModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import EvaluateStage

SPEC = """\
name: own
defaults: {data: {train: [{path: a.jsonl}]}, optimizer: {lr: 1e-3}, tuning: {kind: full}}
stages:
  fetch: {kind: python, script: fetch.py, outputs: [model]}
  sft: {kind: train, model: {kind: folder, path: stage://fetch/model}}
  dpo: {kind: train, model: {kind: stage, name: sft}, objective: {kind: dpo}}
  scores:
    kind: evaluate
    models: {fetched: {kind: folder, path: stage://fetch/model}, theirs: {kind: folder, path: theirs}}
    data: {test: {path: t.jsonl}}
    evaluate: [{task: rouge}]
"""


@pytest.fixture
def pipeline() -> Pipeline:
    found = parse_any(SPEC, where="spec.yaml")
    assert isinstance(found, Pipeline)
    return found


def test_a_model_folder_that_a_script_has_made_is_found_by_whoever_names_it(pipeline: Pipeline, tmp_path: Path) -> None:
    scores = pipeline.stages["scores"]
    assert isinstance(scores, EvaluateStage)
    found = {
        name: wired_model(pipeline, asked, lambda stage: tmp_path / stage).model
        for name, asked in scores.models.items()
    }
    assert found == {
        "fetched": FolderModel(kind="folder", path=str(tmp_path / "fetch" / "model")),
        "theirs": FolderModel(kind="folder", path="theirs"),
    }


@pytest.mark.parametrize(("stage", "path"), [("sft", "../fetch/model"), ("dpo", "../sft")])
def test_a_training_names_what_it_starts_from_relative_to_its_own_folder(
    pipeline: Pipeline, tmp_path: Path, stage: str, path: str
) -> None:
    spec = wired_spec(pipeline, stage, lambda name: tmp_path / name, tmp_path / "here")
    assert spec.model == FolderModel(kind="folder", path=path)


@pytest.mark.parametrize("strays", [(), ("notes.txt",), ("1-sft/x", "2-sft/x")])
def test_the_end_of_a_training_has_one_place_whatever_lies_beside_it(
    pipeline: Pipeline, tmp_path: Path, strays: tuple[str, ...]
) -> None:
    for stray in strays:
        (tmp_path / "stages" / stray).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stages" / stray).touch()
    assert output_of(tmp_path, pipeline.stages["sft"]) == tmp_path.resolve() / "stages/1-sft/checkpoints/final"
    assert output_of(tmp_path, pipeline.stages["dpo"]) == tmp_path.resolve() / "stages/1-dpo/checkpoints/final"
