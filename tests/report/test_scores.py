"""The checkpoint board: what is shown of scores, and which is called best."""

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import DatasetScores, EvalResult, Score
from finefit.errors import RunError
from finefit.report.scores import (
    best_of,
    format_n,
    require_metric,
    sample_answers,
    score_boards,
    scores_document,
    sorted_results,
)
from finefit.stats.metrics import Metric
from tests.evals import make_item, make_result
from tests.report.conftest import note

EXACT = Metric(name="exact", aggregate="rate", counts=("exact",))
BLEU = Metric(name="bleu", aggregate="mean", counts=("bleu",), unit="points")
PERPLEXITY = Metric(name="perplexity", aggregate="mean", counts=("perplexity",), unit="number", better="lower")


def _result(checkpoint: str, value: float, metric: Metric = EXACT, **more: Any) -> EvalResult:
    score = {metric.name: Score(value=value, low=value * 0.5, high=value * 1.5)}
    return make_result(checkpoint, metrics=score, definitions=(metric,), **{"n": 50, "available": 50} | more)


def _shown(renderable: RenderableType, width: int = 200) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width).print(renderable)
    return shown.getvalue()


def test_the_best_is_the_highest_and_of_what_should_be_low_the_lowest() -> None:
    assert (
        best_of([_result("base", 0.1), _result("checkpoint-3", 0.4), _result("checkpoint-6", 0.2)], None).checkpoint  # type: ignore[union-attr]
        == "checkpoint-3"
    )
    low = [_result("base", 9.0, PERPLEXITY), _result("checkpoint-3", 4.0, PERPLEXITY)]
    assert best_of(low, None) is low[1]


def test_nothing_is_best_where_there_is_no_difference_and_of_equals_the_earliest_is() -> None:
    assert best_of([_result("base", 0.4)], None) is None
    assert best_of([_result("base", 0.4), _result("checkpoint-3", 0.4)], None) is None
    three = [_result("base", 0.1), _result("checkpoint-3", 0.4), _result("checkpoint-6", 0.4)]
    assert best_of(three, None) is three[1]


def test_a_number_of_which_nobody_knows_the_better_side_makes_none_the_best() -> None:
    """As lm-eval's word_perplexity, which is no mean over items."""
    scores = [{"word_perplexity": Score(value=value, low=0, high=100)} for value in (9.0, 4.0)]
    assert (
        best_of([make_result(f"checkpoint-{n}", metrics=s, definitions=()) for n, s in enumerate(scores)], None) is None
    )


def test_another_metric_can_decide_and_one_that_is_not_there_is_named() -> None:
    def both(checkpoint: str, exact: float, bleu: float) -> EvalResult:
        scores = {name: Score(value=value, low=0, high=1) for name, value in (("exact", exact), ("bleu", bleu))}
        return make_result(checkpoint, metrics=scores, definitions=(EXACT, BLEU))

    pair = [both("base", 0.9, 10.0), both("checkpoint-3", 0.1, 20.0)]
    assert (best_of(pair, None), best_of(pair, "bleu")) == (pair[0], pair[1])
    require_metric(pair, "bleu")
    with pytest.raises(RunError) as caught:
        require_metric(pair, "blue")
    assert (caught.value.problem, caught.value.remedy) == (
        "--by blue: no task here has this metric",
        "choose from bleu, exact",
    )


def test_a_sample_shows_what_it_is_a_sample_of() -> None:
    assert format_n(_result("base", 0.4)) == "50"
    assert format_n(_result("base", 0.4, available=1200)) == "50 of 1,200"


def test_the_board_has_checkpoints_in_order_with_loss_interval_n_and_coverage_and_marks_the_best(run: RunDir) -> None:
    note(run, event="validated", step=9, validation_loss=0.75)
    results = [
        _result("checkpoint-12", 0.2),
        _result("checkpoint-9", 0.5, coverage=0.9, warnings=("few items",)),
        _result("base", 0.1),
    ]
    shown = _shown(score_boards(results, run))
    names = [line.split()[1] for line in shown.splitlines() if line.startswith("│") and line.split()[1] != "│"]
    assert names == ["base", "checkpoint-9", "checkpoint-12"]
    for part in ("checkpoint-9 *", "0.7500", "50.0%", "25.0% .. 75.0%", "90%", "* best by exact", "note: few items"):
        assert part in shown
    assert "lower is better" in _shown(
        score_boards([_result("base", 9.0, PERPLEXITY), _result("checkpoint-9", 4.0, PERPLEXITY)], run)
    )


@pytest.mark.parametrize("width", [80, 110, 300])
def test_no_figure_is_cut_off_however_narrow_the_terminal(run: RunDir, width: int) -> None:
    metrics = {f"metric_{at}": Score(value=at / 10 + 0.0123, low=at / 10, high=at / 10 + 0.05) for at in range(9)}
    shown = _shown(
        score_boards([make_result("base", metrics=metrics), make_result("checkpoint-1234", metrics=metrics)], run),
        width=width,
    )
    assert max(map(len, shown.splitlines())) <= width
    assert all(f"metric_{at}" in shown and f"{at / 10 + 0.0123:.3g}" in shown for at in range(1, 9))
    assert shown.count("…") == 0
    assert (shown.count("checkpoint-1234") == 1) is (width == 300)


def test_every_task_has_a_board_of_its_own(run: RunDir) -> None:
    results = sorted_results([_result("base", 0.1, task="rouge"), _result("base", 0.1, task="bleu")])
    assert [result.task for result in results] == ["bleu", "rouge"]
    assert _shown(score_boards(results, run)).count("95 % intervals") == 2


def test_samples_show_the_same_items_of_every_checkpoint() -> None:
    base = make_result("base", tuple(make_item(at, all_fields=0.0) for at in range(9)))
    tuned = make_result("checkpoint-3", tuple(make_item(at, all_fields=1.0) for at in range(9)))
    tables = list(sample_answers([base, tuned], 3))
    assert len(tables) == 3
    text = _shown(tables[1])
    assert "prompt 3" in text
    assert "reference: [7]" in text
    assert "all_fields 0.0%" in text
    assert "all_fields 100.0%" in text
    assert list(sample_answers([base, tuned], 0)) == []


def test_the_document_has_for_each_checkpoint_and_task_n_coverage_and_metrics(run: RunDir) -> None:
    note(run, event="validated", step=9, validation_loss=0.75)
    base, tuned = scores_document([_result("base", 0.1, available=90), _result("checkpoint-9", 0.5)], stage_of(run))
    assert base["metrics"] == {"exact": {"value": 0.1, "low": 0.05, "high": pytest.approx(0.15)}}
    assert (base["task"], base["n"], base["available"], base["coverage"], base["best"], base["validation_loss"]) == (
        "json_match",
        50,
        90,
        1.0,
        False,
        None,
    )
    assert (tuned["best"], tuned["validation_loss"], tuned["warnings"]) == (True, 0.75, [])


def test_a_board_tells_the_scores_of_every_source(run: RunDir) -> None:
    part = DatasetScores(n=20, coverage=0.5, metrics={"exact": Score(value=0.25, low=0.1, high=0.4)})
    results = [_result("base", 0.5, by_dataset={"charts": part}), _result("checkpoint-3", 0.75)]
    shown = _shown(score_boards(results, run))
    assert next(line for line in shown.splitlines() if "charts" in line).split() == [
        "│",
        "charts",
        "│",
        "25.0%",
        "│",
        "20",
        "│",
        "50%",
        "│",
    ]
    assert "10.0% .. 40.0%" in shown
    document = scores_document(results, stage_of(run))
    assert document[0]["by_dataset"] == {
        "charts": {"n": 20, "coverage": 0.5, "metrics": {"exact": {"value": 0.25, "low": 0.1, "high": 0.4}}}
    }
    assert document[1]["by_dataset"] == {}
