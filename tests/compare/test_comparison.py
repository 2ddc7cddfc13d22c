"""The same items paired by content; seeds as one group; what is missing stays visible."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import EvalItem, EvalResult
from finefit.compare.comparison import compare
from finefit.compare.records import Pairing
from finefit.errors import RunError
from finefit.stats.comparisons import holm, paired
from finefit.stats.intervals import wilson
from finefit.stats.metrics import Metric, mean, rate
from tests.evals import make_item
from tests.runs import HIT, make_bare, make_run, split_by_dataset, spoil, write_result

HITS = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1)
MISSES = (1, 0, 0, 1, 0, 0, 1, 1, 1, 0)
F1 = Metric(name="f1", aggregate="f1", counts=("matched", "predicted", "gold"))


def _pairing(*runs: object, **asked: object) -> Pairing:
    (task,) = compare([str(run.path) for run in runs], **asked).tasks  # type: ignore[attr-defined, arg-type]
    (found,) = task.pairings
    return found


def test_a_difference_is_that_of_the_same_items_whatever_their_order(tmp_path: Path) -> None:
    items = [make_item(at, hit=float(hit)) for at, hit in enumerate(MISSES)]
    random.Random(3).shuffle(items)
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": items}, overrides=["tuning.rank=16"])
    found = _pairing(one, other)
    (change,) = found.changes
    expected = paired(HIT, np.array(HITS, dtype=float)[:, None], np.array(MISSES, dtype=float)[:, None])
    assert (change.value, change.low, change.high, change.p) == (
        expected.value,
        expected.low,
        expected.high,
        expected.p,
    )
    assert (change.first, change.second) == (0.7, 0.5)
    assert (found.n, found.num_better, found.num_equal, found.num_worse) == (10, 1, 6, 3)
    assert found.item_changes == (1, 0, 0, 0, 0, 0, 0, -1, -1, -1)


def test_items_that_only_one_run_has_are_counted_and_told(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": [make_item(at, hit=1.0) for at in range(12)]})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": [make_item(at, hit=0.0) for at in range(2, 17)]})
    found = compare([str(one.path), str(other.path)])
    pairing = found.tasks[0].pairings[0]
    assert (pairing.n, pairing.only_first, pairing.only_second) == (10, 2, 5)
    assert "exact_match: 10 items are paired; 2 are only in the first, 5 only in the second" in found.warnings
    assert "exact_match: 10 items: the intervals may be too narrow" in found.warnings


def test_the_same_item_twice_is_paired_in_order(tmp_path: Path) -> None:
    twice = [make_item(at, hit=hit) for at, hit in ((0, 1.0), (1, 0.0), (0, 0.0))]
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": twice})
    other = make_run(
        tmp_path / "b-1",
        results={"checkpoint-6": [replace(item, counts={"hit": 1 - item.counts["hit"]}) for item in twice]},
    )
    found = _pairing(one, other)
    assert (found.n, found.repeated, found.only_first, found.only_second) == (3, 1, 0, 0)
    assert sorted(found.item_changes) == [-1, 1, 1]


def test_a_metric_over_all_pairs_is_compared_from_its_counts(tmp_path: Path) -> None:
    def items(matched: int) -> list[EvalItem]:
        return [
            make_item(at, matched=float(min(matched, at + 1)), predicted=float(at + 1), gold=float(at + 2))
            for at in range(9)
        ]

    one = make_run(tmp_path / "a-1", results={"checkpoint-6": items(2)}, metrics=(F1,))
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": items(5)}, metrics=(F1,))
    found = compare([str(one.path), str(other.path)])
    sums = [(2 * sum(min(m, at + 1) for at in range(9))) / sum(2 * at + 3 for at in range(9)) for m in (2, 5)]
    assert found.tasks[0].pairings[0].changes[0].value == pytest.approx(sums[1] - sums[0])
    scored = found.tasks[0].scored[0]
    assert scored is not None
    assert scored.metrics["f1"].value == pytest.approx(sums[0])  # and not the 0.5 that the record says


def test_a_lower_perplexity_is_a_gain(tmp_path: Path) -> None:
    metric = mean("loss", unit="number", better="lower")
    one = make_run(
        tmp_path / "a-1", results={"checkpoint-6": [make_item(at, loss=3.0) for at in range(4)]}, metrics=(metric,)
    )
    other = make_run(
        tmp_path / "b-1", results={"checkpoint-6": [make_item(at, loss=1.0 + at) for at in range(4)]}, metrics=(metric,)
    )
    found = _pairing(one, other)
    assert found.changes[0].value == pytest.approx(-0.5)
    assert (found.num_better, found.num_equal, found.num_worse) == (2, 1, 1)
    assert found.gained[0].change == 2.0


def test_gained_lost_and_reworded_items_are_shown_with_all_that_was_said(tmp_path: Path) -> None:
    answers = ["a b c", "a b c", "d", "a b"]
    items = [
        replace(make_item(at, hit=float(hit)), answer=text)
        for at, (hit, text) in enumerate(zip((0, 1, 1, 0), answers, strict=True))
    ]
    one = make_run(
        tmp_path / "a-1",
        results={"checkpoint-6": [make_item(at, hit=float(hit)) for at, hit in enumerate((1, 0, 1, 0))]},
    )
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": items})
    found = _pairing(one, other, show=1)
    assert [item.place for item in (*found.gained, *found.lost, *found.reworded)] == [
        "test.jsonl:2",
        "test.jsonl:1",
        "test.jsonl:3",
    ]
    assert (found.gained[0].prompt, found.gained[0].reference, found.gained[0].answers) == (
        "prompt 1",
        "[7]",
        ("[1]", "a b c"),
    )
    assert found.lost[0].scores == ({"hit": 1.0}, {"hit": 0.0})
    assert _pairing(one, other, show=0).gained == ()


def test_p_is_corrected_for_all_differences_of_the_comparison(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{rank}-1", results={"checkpoint-6": s}, overrides=[f"tuning.rank={rank}"])
        for rank, s in _RANKS.items()
    ]
    (task,) = compare([str(run.path) for run in runs]).tasks
    changes = [pairing.changes[0] for pairing in task.pairings]
    assert [(pairing.first, pairing.second) for pairing in task.pairings] == [(0, 1), (0, 2)]
    assert [change.corrected_p for change in changes] == holm([change.p for change in changes])
    assert changes[1].corrected_p == pytest.approx(2 * changes[1].p)


_RANKS = {4: (0,) * 10, 8: (0,) * 7 + (1,) * 3, 16: (1,) * 9 + (0,)}


def test_runs_that_differ_in_their_seed_are_one_group_with_mean_and_deviation(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / f"s-{seed}",
            results={"checkpoint-6": (1,) * seed + (0,) * (10 - seed)},
            overrides=[f"seed={seed}"],
        )
        for seed in (4, 6)
    ]
    spoiled = make_run(tmp_path / "s-9", overrides=["seed=9"])
    found = compare([str(run.path) for run in (*runs, spoiled)])
    (group,), (task,) = found.groups, found.tasks
    assert group.sides == (0, 1, 2)
    spread = task.spreads[0]["hit"]
    assert (spread.mean, spread.deviation, spread.n, spread.missing) == pytest.approx((0.5, 0.1 * 2**0.5, 2, 1))
    assert (task.scored[2], task.pairings) == (None, ())
    assert task.missing[2].startswith("it was not scored; `finefit eval ")
    assert any(warning.startswith("s-9 has no result of exact_match: it was not scored") for warning in found.warnings)
    assert found.verdict == "nothing that can change a score differs except the seed"


def _seeded(folder: Path, rank: int, seed: int, hits: tuple[int, ...]) -> str:
    overrides = [f"tuning.rank={rank}", f"seed={seed}"]
    return str(make_run(folder / f"r{rank}-{seed}", results={"checkpoint-6": hits}, overrides=overrides).path)


def test_two_groups_of_seeds_are_compared_per_seed_and_item(tmp_path: Path) -> None:
    runs = [_seeded(tmp_path, 4, seed, hits) for seed, hits in ((1, HITS), (2, MISSES), (3, HITS))]
    runs += [_seeded(tmp_path, 8, seed, hits) for seed, hits in ((2, HITS), (1, (1,) * 10))]
    found = compare(runs)
    assert [group.sides for group in found.groups] == [(0, 1, 2), (3, 4)]
    (pairing,) = found.tasks[0].pairings
    (change,) = pairing.changes
    assert pairing.seeds == (1, 2)
    assert pairing.left_out == ("r4-3",)
    assert change.by_seed == {1: pytest.approx(0.3), 2: pytest.approx(0.2)}
    assert (change.first, change.second, change.value) == pytest.approx((0.6, 0.85, 0.25))
    assert "exact_match: r4-3 has no partner with the same seed and is left out of the difference" in found.warnings
    assert [row.key for row in found.differing] == ["seed", "tuning.rank"]
    assert not found.is_one_variable  # three seeds against two


def test_other_seeds_are_no_partners_of_each_other(tmp_path: Path) -> None:
    runs = [_seeded(tmp_path, 4, seed, hits) for seed, hits in ((1, HITS), (2, MISSES))]
    runs += [_seeded(tmp_path, 8, seed, hits) for seed, hits in ((3, HITS), (4, (1,) * 10))]
    found = compare(runs)
    (pairing,) = found.tasks[0].pairings
    assert (pairing.seeds, pairing.changes[0].by_seed, pairing.left_out) == ((), {}, ())
    assert pairing.changes[0].value == pytest.approx(0.25)
    assert "exact_match: no seed in common, so runs are compared as groups and not seed by seed" in found.warnings


def test_one_run_of_each_needs_no_common_seed(tmp_path: Path) -> None:
    found = compare([_seeded(tmp_path, 4, 1, HITS), _seeded(tmp_path, 8, 2, MISSES)])
    assert not any("seed" in warning for warning in found.warnings)


def test_balanced_seeds_are_no_second_variable(tmp_path: Path) -> None:
    runs = [_seeded(tmp_path, rank, seed, HITS if rank == 4 else MISSES) for rank in (4, 8) for seed in (1, 2)]
    found = compare(runs)
    assert (found.verdict, found.is_one_variable) == ("one setting differs: tuning.rank", True)
    assert [group.name for group in found.groups] == ["r4-1 and 1 more seed", "r8-1 and 1 more seed"]


def test_all_items_come_before_a_sample(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": MISSES}, overrides=["tuning.rank=8"])
    write_result(other.stages()[0], "checkpoint-6", (1, 1), limit=2)
    assert _pairing(one, other).n == 10
    other.stages()[0].evaluation("exact_match", "checkpoint-6").set_aside()
    write_result(other.stages()[0], "checkpoint-6", (1, 1), limit=2)
    found = _pairing(one, other)
    assert (found.n, found.only_first) == (2, 8)


@pytest.mark.parametrize("asked", ["final", "6", "checkpoint-6"])
def test_a_checkpoint_is_named_by_its_role_or_its_step(tmp_path: Path, asked: str) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    found = compare([f"{run.path}:base", f"{run.path}:{asked}"])
    assert [side.checkpoint for side in found.sides] == ["base", "checkpoint-6"]
    assert compare([str(run.path)], checkpoint=asked).sides[1].checkpoint == "checkpoint-6"


def test_a_model_that_was_only_evaluated_is_compared_too(tmp_path: Path) -> None:
    found = compare(
        [
            str(make_bare(tmp_path / "m-1", MISSES).path),
            str(make_run(tmp_path / "a-1", results={"checkpoint-6": HITS}).path),
        ]
    )
    assert found.tasks[0].pairings[0].n == 10
    assert found.sides[0].total_steps is None


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / folder / "a-1", results={"checkpoint-6": HITS}) for folder in ("x", "y")]
    assert [side.name for side in compare([str(run.path) for run in runs]).sides] == ["x/a-1", "y/a-1"]


def test_predictions_are_shown_with_measurements(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    rows = {row.quantity: (row.predicted[1], row.measured[1]) for row in compare([str(run.path)]).predictions}
    assert rows == {
        "peak memory": (2 * 2**30, 5 * 2**29),
        "time per step": (2.0, 2.5),
        "tokens per second": (50.0, 40.0),
        "training time": (12.0, 15.0),
        "cost": (0.012, pytest.approx(0.015)),
        "evaluation memory": (2**29, 2**29),
    }
    assert compare([str(run.path)]).predictions[0].predicted[0] is None  # a base was not trained


def test_curves_hold_losses_and_validations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    (curve,) = compare([str(run.path)]).curves
    assert (curve.side, curve.steps, curve.losses[0], curve.validation) == (1, (1, 2, 3, 4, 5, 6), 3.0, ((6, 0.7),))


def test_a_rate_keeps_wilsons_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    scored = compare([str(run.path)]).tasks[0].scored[1]
    assert scored is not None
    cell = scored.metrics["hit"]
    assert (cell.value, cell.low, cell.high) == (0.7, wilson(7, 10).low, wilson(7, 10).high)


def test_scores_that_another_program_made_are_shown_as_recorded_and_not_compared(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, results={"checkpoint-6": HITS}, metrics=(HIT, rate("acc"))) for name in ("a-1", "b-1")
    ]
    found = compare([str(run.path) for run in runs])
    scored = found.tasks[0].scored[0]
    assert scored is not None
    assert scored.metrics["acc"].value == 0.5
    assert [change.metric for change in found.tasks[0].pairings[0].changes] == ["hit"]


def test_scores_without_items_are_shown_and_said_to_be_unpaired(tmp_path: Path) -> None:
    """As lm-eval leaves them where it logs no samples."""
    runs = [make_run(tmp_path / name, results={"checkpoint-6": ()}, metrics=(rate("acc"),)) for name in ("a-1", "b-1")]
    for run in runs:
        spoil(run.stages()[0].evaluation("exact_match", "checkpoint-6").result, definitions=[])
    found = compare([str(run.path) for run in runs])
    (task,) = found.tasks
    assert [metric.name for metric in task.metrics] == ["acc"]
    assert [scored.metrics["acc"].value for scored in task.scored if scored is not None] == [0.5, 0.5]
    assert "exact_match: no item is in both records, so none is paired" in found.warnings


def test_an_unfinished_run_is_said_to_be_so(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": MISSES}, status="stopped")
    assert "b-1 is not finished: it is stopped" in compare([str(one.path), str(other.path)]).warnings


def test_a_record_of_another_version_is_missing_with_its_reason(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, results={"checkpoint-6": HITS}) for name in ("a-1", "b-1", "c-1")]
    spoil(runs[1].stages()[0].evaluation("exact_match", "checkpoint-6").result, version=1)
    found = compare([str(run.path) for run in runs])
    assert found.tasks[0].scored[1] is None
    assert "EvalResult record of version 1" in found.tasks[0].missing[1]
    assert read_record(runs[2].stages()[0].evaluation("exact_match", "checkpoint-6").result, EvalResult).n == 10


def _refused(*targets: object, **asked: object) -> RunError:
    with pytest.raises(RunError) as caught:
        compare([str(target) for target in targets], **asked)  # type: ignore[arg-type]
    return caught.value


def test_runs_without_a_common_task_are_refused_with_what_each_has(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": HITS}, task="rouge")
    error = _refused(one.path, other.path)
    assert "fewer than two of these were scored on the same task" in error.problem
    assert "a-1: exact_match" in error.problem
    assert "b-1: rouge" in error.problem
    assert "fewer than two of these were scored on bleu" in _refused(one.path, other.path, task="bleu").problem


def test_runs_without_common_items_are_refused(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": [make_item(at, hit=1.0) for at in range(50, 53)]})
    error = _refused(one.path, other.path)
    assert "no item was answered by both" in error.problem
    assert "exact_match: a-1 has 10, b-1 has 3" in error.problem


def test_a_folder_that_is_no_run_and_a_checkpoint_that_is_not_there_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    assert "is not a run directory" in _refused(tmp_path, run.path).problem
    error = _refused(run.path, f"{run.path}:40")
    assert (error.problem, "base, checkpoint-6, final" in error.remedy) == (f"{run.path} has no checkpoint 40", True)
    bare = make_bare(tmp_path / "m-1", HITS)
    write_result(bare.stages()[0], "theirs-52b1cf00", MISSES)
    assert compare([str(bare.path), f"{bare.path}:theirs-52b1cf00"]).sides[1].checkpoint == "theirs-52b1cf00"
    assert "has no checkpoint 3" in _refused(run.path, f"{bare.path}:3").problem


def test_a_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-1", results={"base": MISSES, "checkpoint-6": HITS})
    assert "is named twice" in _refused(run.path, run.path).problem
    assert "is named twice" in _refused(f"{run.path}:final", f"{run.path}:6").problem
    bare = make_bare(tmp_path / "m-1", HITS)
    for alone in (f"{run.path}:base", str(bare.path)):
        assert _refused(alone).problem == f"there is nothing to compare {alone} with"


def test_scores_are_told_by_data_set_each_with_the_interval_of_its_own_items(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{name}-1", results={"checkpoint-6": hits}) for name, hits in (("a", HITS), ("b", MISSES))
    ]
    split_by_dataset(runs[0], {"charts": 4, "scans": 6})
    one, other = compare([str(run.path) for run in runs]).tasks[0].scored
    assert one is not None
    assert other is not None
    assert {name: (part.n, part.metrics["hit"].value) for name, part in one.by_dataset.items()} == {
        "charts": (4, 0.75),
        "scans": (6, 4 / 6),
    }
    charts, own = one.by_dataset["charts"].metrics["hit"], wilson(3, 4)
    assert (charts.low, charts.high) == (own.low, own.high)
    assert other.by_dataset == {}
