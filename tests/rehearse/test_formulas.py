"""A rehearsal against arithmetic that can be done by hand: bytes per token and layer, weights, optimizer state, logits."""

from dataclasses import replace
from typing import Any

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.size import survey
from finefit.rehearse.trace import Trace
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW
from tests.rehearse.conftest import FULL, LORA, SHAPES, make_config, make_scene

TOKENS = 512


def _kept_after_forward(trace: Trace) -> int:
    """Bytes of activations when the last layer of the last forward is done."""
    last = max(at for at, instant in enumerate(trace.instants) if instant == "forward")
    return trace.components(last).get("activations", 0)


def _per_token_and_layer(scene: Scene) -> float:
    """What one more token keeps in one more layer; casts of the weights, which do not grow with tokens, fall out."""

    def kept(layers: int, tokens: int) -> int:
        recompute = layers if scene.levers.recompute else 0
        config, levers = scene.config | {"num_hidden_layers": layers}, replace(scene.levers, recompute=recompute)
        return _kept_after_forward(rehearse(replace(scene, config=config, tokens=tokens, levers=levers)).trace)

    return ((kept(4, 1024) - kept(3, 1024)) - (kept(4, 512) - kept(3, 512))) / 512


def _sizes(shape: str) -> tuple[int, int, int, int, int]:
    known = SHAPES[shape]
    return (
        known["hidden_size"],
        known["heads"] * known["width"],
        known["kv"] * known["width"],
        known["intermediate_size"],
        known["heads"],
    )


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name]["model_type"] != "qwen3"])
def test_lora_with_bf16_inputs_keeps_what_arithmetic_says(shape: str) -> None:
    """12h + 4Q + 4K + 8f + 4 heads, and the adapters' own small activations: 2 bytes for each of seven ranks."""
    h, q, k, f, heads = _sizes(shape)
    found = _per_token_and_layer(make_scene(make_config(shape)))
    wanted = 12 * h + 4 * q + 4 * k + 8 * f + 4 * heads + 7 * 2 * LORA.rank
    assert found == pytest.approx(wanted, rel=0.02)


def test_fp32_adapter_inputs_cost_copies_that_bf16_ones_share() -> None:
    """Cast to fp32 for the adapter and back for its product, the input of q, k, v, gate and up is kept once for each of them."""
    plain, copied = (
        make_scene(make_config("qwen2.5-7b"), levers={"adapter_inputs": kind}) for kind in ("bf16", "fp32")
    )
    assert _per_token_and_layer(copied) - _per_token_and_layer(plain) == pytest.approx(8 * 3584, rel=0.01)


def test_recomputed_layers_keep_their_inputs_alone(shape: str) -> None:
    scene = make_scene(make_config(shape), levers={"recompute": 2})
    assert _per_token_and_layer(scene) == pytest.approx(2 * SHAPES[shape]["hidden_size"], rel=0.001)


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name]["vocab_size"] > 100_000])
def test_the_loss_in_one_piece_takes_twelve_bytes_for_each_logit_at_its_peak(shape: str) -> None:
    """Log-probabilities and two gradients in fp32; the logits themselves are gone by then."""
    config = make_config(shape)

    def peak(supervised: int) -> int:
        scene = make_scene(config, supervised=supervised, tokens=2048, levers={"recompute": 2})
        return rehearse(scene).trace.peaks()["backward"]

    per_logit = (peak(2047) - peak(1023)) / 1024 / config["vocab_size"]
    assert per_logit == pytest.approx(12, rel=0.01)


@pytest.mark.parametrize(("tuning", "bytes_each"), [(FULL, 4), (LORA, 2)], ids=["full", "lora"])
def test_weights_are_counted_to_the_byte(shape: str, tuning: Any, bytes_each: int) -> None:
    h, q, k, f, _ = _sizes(shape)
    known = SHAPES[shape]
    bias = (q + 2 * k) if known["model_type"] == "qwen2" else 0
    norms = 2 * h + (2 * known["width"] if known["model_type"] == "qwen3" else 0)
    layer = 2 * h * q + 2 * h * k + 3 * h * f + bias + norms
    wanted = 2 * layer + 2 * known["vocab_size"] * h + h
    found = rehearse(make_scene(make_config(shape), tuning=tuning))
    weights = found.trace.components(found.trace.marks["step"] - 1)["weights"]
    assert weights == pytest.approx(wanted * bytes_each, rel=1e-4)  # rounded to 512 bytes each


def test_tied_weights_are_counted_once() -> None:
    apart, tied = (survey(make_scene(make_config("smollm2-135m", tied=tied), tuning=FULL)) for tied in (False, True))
    assert apart.parameters - tied.parameters == 49152 * 576
    found = [rehearse(make_scene(make_config("smollm2-135m", tied=tied), tuning=FULL)).trace for tied in (False, True)]
    difference = [trace.components(trace.marks["step"] - 1)["weights"] for trace in found]
    assert difference[0] - difference[1] == 49152 * 576 * 4


def _at_update(found: Rehearsed) -> dict[str, int]:
    last = max(
        at for at, instant in enumerate(found.trace.instants) if instant == "update" and found.trace.events[at][1]
    )
    return found.trace.components(last)


@pytest.mark.parametrize(("kind", "bytes_each"), [("adamw", 8.0), ("adamw_8bit", 2.03)])
def test_optimizer_state_takes_what_its_kind_says(kind: Any, bytes_each: float) -> None:
    scene = make_scene(tuning=FULL, optimizer=AdamW(lr=1e-4, kind=kind))
    assert _at_update(rehearse(scene))["optimizer"] == pytest.approx(bytes_each * survey(scene).trainable, rel=0.02)


def test_four_bit_weights_take_a_little_more_than_half_a_byte() -> None:
    config = make_config("llama-3.1-8b")
    whole, packed = (make_scene(config, tuning=Lora(kind="lora", rank=8, base_bits=bits)) for bits in (None, 4))
    linear = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = survey(whole).weight_bytes - survey(packed).weight_bytes
    assert saved == pytest.approx(linear * (2 - 0.5), rel=0.001)
    assert survey(whole).parameters == survey(packed).parameters


@pytest.mark.parametrize("levers", [{}, {"recompute": 6}], ids=["kept", "recomputed"])
def test_allocated_memory_is_linear_in_depth(levers: dict[str, int]) -> None:
    def peak(layers: int) -> int:
        config = make_config("qwen2.5-7b", layers=layers)
        found = rehearse(make_scene(config, levers=levers and {"recompute": layers}))
        return replay(found.trace.stream()).allocated_bytes

    four, five, six = peak(4), peak(5), peak(6)
    assert six - five == pytest.approx(five - four, abs=4096)


def test_memory_is_linear_in_tokens() -> None:
    def peak(tokens: int) -> int:
        return replay(rehearse(make_scene(tokens=tokens, supervised=tokens - 1)).trace.stream()).allocated_bytes

    assert peak(2048) - peak(1536) == pytest.approx(peak(1536) - peak(1024), rel=0.01)


def test_flops_are_two_for_each_weight_and_token_forward_and_twice_that_backward_in_full_tuning() -> None:
    from finefit.rehearse.clock import total_flops

    config = make_config("llama-3.2-1b")
    scene = make_scene(config, tuning=FULL)
    matrices = (
        survey(scene).parameters - config["vocab_size"] * config["hidden_size"]
    )  # looking up a token is no product
    attention = 2 * 7 * 2 * 32 * (TOKENS * TOKENS // 2) * 64
    assert total_flops(rehearse(scene).trace) == pytest.approx(6 * matrices * TOKENS + attention, rel=0.01)
