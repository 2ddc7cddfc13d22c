"""What speaks against a pipeline keeps it from running, before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.errors import FindingError
from finefit.preflight import StageFinding, require_no_errors
from finefit.run.check_stages import Forecasts, check_pipeline
from finefit.spec.load import parse_any
from finefit.spec.pipeline import Pipeline
from tests.conftest import make_model_folder, make_rows, write_jsonl
from tests.forecasts import make_forecast
from tests.made_pairs import grounded
from tests.stages.test_merge_adapter import make_adapter

STAGES = """\
name: staged
device: cpu
defaults:
  tuning: {kind: lora, rank: 4, alpha: 8}
  optimizer: {lr: 1e-2}
  global_batch: 4
stages:
  sft: {kind: train, model: {kind: folder, path: model}, data: {train: [{path: train.jsonl}], max_tokens: 128}}
  scores:
    kind: evaluate
    models: {sft: {kind: stage, name: sft}}
    data: {test: {path: test.jsonl}, max_tokens: 128, too_long: drop}
    evaluate: [{task: json_match, max_new_tokens: 8}]
  pairs: {kind: make_pairs, train: [{path: nowhere.jsonl}]}
"""
FORECASTS = {"sft": (make_forecast(),)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", make_rows(22))
    write_jsonl(tmp_path / "test.jsonl", make_rows(5, seed=2))
    return tmp_path


def checked(base: Path, *names: str, changes: tuple[str, ...] = ()) -> tuple[StageFinding, ...]:
    pipeline = parse_any(STAGES, where="spec.yaml", overrides=changes)
    assert isinstance(pipeline, Pipeline)
    return _sound(pipeline, base, FORECASTS, names=names or None)


def _sound(pipeline: Pipeline, base: Path, forecasts: Forecasts, **which: Any) -> tuple[StageFinding, ...]:
    found = check_pipeline(pipeline, base, base / "runs", forecasts=forecasts, **which).findings
    require_no_errors(found, FindingError)
    return found


def _long_row_in_both(base: Path) -> None:
    """Longer than either budget, so that neither trains on it nor asks it unless it says cut_prompt."""
    (row,) = make_rows(1, seed=3)
    row["messages"][0]["content"] = " ".join(f"add {at}" for at in range(400))
    write_jsonl(base / "train.jsonl", [*make_rows(22), row])
    write_jsonl(base / "test.jsonl", [*make_rows(5, seed=2), row])


def test_all_that_speaks_against_a_run_is_raised_at_once_with_the_names_of_the_stages(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    with pytest.raises(FindingError) as refused:
        checked(base)
    first, second, third = refused.value.problem.splitlines()
    assert first == "stage scores: 1 of its rows are also training rows of stage sft:"
    assert second == "  train.jsonl:5 (sft) is test.jsonl:4: the same row"
    assert third == "stage pairs: nowhere.jsonl does not exist"
    assert "--set stages.sft.data.overlap=warn" in refused.value.remedy
    assert "paths are relative to the spec file" in refused.value.remedy


def test_what_will_not_run_keeps_nothing_from_running(base: Path) -> None:
    assert {name for name, _ in checked(base, "sft", "scores")} <= {"sft", "scores"}
    with pytest.raises(FindingError, match="nowhere"):
        checked(base, "pairs")


def test_what_is_no_error_is_handed_back(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    found = checked(base, "sft", "scores", changes=("stages.sft.data.overlap=warn",))
    assert [(name, one.level) for name, one in found if "are also training rows" in one.problem] == [
        ("scores", "warning")
    ]


def test_a_training_with_a_forecast_is_judged_by_it(base: Path) -> None:
    pipeline = parse_any(STAGES, where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    frozen = replace(make_forecast(), fits=False)
    with pytest.raises(FindingError, match=r"^stage sft: .*bytes"):
        _sound(pipeline, base, {"sft": (frozen,)}, names=("sft",))


def test_without_a_usable_row_nothing_is_rehearsed_and_the_reasons_are_counted(base: Path) -> None:
    pipeline = parse_any(STAGES, where="spec.yaml", overrides=("stages.sft.data.max_tokens=20",))
    assert isinstance(pipeline, Pipeline)
    found = check_pipeline(pipeline, base, base / "runs", names=("sft",))
    assert found.stages["sft"].prepared is not None
    assert found.stages["sft"].forecast is None
    assert "none of the 22 train rows is left: 22 too long" in [one.problem for _, one in found.findings]


def test_a_leak_is_found_in_rows_that_are_cut(base: Path) -> None:
    _long_row_in_both(base)
    with pytest.raises(FindingError, match=r"train\.jsonl:23 \(sft\) is test\.jsonl:6: the same row"):
        checked(
            base,
            "sft",
            "scores",
            changes=("stages.sft.data.too_long=cut_prompt", "stages.scores.data.too_long=cut_prompt"),
        )


def test_rows_that_a_training_takes_out_itself_are_no_leak(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    with pytest.raises(FindingError, match="are also training rows"):
        checked(base, "scores", changes=("stages.sft.data.overlap=drop",))
    checked(base, "scores", changes=("stages.sft.data.overlap=drop", "stages.sft.data.test={path: test.jsonl}"))


def test_a_file_that_rows_of_experts_are_built_with_is_missed_before_anything_runs(base: Path) -> None:
    model, rows, form = (
        "{kind: folder, path: model}",
        "{a: {path: train.jsonl}, b: {path: test.jsonl}}",
        "{kind: python, path: absent.py}",
    )
    experts = f"base: {model}, experts: {{a: {model}, b: {{kind: folder, path: other}}}}"
    stages = {
        "gate": f"{{kind: gate, {experts}, data: {rows}, task: {form}}}",
        "mix": f"{{kind: build_moe, {experts}, router: {{kind: centroids, data: {rows}, task: {form}}}}}",
    }
    make_model_folder(base / "other")
    with pytest.raises(FindingError) as refused:
        checked(base, *stages, changes=tuple(f"stages.{name}={text}" for name, text in stages.items()))
    assert refused.value.problem.splitlines() == [f"stage {name}: absent.py does not exist" for name in stages]


# What a stage would refuse when it begins is refused before anything runs, in the words of the stage itself.

MODEL = {"kind": "folder", "path": "model"}
TRAINED = {"kind": "stage", "name": "sft"}
EXPERTS: dict[str, Any] = {"base": MODEL, "experts": {"vowels": MODEL, "digits": {"kind": "folder", "path": "other"}}}
ROWS = {"vowels": {"path": "vowels.jsonl"}, "digits": {"path": "digits.jsonl"}}
SAMPLED = {"kind": "sampled", "model": TRAINED, "task": "rouge", "max_new_tokens": 4}


def _rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {at}", "completion": "yes"} for at in range(start, start + count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "other", "third")):
        make_model_folder(folder / name, seed=seed)
    return folder


@pytest.fixture
def rows_base(tmp_path: Path, models: Path) -> Path:
    for name in ("model", "other", "third"):
        (tmp_path / name).symlink_to(models / name)
    write_jsonl(tmp_path / "vowels.jsonl", _rows(12))
    write_jsonl(tmp_path / "digits.jsonl", _rows(12, start=100))
    write_jsonl(tmp_path / "facts.jsonl", grounded(12, seed=1))
    write_jsonl(tmp_path / "more.jsonl", grounded(6, seed=2))
    return tmp_path


def check_rows(rows_base: Path, stage: dict[str, Any], done: Path | None = None) -> tuple[StageFinding, ...]:
    train = {
        "kind": "train",
        "model": MODEL,
        "data": {"train": [{"path": "facts.jsonl"}]},
        "optimizer": {"lr": 0.01},
        "global_batch": 4,
    }
    script = {"kind": "python", "script": "write.py", "outputs": ["rows.jsonl"]}
    tuning = {"kind": "lora", "rank": 4, "alpha": 8}
    document = {
        "name": "p",
        "device": "cpu",
        "stages": {"sft": {**train, "tuning": tuning}, "script": script, "it": stage},
    }
    pipeline = parse_any(json.dumps(document), where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    return _sound(
        pipeline,
        rows_base,
        {"sft": (make_forecast(),)},
        names=("it",),
        done=lambda name: done if name == "script" else None,
    )


def refused(rows_base: Path, stage: dict[str, Any]) -> str:
    with pytest.raises(FindingError) as error:
        check_rows(rows_base, stage)
    return str(error.value)


def gate(**more: Any) -> dict[str, Any]:
    return {"kind": "gate", **EXPERTS, "data": ROWS, **more}


def mixture(**router: Any) -> dict[str, Any]:
    return {"kind": "build_moe", **EXPERTS, "router": {"kind": "centroids", "data": ROWS, **router}}


def pairs(**more: Any) -> dict[str, Any]:
    return {"kind": "make_pairs", "train": [{"path": "facts.jsonl"}], **more}


SOUND: dict[str, dict[str, Any]] = {
    "a gate": gate(),
    "a mixture": mixture(),
    "pairs by rules": pairs(test={"path": "more.jsonl"}),
    "pairs that are sampled": pairs(method=SAMPLED, test={"path": "more.jsonl"}),
}


@pytest.mark.parametrize("stage", SOUND.values(), ids=SOUND)
def test_sound_rows_are_no_finding(stage: dict[str, Any], rows_base: Path) -> None:
    assert check_rows(rows_base, stage) == ()


def test_rows_of_a_copy_that_is_collapsed_are_not_looked_at(rows_base: Path) -> None:
    write_jsonl(rows_base / "again.jsonl", [{"prompt": "why?"}])
    experts = {"experts": {**EXPERTS["experts"], "again": MODEL}, "copies": "collapse"}
    stage = mixture(data={**ROWS, "again": {"path": "again.jsonl"}}) | experts
    assert check_rows(rows_base, stage) == ()
    assert "again" in refused(
        rows_base, stage | {"experts": {**EXPERTS["experts"], "again": {"kind": "folder", "path": "third"}}}
    )


TEST = {"test": {"path": "more.jsonl"}}
UNCHANGEABLE = [{"prompt": f"q{at}", "completion": "a"} for at in range(5)]
REFUSED: dict[str, tuple[dict[str, list[dict[str, Any]]], dict[str, Any], str]] = {
    "a row that a gate cannot read": ({"digits.jsonl": [*_rows(9), {"prompt": "why?"}]}, gate(), "digits.jsonl:10 "),
    "too few rows for a router": ({"digits.jsonl": _rows(1)}, mixture(), "expert digits has 1 different rows"),
    "rows that give no pair": ({"facts.jsonl": UNCHANGEABLE}, pairs(), "no pair could be made for train of 5 rows"),
    "rows in two splits, sampled": (
        {"more.jsonl": grounded(12, seed=1)[3:5]},
        pairs(method=SAMPLED, **TEST),
        "more.jsonl:1",
    ),
    "a task that scores no answer": (
        {},
        pairs(method={**SAMPLED, "task": "hallucination"}),
        "method.task hallucination",
    ),
    "verdicts of no run": (
        {},
        {"kind": "make_pairs", "method": {"kind": "verdicts", "of": ["model"]}},
        "model is neither a run directory nor",
    ),
    "an absent adapter": ({}, {"kind": "merge_adapter", "model": MODEL, "adapter": "absent"}, "absent"),
}


@pytest.mark.parametrize(("files", "stage", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_stage_would_refuse_is_refused_before(
    files: dict[str, list[dict[str, Any]]], stage: dict[str, Any], words: str, rows_base: Path
) -> None:
    for name, rows in files.items():
        write_jsonl(rows_base / name, rows)
    first = refused(rows_base, stage).splitlines()[0]
    assert first.startswith("stage it: ")
    assert words in first


def test_an_adapter_that_is_one_is_no_finding(rows_base: Path) -> None:
    make_adapter(rows_base / "adapter", rows_base / "model")
    assert check_rows(rows_base, {"kind": "merge_adapter", "model": MODEL, "adapter": "adapter"}) == ()


def test_pairs_far_behind_rows_that_give_none_are_found(rows_base: Path) -> None:
    """A few rows show that there will be pairs; only all of them show that there will be none."""
    write_jsonl(
        rows_base / "facts.jsonl", [*({"prompt": f"q{at}", "answer": "a"} for at in range(400)), *grounded(12, seed=1)]
    )
    assert check_rows(rows_base, pairs()) == ()


def test_a_file_that_is_missing_is_told_once(rows_base: Path) -> None:
    (rows_base / "digits.jsonl").unlink()
    assert refused(rows_base, gate()).splitlines()[:-1] == ["stage it: digits.jsonl does not exist"]


def test_rows_of_another_stage_are_read_as_soon_as_they_are_there(rows_base: Path) -> None:
    (rows_base / "write.py").write_text("")
    stage = pairs(train=[{"path": "stage://script/rows.jsonl"}])
    (found,) = check_rows(rows_base, stage)
    assert found[1].problem == "stage://script/rows.jsonl is not made yet, so the rows cannot be checked"
    (rows_base / "made").mkdir()
    write_jsonl(rows_base / "made" / "rows.jsonl", UNCHANGEABLE)
    with pytest.raises(FindingError, match="stage it: no pair could be made for train of 5 rows"):
        check_rows(rows_base, stage, rows_base / "made")
