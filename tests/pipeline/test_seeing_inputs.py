"""What is prepared and planned for models that see: an image where none is known, a model by itself by what its rows show, and no eye but the
model's own."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.pipelines import WiredModel
from finefit.artifacts.rundir import RunDir
from finefit.cli.code import tell_code
from finefit.data.eyes import lens_of
from finefit.pipeline.bare import find_bare, open_bare
from finefit.pipeline.forecasting import lengths_of
from finefit.pipeline.making import evaluate
from finefit.spec.load import load_spec
from finefit.spec.models import CustomModel, FolderModel, ShapeModel
from finefit.spec.stages import EvaluateStage, Pipeline
from tests.conftest import write_jsonl
from tests.data.seen import asked, draw
from tests.own import CODE, SPEC, make_own_project
from tests.pipeline.conftest import prepared
from tests.pipeline.test_making_evaluate import make_order
from tests.vision import make_vlm, vlm_config

SEEING = CODE.replace("self.layers = ", "self.views, self.image_text = 1, '(seen) '\n        self.layers = ")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# a plan without rows


def _assumed(project: Path, config: dict[str, Any], *overrides: str) -> Lengths:
    spec = load_spec(project, overrides)
    return lengths_of(spec.model_copy(update={"model": ShapeModel(kind="shape", config=config)}), project.parent)


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "smolvlm", "gemma3", "paligemma"],
)
def test_a_mere_shape_that_sees_is_planned_with_an_image_that_leaves_room_for_words(project: Path, family: str) -> None:
    config = json.loads(vlm_config(family).to_json_string())
    lens = lens_of(config)
    assert lens is not None
    (grid,) = _assumed(project, config, "data.max_tokens=100").grids
    assert lens.num_tokens(lens.square(1)) <= lens.num_tokens(grid) <= 98
    (more,) = _assumed(project, config, "data.max_tokens=4000").grids
    assert (lens.num_tokens(more) > lens.num_tokens(grid)) == (
        lens.num_tokens(lens.square(1000)) > lens.num_tokens(grid)
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
    return open_bare(find_bare("model"), "test.jsonl", device="cpu", runs=folder / "runs")


def test_a_model_is_asked_anew_when_an_image_was_changed_and_only_then(asking: Path) -> None:
    first = _opened(asking)
    assert _opened(asking).path == first.path
    draw(asking, "a.png", 2)
    second = _opened(asking)
    assert second.path != first.path
    old, new = (run.stage(1, "eval").prepared("test.jsonl").read_text(encoding="utf-8") for run in (first, second))
    assert json.loads(old)["pictures"][0][2] != json.loads(new)["pictures"][0][2]


def test_the_run_of_a_model_that_sees_keeps_its_processor(asking: Path) -> None:
    kept = _opened(asking).stage(1, "eval").tokenizer / "preprocessor_config.json"
    assert kept.read_bytes() == (asking / "model" / "preprocessor_config.json").read_bytes()


# models of a user's own


def test_a_model_of_ones_own_sees_through_no_eye_of_its_tokenizers_model(tmp_path: Path) -> None:
    spec = make_own_project(tmp_path)
    (tmp_path / "tokenizer" / "config.json").write_text(vlm_config("qwen2_5_vl").to_json_string(), encoding="utf-8")
    assert prepared(spec).stage(1, "sft").tokenizer.is_dir()  # no processor lies there, and none is needed


def test_a_stage_asks_a_model_of_ones_own_about_images(tmp_path: Path) -> None:
    make_own_project(tmp_path, code=SEEING)
    draw(tmp_path, "a.png", 1)
    write_jsonl(tmp_path / "test.jsonl", [asked(1, "a.png")])
    tokenizer = FolderModel(kind="folder", path=str(tmp_path / "tokenizer"))
    model = CustomModel(
        kind="custom",
        file=str(tmp_path / "my_model.py"),
        config={"vocab_size": 260, "width": 8, "depth": 1, "dropped": 0.0},
        tokenizer=tokenizer,
    )
    order = make_order(tmp_path, {"own": WiredModel(model=model)}, asked=({"task": "exact_match"},))
    assert isinstance(order.stage, EvaluateStage)
    found = evaluate._asked(order, order.stage.data, {"own": WiredModel(model=model)}, order.stage.evaluate)
    assert found["own"].prepared.record.pictures_sha256 is not None


def test_code_that_only_an_evaluation_runs_is_told_too(tmp_path: Path) -> None:
    make_own_project(tmp_path)
    stage = {
        "kind": "evaluate",
        "models": {"own": SPEC["model"]},
        "data": {"test": {"path": "test.jsonl"}},
        "evaluate": [{"task": "json_match"}],
    }
    said = io.StringIO()
    tell_code(
        Pipeline.model_validate_json(json.dumps({"name": "own", "stages": {"scores": stage}})),
        tmp_path,
        Console(file=said),
    )
    assert said.getvalue().startswith("runs code of yours: my_model.py (sha256 ")
