"""What was foretold and what was measured, kept beside the user's other caches."""

import json
from pathlib import Path

import pytest

from finefit.artifacts.measurements import Measurement, keep_measurement, uncertainty


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "finefit" / "measurements.jsonl"


def _measured(card: str, foretold_bytes: int, measured_bytes: int) -> Measurement:
    return Measurement(card=card, foretold_bytes=foretold_bytes, measured_bytes=measured_bytes)


def test_nothing_measured_is_no_uncertainty() -> None:
    assert uncertainty("RTX 4090") is None


def test_a_measurement_is_kept_and_read_back() -> None:
    keep_measurement(_measured("RTX 4090", 102, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.02)


def test_the_largest_error_of_either_sign_counts() -> None:
    for foretold in (101, 96, 102):
        keep_measurement(_measured("RTX 4090", foretold, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.04)


def test_an_exact_forecast_is_an_uncertainty_of_zero_and_not_an_unknown_one() -> None:
    keep_measurement(_measured("RTX 4090", 100, 100))
    assert uncertainty("RTX 4090") == 0.0


def test_another_card_says_nothing_of_this_one() -> None:
    keep_measurement(_measured("A100-80GB", 120, 100))
    assert uncertainty("RTX 4090") is None
    assert uncertainty("A100-80GB") == pytest.approx(0.2)


@pytest.mark.parametrize("package", ["torch", "transformers", "peft"])
def test_another_version_of_a_package_says_nothing_of_this_one(place: Path, package: str) -> None:
    keep_measurement(_measured("RTX 4090", 120, 100))
    line = json.loads(place.read_text())
    line["versions"][package] = "0.0.1"
    place.write_text(json.dumps(line) + "\n")
    assert uncertainty("RTX 4090") is None
    keep_measurement(_measured("RTX 4090", 101, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.01)


def test_a_line_that_a_kill_tore_is_passed_over(place: Path) -> None:
    keep_measurement(_measured("RTX 4090", 103, 100))
    with place.open("a") as file:
        file.write('{"card": "RTX 4090", "foretold_by')
    keep_measurement(_measured("RTX 4090", 101, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.03)


def test_an_error_above_zero_means_that_too_much_was_foretold() -> None:
    assert _measured("RTX 4090", 110, 100).error == pytest.approx(0.1)
    assert _measured("RTX 4090", 90, 100).error == pytest.approx(-0.1)
