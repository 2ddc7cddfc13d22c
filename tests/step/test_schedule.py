import math
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.step.schedule import learning_rate

Kind = Literal["cosine", "linear", "constant"]
KINDS: tuple[Kind, ...] = ("cosine", "linear", "constant")


def _rates(kind: Kind, *, total: int = 20, warmup: int = 4, peak: float = 0.5) -> list[float]:
    return [learning_rate(step, peak=peak, kind=kind, total_steps=total, warmup_steps=warmup) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_in_equal_steps_to_the_peak(kind: Kind) -> None:
    assert _rates(kind)[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_without_warm_up_the_first_step_has_the_peak(kind: Kind) -> None:
    assert _rates(kind, warmup=0)[0] == 0.5


def test_constant_stays_at_the_peak() -> None:
    assert set(_rates("constant")[4:]) == {0.5}


def test_linear_falls_in_equal_steps_to_zero_after_the_last_step() -> None:
    rates = _rates("linear")
    assert all(math.isclose(a - b, 0.5 / 16) for a, b in pairwise(rates[4:]))
    assert math.isclose(rates[-1], 0.5 / 16)
    assert learning_rate(20, peak=0.5, kind="linear", total_steps=20, warmup_steps=4) == 0


def test_cosine_is_half_way_at_half_time_and_zero_after_the_last_step() -> None:
    rates = _rates("cosine")
    assert math.isclose(rates[12], 0.25)
    assert math.isclose(rates[8], 0.25 * (1 + math.cos(math.pi / 4)))
    assert 0 < rates[-1] < 0.01
    assert math.isclose(learning_rate(20, peak=0.5, kind="cosine", total_steps=20, warmup_steps=4), 0, abs_tol=1e-12)


@given(kind=st.sampled_from(KINDS), total=st.integers(1, 300), share=st.floats(0, 0.99), peak=st.floats(1e-6, 1))
def test_it_never_falls_in_warm_up_nor_rises_after_it_and_stays_in_bounds(
    kind: Kind, total: int, share: float, peak: float
) -> None:
    warmup = int(share * total)
    rates = _rates(kind, total=total, warmup=warmup, peak=peak)
    assert all(0 < rate <= peak for rate in rates)
    assert all(a <= b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert max(rates) == peak
