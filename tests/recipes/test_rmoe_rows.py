"""The rows of rmoe-twin are right, disjoint and reproducible byte for byte; the recipe and its twin are one pipeline on
two models."""

import json
from functools import cache
from pathlib import Path

import pytest

from finefit.spec.load import load_any
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import BuildMoe, EvaluateStage, TrainStage

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "finefit" / "recipes"
ROWS = RECIPES / "rmoe-twin"
NUM_ROWS = {"orders-train": 96, "orders-test": 40, "dates-train": 96, "dates-test": 40}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    return tuple(map(json.loads, (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()))


def pipeline(name: str) -> Pipeline:
    found = load_any(RECIPES / name / "spec.yaml")
    assert isinstance(found, Pipeline)
    return found


def test_no_prompt_and_no_answer_stands_twice() -> None:
    assert {name: len(rows(name)) for name in NUM_ROWS} == NUM_ROWS
    for key in ("prompt", "completion"):
        found = [row[key].lower() for name in NUM_ROWS for row in rows(name)]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_order_names_what_its_answer_holds(split: str) -> None:
    for row in rows(f"orders-{split}"):
        answer = json.loads(row["completion"])
        assert list(answer) == ["item", "count", "day"]
        assert answer["item"].removesuffix("f") in row["prompt"]  # shelf, shelves
        assert answer["day"] in row["prompt"]
        assert row["completion"].startswith(" {")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_date_is_the_one_that_its_prompt_says(split: str) -> None:
    for row in rows(f"dates-{split}"):
        year, month, day = map(int, row["completion"].split("-"))
        assert str(year) in row["prompt"]
        assert MONTHS[month - 1] in row["prompt"]
        assert str(day) in row["prompt"].replace(str(year), "")


@pytest.mark.parametrize("recipe", ["rmoe", "rmoe-twin"])
def test_experts_move_their_mlps_alone_and_routers_stand_alone_too(recipe: str) -> None:
    found = pipeline(recipe)
    mixture = found.stages["mixture"]
    assert isinstance(mixture, BuildMoe)
    trained = {name: stage.tuning for name, stage in found.stages.items() if isinstance(stage, TrainStage)}
    patterns = {name: getattr(tuning, "trainable", None) for name, tuning in trained.items()}
    assert patterns == {
        **dict.fromkeys(mixture.experts, ("layers.*.mlp",)),
        "routed": ("layers.*.mlp.gate",),
        "tuned": None,
    }
    assert mixture.top_k == 2


@pytest.mark.parametrize("recipe", ["rmoe", "rmoe-twin"])
def test_all_models_answer_both_data_sets_and_no_test_file_is_trained_on(recipe: str) -> None:
    found = pipeline(recipe)
    scored = [stage for stage in found.stages.values() if isinstance(stage, EvaluateStage)]
    assert len(scored) == 2
    assert (
        scored[0].models.keys() == scored[1].models.keys() > {"base", "average", "mixture", "routed", "tuned", "gate"}
    )
    trained = {
        source.path for stage in found.stages.values() if isinstance(stage, TrainStage) for source in stage.data.train
    }
    assert {stage.data.test.path for stage in scored}.isdisjoint(trained)


def test_the_twin_has_the_stages_of_the_recipe() -> None:
    kinds = [[stage.kind for stage in pipeline(name).stages.values()] for name in ("rmoe", "rmoe-twin")]
    assert kinds[0] == kinds[1]
