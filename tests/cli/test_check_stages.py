"""`finefit check` of a spec with stages: every finding has the name of its stage."""

from pathlib import Path

import pytest

from tests.cli.conftest import Finefit, rewrite
from tests.cli.test_plan_stages import STAGES
from tests.conftest import make_rows, write_jsonl

SCORES = """\
  scores:
    kind: evaluate
    models: {base: {kind: folder, path: model}, dpo: {kind: stage, name: dpo}}
    data: {test: {path: test.jsonl}}
    evaluate: [{task: json_match, max_new_tokens: 8}]
"""


@pytest.fixture
def stages(folder: Path) -> Path:
    path = folder / "stages.yaml"
    path.write_text(STAGES, encoding="utf-8")
    return path


@pytest.mark.usefixtures("foretold")
def test_a_sound_pipeline_is_proved_and_what_is_to_come_is_said_to_be_unknown(stages: Path, finefit: Finefit) -> None:
    answer = finefit("check", stages.name)
    assert answer.code == 0
    assert answer.out.startswith("sft (train)\ntrain       train.jsonl\n")
    assert "note: stage dpo: stage://pairs/train.jsonl is yet to be made: nothing is known of the rows" in answer.out
    assert answer.out.endswith("nothing speaks against this pipeline\n")
    assert not (stages.parent / "runs").exists()
    document = finefit("check", stages.name, "--json").document
    assert document["ok"] is True
    assert list(document["stages"]) == ["sft", "pairs", "dpo", "merged"]
    assert document["stages"]["sft"]["ledger"]["used"] == 22
    assert document["stages"]["dpo"]["ledger"] is None
    assert document["stages"]["pairs"] == {"kind": "make_pairs"}
    assert {finding["stage"] for finding in document["findings"]} == {"sft", "dpo"}


@pytest.mark.usefixtures("foretold")
def test_all_stages_are_examined_and_each_finding_names_its_own(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        (
            "pairs: {kind: make_pairs, train: [{path: train.jsonl}]}",
            "pairs: {kind: make_pairs, train: [{path: nowhere.jsonl}]}",
        ),
    )
    answer = finefit("check", stages.name, "--set", "stages.dpo.schedule={epochs: 1, warmup: 0.99}")
    assert answer.code == 1
    errors = [line for line in answer.out.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: stage pairs: nowhere.jsonl is not there",
        "error: stage dpo: schedule.warmup 0.99 makes all 12 steps of the run warm-up",
    ]
    assert "--set stages.dpo.schedule.warmup=0" in answer.out
    assert "nothing speaks against" not in answer.out


@pytest.mark.usefixtures("foretold")
def test_rows_that_a_stage_would_refuse_hours_later_are_refused_now(stages: Path, finefit: Finefit) -> None:
    write_jsonl(stages.parent / "short.jsonl", [{"prompt": f"Is it {at}?", "completion": "a"} for at in range(4)])
    rewrite(
        stages,
        (
            "pairs: {kind: make_pairs, train: [{path: train.jsonl}]}",
            "pairs: {kind: make_pairs, train: [{path: short.jsonl}]}",
        ),
    )
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert (
        "error: stage pairs: no pair could be made for train of 4 rows: 4 has an answer that no rule can change"
        in answer.out
    )
    begun = finefit("run", stages.name)
    assert begun.code == 1
    assert "stage pairs: no pair could be made for train of 4 rows" in begun.err
    assert not (stages.parent / "runs").exists()


@pytest.mark.usefixtures("foretold")
def test_a_model_that_is_not_there_does_not_hide_what_else_is_wrong(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        ("path: model}", "path: modell}"),
        ("train: [{path: train.jsonl}]}\n  dpo", "train: [{path: nowhere.jsonl}]}\n  dpo"),
    )
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert "error: stage sft: the model folder" in answer.out
    assert "error: stage pairs: nowhere.jsonl is not there" in answer.out


@pytest.mark.usefixtures("foretold")
def test_a_disk_that_does_not_hold_all_stages_is_told_once(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.pipeline.examined.free_bytes", lambda _: 1)
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert answer.out.count("bytes on the disk") == 1
    assert "error: the stages leave up to " in answer.out


@pytest.mark.usefixtures("foretold")
@pytest.mark.parametrize("through_pairs", [False, True])
def test_rows_that_a_model_was_trained_on_are_found_among_those_it_is_scored_by(
    through_pairs: bool, stages: Path, finefit: Finefit
) -> None:
    """Of pairs to come, the rows that they will be made from tell."""
    rows = make_rows(22)
    write_jsonl(stages.parent / "test.jsonl", [*make_rows(3, seed=2), rows[4]])
    with stages.open("a", encoding="utf-8") as file:
        file.write(SCORES)
    if through_pairs:
        write_jsonl(stages.parent / "others.jsonl", make_rows(8, seed=3))
        rewrite(stages, ("data: {train: [{path: train.jsonl}]}}", "data: {train: [{path: others.jsonl}]}}"))
    answer = finefit("check", stages.name)
    assert answer.code == 1
    guilty = "dpo" if through_pairs else "sft"
    assert f"error: stage scores: 1 of its rows stand in the training rows of stage {guilty} too:" in answer.out
    assert "test.jsonl" in answer.out


@pytest.mark.usefixtures("foretold")
def test_examples_are_shown_of_every_stage_whose_rows_are_there(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        ("tuning: {kind: lora, rank: 4, alpha: 8}", "tuning: {kind: full}"),
        ("  merged: {kind: merge_adapter, model: {kind: stage, name: dpo}}\n", ""),
    )
    with stages.open("a", encoding="utf-8") as file:
        file.write(
            "  more: {kind: train, model: {kind: stage, name: sft}, data: {train: [{path: validation.jsonl}]}}\n"
        )
    answer = finefit("check", stages.name, "--show", "1")
    assert answer.code == 0
    assert answer.out.count("example 1\n") == 2
