"""Stages with models that see are planned with what their rows show; of rows that are yet to be made, with images that are assumed and told."""

import json
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.forecasts import Answer, Question, StageOutlook
from finefit.artifacts.pipelines import WiredModel
from finefit.data.eyes import lens_of
from finefit.pipeline import forecasting
from finefit.pipeline.examined import examine_pipeline
from finefit.pipeline.foreseen import foresee_stages
from finefit.pipeline.making import evaluate
from finefit.pipeline.outlines import Outlines
from finefit.pipeline.outlooks import look_ahead, prepared_questions
from finefit.spec.models import FolderModel
from finefit.spec.stages import EvaluateStage, Pipeline
from tests.conftest import write_jsonl
from tests.data.seen import asked, draw
from tests.here import ask_here, rehearse_here
from tests.own import CODE, SPEC, make_own_project
from tests.pipeline.test_making_evaluate import make_order
from tests.vision import make_vlm, vlm_config

CARD = ("RTX 4090",)
MADE = "stage://drawn/test.jsonl"
DRAWN = {"kind": "python", "script": "draw.py", "outputs": ["test.jsonl", "shown"]}
QWEN, LLAVA = ({"kind": "folder", "path": name} for name in ("qwen", "llava"))


def seeing(views: int | None) -> str:
    return CODE.replace("self.layers = ", f"self.views, self.image_text = {views}, '(seen) '\n        self.layers = ")


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """That rehearsals were asked, all of them answered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rehearse_here(monkeypatch)
    found: list[Question] = []

    def ask(question: Question) -> Answer:
        found.append(question)
        return ask_here(question)

    monkeypatch.setattr(forecasting, "ask", ask)
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_vlm("qwen2_5_vl", tmp_path / "qwen")
    make_vlm("llava", tmp_path / "llava")
    make_own_project(tmp_path, code=seeing(1))
    draw(tmp_path, "a.png", 1, size=(96, 64))
    write_jsonl(tmp_path / "test.jsonl", [asked(1, "a.png")])
    return tmp_path


def scores(models: dict[str, Any], path: str = "test.jsonl", **data: Any) -> dict[str, Any]:
    source = {"path": path} | ({"images_root": data.pop("images_root")} if "images_root" in data else {})
    return {
        "kind": "evaluate",
        "models": models,
        "data": {"test": source, **data},
        "evaluate": [{"task": "exact_match", "max_new_tokens": 8}],
    }


def pipeline_of(**stages: Any) -> Pipeline:
    return Pipeline.model_validate_json(json.dumps({"name": "seeing", "device": "cpu", "stages": stages}))


def outlook(base: Path, **stages: Any) -> StageOutlook:
    return look_ahead(pipeline_of(**stages), base, cards=CARD)["scores"]


def test_a_model_of_ones_own_that_sees_is_asked_as_itself(base: Path, questions: list[Question]) -> None:
    found = outlook(base, scores=scores({"own": SPEC["model"]}))
    assert found.notes == ()
    (question,) = questions
    text = len("(seen) Which digit is it?")
    assert text < (question.lengths.prompt or 0) < 2 * text  # of the rows, and not of max_tokens
    assert question.lengths.prompt_grids == ((96, 64),)


def test_rows_that_a_model_of_ones_own_cannot_take_are_told_by_check(base: Path) -> None:
    (base / "my_model.py").write_text(seeing(2), encoding="utf-8")
    found = examine_pipeline(pipeline_of(scores=scores({"qwen": QWEN, "own": SPEC["model"]})), base, base)
    (problem,) = [finding.problem for name, finding in found.findings if name == "scores" and finding.level == "error"]
    assert "test.jsonl:1 has 1 images, and the model takes 2 with every row" in problem


def test_every_model_is_planned_with_the_images_as_it_sees_them(base: Path, questions: list[Question]) -> None:
    outlook(base, scores=scores({"qwen": QWEN, "llava": LLAVA}))
    qwen, llava = (question.lengths.prompt_grids for question in questions)
    assert (qwen, llava) == (((1, 8, 12),), ((1,),))  # patches of 8 pixels; one image of LLaVA's one size


def test_limits_of_a_stage_hold_for_its_plan_and_for_its_answers(base: Path, questions: list[Question]) -> None:
    limits = {"max_pixels": 48 * 32, "min_pixels": 16 * 16}
    stages = {"scores": scores({"qwen": QWEN}, images=limits)}
    outlook(base, **stages)
    assert [question.lengths.prompt_grids for question in questions] == [((1, 4, 6),)]
    wired = {"qwen": WiredModel(model=FolderModel(kind="folder", path=str(base / "qwen")))}
    order = make_order(base, wired, asked=({"task": "exact_match"},), images=limits)
    assert isinstance(order.stage, EvaluateStage)
    answered = evaluate._asked(order, order.stage.data, wired, order.stage.evaluate)["qwen"]
    assert answered.prepared.record.prompt_grids == ((1, 4, 6),)


def test_prompts_that_are_yet_to_be_made_are_planned_with_images_and_that_is_told(
    base: Path, questions: list[Question]
) -> None:
    models = {
        "qwen": QWEN,
        "own": SPEC["model"],
        "shape": {"kind": "shape", "config": json.loads(vlm_config("qwen2_5_vl").to_json_string())},
    }
    found = outlook(base, drawn=DRAWN, scores=scores(models, MADE, max_tokens=136))
    qwen, own, shape = questions
    lens = lens_of(qwen.config)
    assert lens is not None
    (grid,) = qwen.lengths.prompt_grids
    assert (qwen.lengths.prompt, lens.num_tokens(grid), shape.lengths.prompt_grids) == (
        128,
        36,
        ((1, 16, 16),),
    )  # its processor shows none larger
    assert own.lengths.prompt_grids == ((512, 512),)
    assumed = f"prompts assumed from data.max_tokens, since {MADE} is yet to be made, each with an image of"
    assert found.notes == (
        f"qwen: {assumed} 36 tokens",
        f"own: {assumed} 512 x 512 pixels",
        f"shape: {assumed} 64 tokens",
    )
    assert outlook(base, drawn=DRAWN, scores=scores({"one": QWEN, "other": QWEN}, MADE, max_tokens=136)).notes == (
        f"{assumed} 36 tokens",
    )


def test_rows_whose_images_are_yet_to_be_made_are_planned_as_rows_to_come(base: Path) -> None:
    train = {
        "kind": "train",
        "model": QWEN,
        "tuning": {"kind": "full"},
        "optimizer": {"lr": 1e-3},
        "levers": {"micro_batch": 1},
    }
    rows = {"path": "test.jsonl", "images_root": "stage://drawn/shown"}
    trained = train | {"data": {"train": [rows], "validation": rows, "max_tokens": 128}}
    pipeline = pipeline_of(drawn=DRAWN, trained=trained, scores=scores({"qwen": QWEN}, images_root=rows["images_root"]))
    since = "assumed from data.max_tokens, since stage://drawn/shown is yet to be made, each with an image of"
    (forecast,) = foresee_stages(pipeline, base, cards=CARD)["trained"]
    assert forecast.lengths.source == f"{since} 36 tokens"
    assert look_ahead(pipeline, base, cards=CARD)["scores"].notes[0].startswith(f"prompts {since}")
    (base / "draw.py").write_text("", encoding="utf-8")
    told = [(name, finding.level, finding.problem) for name, finding in examine_pipeline(pipeline, base, base).findings]
    assert [one for one in told if one[1] == "error"] == []
    assert {name for name, _, problem in told if "stage://drawn/shown is yet to be made" in problem} == {
        "trained",
        "scores",
    }


@pytest.mark.parametrize(("views", "count"), [(2, 2), (None, 1)], ids=["as many as it asks for", "or one"])
def test_a_training_of_ones_own_on_rows_to_come_is_rehearsed_with_images(
    views: int | None, count: int, base: Path
) -> None:
    (base / "my_model.py").write_text(seeing(views), encoding="utf-8")
    train = {
        "kind": "train",
        "model": SPEC["model"],
        "tuning": SPEC["tuning"],
        "optimizer": {"lr": 1e-3},
        "levers": {"micro_batch": 1},
    }
    pipeline = pipeline_of(drawn=DRAWN, trained=train | {"data": {"train": [{"path": MADE}], "max_tokens": 64}})
    (found,) = foresee_stages(pipeline, base, cards=CARD)["trained"]
    assert found.lengths.grids == ((512, 512),) * count
    images = "an image" if count == 1 else f"{count} images"
    assert (
        found.lengths.source
        == f"assumed from data.max_tokens, since {MADE} is yet to be made, each with {images} of 512 x 512 pixels"
    )


def test_a_model_that_sees_nothing_is_planned_without_images(base: Path) -> None:
    (base / "my_model.py").write_text(CODE, encoding="utf-8")
    pipeline = pipeline_of(drawn=DRAWN, scores=scores({"own": SPEC["model"]}, MADE))
    found = look_ahead(pipeline, base, cards=CARD)["scores"]
    assert found.notes == (f"prompts assumed from data.max_tokens, since {MADE} is yet to be made",)
    stage = pipeline.stages["scores"]
    assert isinstance(stage, EvaluateStage)
    assert prepared_questions(Outlines(pipeline=pipeline, base=base), stage, "own") is None
