"""A model of the user's own in a pipeline and in a run that goes on: its paths follow, its weights are what a stage has
learnt, its code is the run's copy."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.records import WiredModel, wired_model, wired_spec
from finefit.artifacts.rundir import RunDir
from finefit.cli.console import announce_code
from finefit.evaluate.external_model import find_external_model
from finefit.plan.stage_forecasts import row_lengths
from finefit.run import evaluate_stage
from finefit.run.eval_subjects import open_model_run
from finefit.run.resume import _model
from finefit.spec.load import load_spec, parse_spec
from finefit.spec.models import CustomModel, FolderModel, ShapeModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import EvaluateStage, StageModel, moved
from finefit.tasks.custom import keep_model_file
from finefit.vision import geometry_of
from tests.conftest import write_jsonl
from tests.custom_models import CODE, SPEC, make_custom_project
from tests.data.image_rows import asked, draw
from tests.run.conftest import prepared
from tests.run.test_evaluate_stage import make_job
from tests.spec.test_pipeline import TRAIN
from tests.vision_models import make_vlm, vlm_config

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
    found = moved(model, lambda path: f"../{path}")
    assert isinstance(found, CustomModel)
    assert (found.file, found.weights, found.tokenizer) == (
        "../my_model.py",
        "../w",
        FolderModel(kind="folder", path="../tokenizer"),
    )
    assert found.config == model.config
    still = moved(OWN, lambda path: f"../{path}")
    assert isinstance(still, CustomModel)
    assert still.weights is None


def test_a_run_keeps_the_code_and_its_spec_names_the_copy(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "run").mkdir()
    spec = parse_spec(json.dumps(SPEC), where="spec.yaml", overrides=())
    kept = keep_model_file(
        spec.model_copy(update={"model": moved(spec.model, lambda path: f"../{path}")}), tmp_path / "run"
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
    gone_on = _model(fresh, fresh, before, lambda _: False)
    assert gone_on == before.model_copy(update={"config": {"width": 9}})
    assert _model(fresh, fresh, before, lambda key: key == "model.file").file == "../my_model.py"  # type: ignore[union-attr]


# What is prepared and planned for models that see: an image where none is known, a model by itself by what its rows
# show, and no eye but the model's own.

SEEING = CODE.replace("self.layers = ", "self.views, self.image_text = 1, '(seen) '\n        self.layers = ")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# a plan without rows


def _assumed(project: Path, config: dict[str, Any], *overrides: str) -> Lengths:
    spec = load_spec(project, overrides)
    return row_lengths(spec.model_copy(update={"model": ShapeModel(kind="shape", config=config)}), project.parent)


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "smolvlm", "gemma3", "paligemma"],
)
def test_a_mere_shape_that_sees_is_planned_with_an_image_that_leaves_room_for_words(project: Path, family: str) -> None:
    config = json.loads(vlm_config(family).to_json_string())
    geometry = geometry_of(config)
    assert geometry is not None
    (grid,) = _assumed(project, config, "data.max_tokens=100").grids
    assert geometry.num_tokens(geometry.square_grid(1)) <= geometry.num_tokens(grid) <= 98
    (more,) = _assumed(project, config, "data.max_tokens=4000").grids
    assert (geometry.num_tokens(more) > geometry.num_tokens(grid)) == (
        geometry.num_tokens(geometry.square_grid(1000)) > geometry.num_tokens(grid)
    )
    assert _assumed(project, config, "data.max_tokens=2").grids == ()


def test_an_assumed_image_fills_half_a_row_or_is_as_large_as_it_may_be(project: Path) -> None:
    config = json.loads(vlm_config("qwen2_5_vl").to_json_string())  # of which 16 x 16 pixels are a token
    assert _assumed(project, config, "data.max_tokens=128").grids == ((1, 16, 16),)
    assert _assumed(project, config, "data.max_tokens=128", f"data.images.max_pixels={160 * 160}").grids == (
        (1, 20, 20),
    )
    assert _assumed(project, config, "data.max_tokens=64", f"data.images.max_pixels={160 * 160}").grids == (
        (1, 14, 14),
    )


# a model by itself


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_vlm("qwen2_5_vl", tmp_path / "model")
    draw(tmp_path, "a.png", 1)
    write_jsonl(tmp_path / "test.jsonl", [asked(1, "a.png")])
    return tmp_path


def _opened(folder: Path) -> RunDir:
    return open_model_run(find_external_model("model"), "test.jsonl", device="cpu", runs=folder / "runs")


def test_a_model_is_asked_anew_when_an_image_was_changed_and_only_then(asking: Path) -> None:
    first = _opened(asking)
    assert _opened(asking).path == first.path
    draw(asking, "a.png", 2)
    second = _opened(asking)
    assert second.path != first.path
    old, new = (run.stage(1, "eval").prepared("test.jsonl").read_text(encoding="utf-8") for run in (first, second))
    assert json.loads(old)["image_refs"][0][2] != json.loads(new)["image_refs"][0][2]


def test_the_run_of_a_model_that_sees_keeps_its_processor(asking: Path) -> None:
    kept = _opened(asking).stage(1, "eval").tokenizer / "preprocessor_config.json"
    assert kept.read_bytes() == (asking / "model" / "preprocessor_config.json").read_bytes()


# models of a user's own


def test_a_custom_model_uses_no_image_processor_of_its_tokenizers_model(tmp_path: Path) -> None:
    spec = make_custom_project(tmp_path)
    (tmp_path / "tokenizer" / "config.json").write_text(vlm_config("qwen2_5_vl").to_json_string(), encoding="utf-8")
    assert prepared(spec).stage(1, "sft").tokenizer.is_dir()  # no processor lies there, and none is needed


def test_a_stage_asks_a_model_of_ones_own_about_images(tmp_path: Path) -> None:
    make_custom_project(tmp_path, code=SEEING)
    draw(tmp_path, "a.png", 1)
    write_jsonl(tmp_path / "test.jsonl", [asked(1, "a.png")])
    tokenizer = FolderModel(kind="folder", path=str(tmp_path / "tokenizer"))
    model = CustomModel(
        kind="custom",
        file=str(tmp_path / "my_model.py"),
        config={"vocab_size": 260, "width": 8, "depth": 1, "dropped": 0.0},
        tokenizer=tokenizer,
    )
    order = make_job(tmp_path, {"own": WiredModel(model=model)}, asked=({"task": "exact_match"},))
    assert isinstance(order.stage, EvaluateStage)
    models = {"own": WiredModel(model=model)}
    _, rows = evaluate_stage.models_on_rows(order, order.stage.data, models, order.stage.evaluate)["own"]
    assert rows.record.images_sha256 is not None


def test_code_that_only_an_evaluation_runs_is_told_too(tmp_path: Path) -> None:
    make_custom_project(tmp_path)
    stage = {
        "kind": "evaluate",
        "models": {"own": SPEC["model"]},
        "data": {"test": {"path": "test.jsonl"}},
        "evaluate": [{"task": "json_match"}],
    }
    said = io.StringIO()
    announce_code(
        Pipeline.model_validate_json(json.dumps({"name": "own", "stages": {"scores": stage}})),
        tmp_path,
        Console(file=said),
    )
    assert said.getvalue().startswith("runs code of yours: my_model.py (sha256 ")
