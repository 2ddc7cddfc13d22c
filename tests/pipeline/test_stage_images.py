"""Where the images of a stage's rows start: a path like any other, moved with the stage and a part of what it stands on."""

from pathlib import Path

from finefit.pipeline.stage_keys import grounds
from finefit.pipeline.stage_paths import moved
from finefit.spec.load import parse_any
from finefit.spec.stages import Pipeline, TrainStage
from tests.conftest import write_jsonl

SPEC = """\
name: two
defaults:
  model: {kind: shape, config: {model_type: llava}}
  tuning: {kind: full}
  optimizer: {lr: 1e-4}
stages:
  first: {kind: train, data: {train: [{path: rows.jsonl, images_root: shown}]}}
"""


def _pipeline(folder: Path) -> Pipeline:
    write_jsonl(folder / "rows.jsonl", [{"image": "1.png", "question": "Which?", "answer": "7"}])
    (folder / "shown").mkdir()
    (folder / "shown" / "1.png").write_bytes(b"one")
    found = parse_any(SPEC, where="spec.yaml")
    assert isinstance(found, Pipeline)
    return found


def _inputs(pipeline: Pipeline, folder: Path) -> dict[str, str]:
    return grounds(pipeline, "first", folder, lambda name: folder / name, lambda name: name).inputs


def test_images_that_change_change_what_a_stage_stands_on(tmp_path: Path) -> None:
    pipeline = _pipeline(tmp_path)
    before = _inputs(pipeline, tmp_path)
    assert _inputs(pipeline, tmp_path) == before
    (tmp_path / "shown" / "1.png").write_bytes(b"another")
    after = _inputs(pipeline, tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["data.train.0.images_root"]


def test_they_move_with_the_stage(tmp_path: Path) -> None:
    stage = moved(_pipeline(tmp_path).stages["first"], lambda path: f"elsewhere/{path}")
    assert isinstance(stage, TrainStage)
    (source,) = stage.data.train
    assert (source.path, source.images_root) == ("elsewhere/rows.jsonl", "elsewhere/shown")
