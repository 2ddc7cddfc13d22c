"""What a rehearsal refuses and how it says so; what differs between devices; what its record holds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.errors import ModelError
from finefit.objective.batch import Batch, Forward
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import Rates, phase_seconds, total_flops
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.generation import rehearse_answers
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.models import Lora
from finefit.spec.schema import Dpo
from tests.rehearse.conftest import (
    FULL,
    LORA,
    held_before_the_last_step,
    kept_after_forward,
    last_step,
    make_cfg,
    make_config,
    peak,
)

ON_Q = Lora(kind="lora", rank=8, targets=("q_proj",))
TURING: dict[str, Any] = {"capability": (7, 5), "precision": "fp32"}
PROCESSOR: dict[str, Any] = {"device": "cpu", "capability": (0, 0), "precision": "fp32"}


def _cfg(config: dict[str, Any] | None = None, **changes: Any) -> StepConfig:
    return make_cfg(config, **({"tuning": ON_Q} | changes))


# what is refused


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"hidden_size": 64}, "no model_type"),
        (make_config(model_type="nonesuch"), "nonesuch"),
        ({"model_type": "vit"}, "no causal language model of type vit"),
        ({"model_type": "t5"}, "no causal language model of type t5"),
        ({"model_type": "bert", "num_hidden_layers": 2}, "bert is an encoder"),
        (make_config(hidden_size="wide"), "hidden_size"),
        (make_config(num_attention_heads=7), "not a multiple of the number of attention heads"),
    ],
    ids=["no type", "unknown type", "vision", "encoder and decoder", "encoder", "no number", "no divisor"],
)
def test_a_config_of_no_causal_language_model_is_refused_with_a_remedy(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem) as refused:
        rehearse(_cfg(config))
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
        rehearse(_cfg(levers={"recompute": recompute}), _with_mlp(1, change))
    assert "layers.1.mlp" in refused.value.problem
    assert operation in refused.value.problem
    assert ".item()" in refused.value.remedy
    assert "boolean mask" in refused.value.remedy


def test_shapes_that_do_not_fit_are_not_blamed_on_reading_values() -> None:
    def change(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return forward(hidden[..., 1:])

    with pytest.raises(ModelError, match=r"aten::\S+ in \S+layers\.1\.mlp\S+ failed on fake tensors") as refused:
        rehearse(_cfg(), _with_mlp(1, change))
    assert ".item()" not in refused.value.remedy
    assert "published model" in refused.value.remedy


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize("tuning", [ON_Q, FULL], ids=["lora", "full"])
def test_a_model_with_everything_frozen_is_refused(tuning: Lora) -> None:
    with pytest.raises(ModelError, match="nothing is trained") as refused:
        rehearse(_cfg(tuning=tuning), _freeze)
    assert "requires_grad" in refused.value.remedy


# what differs between devices


def _operations(found: Rehearsal) -> set[str]:
    return {block.operation for block in found.trace.blocks}


def test_dropout_costs_one_byte_for_each_element_on_a_card() -> None:
    """The dropped input is kept in place of the input; the mask comes on top, but for the first layer, whose input
    needs no gradient."""
    plain, dropped = (rehearse(_cfg(tuning=ON_Q.model_copy(update={"dropout": share}))) for share in (0.0, 0.1))
    assert kept_after_forward(dropped) - kept_after_forward(plain) == 512 * 576


def test_dropout_costs_what_its_input_does_on_the_processor() -> None:
    plain, dropped = (
        rehearse(_cfg(tuning=ON_Q.model_copy(update={"dropout": share}), **PROCESSOR)) for share in (0.0, 0.1)
    )
    assert kept_after_forward(dropped) - kept_after_forward(plain) == 4 * 512 * 576


def test_a_turing_card_takes_the_efficient_kernel_with_repeated_heads() -> None:
    """Keys and values of 3 heads are copied out for 9."""
    ampere, turing = rehearse(_cfg()), rehearse(_cfg(**TURING))
    assert "aten::_scaled_dot_product_flash_attention" in _operations(ampere)
    assert "aten::_scaled_dot_product_efficient_attention" in _operations(turing)
    assert not {name for name in _operations(turing) if "flash" in name or "cudnn" in name}

    def copies(found: Rehearsal, num_bytes: int) -> int:
        made = Counter(
            b.operation for b in found.trace.blocks if b.module.endswith("self_attn") and b.num_bytes == num_bytes
        )
        return made["aten::clone"]

    of_two_layers_in_two_steps = 2 * 2 * 2
    assert copies(turing, 4 * 512 * 9 * 64) - copies(ampere, 2 * 512 * 9 * 64) == of_two_layers_in_two_steps


def test_hopper_takes_cudnn_and_blackwell_for_desktops_does_not() -> None:
    assert [
        rehearse(_cfg(capability=capability)).kernels.attention_kernel for capability in ((8, 0), (9, 0), (12, 0))
    ] == [
        "flash",
        "cudnn",
        "flash",
    ]


def test_a_turing_card_holds_no_weight_in_bf16() -> None:
    half, full = measure_size(_cfg()), measure_size(_cfg(**TURING))
    assert full.weight_bytes == 4 * full.parameters
    assert half.weight_bytes == 2 * (half.parameters - half.trainable) + 4 * half.trainable
    held = held_before_the_last_step(rehearse(_cfg(**TURING)))
    assert held["weights"] >= 4 * (full.parameters - full.trainable)


def test_the_processor_needs_no_workspace() -> None:
    assert "workspace" not in rehearse(_cfg(**PROCESSOR)).trace.peaks()
    assert "workspace" in rehearse(_cfg()).trace.peaks()


def test_a_workspace_is_taken_behind_the_result_of_a_product() -> None:
    """As a card does it; the other way round blocks come to lie elsewhere."""
    blocks = rehearse(_cfg()).trace.blocks
    before = [blocks[at - 1].operation for at, block in enumerate(blocks) if block.instant == "workspace"]
    assert len(before) == 2
    assert set(before) <= {"aten::mm", "aten::bmm", "aten::addmm"}


# what the record holds

RECORDED: dict[str, StepConfig] = {
    "lora": _cfg(validation=(100, 99)),
    "full": _cfg(tuning=FULL, levers={"recompute": 2}),
    "turing": _cfg(**TURING),
    "processor": _cfg(**PROCESSOR),
    "quick": _cfg(is_quick=True, accumulates=True),
}


@pytest.mark.parametrize("cfg", RECORDED.values(), ids=RECORDED)
def test_a_rehearsal_agrees_with_itself(cfg: StepConfig) -> None:
    """Components sum to what is allocated at the peak, the highest instant is the peak, and a second rehearsal says the
    same."""
    trace = rehearse(cfg).trace
    found = replay(trace.stream())
    assert sum(trace.components(found.peak_at).values()) == found.allocated_bytes
    assert max(trace.peaks().values()) == found.allocated_bytes
    again = rehearse(cfg).trace
    assert replace(again, events=[]) == replace(trace, events=[])
    assert _frees_in_a_row_sorted(again.events) == _frees_in_a_row_sorted(trace.events)


def _frees_in_a_row_sorted(events: list[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
    """Autocast gives back its copies of the weights in no order."""
    return [sorted(row) for _, row in groupby(events, key=lambda event: event[1])]


def test_validation_is_an_instant_of_its_own_and_keeps_nothing_for_backward() -> None:
    cfg = _cfg()
    without, peaks = (
        rehearse(cfg).trace.peaks(),
        rehearse(replace(cfg, validation=(cfg.tokens, cfg.supervised))).trace.peaks(),
    )
    assert "validation" not in without
    assert {name: peaks[name] for name in without} == without
    assert 0 < peaks["validation"] < peaks["backward"]


@pytest.mark.parametrize("rows", [1, 8])
def test_generation_holds_the_weights_and_the_cache_at_least(rows: int) -> None:
    """Keys and values of every layer, in 2 bytes, for prompt and answer."""
    cfg = _cfg(make_config(layers=4), tokens=448)
    cache = 2 * 4 * 3 * 64 * (448 + 63) * rows * 2
    found = rehearse_answers(cfg, rows=rows, prompt_tokens=cfg.tokens, new_tokens=64).reserved_bytes
    assert found >= measure_size(cfg).weight_bytes + cache
    assert found < 2 * (measure_size(cfg).weight_bytes + cache)


def test_generation_takes_more_with_every_row_and_token() -> None:
    cfg = _cfg()
    few = rehearse_answers(cfg, rows=8, prompt_tokens=cfg.tokens, new_tokens=64).reserved_bytes
    assert few < rehearse_answers(cfg, rows=64, prompt_tokens=cfg.tokens, new_tokens=64).reserved_bytes
    assert few < rehearse_answers(cfg, rows=8, prompt_tokens=cfg.tokens, new_tokens=4096).reserved_bytes


TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def test_capped_attention_scores_are_rehearsed_as_they_are_trained() -> None:
    """Gemma 2: SDPA would leave the cap out, so its attention holds the scores themselves."""
    config = {"model_type": "gemma2", "head_dim": 16, **TINY}
    short, middle, long = (peak(rehearse(_cfg(config, tokens=tokens, supervised=8))) for tokens in (512, 1024, 2048))
    assert long - middle > 2.5 * (middle - short)


def test_a_model_that_stretches_its_positions_can_be_rehearsed() -> None:
    longest = {"original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    config = {"model_type": "phi3", "pad_token_id": 0, "rope_scaling": rope | longest, **TINY, **longest}
    assert rehearse(_cfg(config, tuning=Lora(kind="lora", rank=4))).unreached == ()


# What is rehearsed of packed rows is what runs: the kernel for rows of any length on a card, a call for each row
# elsewhere.

TOKENS, ROWS, HEADS, KV_HEADS, WIDTH, LAYERS = 256, 4, 9, 3, 64, 2
ON_CARDS: dict[str, dict[str, Any]] = {
    "Ampere": {"capability": (8, 0)},
    "Ada": {"capability": (8, 9)},
    "Hopper": {"capability": (9, 0)},
}
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "Turing": {"capability": (7, 5), "precision": "fp32"},
    "processor": {"device": "cpu", "capability": (0, 0), "precision": "fp32"},
}
KEPT = "aten::_flash_attention_forward"


def _cfg_packing(*, packing: bool = True, levers: dict[str, Any] | None = None, **changes: Any) -> StepConfig:
    plain = {"tokens": TOKENS, "supervised": 100, "rows_per_step": ROWS, "tuning": FULL}
    return make_cfg(
        make_config(layers=LAYERS),
        levers={"micro_batch": ROWS, "packing": packing} | (levers or {}),
        **(plain | changes),
    )


def _blocks(found: Rehearsal, operation: str, instant: str) -> list[int]:
    """Sizes in the order in which they were made, of the steady step."""
    start = last_step(found.trace)
    blocks = [found.trace.blocks[ident] for ident, is_new in found.trace.events[start:] if is_new]
    return [block.num_bytes for block in blocks if (block.operation, block.instant) == (operation, instant)]


@pytest.mark.parametrize("card", ON_CARDS.values(), ids=ON_CARDS)
def test_on_a_card_one_kernel_makes_one_answer_and_its_sums(card: dict[str, Any]) -> None:
    found = rehearse(_cfg_packing(**card))
    answer, sums, seeds = ROWS * TOKENS * HEADS * WIDTH * 2, HEADS * ROWS * TOKENS * 4, 2 * 8
    made = _blocks(found, KEPT, "forward")
    assert sorted(size for size in made if size > 8) == sorted([answer, sums, seeds] * LAYERS)
    assert not {block.operation for block in found.trace.blocks if "dot_product" in block.operation}
    padded = rehearse(_cfg_packing(packing=False, **card))
    joined, usual = (_blocks(run, "aten::cat", "forward").count(answer) for run in (found, padded))
    assert joined == usual == LAYERS  # of rotated queries; answers are not joined


@pytest.mark.parametrize("rows_per_step", [ROWS, 40])
def test_backward_takes_a_tile_more_for_every_row_that_a_pack_may_have(rows_per_step: int) -> None:
    found = rehearse(_cfg_packing(rows_per_step=rows_per_step))
    padded = ROWS * TOKENS + 128 * rows_per_step
    hidden = [HEADS * padded * 4, HEADS * padded * WIDTH * 4, *[ROWS * TOKENS * HEADS * WIDTH * 2] * 2]
    made = _blocks(found, "aten::_flash_attention_backward", "backward")
    gradients = [ROWS * TOKENS * heads * WIDTH * 2 for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert sorted(made) == sorted((hidden + gradients) * LAYERS)


@pytest.mark.parametrize("place", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_elsewhere_every_row_is_attended_by_itself(place: dict[str, Any]) -> None:
    found = rehearse(_cfg_packing(**place))
    names = {
        block.operation
        for block in found.trace.blocks
        if "scaled_dot_product" in block.operation and "backward" not in block.operation
    }
    (name,) = names
    answer = TOKENS * HEADS * WIDTH * 4
    assert _blocks(found, name, "forward").count(answer) == LAYERS * ROWS


def test_a_head_wider_than_the_kernel_takes_is_attended_row_by_row() -> None:
    wide = make_config(layers=LAYERS, head_dim=256)
    operations = {
        capability: {
            b.operation
            for b in rehearse(
                make_cfg(wide, levers={"micro_batch": 2, "packing": True}, capability=capability)
            ).trace.blocks
        }
        for capability in ((8, 9), (9, 0))
    }
    assert KEPT in operations[9, 0]
    assert KEPT not in operations[8, 9]


def test_attention_that_is_kept_is_not_computed_again() -> None:
    again, kept = (
        rehearse(_cfg_packing(levers={"recompute": LAYERS, "keep_attention": keep})) for keep in (False, True)
    )
    answer = ROWS * TOKENS * HEADS * WIDTH * 2
    assert _blocks(again, KEPT, "backward").count(answer) == LAYERS
    assert _blocks(kept, KEPT, "backward").count(answer) == 0


@pytest.mark.parametrize("place", [*ON_CARDS.values(), *ONE_BY_ONE.values()], ids=[*ON_CARDS, *ONE_BY_ONE])
def test_full_packs_cost_what_full_padded_micro_batches_do(place: dict[str, Any]) -> None:
    """Within the buffers of attention: the worst pack holds the tokens of the worst padded micro-batch."""
    packed, padded = (peak(rehearse(_cfg_packing(packing=packing, **place))) for packing in (True, False))
    assert packed == pytest.approx(padded, rel=0.05)
    packed_flops, padded_flops = (
        total_flops(rehearse(_cfg_packing(packing=packing, **place)).trace) for packing in (True, False)
    )
    assert packed_flops == pytest.approx(padded_flops, rel=0.01)


@pytest.mark.parametrize("place", [ON_CARDS["Ada"], ONE_BY_ONE["processor"]], ids=["card", "processor"])
def test_packed_layers_repeat_so_that_a_few_stand_for_all(place: dict[str, Any]) -> None:
    whole = replace(_cfg_packing(validation=(TOKENS, 10), **place), config=make_config(layers=9))
    assert peak(rehearse_extrapolated(whole)) == peak(rehearse(whole))


# Preference pairs in a rehearsal: two sequences a row, a pass through the reference, and the fault that leaves a
# policy without gradients.

PAIRS, CACHED = Dpo(kind="dpo"), Dpo(kind="dpo", reference="cached")
GOES_ON = Lora(kind="lora", rank=8, alpha=16, adapter="adapter")
RATES = Rates(half_flops=100e12, full_flops=10e12, bytes_per_second=1e12, host_factor=0.0)
"""The card's time alone: on a model this small the host would decide, and it dispatches less where nothing is kept."""


def _cfg_objectives(**changes: Any) -> StepConfig:
    return make_cfg(make_config(layers=2), **({"objective": PAIRS} | changes))


def test_a_pair_takes_what_two_rows_do() -> None:
    rows = make_cfg(make_config(layers=2), levers={"micro_batch": 2})
    assert kept_after_forward(rehearse(_cfg_objectives())) == kept_after_forward(rehearse(rows))


def test_the_reference_is_a_pass_of_its_own_that_keeps_nothing_for_backward() -> None:
    peaks = rehearse(_cfg_objectives()).trace.peaks()
    assert 0 < peaks["reference"] < peaks["backward"]
    assert "reference" not in rehearse(make_cfg(make_config(layers=2))).trace.peaks()


def test_the_reference_comes_before_the_policy() -> None:
    """While nothing is kept for backward yet."""
    found = rehearse(_cfg_objectives()).trace
    step = found.instants[last_step(found) :]
    assert step.index("reference") < step.index("forward")


def _reference_seconds(cfg: StepConfig) -> float:
    return phase_seconds(rehearse(cfg).trace, RATES)["reference"]


def test_a_reference_in_every_step_takes_about_as_long_as_the_forward_pass() -> None:
    phases = phase_seconds(rehearse(_cfg_objectives()).trace, RATES)
    assert phases["reference"] == pytest.approx(phases["forward"] + phases["loss"], rel=0.35)


@pytest.mark.parametrize(("objective", "tuning"), [(CACHED, LORA), (PAIRS, FULL)], ids=["cached", "without an adapter"])
def test_a_kept_reference_is_computed_before_the_first_step_and_never_again(objective: Dpo, tuning: Any) -> None:
    cfg = _cfg_objectives(objective=objective, tuning=tuning)
    found = rehearse(cfg).trace
    assert _reference_seconds(cfg) == 0
    assert found.instants.index("reference") < found.instants.index("forward")
    assert found.peaks()["reference"] < found.peaks()["backward"]
    assert "reference" not in found.instants[last_step(found) :]


def test_going_on_from_an_adapter_holds_a_frozen_copy_of_it() -> None:
    fresh, going_on = (rehearse(_cfg_objectives(tuning=tuning)) for tuning in (LORA, GOES_ON))
    held = [held_before_the_last_step(found) for found in (fresh, going_on)]
    assert held[1]["adapters"] == 2 * held[0]["adapters"]
    assert held[1]["optimizer"] == held[0]["optimizer"]
    assert going_on.unreached == ()


def test_a_kept_reference_needs_no_copy() -> None:
    cfgs = (_cfg_objectives(objective=CACHED, tuning=tuning) for tuning in (LORA, GOES_ON))
    fresh, cached = (held_before_the_last_step(rehearse(cfg))["adapters"] for cfg in cfgs)
    assert cached == fresh


def test_validation_of_pairs_has_a_reference_too() -> None:
    """A pass more, but none of what it makes is left when the policy answers."""
    cfg = _cfg_objectives(validation=(512, 511))
    peaks = rehearse(cfg).trace.peaks()
    assert 0 < peaks["validation"] < peaks["backward"]


# the policy under no_grad


def _blind(forward: Forward) -> Forward:
    """As one writes it who means the reference."""

    def through(batch: Batch) -> Tensor:
        with torch.no_grad():
            return forward(batch)

    return through


def _blind_backbone(model: nn.Module) -> None:
    backbone = model.get_submodule("base_model.model.model")
    backbone.forward = torch.no_grad()(backbone.forward)


def _blind_layers(model: nn.Module) -> None:
    for layer in model.get_submodule("base_model.model.model").layers:  # type: ignore[union-attr]
        layer.forward = torch.no_grad()(layer.forward)


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "the whole call": {"bend": _blind},
    "the backbone": {"adjust": _blind_backbone},
    "its layers": {"adjust": _blind_layers},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("objective", [PAIRS, CACHED], ids=["auto", "cached"])
def test_a_policy_under_no_grad_is_found_and_named(fault: dict[str, Callable[..., Any]], objective: Dpo) -> None:
    """The reference is rightly computed so, and must not hide that the policy is too."""
    sound, found = (
        rehearse(_cfg_objectives(objective=objective)),
        rehearse(_cfg_objectives(objective=objective), **fault),
    )
    assert sound.unreached == ()
    assert len(found.unreached) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert found.causes
    assert all("is computed under no_grad" in cause for cause in found.causes)
