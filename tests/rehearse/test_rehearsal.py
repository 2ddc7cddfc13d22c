"""What a rehearsal refuses and how it says so; what differs between devices; what its record holds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from torch import Tensor, nn

from finefit.errors import ModelError
from finefit.rehearse.allocator import replay
from finefit.rehearse.generation import rehearse_generation
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.size import survey
from finefit.spec.models import Lora
from tests.rehearse.conftest import FULL, make_config, make_scene

ON_Q = Lora(kind="lora", rank=8, targets=("q_proj",))
TURING: dict[str, Any] = {"capability": (7, 5), "precision": "fp32"}
PROCESSOR: dict[str, Any] = {"device": "cpu", "capability": (0, 0), "precision": "fp32"}


def _scene(config: dict[str, Any] | None = None, **changes: Any) -> Scene:
    return make_scene(config, **({"tuning": ON_Q} | changes))


# what is refused


def _without_type() -> dict[str, Any]:
    return {key: value for key, value in make_config().items() if key != "model_type"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (_without_type(), "no model_type"),
        (make_config(model_type="nonesuch"), "nonesuch"),
        ({"model_type": "vit"}, "vit cannot be built as a causal language model"),
        ({"model_type": "t5"}, "t5 cannot be built as a causal language model"),
    ],
    ids=["no type", "unknown type", "vision", "encoder and decoder"],
)
def test_a_config_of_no_causal_language_model_is_refused_with_a_remedy(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem) as refused:
        rehearse(_scene(config))
    assert refused.value.remedy


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "wide"}, {"num_attention_heads": 7}], ids=["no number", "no divisor"]
)
def test_a_config_with_impossible_values_is_refused_with_a_remedy(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refused:
        rehearse(_scene(make_config(**wrong)))
    assert refused.value.remedy


def _with_mlp(
    layer: int, change: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Callable[[nn.Module], None]:
    """Wraps the forward of one layer's MLP."""

    def adjust(model: nn.Module) -> None:
        mlp = next(module for name, module in model.named_modules() if name.endswith(f"layers.{layer}.mlp"))
        forward = mlp.forward
        mlp.forward = lambda hidden: change(forward, hidden)

    return adjust


READS_A_VALUE: dict[str, tuple[Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], str]] = {
    "item": (lambda forward, hidden: forward(hidden) * hidden.sum().item(), "aten::_local_scalar_dense"),
    "if tensor": (lambda forward, hidden: forward(hidden) if hidden.max() > 0 else hidden, "aten::_local_scalar_dense"),
    "boolean mask": (lambda forward, hidden: forward(hidden[hidden.sum(-1) > 0]), "aten::index.Tensor"),
}


@pytest.mark.parametrize(("change", "operation"), READS_A_VALUE.values(), ids=READS_A_VALUE)
@pytest.mark.parametrize("recompute", [0, 2], ids=["kept", "recomputed"])
def test_a_forward_that_reads_a_tensor_on_the_host_is_named_with_its_module_and_operation(
    change: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], operation: str, recompute: int
) -> None:
    with pytest.raises(ModelError) as refused:
        rehearse(_scene(levers={"recompute": recompute}), _with_mlp(1, change))
    assert "layers.1.mlp" in refused.value.problem
    assert operation in refused.value.problem
    assert ".item()" in refused.value.remedy
    assert "boolean mask" in refused.value.remedy


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize("tuning", [ON_Q, FULL], ids=["lora", "full"])
def test_a_model_with_everything_frozen_is_refused(tuning: Lora) -> None:
    with pytest.raises(ModelError, match="nothing is trained") as refused:
        rehearse(_scene(tuning=tuning), _freeze)
    assert "requires_grad" in refused.value.remedy


# what differs between devices


def _kept_after_forward(found: Rehearsed) -> int:
    last = max(at for at, instant in enumerate(found.trace.instants) if instant == "forward")
    return found.trace.components(last)["activations"]


def _operations(found: Rehearsed) -> set[str]:
    return {block.operation for block in found.trace.blocks}


def test_dropout_costs_one_byte_for_each_element_on_a_card() -> None:
    """The dropped input is kept in place of the input; the mask comes on top, but for the first layer, whose input needs no gradient."""
    plain, dropped = (rehearse(_scene(tuning=ON_Q.model_copy(update={"dropout": share}))) for share in (0.0, 0.1))
    assert _kept_after_forward(dropped) - _kept_after_forward(plain) == 512 * 576


def test_dropout_costs_what_its_input_does_on_the_processor() -> None:
    plain, dropped = (
        rehearse(_scene(tuning=ON_Q.model_copy(update={"dropout": share}), **PROCESSOR)) for share in (0.0, 0.1)
    )
    assert _kept_after_forward(dropped) - _kept_after_forward(plain) == 4 * 512 * 576


def test_a_turing_card_takes_the_efficient_kernel_with_repeated_heads() -> None:
    """Keys and values of 3 heads are copied out for 9."""
    ampere, turing = rehearse(_scene()), rehearse(_scene(**TURING))
    assert "aten::_scaled_dot_product_flash_attention" in _operations(ampere)
    assert "aten::_scaled_dot_product_efficient_attention" in _operations(turing)
    assert not {name for name in _operations(turing) if "flash" in name or "cudnn" in name}

    def copies(found: Rehearsed, num_bytes: int) -> int:
        made = Counter(
            b.operation for b in found.trace.blocks if b.module.endswith("self_attn") and b.num_bytes == num_bytes
        )
        return made["aten::clone"]

    of_two_layers_in_two_steps = 2 * 2 * 2
    assert copies(turing, 4 * 512 * 9 * 64) - copies(ampere, 2 * 512 * 9 * 64) == of_two_layers_in_two_steps


def test_hopper_takes_cudnn_and_blackwell_for_desktops_does_not() -> None:
    assert [
        rehearse(_scene(capability=capability)).kernels.attention_kernel for capability in ((8, 0), (9, 0), (12, 0))
    ] == [
        "flash",
        "cudnn",
        "flash",
    ]


def test_a_turing_card_holds_no_weight_in_bf16() -> None:
    half, full = survey(_scene()), survey(_scene(**TURING))
    assert full.weight_bytes == 4 * full.parameters
    assert half.weight_bytes == 2 * (half.parameters - half.trainable) + 4 * half.trainable
    found = rehearse(_scene(**TURING)).trace
    assert found.components(found.marks["step"] - 1)["weights"] >= 4 * (full.parameters - full.trainable)


def test_the_processor_needs_no_workspace() -> None:
    assert "workspace" not in rehearse(_scene(**PROCESSOR)).trace.peaks()
    assert "workspace" in rehearse(_scene()).trace.peaks()


def test_a_workspace_is_taken_behind_the_result_of_a_product() -> None:
    """As a card does it; the other way round blocks come to lie elsewhere."""
    blocks = rehearse(_scene()).trace.blocks
    before = [blocks[at - 1].operation for at, block in enumerate(blocks) if block.instant == "workspace"]
    assert len(before) == 2
    assert set(before) <= {"aten::mm", "aten::bmm", "aten::addmm"}


# what the record holds

RECORDED: dict[str, Scene] = {
    "lora": _scene(validation=(100, 99)),
    "full": _scene(tuning=FULL, levers={"recompute": 2}),
    "turing": _scene(**TURING),
    "processor": _scene(**PROCESSOR),
    "quick": _scene(is_quick=True, accumulates=True),
}


@pytest.mark.parametrize("scene", RECORDED.values(), ids=RECORDED)
def test_a_rehearsal_agrees_with_itself(scene: Scene) -> None:
    """Components sum to what is allocated at the peak, the highest instant is the peak, and a second rehearsal says the same."""
    trace = rehearse(scene).trace
    found = replay(trace.stream())
    assert sum(trace.components(found.peak_at).values()) == found.allocated_bytes
    assert max(trace.peaks().values()) == found.allocated_bytes
    again = rehearse(scene).trace
    assert replace(again, events=[]) == replace(trace, events=[])
    assert _frees_in_a_row_sorted(again.events) == _frees_in_a_row_sorted(trace.events)


def _frees_in_a_row_sorted(events: list[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
    """Autocast gives back its copies of the weights in no order."""
    return [sorted(row) for _, row in groupby(events, key=lambda event: event[1])]


def test_validation_is_an_instant_of_its_own_and_keeps_nothing_for_backward() -> None:
    scene = _scene()
    without, peaks = (
        rehearse(scene).trace.peaks(),
        rehearse(replace(scene, validation=(scene.tokens, scene.supervised))).trace.peaks(),
    )
    assert "validation" not in without
    assert {name: peaks[name] for name in without} == without
    assert 0 < peaks["validation"] < peaks["backward"]


@pytest.mark.parametrize("rows", [1, 8])
def test_generation_holds_the_weights_and_the_cache_at_least(rows: int) -> None:
    """Keys and values of every layer, in 2 bytes, for prompt and answer."""
    scene = _scene(make_config(layers=4), tokens=448)
    cache = 2 * 4 * 3 * 64 * (448 + 63) * rows * 2
    found = rehearse_generation(scene, rows=rows, prompt_tokens=scene.tokens, new_tokens=64)
    assert found >= survey(scene).weight_bytes + cache
    assert found < 2 * (survey(scene).weight_bytes + cache)


def test_generation_takes_more_with_every_row_and_token() -> None:
    scene = _scene()
    few = rehearse_generation(scene, rows=8, prompt_tokens=scene.tokens, new_tokens=64)
    assert few < rehearse_generation(scene, rows=64, prompt_tokens=scene.tokens, new_tokens=64)
    assert few < rehearse_generation(scene, rows=8, prompt_tokens=scene.tokens, new_tokens=4096)


def test_an_encoder_is_no_causal_language_model() -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    with pytest.raises(ModelError, match="bert is an encoder"):
        rehearse(_scene(config))


def test_capped_attention_scores_are_rehearsed_as_they_are_trained() -> None:
    """Gemma 2: SDPA would leave the cap out, so its attention holds the scores themselves."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
    }

    def peak(tokens: int) -> int:
        config = {"model_type": "gemma2", "num_hidden_layers": 2, **shape}
        return replay(rehearse(_scene(config, tokens=tokens, supervised=8)).trace.stream()).allocated_bytes

    assert peak(2048) - peak(1024) > 2.5 * (peak(1024) - peak(512))


def test_a_model_that_stretches_its_positions_can_be_rehearsed() -> None:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "pad_token_id": 0,
    }
    config = {
        "model_type": "phi3",
        "num_hidden_layers": 2,
        **shape,
        "original_max_position_embeddings": 64,
        "rope_scaling": rope,
    }
    assert rehearse(_scene(config, tuning=Lora(kind="lora", rank=4))).unreached == ()
