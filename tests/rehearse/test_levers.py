"""What each exact lever saves and costs at real widths, and the published set-ups that the step can be held against."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import AdamW
from tests.rehearse.conftest import (
    FULL,
    LORA,
    SHAPES,
    held_before_the_last_step,
    kept_after_forward,
    make_cfg,
    make_config,
    peak,
)
from tests.slow_cases import slow_but

GIB = 2**30
ADAPTED = Lora(kind="lora", rank=64, targets=("q_proj", "gate_proj", "down_proj"))
LAYERS, TOKENS = 4, 2048
HIDDEN, HEADS, WIDTH = (SHAPES["qwen2.5-7b"][name] for name in ("hidden_size", "heads", "width"))


@cache
def _rehearsed(
    shape: str = "qwen2.5-7b",
    tokens: int = TOKENS,
    supervised: int | None = None,
    accumulates: bool = False,
    **levers: Any,
) -> Rehearsal:
    supervised = tokens - 1 if supervised is None else supervised
    config, how = make_config(shape, layers=LAYERS), {"accumulates": accumulates, "is_quick": True, "levers": levers}
    return rehearse(make_cfg(config, tuning=ADAPTED, tokens=tokens, supervised=supervised, **how))


def _peak(**how: Any) -> int:
    return peak(_rehearsed(**how))


def _loss_peak(**how: Any) -> int:
    return _rehearsed(**how).trace.peaks()["loss"]


def test_every_further_recomputed_layer_lowers_the_peak() -> None:
    """With the loss in small chunks, so that activations are what counts; the last steps meet one layer's own working
    set."""
    peaks = [_peak(loss_chunk=256, recompute=count) for count in range(LAYERS + 1)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(more > less for more, less in pairwise(peaks[:-1]))


def test_smaller_loss_chunks_lower_the_peak_where_logits_dominate() -> None:
    whole, large, small = (_peak(recompute=LAYERS, loss_chunk=chunk) for chunk in (None, 1024, 256))
    assert whole > large > small


def test_a_chunk_holds_its_logits_and_no_more() -> None:
    """About 10 bytes for each logit of 1024 - 256 tokens while the loss is computed; backward, with 12, has a test of
    its own."""
    difference = _loss_peak(recompute=LAYERS, loss_chunk=1024) - _loss_peak(recompute=LAYERS, loss_chunk=256)
    assert difference == pytest.approx((1024 - 256) * 152064 * 10, rel=0.25)


def test_only_supervised_positions_meet_the_vocabulary() -> None:
    few, many, all_of_them = (_loss_peak(recompute=LAYERS, supervised=count) for count in (64, 512, TOKENS - 1))
    assert few < many < all_of_them
    assert all_of_them - many == pytest.approx((TOKENS - 1 - 512) * 152064 * 10, rel=0.25)


def test_offloaded_inputs_wait_on_the_host_and_not_on_the_device() -> None:
    plain, offloaded = (_rehearsed(recompute=LAYERS, loss_chunk=256, offload=offload) for offload in (False, True))
    inputs = 2 * TOKENS * HIDDEN * LAYERS
    assert (plain.trace.host_bytes, offloaded.trace.host_bytes) == (0, LAYERS * 2 * TOKENS * HIDDEN)
    on_its_way = 2 * TOKENS * HIDDEN  # the last one, which is still leaving
    assert kept_after_forward(plain) - kept_after_forward(offloaded) == pytest.approx(inputs - on_its_way, rel=0.01)
    assert _peak(recompute=LAYERS, loss_chunk=256, offload=True) < _peak(
        recompute=LAYERS, loss_chunk=256, offload=False
    )


def test_only_recomputed_layers_are_offloaded() -> None:
    found = _rehearsed(recompute=2, loss_chunk=256, offload=True)
    assert found.trace.host_bytes == 2 * TOKENS * HIDDEN * 2


def test_tiles_lower_the_peak_of_long_rows() -> None:
    """There the MLP's 18,944 columns are the largest part of a layer's working set; the tiles are computed again, so
    they cost time."""
    how: dict[str, Any] = {"tokens": 8192, "recompute": LAYERS, "loss_chunk": 256, "supervised": 1024}
    whole, halves, tiled = (_peak(**how, mlp_tiles=tiles) for tiles in (1, 2, 8))
    assert whole > halves > tiled
    assert whole - tiled > 2 * 8192 * 18944 * 2  # two activations of the MLP, of those that live at once
    assert total_flops(_rehearsed(**how, mlp_tiles=8).trace) > total_flops(_rehearsed(**how, mlp_tiles=1).trace)


def test_kept_attention_costs_its_outputs_and_saves_their_flops() -> None:
    """2 bytes for each output and 4 for the logsumexp of each head, rounded up, and the random state of each layer."""
    again, kept = (_rehearsed(recompute=LAYERS, loss_chunk=256, keep_attention=keep) for keep in (False, True))
    cost = LAYERS * (2 * TOKENS * HEADS * WIDTH + 4 * TOKENS * HEADS)
    assert cost <= kept_after_forward(kept) - kept_after_forward(again) <= cost + LAYERS * 2048
    forward = LAYERS * 2 * 2 * HEADS * (TOKENS * TOKENS // 2) * WIDTH
    assert total_flops(again.trace) - total_flops(kept.trace) == forward


@pytest.mark.parametrize("shape", slow_but(["qwen3-4b"], ["qwen2.5-7b", "qwen3-4b"]))
@pytest.mark.parametrize("recompute", [0, LAYERS], ids=["kept", "recomputed"])
def test_bf16_adapter_inputs_never_take_more_than_fp32_ones(shape: str, recompute: int) -> None:
    bf16, fp32 = (
        _peak(shape=shape, recompute=recompute, loss_chunk=256, adapter_inputs=kind) for kind in ("bf16", "fp32")
    )
    assert bf16 <= fp32


def test_two_rows_take_less_than_twice_what_one_takes_beyond_the_weights() -> None:
    weights = measure_size(make_cfg(make_config("qwen2.5-7b", layers=LAYERS), tuning=ADAPTED)).weight_bytes
    one, two = (_peak(micro_batch=rows, recompute=LAYERS, loss_chunk=256) - weights for rows in (1, 2))
    assert one < two < 2 * one


def test_accumulation_adds_one_copy_of_the_gradients() -> None:
    """They wait while the next micro-batch is at its loss; without accumulation none exists then."""
    gradients = 4 * measure_size(make_cfg(make_config("qwen2.5-7b", layers=LAYERS), tuning=ADAPTED)).trainable
    added = _loss_peak(accumulates=True, recompute=LAYERS) - _loss_peak(accumulates=False, recompute=LAYERS)
    assert added == pytest.approx(gradients, rel=0.01)


def test_no_exact_lever_changes_the_work_that_is_not_done_twice() -> None:
    """Chunks, offloading and the type of adapter inputs move or split what there is; recomputation alone adds a
    forward."""
    plain = total_flops(_rehearsed(recompute=LAYERS, loss_chunk=256).trace)
    for levers in ({"offload": True}, {"adapter_inputs": "fp32"}):
        assert total_flops(_rehearsed(recompute=LAYERS, loss_chunk=256, **levers).trace) == plain
    assert total_flops(_rehearsed(recompute=0, loss_chunk=256).trace) < plain


# published and measured set-ups

R128 = Lora(kind="lora", rank=128, alpha=256, dropout=0.05)


@cache
def _qwen_7b(tokens: int, **levers: Any) -> tuple[float, float]:
    """Allocated and reserved GiB of the whole model, r=128 on all linear layers, on Hopper."""
    cfg = make_cfg(
        make_config("qwen2.5-7b", layers=28),
        tuning=R128,
        capability=(9, 0),
        tokens=tokens,
        supervised=tokens - 1,
        levers=levers,
    )
    found = replay(rehearse_extrapolated(cfg).trace.stream())
    return found.allocated_bytes / GIB, found.reserved_bytes / GIB


@pytest.mark.parametrize(
    ("tokens", "recompute", "allocated", "reserved"),
    [(2048, 28, 21.786, 23.451), (512, 0, 23.087, 23.465)],
    ids=["1x2048 recomputed", "1x512 kept"],
)
def test_qwen_7b_takes_what_was_measured_on_an_h200(
    tokens: int, recompute: int, allocated: float, reserved: float
) -> None:
    """Measured with the usual stack: fp32 adapter inputs, dropout 0.05, the loss in one piece, AdamW over lists of
    tensors. Loss or backward set the peak here; of shorter recomputed rows it is the stack's update, which is not ours.
    Our loss gives its logits in 16 bits back a little earlier."""
    found_allocated, found_reserved = _qwen_7b(tokens, recompute=recompute, adapter_inputs="fp32")
    assert found_allocated == pytest.approx(allocated, rel=0.002)
    assert found_reserved == pytest.approx(reserved, rel=0.005)


CONTEXT_GIB = 0.749
"""What the driver and its libraries took beside it."""


def test_chunked_loss_alone_makes_2048_tokens_of_qwen_7b_fit_24_gb() -> None:
    """By arithmetic 21.0 GiB; a card that is sold as 24 GB gives 23.5 GiB to programs."""
    _, reserved = _qwen_7b(2048, recompute=28, loss_chunk=1024, adapter_inputs="fp32")
    assert reserved == pytest.approx(21.0, rel=0.02)
    assert reserved + CONTEXT_GIB < 23.5


def test_the_loss_in_one_piece_leaves_no_room_on_24_gb() -> None:
    """The set-up that had to fall back to 512 tokens."""
    _, reserved = _qwen_7b(2048, recompute=28, adapter_inputs="fp32")
    assert reserved + CONTEXT_GIB > 23.5


def test_all_exact_levers_bring_262144_tokens_of_qwen_4b_near_the_arithmetic() -> None:
    """About 36 GiB are live with every lever pulled; plainly it would be some 500. The inputs of 36 layers are 45
    GiB."""
    tokens = 262_144
    cfg = make_cfg(
        make_config("qwen3-4b", layers=36, tied=True),
        tuning=Lora(kind="lora", rank=16, targets=("q_proj", "v_proj")),
        capability=(9, 0),
        tokens=tokens,
        supervised=tokens - 1,
        is_quick=True,
        levers={"recompute": 36, "loss_chunk": 8192, "offload": True, "mlp_tiles": 8},
    )
    found = rehearse_extrapolated(cfg).trace
    assert replay(found.stream()).allocated_bytes / GIB == pytest.approx(36, rel=0.1)
    assert found.host_bytes == 36 * tokens * 2560 * 2 == 45 * GIB
    plain = replace(cfg, levers=replace(cfg.levers, loss_chunk=None, offload=False, mlp_tiles=1, adapter_inputs="fp32"))
    assert replay(rehearse_extrapolated(plain).trace.stream()).allocated_bytes > 400 * GIB


def test_full_tuning_takes_sixteen_bytes_for_each_parameter() -> None:
    """Weights, gradients and two moments, each in fp32; beyond them one update's own temporaries and the batch."""
    cfg = make_cfg(make_config("llama-3.2-1b", layers=4), tuning=FULL, tokens=64, supervised=63)
    trace, parameters = rehearse(cfg).trace, measure_size(cfg).parameters
    last = max(at for at, instant in enumerate(trace.instants) if instant == "update" and trace.events[at][1])
    held = trace.components(last)
    assert [held[name] / parameters for name in ("weights", "gradients", "optimizer")] == pytest.approx(
        [4, 4, 8], rel=0.001
    )
    assert replay(trace.stream()).allocated_bytes >= 16 * parameters


# What each kind of tuning, of weights and of optimizer comes to in bytes.

MLP = Subset(kind="subset", trainable=("layers.*.mlp",))
SMALL, WIDE, VOCABULARY, SHORT = 576, 1536, 49152, 512
KEYS = 3 * 64
LINEAR = 2 * SMALL * SMALL + 2 * SMALL * KEYS + 3 * SMALL * WIDE
"""Weights of a layer's projections."""


def lora(**given: Any) -> Lora:
    return LORA.model_copy(update=given)


def _cfg(**changes: Any) -> StepConfig:
    return make_cfg(make_config(layers=2), **changes)


# adapters


def test_adapters_in_bf16_take_half_with_their_gradients_and_moments() -> None:
    wide, narrow = (rehearse(_cfg(tuning=lora(weights=kind))) for kind in ("fp32", "bf16"))
    held = [held_before_the_last_step(found) for found in (wide, narrow)]
    assert held[1]["adapters"] == pytest.approx(held[0]["adapters"] / 2, rel=0.01)
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"] / 2, rel=0.02)
    assert narrow.unreached == ()

    def gradients(found: Rehearsal) -> int:
        return sum(
            block.num_bytes for at, block in enumerate(found.trace.blocks) if found.trace.category(at) == "gradients"
        )

    assert gradients(narrow) == gradients(wide) // 2


def test_rank_stabilised_adapters_take_what_others_do() -> None:
    assert peak(rehearse(_cfg(tuning=lora(rank_stabilised=True)))) == peak(rehearse(_cfg()))


def test_dora_learns_a_length_for_every_row_of_a_weight() -> None:
    plain, dora = measure_size(_cfg()), measure_size(_cfg(tuning=lora(dora=True)))
    lengths = 2 * (2 * SMALL + 2 * KEYS + 2 * WIDE + SMALL)
    assert dora.trainable - plain.trainable == lengths
    assert dora.trainable_tensors - plain.trainable_tensors == 2 * 7


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_dora_makes_whole_weights_in_every_step_and_reaches_all_it_trains(bits: int | None) -> None:
    plain, dora = (rehearse(_cfg(tuning=lora(dora=is_dora, base_bits=bits))) for is_dora in (False, True))
    assert dora.unreached == ()
    largest = max(
        block.num_bytes
        for block in dora.trace.blocks
        if block.module.endswith("lora_magnitude_vector.default") and block.instant == "forward"
    )
    assert largest >= 4 * SMALL * WIDE  # the product of A and B beside the weight
    assert total_flops(dora.trace) > total_flops(plain.trace)


# a part of the model's own weights


def test_a_subset_is_trained_in_fp32_beside_frozen_halves() -> None:
    size = measure_size(_cfg(tuning=MLP))
    trained = 2 * 3 * SMALL * WIDE
    assert (size.trainable, size.trainable_bytes) == (trained, 4 * trained)
    assert size.weight_bytes == 2 * (size.parameters - trained) + 4 * trained
    found = rehearse(_cfg(tuning=MLP))
    held = held_before_the_last_step(found)
    assert found.unreached == ()
    assert held["optimizer"] == pytest.approx(8 * trained, rel=0.01)
    assert "adapters" not in held


def test_a_subset_is_loaded_in_halves_and_widened_one_by_one() -> None:
    """Never is more than one weight there twice."""
    size, loaded = measure_size(_cfg(tuning=MLP)), rehearse(_cfg(tuning=MLP)).trace.peaks()["load"]
    assert size.weight_bytes <= loaded <= size.weight_bytes + 2 * SMALL * WIDE + (1 << 20)


# weights in bits


def test_eight_bits_are_a_byte_for_each_weight_and_a_scale_for_each_row() -> None:
    size = measure_size(_cfg(tuning=lora(base_bits=8)))
    plain = measure_size(_cfg())
    assert size.parameters == plain.parameters
    assert plain.weight_bytes - size.weight_bytes == 2 * LINEAR
    rows = 2 * (2 * SMALL + 2 * KEYS + 2 * WIDE + SMALL)
    half, eight = (
        held_before_the_last_step(rehearse(_cfg(tuning=tuning)))["weights"] for tuning in (LORA, lora(base_bits=8))
    )
    assert half - eight == pytest.approx(2 * LINEAR - 4 * rows, abs=2 * 7 * 2 * 512)


def test_a_product_in_eight_bits_counts_as_one_in_sixteen() -> None:
    assert total_flops(rehearse(_cfg(tuning=lora(base_bits=8))).trace) == total_flops(rehearse(_cfg()).trace)


def test_in_eight_bits_the_inputs_of_layers_stay_though_these_are_computed_again() -> None:
    """bitsandbytes keeps them where recomputation does not see it. The first layer's first input needs no gradient, so
    it is not kept."""
    four, eight = (
        kept_after_forward(rehearse(_cfg(tuning=lora(base_bits=bits), levers={"recompute": 2}))) for bits in (4, 8)
    )
    inputs = 2 * SHORT * (SMALL + SMALL + SMALL + WIDE)  # of q, k and v; of o; of gate and up; of down
    assert eight - four == pytest.approx(2 * inputs - 2 * SHORT * SMALL, rel=0.1)


def test_under_autocast_an_adapter_on_packed_weights_takes_its_input_as_it_is() -> None:
    """peft's layers for bitsandbytes make no fp32 copy, whatever the lever says."""
    for bits in (4, 8):
        asked, unasked = (
            peak(rehearse(_cfg(tuning=lora(base_bits=bits), levers={"adapter_inputs": kind})))
            for kind in ("bf16", "fp32")
        )
        assert asked == unasked


# precision


def test_fp16_takes_the_bytes_of_bf16() -> None:
    for tuning in (LORA, FULL):
        assert peak(rehearse(_cfg(tuning=tuning, precision="fp16"))) == pytest.approx(
            peak(rehearse(_cfg(tuning=tuning))), abs=4096
        )


def test_an_older_card_in_fp16_holds_halves_and_takes_the_efficient_kernel() -> None:
    older = rehearse(_cfg(precision="fp16", capability=(7, 5)))
    assert older.kernels.attention_kernel == "efficient"
    assert measure_size(_cfg(precision="fp16", capability=(7, 5))).weight_bytes == measure_size(_cfg()).weight_bytes
    assert rehearse(_cfg(precision="fp16")).kernels.attention_kernel == "flash"


# optimizers


@pytest.mark.parametrize(("kind", "each"), [("paged_adamw", 4), ("paged_adamw_8bit", 1)])
def test_paged_moments_are_on_no_card_and_counted_apart(kind: Any, each: int) -> None:
    cfg = _cfg(tuning=FULL, optimizer=AdamW(lr=1e-4, kind=kind))
    large = VOCABULARY * SMALL * 2 + 2 * (LINEAR)
    assert measure_size(cfg).paged_bytes == 2 * each * large
    held = held_before_the_last_step(rehearse(cfg)).get("optimizer", 0)
    assert held < 0.05 * 8 * large
    assert measure_size(_cfg(tuning=FULL)).paged_bytes == 0
