"""`finefit check`, and `finefit run` where a check finds something: nothing begins that is known to go wrong."""

from pathlib import Path

import pytest

from tests.cli.conftest import Finefit

ALL_WARM_UP = ("--set", "schedule={epochs: 1, warmup: 0.99}")


@pytest.mark.usefixtures("folder")
def test_a_sound_spec_is_proved(finefit: Finefit) -> None:
    answer = finefit("check", "spec.yaml")
    assert answer.code == 0
    assert "gradients  all 28 trained tensors get one" in answer.out
    assert "rows       longest 77 tokens (counted)" in answer.out
    assert answer.out.endswith("nothing speaks against this run\n")


def test_a_finding_is_exit_code_1_with_its_remedy(folder: Path, finefit: Finefit) -> None:
    answer = finefit("check", "spec.yaml", *ALL_WARM_UP)
    assert answer.code == 1
    assert "error: schedule.warmup 0.99 makes all 6 steps of the run warm-up" in answer.out
    assert "--set schedule.warmup=0" in answer.out
    assert "nothing speaks against" not in answer.out
    assert not (folder / "runs").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("arguments", "is_sound"), [((), True), (ALL_WARM_UP, False)])
def test_the_document_has_findings_and_gradients(finefit: Finefit, arguments: tuple[str, ...], is_sound: bool) -> None:
    answer = finefit("check", "spec.yaml", *arguments, "--json")
    document = answer.document
    assert document.keys() >= {"ok", "findings", "gradients"}
    assert (answer.code, document["ok"]) == ((0, True) if is_sound else (1, False))
    assert [finding["level"] for finding in document["findings"]] == ([] if is_sound else ["error"])
    assert document["gradients"] == {"trainable": 28, "reached": 28, "unreached": [], "causes": [], "frozen": []}


def test_a_run_with_a_finding_stops_before_anything_is_loaded(folder: Path, finefit: Finefit) -> None:
    answer = finefit("run", "spec.yaml", *ALL_WARM_UP, "--json")
    assert answer.code == answer.document["error"]["exit_code"] == 1
    assert answer.document["error"]["kind"] == "FindingError"
    assert "makes all 6 steps of the run warm-up" in answer.err
    assert list((folder / "runs").iterdir()) == []


def test_a_run_that_its_disk_cannot_hold_stops_before_anything_is_loaded(folder: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.pipeline.preparation.free_bytes", lambda _: 10)
    answer = finefit("run", "spec.yaml")
    assert answer.code == 1
    assert "bytes of disk, 10 are free" in answer.err
    assert "lower save.keep (now 2)" in answer.err
    assert list((folder / "runs").iterdir()) == []
