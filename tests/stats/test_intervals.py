import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import t as student

from finefit.stats.intervals import difference_ends, student_quantile, wilson


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


def test_wilson_narrows_with_more_observations() -> None:
    by_n = [wilson(n // 2, n) for n in (10, 100, 1000)]
    assert all(wide.high - wide.low > narrow.high - narrow.low for wide, narrow in pairwise(by_n))


def test_wilson_covers_the_true_rate_95_times_in_100() -> None:
    n, rng = 50, np.random.default_rng(0)
    intervals = [wilson(successes, n) for successes in range(n + 1)]
    covered = []
    for rate in np.linspace(0.05, 0.95, 37):
        drawn = rng.binomial(n, rate, size=1000)
        covered.append(np.mean([intervals[successes].low <= rate <= intervals[successes].high for successes in drawn]))
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize(("space", "within"), [(1, 1e-9), (2, 1e-9), (3, 0.05), (5, 0.01), (11, 1e-3), (49, 1e-5)])
def test_students_quantile_is_scipys(space: int, within: float) -> None:
    assert student_quantile(space) == pytest.approx(student.ppf(0.975, space), rel=within)


def test_the_interval_of_a_difference_is_bonett_and_prices() -> None:
    """One is added to each kind of change, two to the items."""
    low, high = difference_ends(1, 6, 26)
    up, down = 2 / 28, 7 / 28
    half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / 28)
    assert (low, high) == pytest.approx((up - down - half, up - down + half))
    assert difference_ends(6, 1, 26) == pytest.approx((-high, -low))


@pytest.mark.parametrize(("gained", "lost", "n"), [(0, 0, 1), (5, 0, 5), (0, 5, 5), (0, 0, 40), (3, 3, 6)])
def test_the_interval_of_a_difference_holds_what_was_seen_and_no_more_than_there_is(
    gained: int, lost: int, n: int
) -> None:
    low, high = difference_ends(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    assert low < high


@pytest.mark.parametrize("successes", [-1, 11])
def test_wilson_refuses_impossible_counts(successes: int) -> None:
    with pytest.raises(ValueError, match="of 10 observations"):
        wilson(successes, 10)


def test_nothing_observed_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 observations"):
        wilson(0, 0)
