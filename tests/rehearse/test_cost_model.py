"""The roofline by hand on invented traces, and its trends on rehearsed ones."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from finefit.rehearse.cost_model import (
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    HOST_SECONDS,
    MATRIX_SHARE,
    STEP_SECONDS,
    Rates,
    phase_seconds,
    step_seconds,
    total_flops,
)
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal
from finefit.rehearse.trace import Cost, Trace
from finefit.spec.models import Lora
from tests.rehearse.conftest import make_cfg, make_config

RATES = Rates(half_flops=100e12, full_flops=10e12, bytes_per_second=1e12)
FAST = Rates(half_flops=800e12, full_flops=60e12, bytes_per_second=4.8e12)
MEMO: dict[str, Rehearsal] = {}


def _trace(cost: Cost, count: int = 1, *, operations: int = 0, instant: str = "forward") -> Trace:
    kinds = Counter({"kernel": operations})
    return Trace(costs={(instant, 0): Counter({cost: count})}, operations={(instant, 0): kinds})


def _phases(card_seconds: dict[str, float], host_seconds: dict[str, float]) -> dict[str, float]:
    """The phases of a step whose kernels and operations take this long."""
    flops = {phase: seconds * 100e12 * MATRIX_SHARE for phase, seconds in card_seconds.items()}
    dispatched = {phase: round(seconds / HOST_SECONDS["kernel"]) for phase, seconds in host_seconds.items()}
    trace = Trace(
        costs={(phase, 0): Counter({Cost(count, 0, True): 1}) for phase, count in flops.items()},
        operations={(phase, 0): Counter({"kernel": count}) for phase, count in dispatched.items()},
    )
    return phase_seconds(trace, RATES)


def test_a_kernel_bound_by_its_product_takes_its_flops_by_the_rate() -> None:
    """The rate is what a large product reaches; those of a step reach most of it. One kernel follows the other after
    microseconds."""
    found = step_seconds(_trace(Cost(100e12, 1e6, True)), RATES)
    assert found == pytest.approx(1 / MATRIX_SHARE, rel=0.004)
    assert step_seconds(_trace(Cost(200e12, 1e6, True)), RATES) == pytest.approx(2 * found, rel=0.004)


def test_a_kernel_bound_by_traffic_takes_its_bytes_by_the_bandwidth() -> None:
    found = step_seconds(_trace(Cost(1e6, 1e12, True)), RATES)
    assert found == pytest.approx(1 / BANDWIDTH_SHARE, rel=0.004)
    assert step_seconds(_trace(Cost(1e6, 2e12, True)), RATES) == pytest.approx(2 * found, rel=0.004)


def test_a_kernel_takes_the_longer_of_product_and_traffic_and_not_their_sum() -> None:
    alone = step_seconds(_trace(Cost(100e12, 0, True)), RATES)
    assert step_seconds(_trace(Cost(100e12, 0.5e12, True)), RATES) == alone


def test_a_product_in_32_bits_has_the_rate_of_32_bits() -> None:
    half, full = (step_seconds(_trace(Cost(100e12, 0, is_half)), RATES) for is_half in (True, False))
    assert full == pytest.approx(10 * half, rel=0.004)


def test_attention_reaches_a_smaller_share_of_the_rate_than_a_product() -> None:
    product, attention = (
        step_seconds(_trace(Cost(100e12, 0, True, is_attention)), RATES) for is_attention in (False, True)
    )
    assert attention / product == pytest.approx(MATRIX_SHARE / ATTENTION_SHARE, rel=0.004)


def test_many_tiny_kernels_are_bound_by_their_launches() -> None:
    trace = _trace(Cost(1e3, 1e3, True), 1000, operations=1000)
    assert step_seconds(trace, RATES) == pytest.approx(1000 * HOST_SECONDS["kernel"] + STEP_SECONDS)


def test_launches_do_not_count_where_the_card_is_busy() -> None:
    cost = Cost(100e12, 0, True)
    assert step_seconds(_trace(cost, operations=1000), RATES) == step_seconds(_trace(cost), RATES)


def test_a_host_that_launches_for_nothing_leaves_the_gaps_between_kernels() -> None:
    free = replace(RATES, host_factor=0.0)
    assert 0 < step_seconds(_trace(Cost(1, 1, True), 1000, operations=1000), free) < 1000 * HOST_SECONDS["kernel"]


def test_a_host_of_half_the_speed_takes_twice_as_long() -> None:
    trace = _trace(Cost(1e3, 1e3, True), 1000, operations=1000)
    assert step_seconds(trace, replace(RATES, host_factor=2.0)) == pytest.approx(2 * step_seconds(trace, RATES))


def test_a_host_that_is_ahead_hides_the_dispatches_of_the_next_phase() -> None:
    """While the card computes the forward, the host dispatches the backward, whose card time alone remains."""
    found = _phases({"forward": 1.0, "backward": 0.1}, {"forward": 0.2, "backward": 0.5})
    assert found["forward"] == pytest.approx(1.0, rel=0.01)
    assert found["backward"] == pytest.approx(0.1, rel=0.01)


def test_a_host_that_is_behind_lets_the_card_wait() -> None:
    found = _phases({"forward": 0.1, "backward": 0.1}, {"forward": 0.3, "backward": 0.4})
    assert (found["forward"], found["backward"]) == pytest.approx((0.3, 0.4), rel=0.01)


def test_the_host_waits_for_the_gradient_before_the_update() -> None:
    """It reads whether the gradient is finite, so it cannot dispatch the update ahead."""
    found = _phases({"forward": 1.0, "update": 0.01}, {"forward": 0.1, "update": 0.3})
    assert found["update"] == pytest.approx(0.3 + STEP_SECONDS, rel=0.01)


@pytest.mark.parametrize(
    ("levers", "kind"),
    [
        ({"kernels": "fused"}, "triton"),
        ({"kernels": "fused"}, "function"),
        ({"recompute": 4}, "kernel again"),
        ({"recompute": 4, "keep_attention": True}, "selective"),
    ],
)
def test_operations_are_counted_by_what_the_host_does_for_them(levers: dict[str, Any], kind: str) -> None:
    """Each kind appears with the lever that causes it, and not without."""
    config = make_config("qwen2.5-7b", layers=4)
    plain, pulled = (_kinds(make_cfg(config, tokens=64, supervised=63, levers=one)) for one in ({}, levers))
    assert pulled[kind] > 0 == plain[kind]


def _kinds(cfg: StepConfig) -> Counter[str]:
    found: Counter[str] = Counter()
    for kinds in rehearse_extrapolated(cfg, MEMO).trace.operations.values():
        found.update(kinds)
    assert found.keys() <= HOST_SECONDS.keys()
    return found


def test_phases_sum_to_the_step_and_validation_is_none_of_them() -> None:
    cost = Cost(100e12, 0, True)
    phases = ("reference", "forward", "loss", "backward", "update")
    trace = Trace(costs={(instant, 0): Counter({cost: 1}) for instant in (*phases, "validation")})
    found = phase_seconds(trace, RATES)
    assert tuple(found) == phases
    assert (
        step_seconds(trace, RATES) == pytest.approx(sum(found.values())) == pytest.approx(5 / MATRIX_SHARE, rel=0.001)
    )


def test_equal_kernels_count_as_often_as_they_run() -> None:
    assert total_flops(_trace(Cost(3.0, 1.0, True), 7)) == 21.0


def _step(tokens: int, *, recompute: int = 0) -> float:
    """Of a 7B model on a card like an H200."""
    config = make_config("qwen2.5-7b", layers=28)
    tuning = Lora(kind="lora", rank=16, targets=("q_proj", "v_proj"))
    cfg = make_cfg(
        config,
        tuning=tuning,
        tokens=tokens,
        supervised=tokens - 1,
        is_quick=True,
        levers={"recompute": recompute, "loss_chunk": 1024},
    )
    return step_seconds(rehearse_extrapolated(cfg, MEMO).trace, FAST)


def test_a_step_takes_longer_with_more_tokens() -> None:
    """At least in proportion once the card is busy, since attention grows with the square."""
    seconds = [_step(tokens) for tokens in (128, 1024, 4096, 8192)]
    assert seconds == sorted(seconds)
    assert seconds[3] / seconds[2] > 2


def test_recomputation_costs_between_a_fifth_and_a_half_more_time() -> None:
    """With frozen weights forward is half of the work, less the head, which is not computed again."""
    assert 1.2 < _step(4096, recompute=28) / _step(4096) < 1.5
