"""What is trained of each tower of a model that sees is told wherever a run is planned, checked or begun; of other
models nothing is."""

import io
from pathlib import Path

from rich.console import Console

from finefit.artifacts.forecasts import Forecast, Plan, TowerSize
from finefit.report.check import check_document, show_stage
from finefit.report.forecast import forecast_object, show_forecast
from finefit.report.plan import plan_view
from finefit.run.check_stages import CheckedPipeline, CheckedStage
from tests.forecasts import make_forecast

TOWERS = {
    "vision": TowerSize(parameters=668_000_000, trainable=4_000, tensors=24, unreached=2),
    "projector": TowerSize(parameters=44_000_000, trainable=0, tensors=0),
    "language": TowerSize(parameters=3_085_000_000, trainable=30_000, tensors=504),
}
LINES = (
    "language: 30,000 trained in 504 tensors, of 3,085,000,000",
    "vision: 4,000 trained in 24 tensors, 2 get no gradient, of 668,000,000",
    "projector: frozen, of 44,000,000",
)


def _checked(forecast: Forecast) -> CheckedPipeline:
    stages = {"sft": CheckedStage(kind="train", forecast=forecast)}
    return CheckedPipeline(is_flat=True, stages=stages, findings=(), disk_bytes=1, free_disk_bytes=2)


def _shown(forecast: Forecast) -> tuple[str, str, str]:
    consoles = [Console(file=io.StringIO(), width=160) for _ in range(3)]
    show_forecast(forecast, consoles[0], stage="sft")
    show_stage("sft", _checked(forecast).stages["sft"], consoles[1], is_flat=True)
    consoles[2].print(plan_view(Plan(stages={"sft": {}}, forecasts={"sft": forecast}), Path("plan.json")))
    plan, check, run = (console.file.getvalue() for console in consoles if isinstance(console.file, io.StringIO))
    return plan, check, run


def test_plan_check_and_run_tell_each_tower_in_one_order() -> None:
    for text in _shown(make_forecast(towers=TOWERS)):
        places = [text.index(line) for line in LINES]
        assert places == sorted(places)


def test_nothing_is_told_of_towers_where_a_model_sees_nothing() -> None:
    assert not any("tower" in text for text in _shown(make_forecast()))


def test_both_documents_hold_the_numbers() -> None:
    forecast = make_forecast(towers=TOWERS)
    for document in (forecast_object(forecast), check_document(_checked(forecast))):
        assert document["towers"]["vision"] == {
            "parameters": 668_000_000,
            "trainable": 4_000,
            "tensors": 24,
            "unreached": 2,
        }
