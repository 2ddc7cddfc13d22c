import numpy as np
import pytest
from scipy.stats import binomtest

from finefit.stats import kappa, preference, sign_test, wilson


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
