"""Answers on fake tensors: what they hold, and that it is what the real calls hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finefit.evaluate.decoding import decode_step, prefill
from finefit.plan.search import TYPICAL_RATES
from finefit.rehearse.fake_kernels import device_kernels
from finefit.rehearse.fake_model import StepConfig, measure_size, read_config
from finefit.rehearse.generation import (
    GENERATION,
    PROMPTS,
    extrapolated_bytes,
    rehearse_answers,
    rehearse_likelihood,
)
from finefit.spec.models import Tuning
from tests.rehearse.conftest import FULL, LORA, make_cfg, make_config

CPU: dict[str, Any] = {"device": "cpu", "capability": (0, 0), "precision": "fp32"}


def _cache(cfg: StepConfig, rows: int, tokens: int) -> int:
    config = cfg.config
    size = 2 if cfg.precision == "bf16" else 4
    return int(
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * tokens * rows * size
    )


def test_a_model_that_was_trained_whole_answers_in_halves_and_an_adapter_lies_over_halves() -> None:
    """Training keeps fp32 weights; an evaluation loads a checkpoint in bf16."""
    whole, adapted = make_cfg(tuning=FULL), make_cfg(tuning=LORA)
    trained = measure_size(whole).weight_bytes
    assert rehearse_answers(whole, rows=1, prompt_tokens=16, new_tokens=2).allocated_bytes < trained
    assert rehearse_answers(adapted, rows=1, prompt_tokens=16, new_tokens=2).allocated_bytes > trained / 2


def test_the_cache_is_weighed_at_its_full_length_with_one_layer_twice() -> None:
    """So many tokens are generated that neither prompts nor logits count."""
    cfg = make_cfg(make_config(layers=8), tuning=FULL)
    short, long = (
        rehearse_answers(cfg, rows=4, prompt_tokens=8, new_tokens=new).allocated_bytes for new in (4096, 8192)
    )
    grown = _cache(cfg, 4, 4096)
    assert grown <= long - short <= grown * (1 + 2 / 8)


def test_the_prompts_count_only_their_own_tokens() -> None:
    """Prefill holds activations of the prompts, and none of what is still to be generated."""
    cfg = make_cfg(make_config(layers=2), tuning=FULL)
    few, many = (rehearse_answers(cfg, rows=8, prompt_tokens=2048, new_tokens=new).allocated_bytes for new in (2, 64))
    assert many - few < 2 * _cache(cfg, 8, 64)


def test_of_unequal_prompts_no_key_is_repeated_for_the_heads_that_share_it() -> None:
    cfg = make_cfg(make_config("qwen2.5-7b", layers=1), tuning=FULL)
    one = _cache(cfg, 16, 4096)
    found = rehearse_answers(cfg, rows=16, prompt_tokens=2, new_tokens=4096)
    weights = rehearse_answers(cfg, rows=1, prompt_tokens=2, new_tokens=2).allocated_bytes
    assert (
        found.allocated_bytes - weights < 2 * one
    )  # repeated for 7 heads each, keys alone would take 3.5 times as much


def test_one_long_prompt_meets_no_mask() -> None:
    """32,768 x 32,768 booleans are a GiB."""
    cfg = make_cfg(make_config(layers=1), tuning=FULL)
    blocks = rehearse_answers(cfg, rows=1, prompt_tokens=32769, new_tokens=4).trace.blocks
    assert max(block.num_bytes for block in blocks) < 1 << 30


def test_an_mlp_in_pieces_holds_less_of_a_long_prompt() -> None:
    cfg = make_cfg(make_config(layers=1), tuning=FULL)
    whole, tiled = (
        rehearse_answers(cfg, rows=1, prompt_tokens=65536, new_tokens=4, mlp_tiles=tiles).allocated_bytes
        for tiles in (1, 8)
    )
    assert whole - tiled > 65536 * cfg.config["intermediate_size"] * 2


@pytest.mark.parametrize("device", [{}, CPU], ids=["card", "cpu"])
def test_a_few_layers_tell_what_all_of_them_allocate(device: dict[str, Any]) -> None:
    cfg = make_cfg(make_config(layers=12), tuning=LORA, **device)

    def rehearse(shown: StepConfig) -> Any:
        return rehearse_answers(shown, rows=4, prompt_tokens=128, new_tokens=32)

    assert extrapolated_bytes(cfg, rehearse) == rehearse(cfg).allocated_bytes


def test_likelihoods_keep_no_cache_and_meet_the_head_in_pieces() -> None:
    cfg = make_cfg(make_config(layers=4), tuning=FULL)
    read = rehearse_likelihood(cfg, rows=8, tokens=1024, counted=512).allocated_bytes
    all_logits = 8 * 512 * cfg.config["vocab_size"] * 4
    assert read < rehearse_answers(cfg, rows=8, prompt_tokens=1024, new_tokens=512).allocated_bytes + all_logits / 4


def test_reserved_is_at_least_what_is_allocated() -> None:
    cfg = make_cfg(make_config(layers=4))
    found = rehearse_answers(cfg, rows=8, prompt_tokens=256, new_tokens=64)
    assert (
        found.allocated_bytes
        <= found.reserved_bytes
        == rehearse_answers(cfg, rows=8, prompt_tokens=256, new_tokens=64).reserved_bytes
    )


def test_time_grows_with_what_is_generated_and_counts_one_step_for_each_token() -> None:
    cfg = make_cfg(make_config(layers=2))
    ten, twenty = (rehearse_answers(cfg, rows=2, prompt_tokens=64, new_tokens=new) for new in (10, 20))
    assert {instant for instant, _ in ten.trace.costs} >= {PROMPTS, GENERATION}
    assert 1.6 < (twenty.seconds(TYPICAL_RATES) / ten.seconds(TYPICAL_RATES)) < 2.1


def test_a_model_that_is_not_known_to_follow_its_positions_is_asked_under_a_mask() -> None:
    """As transformers' own loop does it, with a mask over all prompts."""
    cfg = make_cfg(
        make_config(layers=2, model_type="opt", word_embed_proj_dim=576, ffn_dim=1536, max_position_embeddings=4096),
        tuning=FULL,
    )
    assert rehearse_answers(cfg, rows=2, prompt_tokens=64, new_tokens=8).allocated_bytes > 0


def test_the_rehearsed_calls_are_those_of_a_real_model() -> None:
    """On a CPU, where what torch allocates can be counted: keys and values of all layers, at the length that the last
    token finds."""
    config = make_config(layers=2, vocab_size=128, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(read_config(config), dtype=torch.float32).eval()
    with torch.no_grad():
        context = prefill(model, torch.ones(2, 7, dtype=torch.long), [7, 6], max_new_tokens=3)
        tokens = torch.ones(2, dtype=torch.long)
        for _ in range(3):
            tokens = decode_step(model, context, tokens)
    held = sum(
        tensor.untyped_storage().nbytes() for layer in context.cache.layers for tensor in (layer.keys, layer.values)
    )
    cfg = make_cfg(config, tuning=FULL, **CPU)
    rehearsed = rehearse_answers(cfg, rows=2, prompt_tokens=8, new_tokens=3).trace
    alive = replace(rehearsed)
    sizes = [block.num_bytes for block in alive.blocks if block.instant == GENERATION]
    assert sizes.count(held // 4) >= 4  # keys and values of two layers, as long as the last copy makes them
    assert device_kernels("cpu", (0, 0), "fp32").workspace_bytes == 0


@pytest.mark.parametrize(
    ("tuning", "stored", "precision", "of_weights"),
    [
        (LORA, "float32", "fp32", 0.0),
        (LORA, "bfloat16", "fp32", 0.5),
        (LORA, "bfloat16", "bf16", 0.0),
        (LORA, "float32", "bf16", 2.0),
        (FULL, "bfloat16", "fp32", 0.5),  # the base; a checkpoint is in fp32
        (FULL, "bfloat16", "bf16", 2.0),  # a checkpoint
        (LORA.model_copy(update={"base_bits": 4}), "float32", "fp32", None),
    ],
)
def test_on_a_cpu_a_file_of_another_precision_lies_beside_the_weights_until_they_are_read(
    tuning: Tuning, stored: str, precision: str, of_weights: float | None
) -> None:
    cfg = make_cfg(make_config(dtype=stored), tuning=tuning, **(CPU | {"precision": precision}))
    found = rehearse_answers(cfg, rows=1, prompt_tokens=16, new_tokens=2).trace
    sizes = dict.fromkeys(("weights", "weights_file"), 0)
    for ident, block in enumerate(found.blocks):
        if block.instant == "load":
            sizes[found.category(ident)] = sizes.get(found.category(ident), 0) + block.num_bytes
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(read_config(cfg.config)).parameters())
    expected = 4 * parameters if of_weights is None else of_weights * sizes["weights"]
    assert sizes["weights_file"] == pytest.approx(expected, rel=0.001)
    held = found.components(len(found.events) - 1)
    assert "weights_file" not in held
    on_card = make_cfg(make_config(dtype=stored), tuning=tuning)
    assert (
        "weights_file"
        not in rehearse_answers(on_card, rows=1, prompt_tokens=16, new_tokens=2).trace.categories.values()
    )
