"""`finefit run` from a spec to a finished run, and the same command again."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from finefit.artifacts.atomic import read_lines
from tests.cli.conftest import STAGE, Finefit, Finished, files_with_times, rewrite, started


def test_a_finished_run_prints_one_json_document(first_run: Finished) -> None:
    assert first_run.answer.code == 0, first_run.answer.err
    document = first_run.answer.document
    assert (document["run"], document["status"], document["failure"]) == ("runs/tiny-1", "finished", None)
    assert document["result"]["step"] == document["result"]["total_steps"] == 12
    assert [(e["task"], e["checkpoint"], e["n"]) for e in document["evaluations"]] == [
        ("json_match", "base", 5),
        ("json_match", "checkpoint-12", 5),
    ]


def test_a_run_directory_holds_every_record(first_run: Finished) -> None:
    run = first_run.folder / "runs" / "tiny-1"
    stage = run / STAGE
    for name in ("spec.yaml", "spec.json", "facts.json", "plan.json", "run.json", "logs/run.log"):
        assert (run / name).is_file(), name
    for name in (
        "stage.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "memory.jsonl",
        "result.json",
        "evals/json_match/base.json",
    ):
        assert (stage / name).is_file(), name
    assert sorted(p.name for p in (stage / "checkpoints").iterdir()) == [
        "best",
        "checkpoint-12",
        "checkpoint-9",
        "final",
    ]
    assert (stage / "checkpoints" / "final").readlink() == Path("checkpoint-12")
    assert (stage / "checkpoints" / "best").is_dir()


def test_the_spec_is_kept_as_it_was_written(first_run: Finished) -> None:
    assert (first_run.folder / "runs/tiny-1/spec.yaml").read_bytes() == (first_run.folder / "spec.yaml").read_bytes()


def test_every_value_of_the_plan_has_a_source(first_run: Finished) -> None:
    plan = json.loads((first_run.folder / "runs/tiny-1/plan.json").read_text())
    assert all(value["source"].strip() for value in plan["stages"]["sft"].values())
    assert plan["stages"]["sft"] == first_run.answer.document["plan"]["sft"]


def test_no_file_of_a_run_directory_holds_an_absolute_path(first_run: Finished) -> None:
    place = str(first_run.folder.parent).encode()
    files = [p for p in (first_run.folder / "runs").rglob("*") if p.is_file()]
    assert len(files) > 30
    assert [str(p) for p in files if place in p.read_bytes()] == []


def test_what_is_not_json_goes_to_stderr_as_plain_lines(first_run: Finished) -> None:
    said = first_run.answer.err
    assert "\x1b" not in said
    assert "step 12/12" in said
    assert "train train.jsonl: 22 records; 22 used; 1,453 tokens, 605 supervised (42%)" in said
    assert said.count("step 6: validation loss") == 1


@pytest.mark.parametrize("target", ["spec.yaml", "runs/tiny-1"])
def test_the_same_command_again_says_that_it_is_finished_and_trains_nothing(
    finished: Path, finefit: Finefit, target: str
) -> None:
    before = files_with_times(finished / "runs")
    answer = finefit("run", target, "--json")
    assert (answer.code, answer.document["status"]) == (0, "finished")
    assert "runs/tiny-1 is already finished" in answer.err
    assert files_with_times(finished / "runs") == before


def test_an_equal_run_started_elsewhere_with_other_paths_is_the_same_run(finished: Path, finefit: Finefit) -> None:
    (finished / "train.jsonl").rename(finished / "moved.jsonl")
    rewrite(finished / "spec.yaml", ("train.jsonl", "moved.jsonl"))
    assert "runs/tiny-1 is already finished" in finefit("run", "spec.yaml").out


def test_new_and_a_changed_spec_each_start_the_next_run(
    finished: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out: list[str] = []
    monkeypatch.setattr("finefit.cli.run.carry_out", lambda _, place, __: carried_out.append(place.path.name))
    monkeypatch.setattr("finefit.report.run.show_end", lambda *_: None)
    assert finefit("run", "spec.yaml", "--new").code == 0
    assert finefit("run", "spec.yaml", "--set", "seed=8").code == 0
    assert finefit("run", "spec.yaml", "--set", "seed=8").code == 0  # prepared and unfinished: it goes on
    assert carried_out == ["tiny-2", "tiny-3", "tiny-3"]
    assert json.loads((finished / "runs/tiny-3/plan.json").read_text())["stages"]["sft"]["seed"] == {
        "value": 8,
        "source": "--set",
    }


@pytest.mark.slow
def test_a_run_that_was_ended_by_sigterm_goes_on_in_its_directory(folder: Path, finefit: Finefit) -> None:
    rewrite(folder / "spec.yaml", ("epochs: 2", "epochs: 40"), ("3 steps", "1000 steps"), ("evaluate:", "# evaluate:"))
    metrics = folder / "runs/tiny-1" / STAGE / "metrics.jsonl"
    with started("run", "spec.yaml", cwd=folder) as child:
        deadline = time.monotonic() + 400
        while not (metrics.exists() and metrics.stat().st_size > 1000):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 3
    stopped = re.search(r"error: stopped by SIGTERM after step (\d+) of 240; the checkpoint is written", err)
    assert stopped is not None, err

    answer = finefit("run", "spec.yaml", "--json")
    assert (answer.code, answer.document["run"], answer.document["result"]["step"]) == (0, "runs/tiny-1", 240)
    assert f"resumed from checkpoint-{stopped[1]}" in answer.err
    assert [p.name for p in (folder / "runs").iterdir()] == ["tiny-1"]


@pytest.mark.slow
def test_a_share_of_the_training_rows_is_validated_on_and_not_trained_on(folder: Path, finefit: Finefit) -> None:
    rewrite(
        folder / "spec.yaml",
        ("{path: validation.jsonl}", "{share: 0.25}"),
        ("evaluate:", "# evaluate:"),
        ("epochs: 2", "epochs: 1"),
    )
    answer = finefit("run", "spec.yaml", "--json")
    assert answer.code == 0, answer.err
    ledger = {entry["split"]: entry for entry in answer.document["ledger"] if "read" in entry}
    counts = {split: (entry["records"], entry["read"], entry["used"]) for split, entry in ledger.items()}
    train, held = ledger["train"]["used"], ledger["validation"]["used"]
    assert counts == {"train": (22, train, train), "validation": (0, held, held), "test": (5, 5, 5)}
    assert (train + held, held) == (22, 6)
    assert answer.document["plan"]["sft"]["steps_per_epoch"] == {"value": 4, "source": "16 rows / 4 global, rounded up"}
    stage = folder / "runs/tiny-1" / STAGE
    assert [
        line["validation_loss"] > 0 for line in read_lines(stage / "metrics.jsonl") if line.get("event") == "validated"
    ] == [True, True]
    assert (stage / "checkpoints" / "best").is_dir()
    again = finefit("run", "runs/tiny-1", "--set", "data.validation.share=0.5")
    assert again.code == 2
    assert "data.validation.share: 0.25 -> 0.5" in again.err
