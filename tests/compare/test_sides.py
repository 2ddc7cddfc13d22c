"""What a command names: an evaluation is all its models, a stage is called as its spec calls it."""

from pathlib import Path

import pytest

from finefit.artifacts.rundir import evaluation_of, models_of, shown_parts
from finefit.compare.comparison import compare
from finefit.compare.sides import expand_targets, stored_comparisons
from finefit.errors import RunError
from finefit.review.items import RunTarget
from tests.evaluations import make_evaluation, make_pipeline
from tests.runs import make_bare, make_run

HITS = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1)
MISSES = (1, 0, 0, 1, 0, 0, 1, 1, 1, 0)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    run = make_pipeline(tmp_path / "medical-1", {"sft": "train", "dpo": "train", "scores": "evaluate"})
    make_evaluation(run.path / "stages/3-scores", {"zero": MISSES, "base": HITS, "dpo": HITS})
    return run.path


def test_an_evaluation_is_all_its_models_in_the_order_of_the_spec(pipeline: Path) -> None:
    place = pipeline / "stages/3-scores"
    assert [path.name for path in models_of(place)] == ["zero", "base", "dpo"]
    assert expand_targets([f"{pipeline}/scores"]) == [str(place / name) for name in ("zero", "base", "dpo")]
    assert expand_targets([str(pipeline)]) == expand_targets([f"{pipeline}/scores"])  # it has no other
    assert expand_targets([f"{pipeline}/scores/base", "elsewhere:final"]) == [
        f"{pipeline}/scores/base",
        "elsewhere:final",
    ]
    (place / "done.json").unlink()
    assert [path.name for path in models_of(place)] == ["base", "dpo", "zero"]


def test_the_models_of_an_evaluation_are_called_as_in_the_spec_and_each_is_paired_with_the_first(
    pipeline: Path,
) -> None:
    found = compare(expand_targets([f"{pipeline}/scores"]))
    assert [side.name for side in found.sides] == ["zero", "base", "dpo"]
    assert [(pairing.first, pairing.second, pairing.n) for pairing in found.tasks[0].pairings] == [
        (0, 1, 10),
        (0, 2, 10),
    ]
    assert found.is_one_variable
    assert found.verdict == "only declared settings differ: model"


def test_models_of_one_evaluation_are_meant_to_differ_and_those_of_two_are_not(pipeline: Path, tmp_path: Path) -> None:
    other = make_bare(tmp_path / "eval-m-1", MISSES, weights="../x/adapter", model_fingerprint="0" * 64)
    found = compare([f"{pipeline}/scores/base", str(other.path)])
    assert [side.name for side in found.sides] == ["base", "eval-m-1"]
    assert not found.is_one_variable


def test_another_precision_in_one_evaluation_is_named(pipeline: Path) -> None:
    make_bare(pipeline / "stages/3-scores/half", MISSES, name="half", precision="bf16")
    found = compare([f"{pipeline}/scores/base", f"{pipeline}/scores/half"])
    assert (found.is_one_variable, "evaluation.precision" in [setting.key for setting in found.differing]) == (
        False,
        True,
    )


def test_a_stage_is_called_as_in_the_spec_wherever_it_lies(pipeline: Path, tmp_path: Path) -> None:
    for place, rank in (("1-sft", 4), ("2-dpo", 16)):
        (pipeline / "stages" / place).rmdir()
        make_run(pipeline / "stages" / place, results={"checkpoint-6": HITS}, overrides=[f"tuning.rank={rank}"])
    make_pipeline(
        tmp_path / "medical-2", {"sft": "train", "dpo": "train"}, elsewhere={"sft": "../medical-1/stages/1-sft"}
    )
    (tmp_path / "medical-2/stages/2-dpo").rmdir()
    make_run(tmp_path / "medical-2/stages/2-dpo", results={"checkpoint-6": MISSES})
    assert [side.name for side in compare([f"{pipeline}/sft", f"{pipeline}/dpo"]).sides] == ["sft", "dpo"]
    found = compare([f"{tmp_path}/medical-2/sft", f"{tmp_path}/medical-2/dpo", f"{pipeline}/dpo"])
    assert [side.name for side in found.sides] == ["medical-1/sft", "medical-2/dpo", "medical-1/dpo"]
    assert [side.name for side in compare([f"{pipeline}/sft:final", f"{pipeline}/scores/base"]).sides] == [
        "sft:final",
        "base",
    ]


def test_a_folder_of_stages_that_no_pipeline_made_keeps_its_name(tmp_path: Path) -> None:
    assert shown_parts(tmp_path / "stages" / "3-dpo")[-2:] == ("stages", "3-dpo")
    assert evaluation_of(tmp_path / "stages" / "3-scores" / "base") is None


def test_one_run_is_asked_for_where_several_are_named(pipeline: Path) -> None:
    with pytest.raises(RunError, match="holds 3 of them") as refused:
        RunTarget.parse(f"{pipeline}/scores")
    assert f"{pipeline}/scores/base" in refused.value.remedy
    with pytest.raises(RunError, match="is a pipeline, but one run is needed here"):
        RunTarget.parse(str(pipeline))


def test_a_pipeline_that_compares_nothing_keeps_no_comparison(pipeline: Path) -> None:
    assert stored_comparisons([str(pipeline)]) == ()
    assert stored_comparisons([f"{pipeline}/sft", f"{pipeline}/dpo"]) == ()
    assert stored_comparisons([f"{pipeline}/sft:base"]) == ()
