"""Content-keyed folders and records, and the measured errors of predictions."""

import json
import os
import shutil
from pathlib import Path

import pytest

from finefit.artifacts.cache import (
    Measurement,
    StepTime,
    cached_folder,
    cached_record,
    forget_old,
    keep_measurement,
    keep_step_time,
    time_factor,
    uncertainty,
)
from finefit.artifacts.records import Check, Finding
from finefit.errors import RunError


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "finefit" / "measurements.jsonl"


def _measured(card: str, predicted_bytes: int, measured_bytes: int) -> Measurement:
    return Measurement(card=card, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes)


def test_nothing_measured_is_no_uncertainty() -> None:
    assert uncertainty("RTX 4090") is None


def test_a_measurement_is_kept_and_read_back() -> None:
    keep_measurement(_measured("RTX 4090", 102, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.02)


def test_the_largest_error_of_either_sign_counts() -> None:
    for predicted in (101, 96, 102):
        keep_measurement(_measured("RTX 4090", predicted, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.04)


def test_an_exact_forecast_is_an_uncertainty_of_zero_and_not_an_unknown_one() -> None:
    keep_measurement(_measured("RTX 4090", 100, 100))
    assert uncertainty("RTX 4090") == 0.0


def test_another_card_says_nothing_of_this_one() -> None:
    keep_measurement(_measured("A100-80GB", 120, 100))
    assert uncertainty("RTX 4090") is None
    assert uncertainty("A100-80GB") == pytest.approx(0.2)


@pytest.mark.parametrize("package", ["finefit", "torch", "transformers", "peft"])
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
        file.write('{"card": "RTX 4090", "predicted_by')
    keep_measurement(_measured("RTX 4090", 101, 100))
    assert uncertainty("RTX 4090") == pytest.approx(0.03)


@pytest.mark.parametrize(
    "damaged",
    [
        "\0\0{}",
        "[1]",
        '{"predicted_bytes": 0, "predicted_seconds": 0}',
        '{"measured_bytes": 0, "measured_seconds": NaN}',
        '{"measured_bytes": "many", "measured_seconds": null}',
    ],
)
def test_a_damaged_line_costs_only_what_it_said(place: Path, damaged: str) -> None:
    for _ in range(2):
        keep_measurement(_measured("RTX 4090", 103, 100))
        keep_step_time(_step("RTX 4090", "a host", 2.4))
    values = json.loads(damaged) if damaged.startswith("{") else None
    first, second, *others = place.read_text().splitlines()
    spoilt = [damaged] if values is None else [json.dumps(json.loads(line) | values) for line in (first, second)]
    place.write_text("\n".join([*spoilt, *others]) + "\n")
    assert uncertainty("RTX 4090") == pytest.approx(0.03)
    assert time_factor("RTX 4090", "a host") == pytest.approx(1.2)


def test_a_measurement_that_cannot_be_kept_stops_no_training(place: Path) -> None:
    place.parent.write_text("a file where the cache should be")
    keep_measurement(_measured("RTX 4090", 103, 100))
    keep_step_time(_step("RTX 4090", "a host", 2.4))
    place.parent.unlink()
    place.mkdir(parents=True)
    keep_measurement(_measured("RTX 4090", 103, 100))
    assert (uncertainty("RTX 4090"), time_factor("RTX 4090", "a host")) == (None, None)


def test_an_error_above_zero_means_that_too_much_was_predicted() -> None:
    assert _measured("RTX 4090", 110, 100).error == pytest.approx(0.1)
    assert _measured("RTX 4090", 90, 100).error == pytest.approx(-0.1)


def _step(card: str, host: str, measured: float) -> StepTime:
    return StepTime(card=card, host=host, predicted_seconds=2.0, measured_seconds=measured)


def test_times_are_corrected_by_the_median_of_runs_on_the_same_card_and_host() -> None:
    """An outlier does not count, nor do runs elsewhere; what was measured of memory is another matter."""
    assert time_factor("H200", "a host") is None
    for measured in (2.4, 2.6, 20.0):
        keep_step_time(_step("H200", "a host", measured))
    keep_step_time(_step("H200", "another host", 8.0))
    keep_step_time(_step("L4", "a host", 8.0))
    keep_measurement(_measured("H200", 102, 100))
    assert time_factor("H200", "a host") == pytest.approx(1.3)
    assert uncertainty("H200") == pytest.approx(0.02)


def test_a_record_is_made_once_for_the_same_content() -> None:
    made = []

    def make() -> Check:
        made.append(1)
        return Check(findings=(Finding(level="note", problem="p", remedy="r"),))

    first = cached_record("checks", ["a", 1], Check, make)
    assert cached_record("checks", ["a", 1], Check, make) == first
    assert len(made) == 1
    cached_record("checks", ["a", 2], Check, make)
    assert len(made) == 2


def test_a_record_that_cannot_be_written_is_made_again(tmp_path: Path) -> None:
    made = []

    def make() -> Check:
        made.append(1)
        return Check(findings=())

    (tmp_path / "finefit").write_text("a file where the cache should be")
    for _ in range(2):
        cached_record("checks", 1, Check, make)
    assert len(made) == 2


def _fill(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("text")


def test_a_folder_is_filled_once_and_leaves_nothing_hidden(tmp_path: Path) -> None:
    for _ in range(2):
        folder = cached_folder(tmp_path / "cache" / "key", _fill)
    assert (folder / "inner" / "file").read_text() == "text"
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_a_damaged_folder_is_filled_again(tmp_path: Path) -> None:
    def is_complete(folder: Path) -> bool:
        return (folder / "inner" / "file").is_file()

    folder = cached_folder(tmp_path / "key", _fill, is_complete=is_complete)
    shutil.rmtree(folder / "inner")
    assert is_complete(cached_folder(folder, _fill, is_complete=is_complete))


def test_the_result_of_a_faster_process_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "key"

    def slow(folder: Path) -> None:
        _fill(folder)
        target.mkdir()
        (target / "faster").touch()

    cached_folder(target, slow)
    assert [path.name for path in target.iterdir()] == ["faster"]
    assert list(tmp_path.glob(".*")) == []


def test_a_failed_filling_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        _fill(folder)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        cached_folder(tmp_path / "key", fails)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file cannot be written") as caught:
        cached_folder(tmp_path / "file" / "key", _fill)
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_entries_used_last_are_kept_within_number_and_bytes(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "second", "third", ".staging-killed", ".staging-at-work")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    os.utime(tmp_path / ".staging-at-work")
    forget_old(tmp_path, max_entries=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging-at-work", "newest", "second"]
    forget_old(tmp_path, max_bytes=50)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging-at-work", "newest"]
