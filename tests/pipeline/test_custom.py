"""A model of the user's own in a pipeline and in a run that goes on: its paths follow, its weights are what a stage has learnt, its code is the run's
copy."""

import json
from pathlib import Path
from typing import Any

from finefit.pipeline.inputs import moved_model
from finefit.pipeline.resume import _same_files
from finefit.pipeline.taskfiles import keep_model_file
from finefit.pipeline.wiring import wired_model, wired_spec
from finefit.spec.load import parse_spec
from finefit.spec.models import CustomModel, FolderModel
from finefit.spec.stages import Pipeline, StageModel
from tests.own import CODE, SPEC
from tests.spec.test_custom import TRAIN

OWN = CustomModel.model_validate(SPEC["model"])


def two_stages(tuning: dict[str, Any]) -> Pipeline:
    first = TRAIN | {"model": SPEC["model"], "tuning": tuning}
    return Pipeline.model_validate_json(
        json.dumps(
            {"name": "own", "stages": {"first": first, "second": TRAIN | {"model": {"kind": "stage", "name": "first"}}}}
        )
    )


def at(name: str) -> Path:
    return Path("/runs") / name


def test_the_model_of_a_stage_is_the_same_code_with_what_it_has_learnt() -> None:
    whole = two_stages({"kind": "full"})
    assert wired_model(whole, StageModel(kind="stage", name="first"), at).model == OWN.model_copy(
        update={"weights": "/runs/first"}
    )
    model = wired_spec(whole, "second", at, Path("/specs")).model
    assert isinstance(model, CustomModel)
    assert (model.file, model.weights) == ("my_model.py", "../runs/first")
    adapted = wired_model(two_stages(TRAIN["tuning"]), StageModel(kind="stage", name="first"), at)
    assert (adapted.model, adapted.adapter) == (OWN, "/runs/first")


def test_all_paths_of_the_model_move_and_nothing_else() -> None:
    model = OWN.model_copy(update={"weights": "w"})
    moved = moved_model(model, lambda path: f"../{path}")
    assert isinstance(moved, CustomModel)
    assert (moved.file, moved.weights, moved.tokenizer) == (
        "../my_model.py",
        "../w",
        FolderModel(kind="folder", path="../tokenizer"),
    )
    assert moved.config == model.config
    still = moved_model(OWN, lambda path: f"../{path}")
    assert isinstance(still, CustomModel)
    assert still.weights is None


def test_a_run_keeps_the_code_and_its_spec_names_the_copy(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "run").mkdir()
    spec = parse_spec(json.dumps(SPEC), where="spec.yaml", overrides=())
    kept = keep_model_file(
        spec.model_copy(update={"model": moved_model(spec.model, lambda path: f"../{path}")}), tmp_path / "run"
    )
    assert isinstance(kept.model, CustomModel)
    assert kept.model.file == "model/my_model.py"
    assert (tmp_path / "run" / "model" / "my_model.py").read_text(encoding="utf-8") == CODE
    assert keep_model_file(kept, tmp_path / "run") == kept


def test_a_run_that_goes_on_has_its_own_copy_unless_another_file_is_given_now() -> None:
    before = OWN.model_copy(
        update={"file": "model/my_model.py", "tokenizer": FolderModel(kind="folder", path="../tokenizer")}
    )
    fresh = OWN.model_copy(update={"file": "../my_model.py", "config": {"width": 9}})
    gone_on = _same_files(fresh, before, lambda _: False)
    assert gone_on == before.model_copy(update={"config": {"width": 9}})
    assert _same_files(fresh, before, lambda key: key == "model.file").file == "../my_model.py"  # type: ignore[union-attr]
