"""Dense models of half a billion parameters made into mixtures of two and of thirty-two experts, planned for a card of 80 GB."""

from functools import cache
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.errors import SpecError
from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.model.moe import moe_config
from finefit.plan.forecast import make_forecast
from finefit.plan.search import freedom_of
from finefit.plan.target import find_target
from finefit.spec.load import parse_spec
from finefit.spec.schema import Levers
from tests.mixtures import mixture_config

GIB = 2**30
HALF_A_BILLION: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SPEC = """\
name: mixture
model: {kind: folder, path: model}
tuning: {kind: full}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-5}
global_batch: 1
levers: {micro_batch: 1, recompute: all, loss_chunk: 256, offload: none, mlp_tiles: 1, keep_attention: false}
"""
LENGTHS = Lengths(num_rows=100, longest=512, mean=512, supervised=256, mean_supervised=256, source="counted")


@cache
def _planned(num_experts: int, tuning: str = "{kind: full}") -> Forecast:
    """With the MLP of the base as a shared expert, as the mixture of thirty-two was once built."""
    config = moe_config(HALF_A_BILLION, num_experts=num_experts, top_k=2, shared="base")
    spec = parse_spec(SPEC.replace("{kind: full}", tuning), where="spec.yaml", overrides=())
    return make_forecast(spec, config, LENGTHS, find_target(parse_card("A100-80GB"), read_machine(), "auto"))


def test_thirty_two_experts_trained_whole_are_refused_on_one_card() -> None:
    """Weights, gradients and two moments of 10.7 billion parameters in fp32: 159 GiB before the first activation."""
    found = _planned(32)
    assert found.parameters == pytest.approx(10.67e9, rel=0.002)
    assert not found.fits
    held = sum(found.components[part] for part in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(159 * GIB, rel=0.005)
    assert found.peak_bytes > held


def test_two_experts_fit_the_same_card() -> None:
    found = _planned(2)
    assert found.fits
    assert found.parameters == pytest.approx(1.258e9, rel=0.002)
    assert 4 * 4 * found.parameters < found.peak_bytes < 4 * 4 * found.parameters + 6 * GIB


def test_the_experts_that_a_token_does_not_meet_are_told_apart() -> None:
    found = _planned(2)
    assert found.active_parameters == found.parameters
    many = _planned(32)
    one = 24 * 3 * 896 * 4864
    assert many.active_parameters == many.parameters - 30 * one
    assert any(
        f"{many.active_parameters:,} of {many.parameters:,} parameters meet a token" in note for note in many.notes
    )
    assert any("the card is waited for" in note for note in many.notes)  # an A100 takes one product for each expert


def test_experts_that_stay_as_they_are_under_four_bits_are_named() -> None:
    found = _planned(2, "{kind: lora, rank: 8, targets: [q_proj], base_bits: 4}")
    assert any("are not packed into 4 bits" in note for note in found.notes)


def test_experts_without_an_adapter_are_told_where_adapters_are_planned() -> None:
    words = "the experts carry no adapter and stay as they are"
    assert any(words in note for note in _planned(2, "{kind: lora, rank: 8, targets: [q_proj], base_bits: 4}").notes)
    assert not any(words in note for note in _planned(2).notes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_compiled_layers_are_refused_for_a_mixture_before_anything_is_run(precision: str) -> None:
    config = mixture_config("llama")
    spec = parse_spec(SPEC, where="spec.yaml", overrides=("levers.compile=true", f"precision={precision}"))
    with pytest.raises(SpecError, match=r"levers\.compile: true is not for mixtures of experts"):
        make_forecast(spec, config, LENGTHS, find_target(parse_card("A100-80GB"), read_machine(), precision))


def test_tiles_are_not_tried_on_experts_which_are_left_whole() -> None:
    shape = {"rows": 4, "supervised": 100, "num_layers": 8, "precision": "bf16", "device": "cuda"}
    assert freedom_of(Levers(), **shape).most_frugal().mlp_tiles > 1  # type: ignore[arg-type]
    assert freedom_of(Levers(), **shape, has_experts=True).most_frugal().mlp_tiles == 1  # type: ignore[arg-type]


def test_a_checkpoint_of_the_routers_has_the_experts_as_their_base_stores_them() -> None:
    """In bf16 they are computed with, whatever they are stored in."""
    spec = parse_spec(
        SPEC.replace("{kind: full}", "{kind: subset, trainable: [mlp.gate]}") + "save: {keep: 1, every: 10 steps}\n",
        where="spec.yaml",
        overrides=(),
    )
    target = find_target(parse_card("A100-80GB"), read_machine(), "auto")
    for stored, each in (("float32", 4), ("bfloat16", 2), (None, 4)):
        config = mixture_config("qwen2", dtype=stored)
        found = make_forecast(spec, config, LENGTHS, target)
        frozen = found.parameters - found.trainable_parameters
        assert found.disk_bytes == 4 * (each * frozen + 12 * found.trainable_parameters)


def test_routers_alone_are_not_trained_under_zero3() -> None:
    engine = "engine: {kind: deepspeed, devices: 2, stage: 3}\n"
    spec = parse_spec(
        SPEC.replace("{kind: full}", "{kind: subset, trainable: [mlp.gate]}") + engine, where="spec.yaml", overrides=()
    )
    with pytest.raises(SpecError, match="stage 3 loses the gradient of a router") as caught:
        make_forecast(
            spec, mixture_config("qwen2"), LENGTHS, find_target(parse_card("2xA100-80GB"), read_machine(), "auto")
        )
    assert "fsdp2" in caught.value.remedy
