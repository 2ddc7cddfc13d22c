"""What each kind of tuning, of weights and of optimizer comes to in bytes."""

from typing import Any

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import total_flops
from finefit.rehearse.depth import rehearse_depth
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.size import survey
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import AdamW
from tests.rehearse.conftest import FULL, LORA, make_config, make_scene

MLP = Subset(kind="subset", trainable=("layers.*.mlp",))
HIDDEN, WIDE, VOCABULARY, TOKENS = 576, 1536, 49152, 512
KEYS = 3 * 64
LINEAR = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * WIDE
"""Weights of a layer's projections."""


def lora(**given: Any) -> Lora:
    return LORA.model_copy(update=given)


def _scene(**changes: Any) -> Scene:
    return make_scene(make_config(layers=2), **changes)


def _held_before_the_last_step(found: Rehearsed) -> dict[str, int]:
    return found.trace.components(found.trace.marks["step"] - 1)


def _peak(scene: Scene) -> int:
    return replay(rehearse(scene).trace.stream()).allocated_bytes


# adapters


def test_adapters_in_bf16_take_half_with_their_gradients_and_moments() -> None:
    wide, narrow = (rehearse(_scene(tuning=lora(weights=kind))) for kind in ("fp32", "bf16"))
    held = [_held_before_the_last_step(found) for found in (wide, narrow)]
    assert held[1]["adapters"] == pytest.approx(held[0]["adapters"] / 2, rel=0.01)
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"] / 2, rel=0.02)
    assert narrow.unreached == ()

    def gradients(found: Rehearsed) -> int:
        return sum(
            block.num_bytes for at, block in enumerate(found.trace.blocks) if found.trace.category(at) == "gradients"
        )

    assert gradients(narrow) == gradients(wide) // 2


def test_rank_stabilised_adapters_take_what_others_do() -> None:
    assert _peak(_scene(tuning=lora(rank_stabilised=True))) == _peak(_scene())


def test_dora_learns_a_length_for_every_row_of_a_weight() -> None:
    plain, dora = survey(_scene()), survey(_scene(tuning=lora(dora=True)))
    lengths = 2 * (2 * HIDDEN + 2 * KEYS + 2 * WIDE + HIDDEN)
    assert dora.trainable - plain.trainable == lengths
    assert dora.trainable_tensors - plain.trainable_tensors == 2 * 7


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_dora_makes_whole_weights_in_every_step_and_reaches_all_it_trains(bits: int | None) -> None:
    plain, dora = (rehearse(_scene(tuning=lora(dora=is_dora, base_bits=bits))) for is_dora in (False, True))
    assert dora.unreached == ()
    largest = max(
        block.num_bytes
        for block in dora.trace.blocks
        if block.module.endswith("lora_magnitude_vector.default") and block.instant == "forward"
    )
    assert largest >= 4 * HIDDEN * WIDE  # the product of A and B beside the weight
    assert total_flops(dora.trace) > total_flops(plain.trace)


# a part of the model's own weights


def test_a_subset_is_trained_in_fp32_beside_frozen_halves() -> None:
    size = survey(_scene(tuning=MLP))
    trained = 2 * 3 * HIDDEN * WIDE
    assert (size.trainable, size.trainable_bytes) == (trained, 4 * trained)
    assert size.weight_bytes == 2 * (size.parameters - trained) + 4 * trained
    found = rehearse(_scene(tuning=MLP))
    held = _held_before_the_last_step(found)
    assert found.unreached == ()
    assert held["optimizer"] == pytest.approx(8 * trained, rel=0.01)
    assert "adapters" not in held


def test_a_subset_is_loaded_in_halves_and_widened_one_by_one() -> None:
    """Never is more than one weight there twice."""
    size, loaded = survey(_scene(tuning=MLP)), rehearse(_scene(tuning=MLP)).trace.peaks()["load"]
    assert size.weight_bytes <= loaded <= size.weight_bytes + 2 * HIDDEN * WIDE + (1 << 20)


# weights in bits


def test_eight_bits_are_a_byte_for_each_weight_and_a_scale_for_each_row() -> None:
    size = survey(_scene(tuning=lora(base_bits=8)))
    plain = survey(_scene())
    assert size.parameters == plain.parameters
    assert plain.weight_bytes - size.weight_bytes == 2 * LINEAR
    rows = 2 * (2 * HIDDEN + 2 * KEYS + 2 * WIDE + HIDDEN)
    half, eight = (
        _held_before_the_last_step(rehearse(_scene(tuning=tuning)))["weights"] for tuning in (LORA, lora(base_bits=8))
    )
    assert half - eight == pytest.approx(2 * LINEAR - 4 * rows, abs=2 * 7 * 2 * 512)


def test_a_product_in_eight_bits_counts_as_one_in_sixteen() -> None:
    assert total_flops(rehearse(_scene(tuning=lora(base_bits=8))).trace) == total_flops(rehearse(_scene()).trace)


def _kept_after_forward(scene: Scene) -> int:
    trace = rehearse(scene).trace
    last = max(at for at, instant in enumerate(trace.instants) if instant == "forward")
    return trace.components(last)["activations"]


def test_in_eight_bits_the_inputs_of_layers_stay_though_these_are_computed_again() -> None:
    """bitsandbytes keeps them where recomputation does not see it. The first layer's first input needs no gradient, so it is not kept."""
    four, eight = (_kept_after_forward(_scene(tuning=lora(base_bits=bits), levers={"recompute": 2})) for bits in (4, 8))
    inputs = 2 * TOKENS * (HIDDEN + HIDDEN + HIDDEN + WIDE)  # of q, k and v; of o; of gate and up; of down
    assert eight - four == pytest.approx(2 * inputs - 2 * TOKENS * HIDDEN, rel=0.1)


def test_under_autocast_an_adapter_on_packed_weights_takes_its_input_as_it_is() -> None:
    """peft's layers for bitsandbytes make no fp32 copy, whatever the lever says."""
    for bits in (4, 8):
        asked, unasked = (
            _peak(_scene(tuning=lora(base_bits=bits), levers={"adapter_inputs": kind})) for kind in ("bf16", "fp32")
        )
        assert asked == unasked


# precision


def test_fp16_takes_the_bytes_of_bf16() -> None:
    for tuning in (LORA, FULL):
        assert _peak(_scene(tuning=tuning, precision="fp16")) == pytest.approx(_peak(_scene(tuning=tuning)), abs=4096)


def test_an_older_card_in_fp16_holds_halves_and_takes_the_efficient_kernel() -> None:
    older = rehearse(_scene(precision="fp16", capability=(7, 5)))
    assert older.kernels.attention_kernel == "efficient"
    assert survey(_scene(precision="fp16", capability=(7, 5))).weight_bytes == survey(_scene()).weight_bytes
    assert rehearse(_scene(precision="fp16")).kernels.attention_kernel == "flash"


# optimizers


@pytest.mark.parametrize(("kind", "each"), [("paged_adamw", 4), ("paged_adamw_8bit", 1)])
def test_paged_moments_are_on_no_card_and_counted_apart(kind: Any, each: int) -> None:
    scene = _scene(tuning=FULL, optimizer=AdamW(lr=1e-4, kind=kind))
    large = VOCABULARY * HIDDEN * 2 + 2 * (LINEAR)
    assert survey(scene).paged_bytes == 2 * each * large
    held = _held_before_the_last_step(rehearse(scene)).get("optimizer", 0)
    assert held < 0.05 * 8 * large
    assert survey(_scene(tuning=FULL)).paged_bytes == 0


# a few layers stand for all

DEEP: dict[str, dict[str, Any]] = {
    "8 bits, recomputed": {"tuning": lora(base_bits=8), "levers": {"recompute": 6}},
    "dora in 4 bits": {"tuning": lora(base_bits=4, dora=True)},
    "subset, recomputed": {"tuning": MLP, "levers": {"recompute": 6}},
    "8-bit moments": {"tuning": FULL, "optimizer": AdamW(lr=1e-4, kind="adamw_8bit")},
    "paged moments": {"tuning": FULL, "optimizer": AdamW(lr=1e-4, kind="paged_adamw_8bit")},
    "fp16": {"precision": "fp16", "tuning": lora(weights="bf16")},
}


@pytest.mark.parametrize("changes", DEEP.values(), ids=DEEP)
def test_a_stretched_rehearsal_equals_the_whole_one(changes: dict[str, Any]) -> None:
    scene = make_scene(make_config(layers=6), **changes)
    whole, stretched = (replay(found(scene).trace.stream()) for found in (rehearse, rehearse_depth))
    assert (stretched.allocated_bytes, stretched.reserved_bytes) == (whole.allocated_bytes, whole.reserved_bytes)
