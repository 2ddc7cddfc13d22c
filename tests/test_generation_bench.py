"""The benchmark of generation in its small form: it runs without a card, and both sides give the same answers."""

import json
from pathlib import Path

import pytest

from bench.generation import SMALL, errors, measure


@pytest.mark.slow
def test_the_benchmark_of_generation_runs_on_a_cpu(tmp_path: Path) -> None:
    measure(tmp_path / "out.json", SMALL)
    found = json.loads((tmp_path / "out.json").read_text())
    batched, long = found["batched"], found["long"]
    assert (batched["answers_equal_to_transformers"], batched["answers_equal_between_batches"]) == (1.0, 1.0)
    for side in ("finefit", "finefit_planned", "transformers"):
        assert batched[side]["new_tokens_per_second"] > 0
        assert batched[side]["warnings"] == []
    assert batched["finefit"]["predicted_bytes"] > 100_000
    assert (long["prompt_tokens"], long["new_tokens"]) == (300, 8)
    assert found["long_in_tiles"]["predicted_bytes"] < long["predicted_bytes"]


def test_a_part_that_is_measured_again_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    earlier = {"date": "2026-01-01", "long": {"predicted_bytes": 95, "reserved_bytes": 100}}
    (tmp_path / "out.json").write_text(json.dumps(earlier))
    measure(tmp_path / "out.json", SMALL, ["seeing", "seeing_large"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert {key: found[key] for key in earlier} == earlier
    assert "batched" not in found
    assert (found["seeing"]["image_tokens"], found["seeing_large"]["image_tokens"]) == (16, 64)
    assert 100_000 < found["seeing"]["predicted_bytes"] < found["seeing_large"]["predicted_bytes"]
    assert found["errors"] == {"long": -0.05}


def test_an_error_is_what_a_forecast_has_above_the_truth() -> None:
    found = {
        "batched": {"finefit": {"predicted_bytes": 110, "reserved_bytes": 100}, "speedup": 1.0},
        "long": {"predicted_bytes": 95, "reserved_bytes": 100},
    }
    assert errors(found) == {"batched/finefit": 0.1, "long": -0.05}
