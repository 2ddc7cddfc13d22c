"""Intervals of metrics: what 95 % means is counted, not believed."""

import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finefit.stats import intervals
from finefit.stats.intervals import Numbers, wilson, wilson_ends
from finefit.stats.metrics import Metric, cautions, combined, interval_of, mean, rate

Draw = Callable[[np.random.Generator, int], Numbers]
SHARE, NUMBER = mean("x"), mean("x", unit="number")
F1 = Metric(name="f1", aggregate="f1", counts=("matched", "predicted", "gold"))
RATIO = Metric(name="length", aggregate="ratio", counts=("words", "wanted"), unit="number")
BLEU = Metric(name="bleu", aggregate="bleu", counts=("length", "wanted", *"1234", *"abcd"), unit="points")
PERPLEXITY = Metric(name="perplexity", aggregate="perplexity", counts=("nll", "tokens"), unit="number", better="lower")


def _pairs(rng: np.random.Generator, n: int) -> Numbers:
    """A sixth of the answers failed: nothing matched and nothing predicted, but all of the gold is there."""
    gold = 1 + rng.poisson(rng.gamma(2, 8, size=n))
    matched = rng.binomial(gold, rng.beta(5, 2, size=n)) * (rng.random(n) > 0.15)
    predicted = np.where(matched > 0, matched + rng.poisson(3, size=n), 0)
    return np.stack([matched, predicted, gold], axis=1).astype(float)


def _lengths(rng: np.random.Generator, n: int) -> Numbers:
    wanted = rng.lognormal(3, 0.7, size=n)
    return np.stack([wanted * rng.gamma(4, 0.25, size=n), wanted], axis=1)


def _likelihoods(rng: np.random.Generator, n: int) -> Numbers:
    tokens = 1 + rng.poisson(rng.gamma(1.5, 20, size=n))
    return np.stack([tokens * rng.gamma(4, 0.4, size=n), tokens], axis=1).astype(float)


def _translations(rng: np.random.Generator, n: int) -> Numbers:
    wanted = 5 + rng.poisson(rng.gamma(3, 5, size=n))
    length = np.maximum(4, wanted + rng.integers(-4, 4, size=n))
    ngrams, likeness = [length - order for order in range(4)], rng.beta(3, 2, size=n)
    matched = [rng.binomial(there, likeness ** (1 + 0.8 * order)) for order, there in enumerate(ngrams)]
    return np.stack([length, wanted, *matched, *ngrams], axis=1).astype(float)


CASES: dict[str, tuple[Metric, Draw]] = {
    "times with a long tail": (NUMBER, lambda rng, n: rng.exponential(size=(n, 1))),
    "low scores": (SHARE, lambda rng, n: rng.beta(0.5, 3, size=(n, 1))),
    "mostly failures": (SHARE, lambda rng, n: (rng.random((n, 1)) < 0.4) * rng.beta(2, 2, size=(n, 1))),
    "mostly right": (SHARE, lambda rng, n: np.where(rng.random((n, 1)) < 0.8, 1.0, rng.random((n, 1)))),
    "F1 over all pairs": (F1, _pairs),
    "ratio of lengths": (RATIO, _lengths),
    "perplexity over all tokens": (PERPLEXITY, _likelihoods),
    "BLEU over all texts": (BLEU, _translations),
}


def _covered(metric: Metric, draw: Draw, n: int, *, trials: int) -> float:
    rng = np.random.default_rng(n)
    many = draw(rng, 1_000_000)
    truth = float(combined(metric, many.sum(axis=0), len(many)))
    found = [interval_of(metric, draw(rng, n), seed=number) for number in range(trials)]
    return float(np.mean([interval.low <= truth <= interval.high for interval in found]))


@pytest.fixture
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For speed; the ends vary a little more."""
    monkeypatch.setattr(intervals, "RESAMPLES", 399)


@pytest.mark.usefixtures("_fewer_draws")
@pytest.mark.parametrize("case", CASES)
def test_95_of_100_intervals_of_50_items_hold_the_truth(case: str) -> None:
    """1,500 of them: at 95 % their own standard error is 0.6."""
    assert 0.93 <= _covered(*CASES[case], 50, trials=1500) <= 0.97


@pytest.mark.usefixtures("_fewer_draws")
@pytest.mark.parametrize("case", CASES)
def test_intervals_of_12_items_still_hold(case: str) -> None:
    assert _covered(*CASES[case], 12, trials=600) >= 0.91


def test_an_interval_reaches_farther_to_the_side_of_the_long_tail() -> None:
    """Farther than the logarithm alone would have it, on which Student's is symmetric."""
    found = interval_of(NUMBER, np.random.default_rng(0).lognormal(0, 1.2, size=(60, 1)))
    assert math.log(found.high / found.value) > 1.1 * math.log(found.value / found.low)
    mirrored = interval_of(SHARE, 1 - np.random.default_rng(0).beta(0.2, 4, size=(60, 1)))
    odds = [math.log(end / (1 - end)) for end in (mirrored.low, mirrored.value, mirrored.high)]
    assert odds[1] - odds[0] > 1.1 * (odds[2] - odds[1])


def test_a_rate_has_wilsons_interval() -> None:
    table = np.array([[1.0]] * 6 + [[0.0]] * 4)
    assert interval_of(rate("x"), table) == wilson(6, 10)


def test_a_rate_of_parts_is_a_mean() -> None:
    table = np.array([[0.4], [0.6]] * 10)
    assert interval_of(rate("x"), table) == interval_of(mean("x"), table) != wilson(10, 20)


def test_a_single_item_says_nothing() -> None:
    assert (interval_of(SHARE, np.array([[0.3]])).low, interval_of(SHARE, np.array([[0.3]])).high) == (0.0, 1.0)
    points = interval_of(mean("x", unit="points"), np.array([[30.0]]))
    assert (points.low, points.value, points.high) == (0.0, 30.0, 100.0)
    number = interval_of(NUMBER, np.array([[30.0]]))
    assert (number.low, number.high) == (0.0, math.inf)
    assert interval_of(NUMBER, np.array([[-3.0]])).low == -math.inf


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, wilson(0, 20).high), (1.0, wilson(20, 20).low, 1.0)])
def test_equal_scores_leave_room_for_items_that_did_not_come_up(value: float, low: float, high: float) -> None:
    found = interval_of(SHARE, np.full((20, 1), value))
    assert (found.low, found.value, found.high) == pytest.approx((low, value, high))


def test_an_f1_of_nothing_found_has_a_width_too() -> None:
    found = interval_of(F1, np.array([[0.0, 0.0, 9.0]] * 30))
    assert found.value == found.low == 0
    assert 0.05 < found.high < 0.2


def test_equal_numbers_have_no_width() -> None:
    found = interval_of(NUMBER, np.full((20, 1), 7.0))
    assert (found.low, found.value, found.high) == (7, 7, 7)


@pytest.mark.parametrize("metric", [SHARE, mean("x", unit="points")])
def test_an_interval_stays_within_what_there_is(metric: Metric) -> None:
    top = 1.0 if metric is SHARE else 100.0
    for wrong in range(1, 20):
        scores = np.full((20, 1), top)
        scores[:wrong] = 0.4 * top
        found = interval_of(metric, scores)
        assert 0 <= found.low < found.value < found.high <= top


@given(st.lists(st.floats(0, 1), min_size=2, max_size=25))
@example([1.0] * 11 + [0.9])  # a third of all draws do not hold the last one, and have no spread
@example([1.0] * 9 + [0.0])
@example([0.0] * 7 + [1.0, 0.5, 0.9])
def test_no_interval_of_scores_is_wider_than_that_of_zeros_and_ones(scores: list[float]) -> None:
    found = interval_of(SHARE, np.array(scores)[:, None])
    low, high = wilson_ends(found.value, len(scores))
    assert low - 1e-9 <= found.low <= found.value <= found.high <= high + 1e-9


def test_a_value_below_zero_is_taken_as_it_stands() -> None:
    found = interval_of(NUMBER, np.random.default_rng(0).normal(-5, 1, size=(200, 1)))
    assert (found.low, found.high) == pytest.approx((found.value - 0.14, found.value + 0.14), abs=0.03)


def test_the_same_seed_is_the_same_interval() -> None:
    table = np.random.default_rng(1).beta(2, 5, size=(60, 1))
    assert interval_of(SHARE, table, seed=3) == interval_of(SHARE, table, seed=3)
    assert interval_of(SHARE, table, seed=3) != interval_of(SHARE, table, seed=4)


def test_the_order_of_items_does_not_matter_beyond_the_draw() -> None:
    table = np.random.default_rng(1).beta(2, 5, size=(200, 1))
    one, other = interval_of(SHARE, table), interval_of(SHARE, table[::-1])
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.005)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_counts_that_are_not_finite_are_refused_by_name(wrong: float) -> None:
    with pytest.raises(ValueError, match="length: the counts of 1 of 3 items are not finite"):
        interval_of(RATIO, np.array([[1.0, 1.0], [wrong, 1.0], [1.0, 2.0]]))


def test_a_metric_that_is_infinite_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="perplexity of 2 items is inf"):
        interval_of(PERPLEXITY, np.array([[5000.0, 5.0], [5000.0, 5.0]]))


def test_nothing_observed_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 observations"):
        interval_of(SHARE, np.zeros((0, 1)))


def test_ten_thousand_items_take_less_than_two_seconds_and_little_memory() -> None:
    table = _pairs(np.random.default_rng(0), 10_000)
    began = time.thread_time()
    interval_of(F1, table)
    assert time.thread_time() - began < 2
    tracemalloc.start()
    interval_of(F1, table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_few_items_are_said_to_be_few() -> None:
    assert cautions(1) == ("1 item: nothing is known of the spread",)
    assert cautions(12) == ("12 items: the intervals may be too narrow",)
    assert cautions(30) == ()
