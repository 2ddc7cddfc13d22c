"""Forecasts and measurements of the benchmark of memory, put together."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.memory import predict, renewed, versions

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "memory.json"
EXACT = ("allocated_bytes", "reserved_bytes", "peak_bytes", "components")


def _row(config: str, reserved: int) -> dict[str, Any]:
    told = {
        "allocated_bytes": 1,
        "reserved_bytes": reserved,
        "peak_bytes": 3,
        "step_seconds": 0.5,
        "components": {"weights": 1},
    }
    return {
        "config": config,
        "date": "2026-01-01",
        "versions": {"predicted": {"torch": "0"}, "measured": {"torch": "1"}},
        "predicted": told,
    }


def test_a_renewed_forecast_stands_beside_the_measurement_that_stays() -> None:
    old, other = (
        _row(config, 7) | {"measured": {"reserved_bytes": 8}, "capped": {"fits": True}} for config in ("old", "other")
    )
    told = [
        {"config": config, "margin_bytes": 1} | _row(config, 9)["predicted"] for config in ("old", "never measured")
    ]
    assert renewed([old, other], told) == [
        _row("old", 9) | {**{key: old[key] for key in ("measured", "capped")}, "versions": _now()},
        other,
    ]


def _now() -> dict[str, Any]:
    return {"predicted": versions(), "measured": {"torch": "1"}}


COMMITTED = {row["config"]: row["predicted"] for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
QUICK = ("r64-2x2048-re4-chunk1024-fused", "qwen2.5-0.5b-24L-full-2x512")


@pytest.mark.parametrize(
    "config",
    [pytest.param(name, marks=() if any(part in name for part in QUICK) else pytest.mark.slow) for name in COMMITTED],
)
def test_a_committed_prediction_is_predicted_again_to_the_byte(config: str) -> None:
    """When a tensor is freed decides what is reserved: a local variable more or less in the step shows here."""
    (found,) = (row for row in predict([config]) if row["config"] == config)
    assert {key: found[key] for key in EXACT} == {key: COMMITTED[config][key] for key in EXACT}
