"""Two models on the same items: an interval that holds, and a p that is small by chance as often as it says."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from finefit.stats import intervals
from finefit.stats.comparisons import holm, kappa, paired, preference, sign_test, spread
from finefit.stats.intervals import Numbers, wilson
from finefit.stats.metrics import Metric, combined, mean, rate, value

Pair = tuple[Numbers, Numbers]
F1 = Metric(name="f1", aggregate="f1", counts=("matched", "predicted", "gold"))
PERPLEXITY = Metric(name="perplexity", aggregate="perplexity", counts=("nll", "tokens"), unit="number", better="lower")
HIT = rate("hit")


def _scores(rng: np.random.Generator, n: int, shift: float) -> Pair:
    """Both models find the same items hard."""
    ease = 4 * rng.beta(2, 2, size=n)
    first, second = (rng.beta(ease + 0.3 + more, 4.3 - ease)[:, None] for more in (0.0, 5 * shift))
    return first, second


def _hits(rng: np.random.Generator, n: int, shift: float) -> Pair:
    ease = rng.random(n)
    first, second = ((rng.random(n) < ease + more).astype(float)[:, None] for more in (0.0, shift))
    return first, second


def _graphs(rng: np.random.Generator, n: int, shift: float) -> Pair:
    gold, ease = 1 + rng.poisson(rng.gamma(2, 8, size=n)), rng.beta(5, 2, size=n)
    tables = []
    for less in (0.0, shift):
        matched = rng.binomial(gold, np.clip(ease - less, 0, 1)) * (rng.random(n) > 0.15)
        tables.append(
            np.stack([matched, np.where(matched > 0, matched + rng.poisson(3, size=n), 0), gold], axis=1).astype(float)
        )
    return tables[0], tables[1]


def _likelihoods(rng: np.random.Generator, n: int, shift: float) -> Pair:
    tokens, hardness = 1 + rng.poisson(rng.gamma(1.5, 20, size=n)), rng.gamma(4, 0.4, size=n)
    first, second = (
        np.stack([tokens * hardness * rng.gamma(20, (1 + more) / 20, size=n), tokens], axis=1) for more in (0.0, shift)
    )
    return first, second


CASES: dict[str, tuple[Metric, Callable[[np.random.Generator, int, float], Pair], int]] = {
    "scores": (mean("x"), _scores, 50),
    "hits": (HIT, _hits, 150),
    "graphs": (F1, _graphs, 50),
    "likelihoods": (PERPLEXITY, _likelihoods, 50),
}


@pytest.fixture
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RESAMPLES", 299)
    monkeypatch.setattr("finefit.stats.comparisons.EXCHANGES", 299)


@pytest.mark.usefixtures("_fewer_draws")
@pytest.mark.parametrize("case", CASES)
def test_of_models_that_are_alike_5_in_100_differ_by_chance(case: str) -> None:
    metric, draw, n = CASES[case]
    rng = np.random.default_rng(5)
    found = [paired(metric, *draw(rng, n, 0.0), seed=number) for number in range(1000)]
    assert 0.03 <= np.mean([difference.p <= 0.05 for difference in found]) <= 0.07
    assert 0.93 <= np.mean([difference.low <= 0 <= difference.high for difference in found]) <= 0.975


@pytest.mark.usefixtures("_fewer_draws")
@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_a_difference_that_is_there(case: str) -> None:
    metric, draw, n = CASES[case]
    rng = np.random.default_rng(6)
    first, second = draw(rng, 1_000_000, 0.1)
    truth = float(combined(metric, second.sum(axis=0), len(second)) - combined(metric, first.sum(axis=0), len(first)))
    assert abs(truth) > 0.02
    found = [paired(metric, *draw(rng, n, 0.1), seed=number) for number in range(600)]
    assert 0.93 <= np.mean([difference.low <= truth <= difference.high for difference in found]) <= 0.98
    assert np.mean([difference.p <= 0.05 for difference in found]) > 0.1


def test_a_difference_is_the_second_less_the_first() -> None:
    found = paired(HIT, np.zeros((10, 1)), np.ones((10, 1)))
    assert (found.value, found.n, found.p) == pytest.approx((1.0, 10, 2 / 2**10))
    assert paired(HIT, np.ones((10, 1)), np.zeros((10, 1))).value == -1.0


@pytest.mark.parametrize(("gained", "lost"), [(1, 0), (5, 0), (6, 2), (9, 4), (3, 3)])
def test_p_of_a_rate_is_mcnemars_exact_one(gained: int, lost: int) -> None:
    first = np.array([0.0] * gained + [1.0] * lost + [1.0] * 20)[:, None]
    second = np.array([1.0] * gained + [0.0] * lost + [1.0] * 20)[:, None]
    assert paired(HIT, first, second).p == pytest.approx(binomtest(gained, gained + lost).pvalue)


def test_p_of_many_items_is_near_the_exact_one_and_never_zero() -> None:
    first, second = np.zeros((100, 1)), np.zeros((100, 1))
    first[:10], second[10:34] = 1, 1
    assert paired(HIT, first, second).p == pytest.approx(binomtest(10, 34).pvalue, abs=0.01)
    assert paired(HIT, np.zeros((60, 1)), np.ones((60, 1))).p == pytest.approx(1 / 10_000)


def test_the_same_answers_differ_by_nothing_and_still_leave_a_doubt() -> None:
    scores = np.random.default_rng(0).random((40, 1))
    found = paired(mean("x"), scores, scores)
    assert (found.value, found.p) == (0.0, 1.0)
    assert -0.1 < found.low < 0 < found.high < 0.1
    same = paired(PERPLEXITY, np.array([[3.0, 2.0]] * 9), np.array([[3.0, 2.0]] * 9))
    assert (same.low, same.value, same.high, same.p) == (0, 0, 0, 1)


def test_one_item_says_nothing_of_a_difference() -> None:
    found = paired(mean("x"), np.array([[0.2]]), np.array([[0.6]]))
    assert (found.value, found.low, found.high, found.p) == pytest.approx((0.4, -1.0, 1.0, 1.0))


def test_one_item_that_changed_among_many_does_not_open_the_whole_range() -> None:
    first = np.ones((60, 1))
    second = first.copy()
    second[0] = 0.3
    found = paired(mean("x"), first, second)
    assert -0.1 < found.low < found.value < found.high < 0.1


def test_pairing_is_worth_more_than_two_intervals_beside_one_another() -> None:
    rng = np.random.default_rng(3)
    hardness = rng.beta(1, 1, size=(80, 1))
    first, second = 0.9 * hardness, 0.9 * hardness + 0.05 + 0.05 * rng.random((80, 1))
    found = paired(mean("x"), first, second)
    assert found.low > 0.05
    assert found.p < 0.001


def test_tables_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 4 items cannot be paired"):
        paired(HIT, np.zeros((3, 1)), np.zeros((4, 1)))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_every_difference_lies_within_its_interval(scores: list[tuple[float, float]]) -> None:
    metric = mean("x")
    first, second = (np.array([[pair[at]] for pair in scores]) for at in (0, 1))
    found = paired(metric, first, second)
    expected = value(metric, [{"x": s} for _, s in scores]) - value(metric, [{"x": f} for f, _ in scores])
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert 0 < found.p <= 1


def test_ten_thousand_items_are_compared_in_seconds() -> None:
    rng = np.random.default_rng(0)
    first, second = _graphs(rng, 10_000, 0.01)
    began = time.thread_time()
    paired(F1, first, second)
    assert time.thread_time() - began < 6


def test_holm_gives_the_textbook_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_seeds_have_a_sample_deviation_and_what_is_missing_is_counted() -> None:
    found = spread([0.5, None, 0.7, 0.6])
    assert (found.mean, found.deviation, found.n, found.missing) == pytest.approx((0.6, 0.1, 3, 1))
    assert (spread([0.5]).deviation, spread([None]).mean) == (None, None)


def _pairs(both: int, first: int, second: int, neither: int) -> list[tuple[str, str]]:
    return (
        [("bad", "bad")] * both + [("bad", "good")] * first + [("good", "bad")] * second + [("good", "good")] * neither
    )


def test_kappa_of_the_textbook_example() -> None:
    """50 grants, 20 accepted by both, 15 rejected by both: kappa 0.4."""
    found = kappa(_pairs(20, 5, 10, 15))
    assert found.kappa is not None
    assert (found.kappa.value, found.kappa.n) == pytest.approx((0.4, 50))
    assert found.observed == wilson(35, 50)
    assert found.kappa.low == pytest.approx(0.15, abs=0.05)  # 0.4 -+ 1.96 x 0.127
    assert found.kappa.high == pytest.approx(0.65, abs=0.05)


def test_kappa_of_chance_is_about_zero_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(0)
    held = []
    for number in range(300):
        one, other = rng.random(60) < 0.4, rng.random(60) < 0.5
        found = kappa(list(zip(one.tolist(), other.tolist(), strict=True)), seed=number).kappa
        assert found is not None
        held.append(found.low <= 0 <= found.high)
    assert 0.92 <= np.mean(held) <= 0.98


def test_full_agreement_is_one_with_room_for_doubt() -> None:
    found = kappa(_pairs(6, 0, 0, 6)).kappa
    assert found is not None
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.2 < found.low < 0.8


def test_raters_who_only_ever_say_one_thing_have_no_kappa() -> None:
    found = kappa([("good", "good")] * 8)
    assert (found.kappa, found.observed) == (None, wilson(8, 8))


def test_labels_may_be_several_and_of_any_kind() -> None:
    found = kappa([(1, 1), (2, 2), (3, 1), (None, None), (2, 3), (1, 1)]).kappa
    assert found is not None
    assert found.value == pytest.approx((4 / 6 - 10 / 36) / (1 - 10 / 36))
    assert -1 <= found.low < found.value < found.high <= 1


def test_one_item_says_nothing_of_agreement() -> None:
    found = kappa([("good", "bad")]).kappa
    assert found is not None
    assert (found.low, found.high) == (-1.0, 1.0)


def test_a_tie_is_half_a_win_for_each() -> None:
    found = preference(6, 2, 4)
    assert (found.share.value, found.share.n) == pytest.approx((8 / 12, 12))
    assert found.share.low < 0.5 < found.share.high < 1
    assert found.p == pytest.approx(binomtest(6, 8).pvalue)


def test_a_clear_preference_leaves_out_one_half() -> None:
    found = preference(40, 10, 10)
    assert 0.6 < found.share.low < 0.75 < found.share.high < 0.9
    assert found.p < 1e-4


def test_a_preference_holds_its_own_share_at_the_ends() -> None:
    assert preference(3, 0, 0).share.high == preference(3, 0, 0).share.value == 1.0
    assert preference(0, 0, 5).share.value == 0.5


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 5), (7, 2), (0, 12), (300, 240), (3000, 3100)])
def test_the_sign_test_is_the_exact_binomial_one(wins: int, losses: int) -> None:
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-6)


def test_nothing_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 observations"):
        preference(0, 0, 0)
    with pytest.raises(ValueError, match="0 observations"):
        kappa([])
