"""What each of several cards holds, by arithmetic on the rehearsed tensors."""

from collections import Counter
from functools import cache

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.layer_extrapolation import find_inconsistencies
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block, Sharding, Trace, sharded
from finefit.spec.models import Lora, Tuning
from tests.rehearse.conftest import FULL, make_cfg, make_config

CARDS = 8
ADAPTED = Lora(kind="lora", rank=64, targets=("q_proj", "v_proj"))


@cache
def _whole(tuning: Tuning) -> Trace:
    """Wide and deep enough that weights and their state are most of the peak."""
    return rehearse_extrapolated(
        make_cfg(make_config("llama-3.2-1b", layers=32), tuning=tuning, tokens=64, supervised=63)
    ).trace


def _bytes_by_category(trace: Trace) -> Counter[str]:
    """Of every block that was ever made, but for the piece that loading takes first."""
    found: Counter[str] = Counter()
    for ident, block in enumerate(trace.blocks):
        if block.operation != WARM_UP:
            found[trace.category(ident)] += block.num_bytes
    return found


def _shares(tuning: Tuning, sharding: Sharding) -> dict[str, float]:
    whole, part = _bytes_by_category(_whole(tuning)), _bytes_by_category(sharded(_whole(tuning), sharding, CARDS))
    return {category: part[category] / whole[category] for category in whole if category != "workspace"}


def _peak(tuning: Tuning, sharding: Sharding, count: int = CARDS) -> int:
    return replay(sharded(_whole(tuning), sharding, count).stream()).allocated_bytes


def test_ddp_divides_nothing_and_adds_buckets_for_gradients_on_their_way() -> None:
    assert set(_shares(FULL, "ddp").values()) == {1.0}
    added = _peak(FULL, "ddp") - replay(_whole(FULL).stream()).allocated_bytes
    assert 1 << 20 < added <= 64 << 20
    assert added == _peak(FULL, "ddp", 2) - replay(_whole(FULL).stream()).allocated_bytes


@pytest.mark.parametrize("tuning", [FULL, ADAPTED], ids=["full", "lora"])
def test_zero2_divides_gradients_and_optimizer_state(tuning: Tuning) -> None:
    shares = _shares(tuning, "zero2")
    divided = {category for category, share in shares.items() if share < 1}
    assert divided == {"gradients", "optimizer"}
    assert [shares[category] for category in divided] == [pytest.approx(1 / CARDS, rel=0.01)] * 2


@pytest.mark.parametrize(
    ("tuning", "held"), [(FULL, {"weights"}), (ADAPTED, {"weights", "adapters"})], ids=["full", "lora"]
)
def test_zero3_divides_the_weights_too(tuning: Tuning, held: set[str]) -> None:
    shares = _shares(tuning, "zero3")
    assert {category for category, share in shares.items() if share < 1} == {"gradients", "optimizer", *held}
    assert shares["weights"] == pytest.approx(1 / CARDS, rel=0.01)


def test_each_further_sharding_and_card_lowers_what_a_card_holds_in_full_tuning() -> None:
    ddp, zero2, zero3 = (_peak(FULL, sharding) for sharding in ("ddp", "zero2", "zero3"))
    assert ddp > zero2 > zero3
    for sharding in ("zero2", "zero3"):
        two, four, eight = (_peak(FULL, sharding, count) for count in (2, 4, 8))
        assert two > four > eight


def test_zero3_holds_two_layers_whole_and_never_embedding_and_head_at_once() -> None:
    """The layer that is used and the next one; embedding and head are used at the two ends of a pass."""
    bucket, both = (
        _bytes_by_category(sharded(_whole(FULL), sharding, CARDS))["workspace"] for sharding in ("zero2", "zero3")
    )
    layer = 4 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    assert 2 * layer <= both - bucket <= 2 * 4 * 128256 * 2048


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_a_sharded_trace_is_whole_and_the_old_one_untouched(sharding: Sharding) -> None:
    before = len(_whole(FULL).events)
    found = sharded(_whole(FULL), sharding, CARDS)
    assert not list(find_inconsistencies(found))
    assert len(found.events) == len(found.units) == len(found.instants) == before + 1
    assert len(_whole(FULL).events) == before


def test_the_most_that_small_blocks_took_at_once() -> None:
    trace = Trace()
    first, _, second = (trace.allocate(Block(size, "forward", "", "", OUTSIDE), OUTSIDE) for size in (3, 100, 4))
    trace.free(first, OUTSIDE, "backward")
    trace.allocate(Block(2, "backward", "", "", OUTSIDE), OUTSIDE)
    trace.free(second, OUTSIDE, "backward")
    assert (trace.peak_below(100), trace.peak_below(101), trace.peak_below(1)) == (7, 107, 0)
