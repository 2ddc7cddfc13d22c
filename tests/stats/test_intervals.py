import math
from itertools import pairwise

import numpy as np
import pytest

from finefit.stats import Interval, bootstrap_mean, wilson


def test_wilson_gives_the_published_interval_of_6_in_10() -> None:
    found = wilson(6, 10)
    assert (found.value, found.n) == (0.6, 10)
    assert (found.low, found.high) == pytest.approx((0.3127, 0.8318), abs=1e-4)


def test_wilson_keeps_a_width_where_all_or_none_succeed() -> None:
    none, all_of_them = wilson(0, 20), wilson(20, 20)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1611, abs=1e-4)
    assert (all_of_them.value, all_of_them.high) == (1.0, 1.0)
    assert all_of_them.low == pytest.approx(0.8389, abs=1e-4)


def test_wilson_is_symmetric_in_success_and_failure() -> None:
    for successes in range(31):
        one, other = wilson(successes, 30), wilson(30 - successes, 30)
        assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low))


def test_wilson_narrows_with_more_observations_and_widens_with_more_confidence() -> None:
    by_n = [wilson(n // 2, n) for n in (10, 100, 1000)]
    by_confidence = [wilson(5, 10, confidence) for confidence in (0.99, 0.95, 0.8)]
    for row in (by_n, by_confidence):
        assert all(wide.high - wide.low > narrow.high - narrow.low for wide, narrow in pairwise(row))


def test_wilson_covers_the_true_rate_95_times_in_100() -> None:
    n, rng = 50, np.random.default_rng(0)
    intervals = [wilson(successes, n) for successes in range(n + 1)]
    covered = []
    for rate in np.linspace(0.05, 0.95, 37):
        drawn = rng.binomial(n, rate, size=1000)
        covered.append(np.mean([intervals[successes].low <= rate <= intervals[successes].high for successes in drawn]))
    assert 0.93 <= np.mean(covered) <= 0.97


def test_bootstrap_of_the_same_seed_is_the_same_interval() -> None:
    values = np.random.default_rng(1).normal(size=40).tolist()
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_bootstrap_agrees_with_the_normal_interval_of_a_large_sample() -> None:
    values = np.random.default_rng(2).normal(loc=5, scale=2, size=2000)
    found = bootstrap_mean(values.tolist())
    half = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_bootstrap_covers_the_true_mean_about_95_times_in_100() -> None:
    rng = np.random.default_rng(3)
    found = [bootstrap_mean(rng.normal(size=40).tolist(), seed=number, resamples=500) for number in range(400)]
    assert 0.90 <= np.mean([interval.low <= 0 <= interval.high for interval in found]) <= 0.98


def test_bootstrap_in_blocks_holds_every_resample() -> None:
    values = np.random.default_rng(4).normal(size=300_000).tolist()  # 3 resamples to a block
    found = bootstrap_mean(values, resamples=10)
    assert found.low < found.high


def test_bootstrap_of_equal_values_has_no_width() -> None:
    assert bootstrap_mean([0.1, 0.1, 0.1]) == Interval(value=0.1, low=0.1, high=0.1, n=3)


def test_bootstrap_of_one_value_claims_no_certainty() -> None:
    assert bootstrap_mean([0.7]) == Interval(value=0.7, low=-math.inf, high=math.inf, n=1)


@pytest.mark.parametrize("successes", [-1, 11])
def test_wilson_refuses_impossible_counts(successes: int) -> None:
    with pytest.raises(ValueError, match="of 10 observations"):
        wilson(successes, 10)


def test_nothing_observed_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 observations"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="0 observations"):
        bootstrap_mean([])


def test_a_value_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 of 3 values"):
        bootstrap_mean([1.0, math.nan, 2.0])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(1, 2, confidence)
