"""Forecasts and measurements of the benchmark of memory, put together."""

from typing import Any

from bench.memory import renewed, versions


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
