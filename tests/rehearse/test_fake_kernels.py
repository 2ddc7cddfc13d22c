"""What the stand-ins answer is what the real layers answer. What they allocate is held on a card
(tests/gpu/test_fake_kernels.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_layers import Int8Linear, Nf4Linear, leave_uncast
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW
from finefit.step.levers import layers_of
from tests.quantised import quantised_layer, with_dora
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

WIDTH = 64


@contextmanager
def autocast_as_on_a_card() -> Iterator[None]:
    """peft asks whether CUDA's is on; the products here follow the CPU's."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def dtypes_through(model: nn.Module, given: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of what it answers, and of the gradient of what it was given."""
    x = torch.ones(2, 8, WIDTH, dtype=given, requires_grad=True)
    with autocast_as_on_a_card():
        out: Tensor = model(x)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out.dtype, x.grad.dtype


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "fake_of"), [(4, Nf4Linear), (8, Int8Linear)])
def test_dora_on_a_quantised_layer_answers_in_fp32_as_peft_on_bitsandbytes_does(
    bits: int, fake_of: Any, given: torch.dtype
) -> None:
    pytest.importorskip("bitsandbytes")
    real = with_dora(quantised_layer(bits, WIDTH, WIDTH, device="cpu"), bits)
    with torch.device("meta"):
        fake = with_dora(fake_of(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)), bits)
    leave_uncast(fake.to_empty(device="cpu"))
    assert dtypes_through(fake, given) == dtypes_through(real, given) == (torch.float32, given)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_in_four_bits_answers_in_the_precision_of_its_input(given: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    real = quantised_layer(4, WIDTH, WIDTH, device="cpu")
    with torch.device("meta"):
        fake = Nf4Linear(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
    assert dtypes_through(fake.to_empty(device="cpu"), given) == dtypes_through(real, given) == (given, given)


@pytest.mark.parametrize(
    ("base_bits", "is_dora", "wanted"),
    [(4, True, torch.float32), (8, True, torch.float32), (4, False, torch.bfloat16), (None, True, torch.bfloat16)],
)
def test_a_rehearsal_has_hidden_states_in_fp32_where_dora_meets_quantised_layers(
    base_bits: int | None, is_dora: bool, wanted: torch.dtype
) -> None:
    seen: set[torch.dtype] = set()

    def listen(model: nn.Module) -> None:
        for layer in layers_of(model):
            layer.register_forward_hook(lambda *called: seen.add(called[-1].dtype))

    rehearse(
        make_cfg(make_config(layers=2), tuning=LORA.model_copy(update={"base_bits": base_bits, "dora": is_dora})),
        adjust=listen,
    )
    assert seen == {wanted}


# A rehearsal against arithmetic that can be done by hand: bytes per token and layer, weights, optimizer state,
# logits.

TOKENS = 512


def _per_token_and_layer(cfg: StepConfig) -> float:
    """What one more token keeps in one more layer; casts of the weights, which do not grow with tokens, fall out."""

    def kept(layers: int, tokens: int) -> int:
        recompute = layers if cfg.levers.recompute else 0
        config, levers = cfg.config | {"num_hidden_layers": layers}, replace(cfg.levers, recompute=recompute)
        return kept_after_forward(rehearse(replace(cfg, config=config, tokens=tokens, levers=levers)))

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


@pytest.mark.parametrize(
    "shape", slow_but(["qwen2.5-7b"], [name for name in SHAPES if SHAPES[name]["model_type"] != "qwen3"])
)
def test_lora_with_bf16_inputs_keeps_what_arithmetic_says(shape: str) -> None:
    """12h + 4Q + 4K + 8f + 4 heads, and the adapters' own small activations: 2 bytes for each of seven ranks."""
    h, q, k, f, heads = _sizes(shape)
    found = _per_token_and_layer(make_cfg(make_config(shape)))
    wanted = 12 * h + 4 * q + 4 * k + 8 * f + 4 * heads + 7 * 2 * LORA.rank
    assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
def test_fp32_adapter_inputs_cost_copies_that_bf16_ones_share() -> None:
    """Cast to fp32 for the adapter and back for its product, the input of q, k, v, gate and up is kept once for each of
    them."""
    plain, copied = (make_cfg(make_config("qwen2.5-7b"), levers={"adapter_inputs": kind}) for kind in ("bf16", "fp32"))
    assert _per_token_and_layer(copied) - _per_token_and_layer(plain) == pytest.approx(8 * 3584, rel=0.01)


@pytest.mark.parametrize("shape", slow_but(["qwen3-4b"], list(SHAPES)))
def test_recomputed_layers_keep_their_inputs_alone(shape: str) -> None:
    cfg = make_cfg(make_config(shape), levers={"recompute": 2})
    assert _per_token_and_layer(cfg) == pytest.approx(2 * SHAPES[shape]["hidden_size"], rel=0.001)


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name]["vocab_size"] > 100_000])
def test_the_loss_in_one_piece_takes_twelve_bytes_for_each_logit_at_its_peak(shape: str) -> None:
    """Log-probabilities and two gradients in fp32; the logits themselves are gone by then."""
    config = make_config(shape)

    def peak(supervised: int) -> int:
        cfg = make_cfg(config, supervised=supervised, tokens=2048, levers={"recompute": 2})
        return rehearse(cfg).trace.peaks()["backward"]

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
    weights = held_before_the_last_step(rehearse(make_cfg(make_config(shape), tuning=tuning)))["weights"]
    assert weights == pytest.approx(wanted * bytes_each, rel=1e-4)  # rounded to 512 bytes each


def test_tied_weights_are_counted_once() -> None:
    apart, tied = (make_cfg(make_config("smollm2-135m", tied=tied), tuning=FULL) for tied in (False, True))
    assert measure_size(apart).parameters - measure_size(tied).parameters == 49152 * 576
    held = [held_before_the_last_step(rehearse(cfg))["weights"] for cfg in (apart, tied)]
    assert held[0] - held[1] == 49152 * 576 * 4


def _at_update(found: Rehearsal) -> dict[str, int]:
    last = max(
        at for at, instant in enumerate(found.trace.instants) if instant == "update" and found.trace.events[at][1]
    )
    return found.trace.components(last)


@pytest.mark.parametrize(("kind", "bytes_each"), [("adamw", 8.0), ("adamw_8bit", 2.03)])
def test_optimizer_state_takes_what_its_kind_says(kind: Any, bytes_each: float) -> None:
    cfg = make_cfg(tuning=FULL, optimizer=AdamW(lr=1e-4, kind=kind))
    assert _at_update(rehearse(cfg))["optimizer"] == pytest.approx(bytes_each * measure_size(cfg).trainable, rel=0.02)


def test_four_bit_weights_take_a_little_more_than_half_a_byte() -> None:
    config = make_config("llama-3.1-8b")
    whole, packed = (make_cfg(config, tuning=Lora(kind="lora", rank=8, base_bits=bits)) for bits in (None, 4))
    linear = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = measure_size(whole).weight_bytes - measure_size(packed).weight_bytes
    assert saved == pytest.approx(linear * (2 - 0.5), rel=0.001)
    assert measure_size(whole).parameters == measure_size(packed).parameters


@pytest.mark.parametrize("levers", [{}, {"recompute": 6}], ids=["kept", "recomputed"])
def test_allocated_memory_is_linear_in_depth(levers: dict[str, int]) -> None:
    def cfg(layers: int) -> StepConfig:
        return make_cfg(make_config("qwen2.5-7b", layers=layers), levers=levers and {"recompute": layers})

    four, five, six = (peak(rehearse(cfg(layers))) for layers in (4, 5, 6))
    assert six - five == pytest.approx(five - four, abs=4096)


def test_memory_is_linear_in_tokens() -> None:
    short, middle, long = (
        peak(rehearse(make_cfg(tokens=tokens, supervised=tokens - 1))) for tokens in (1024, 1536, 2048)
    )
    assert long - middle == pytest.approx(middle - short, rel=0.01)


def test_flops_are_two_for_each_weight_and_token_forward_and_twice_that_backward_in_full_tuning() -> None:
    config = make_config("llama-3.2-1b")
    cfg = make_cfg(config, tuning=FULL)
    matrices = (
        measure_size(cfg).parameters - config["vocab_size"] * config["hidden_size"]
    )  # looking up a token is no product
    attention = 2 * 7 * 2 * 32 * (TOKENS * TOKENS // 2) * 64
    assert total_flops(rehearse(cfg).trace) == pytest.approx(6 * matrices * TOKENS + attention, rel=0.01)


LATENT = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Multi-head latent attention: queries and keys of 192, values of 128."""


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("capability", "precision", "kernel"),
    [((9, 0), "bf16", "cudnn"), ((8, 9), "bf16", "efficient"), ((8, 9), "fp32", "efficient")],
    ids=["hopper", "ada", "fp32"],
)
def test_values_narrower_than_keys_are_attended_to_in_their_own_width(
    capability: tuple[int, int], precision: str, kernel: str, packing: bool
) -> None:
    tuning = Lora(kind="lora", rank=8, targets=("o_proj",))
    levers = {"micro_batch": 2, "packing": packing}
    cfg = make_cfg(LATENT, tuning=tuning, capability=capability, precision=precision, levers=levers)
    found = rehearse(replace(cfg, tokens=128, supervised=100))
    assert found.unreached == ()
    attended = [block for block in found.trace.blocks if f"{kernel}_attention" in block.operation]
    assert {block.operation for block in found.trace.blocks if "_attention" in block.operation} == {
        f"aten::_scaled_dot_product_{kernel}_attention",
        f"aten::_scaled_dot_product_{kernel}_attention_backward",
    }
    rows, width = (1 if packing else 2) * 128 * 4, 2 if precision == "bf16" else 4
    made = {block.num_bytes for block in attended if not block.operation.endswith("backward")}
    assert rows * 128 * width in made  # the answer
    assert rows * 192 * width not in made


@pytest.mark.parametrize(("width", "kernel"), [(256, "flash"), (512, "efficient")])
def test_heads_wider_than_flash_attention_takes_are_attended_to_by_the_efficient_kernel(
    width: int, kernel: str
) -> None:
    config = make_config(head_dim=width, num_attention_heads=2, num_key_value_heads=1)
    found = rehearse(make_cfg(config, tokens=64, supervised=60))
    assert any(f"{kernel}_attention_backward" in block.operation for block in found.trace.blocks)
