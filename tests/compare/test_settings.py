"""Settings that differ are named, those that cannot change a score stand apart, and what follows from another is not
told twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.artifacts.rundir import RunDir
from finefit.compare.comparison import compare
from finefit.compare.records import ABSENT, Comparison
from finefit.errors import RunError
from finefit.spec.models import ShapeModel
from tests.runs import FILE, MACHINE, make_bare, make_run, write_result

HITS = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1)
MISSES = (1, 0, 0, 1, 0, 0, 1, 0, 1, 0)


def _compared(folder: Path, first: dict[str, Any], second: dict[str, Any], **asked: Any) -> Comparison:
    one = make_run(folder / "a-1", **{"results": {"checkpoint-6": HITS}} | first)
    other = make_run(folder / "b-1", **{"results": {"checkpoint-6": MISSES}} | second)
    return compare([str(one.path), str(other.path)], **asked)


def _keys(comparison: Comparison) -> tuple[list[str], list[str]]:
    return [row.key for row in comparison.differing], [row.key for row in comparison.without_effect]


def test_equal_runs_differ_by_chance_alone(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {})
    assert _keys(found) == ([], [])
    assert found.verdict == "nothing that can change a score differs except chance"
    assert found.is_one_variable


def test_one_setting_is_named_with_its_value_in_each_run(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {"overrides": ["tuning.rank=16"]})
    (row,) = found.differing
    assert (row.key, row.values) == ("tuning.rank", (4, 16))
    assert (found.verdict, found.is_one_variable) == ("one setting differs: tuning.rank", True)


def test_several_settings_are_never_called_the_effect_of_one(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {"overrides": ["tuning.rank=16", "optimizer.lr=1e-3", "seed=8"]})
    assert _keys(found)[0] == ["seed", "tuning.rank", "optimizer.lr"]
    assert (
        found.verdict == "these runs differ in 3 settings: a difference in score is not the effect of any one of them"
    )
    assert not found.is_one_variable


def test_what_is_declared_may_differ_and_anything_else_is_told(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {"overrides": ["tuning.rank=16", "tuning.alpha=8"]}, declared=("tuning",))
    assert (found.verdict, found.is_one_variable) == ("only declared settings differ: tuning.rank, tuning.alpha", True)
    found = compare([str(tmp_path / "a-1"), str(tmp_path / "b-1")], declared=("tuning.rank", "optimizer.lr"))
    assert not found.is_one_variable
    assert found.verdict.startswith("these runs differ in 1 setting besides tuning.rank: ")
    assert "optimizer.lr is declared to differ but does not" in found.warnings


@pytest.mark.parametrize(
    ("second", "key"),
    [
        ({"overrides": ["name=other"]}, "name"),
        ({"overrides": ["save.every=5 steps"]}, "save.every"),
        ({"overrides": ["card=24GiB"]}, "card"),
        ({"overrides": ["trackers=[{kind: tensorboard}]"]}, "trackers"),
        ({"overrides": ["data.train=[{path: elsewhere/train.jsonl}]"]}, "data.train.0.path"),
        ({"levers": Levers(micro_batch=1)}, "levers.micro_batch"),
        ({"machine": replace(MACHINE, host="two")}, "machine.host"),
        ({"machine": replace(MACHINE, versions={"torch": "2.11.0", "rich": "15.0"})}, "version.rich"),
    ],
)
def test_what_cannot_change_a_score_stands_apart(tmp_path: Path, second: dict[str, Any], key: str) -> None:
    found = _compared(tmp_path, {}, second)
    assert key in _keys(found)[1]
    assert not found.differing
    assert found.is_one_variable


@pytest.mark.parametrize(
    ("second", "key"),
    [
        ({"train": replace(FILE, sha256="b" * 64)}, "data.train"),
        ({"machine": replace(MACHINE, versions={"torch": "2.12.0", "rich": "14.0"})}, "version.torch"),
        ({"finefit": "0.6"}, "version.finefit"),
        ({"settings": {"max_new_tokens": 9}}, "exact_match.max_new_tokens"),
        ({"signature": {"tokenizer": "other"}}, "exact_match.signature.tokenizer"),
        ({"precision": "bf16"}, "evaluation.precision"),
        ({"template_sha256": "0" * 64}, "template"),
        ({"model_fingerprint": "0" * 64}, "model"),
    ],
)
def test_what_can_change_a_score_is_named(tmp_path: Path, second: dict[str, Any], key: str) -> None:
    assert _keys(_compared(tmp_path, {}, second))[0] == [key]


def _with_best(run: RunDir, step: int, hits: tuple[int, ...], **evaluation: Any) -> str:
    where = run.stages()[0]
    (where.checkpoints / f"checkpoint-{step}").mkdir(exist_ok=True)
    (where.checkpoints / "best").symlink_to(f"checkpoint-{step}")
    write_result(where, f"checkpoint-{step}", hits, **evaluation)
    return f"{run.path}:best"


def test_how_often_is_saved_can_change_which_checkpoint_is_the_best(tmp_path: Path) -> None:
    one = _with_best(make_run(tmp_path / "a-1"), 6, HITS)
    other = _with_best(make_run(tmp_path / "b-1", overrides=["save.every=2 steps", "save.keep=9"]), 4, MISSES)
    found = compare([one, other])
    assert _keys(found) == (["save.every"], ["save.keep"])
    assert found.verdict == "one setting differs: save.every"
    assert "a-1 is checkpoint-6" in found.warnings[0]
    assert "b-1 is checkpoint-4" in found.warnings[1]


def test_seeds_whose_best_checkpoints_are_of_other_steps_are_one_group(tmp_path: Path) -> None:
    runs = [
        _with_best(make_run(tmp_path / f"s-{seed}", overrides=[f"seed={seed}"]), 2 * seed, HITS, seed=seed)
        for seed in (2, 3)
    ]
    assert [group.sides for group in compare(runs).groups] == [(0, 1)]


def test_a_task_that_a_third_run_lacks_does_not_differ_between_those_that_have_it(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, results={"checkpoint-6": HITS}) for name in ("a-1", "b-1", "c-1")]
    for run, tokens in zip(runs[:2], (8, 8), strict=True):
        write_result(run.stages()[0], "checkpoint-6", HITS, task="rouge", settings={"max_new_tokens": tokens})
    targets = [str(run.path) for run in runs]
    found = compare(targets)
    assert not found.differing
    assert any(warning.startswith("c-1 has no result of rouge") for warning in found.warnings)
    write_result(runs[1].stages()[0], "checkpoint-6", HITS, task="rouge", settings={"max_new_tokens": 9})
    (row,) = compare(targets).differing
    assert (row.key, row.values) == ("rouge.max_new_tokens", (8, 9, ABSENT))


def test_external_answers_have_no_settings_of_the_run_that_scored_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", overrides=["tuning.rank=16"], results={"checkpoint-6": HITS})
    made: dict[str, Any] = {
        "model": ShapeModel(kind="shape", config={}),
        "model_name": "answers of theirs.jsonl",
        "model_fingerprint": "9" * 64,
    }
    write_result(run.stages()[0], "theirs-52b1cf00", MISSES, **made)
    other = make_run(
        tmp_path / "b-1",
        results={"checkpoint-6": HITS},
        machine=replace(MACHINE, versions={"torch": "2.12.0", "rich": "14.0"}),
    )
    found = compare([str(other.path), f"{run.path}:theirs-52b1cf00"])
    assert [side.name for side in found.sides] == ["b-1:final", "a-1:theirs-52b1cf00"]
    assert (found.sides[1].checkpoint, found.sides[1].seed) == ("theirs-52b1cf00", None)
    assert _keys(found)[0] == ["checkpoint", "model"]
    assert [curve.side for curve in found.curves] == [0]
    with pytest.raises(RunError) as caught:
        compare([str(other.path), f"{run.path}:ours"])
    assert "base, checkpoint-6, final, theirs-52b1cf00" in caught.value.remedy


def test_other_items_are_a_setting_too(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {"results": {"checkpoint-6": (*MISSES, 1)}})
    (row,) = found.differing
    assert row.key == "exact_match.items"
    assert row.values[0].startswith("10 of 10 (")
    assert row.values[1].startswith("11 of 11 (")


def test_what_follows_from_another_difference_is_not_told_twice(tmp_path: Path) -> None:
    found = _compared(tmp_path, {}, {"overrides": ["precision=bf16"], "precision": "bf16"})
    assert _keys(found)[0] == ["evaluation.precision"]  # the plan resolved both to fp32, so the spec's word is none
    one = _compared(tmp_path / "more", {}, {"overrides": ["data.template=plain"], "template_sha256": "0" * 64})
    assert _keys(one)[0] == ["data.template"]


def test_a_run_alone_is_its_base_and_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    found = compare([str(run.path)])
    assert [side.name for side in found.sides] == ["a-1:base", "a-1:final"]
    assert [(row.key, row.values) for row in found.differing] == [("checkpoint", ("base", "final"))]
    assert found.tasks[0].pairings[0].changes[0].value == pytest.approx(0.3)


def test_settings_of_training_do_not_count_for_a_base(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"base": MISSES})
    other = make_run(tmp_path / "b-1", results={"base": HITS}, overrides=["tuning.rank=16"])
    assert not compare([f"{one.path}:base", f"{other.path}:base"]).differing


def test_two_adapters_of_one_model_are_identified_by_their_content(tmp_path: Path) -> None:
    one = make_bare(tmp_path / "a-1", HITS, weights="../x/adapter", manifest="a" * 64)
    other = make_bare(tmp_path / "b-1", MISSES, weights="../y/adapter", manifest="b" * 64)
    found = compare([str(one.path), str(other.path)])
    assert [(row.key, row.values) for row in found.differing] == [
        ("checkpoint", ("adapter (aaaaaaaaaaaa)", "adapter (bbbbbbbbbbbb)"))
    ]
    trained = make_run(tmp_path / "c-1", results={"checkpoint-6": HITS})
    assert [row.key for row in compare([str(one.path), str(trained.path)]).differing] == ["checkpoint"]
