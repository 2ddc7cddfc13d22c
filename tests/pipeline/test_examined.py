"""What speaks against a pipeline keeps it from running, before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from finefit.errors import FindingError
from finefit.pipeline.examined import require_examined
from finefit.preflight.stages import Named
from finefit.spec.load import parse_any
from finefit.spec.stages import Pipeline
from tests.conftest import make_model_folder, make_rows, write_jsonl
from tests.forecasts import make_forecast

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


def examined(base: Path, *names: str, changes: tuple[str, ...] = ()) -> tuple[Named, ...]:
    pipeline = parse_any(STAGES, where="spec.yaml", overrides=changes)
    assert isinstance(pipeline, Pipeline)
    return require_examined(pipeline, base, FORECASTS, runs=base / "runs", names=names or None)


def _long_row_in_both(base: Path) -> None:
    """Longer than either budget, so that neither trains on it nor asks it unless it says cut_prompt."""
    (row,) = make_rows(1, seed=3)
    row["messages"][0]["content"] = " ".join(f"add {at}" for at in range(400))
    write_jsonl(base / "train.jsonl", [*make_rows(22), row])
    write_jsonl(base / "test.jsonl", [*make_rows(5, seed=2), row])


def test_all_that_speaks_against_a_run_is_raised_at_once_with_the_names_of_the_stages(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    with pytest.raises(FindingError) as refused:
        examined(base)
    first, second, third = refused.value.problem.splitlines()
    assert first == "stage scores: 1 of its rows stand in the training rows of stage sft too:"
    assert second == "  train.jsonl:5 (sft) is test.jsonl:4: the same row"
    assert third == "stage pairs: nowhere.jsonl is not there"
    assert "--set stages.sft.data.overlap=warn" in refused.value.remedy
    assert "paths are relative to the spec file" in refused.value.remedy


def test_what_will_not_run_keeps_nothing_from_running(base: Path) -> None:
    assert {name for name, _ in examined(base, "sft", "scores")} <= {"sft", "scores"}
    with pytest.raises(FindingError, match="nowhere"):
        examined(base, "pairs")


def test_what_is_no_error_is_handed_back(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    found = examined(base, "sft", "scores", changes=("stages.sft.data.overlap=warn",))
    assert [(name, one.level) for name, one in found if "stand in the training rows" in one.problem] == [
        ("scores", "warning")
    ]


def test_a_training_that_was_foretold_is_judged_by_what_was_foretold(base: Path) -> None:
    pipeline = parse_any(STAGES, where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    frozen = replace(make_forecast(), fits=False)
    with pytest.raises(FindingError, match=r"^stage sft: .*bytes"):
        require_examined(pipeline, base, {"sft": (frozen,)}, runs=base / "runs", names=("sft",))


def test_a_leak_is_found_in_rows_that_are_cut(base: Path) -> None:
    _long_row_in_both(base)
    with pytest.raises(FindingError, match=r"train\.jsonl:23 \(sft\) is test\.jsonl:6: the same row"):
        examined(
            base,
            "sft",
            "scores",
            changes=("stages.sft.data.too_long=cut_prompt", "stages.scores.data.too_long=cut_prompt"),
        )


def test_rows_that_a_training_takes_out_itself_are_no_leak(base: Path) -> None:
    write_jsonl(base / "test.jsonl", [*make_rows(3, seed=2), make_rows(22)[4]])
    with pytest.raises(FindingError, match="stand in the training rows"):
        examined(base, "scores", changes=("stages.sft.data.overlap=drop",))
    examined(base, "scores", changes=("stages.sft.data.overlap=drop", "stages.sft.data.test={path: test.jsonl}"))


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
        examined(base, *stages, changes=tuple(f"stages.{name}={text}" for name, text in stages.items()))
    assert refused.value.problem.splitlines() == [f"stage {name}: absent.py is not there" for name in stages]
