"""A few layers stretched to the whole depth give what the whole depth gives: memory to the byte, work to the
operation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from finefit.artifacts.records import Levers
from finefit.plan.search import TYPICAL_RATES
from finefit.rehearse import generation
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import phase_seconds, total_flops
from finefit.rehearse.fake_kernels import DeviceKernels
from finefit.rehearse.fake_model import StepConfig, build_on_meta, read_config
from finefit.rehearse.generation import GenerationRehearsal, extrapolated_bytes, rehearse_answers
from finefit.rehearse.layer_extrapolation import (
    REHEARSED_PERIODS,
    LayerRun,
    LayersDiffer,
    extrapolate,
    find_inconsistencies,
)
from finefit.rehearse.layer_kinds import (
    layer_kinds,
    layer_runs,
    memo_key,
    names_layers,
    rehearse_extrapolated,
    tower_cuts,
    tower_kinds,
    with_layers,
    with_tower_layers,
)
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block, Cost, Trace
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import AdamW, Dpo
from finefit.vision.family import Grid
from tests.rehearse.conftest import FULL, LORA, make_cfg, make_config
from tests.slow_cases import slow_but
from tests.vision_models import vlm_config

NARROW = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FEW = Lora(kind="lora", rank=8, targets=("q_proj", "down_proj"))
"""Adapters on two of seven products: half the operations, the same paths."""
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window": 64}


def _config(layers: int = 6, **more: Any) -> dict[str, Any]:
    return make_config(layers=layers, **(NARROW | more))


def _cfg(config: dict[str, Any] | None = None, **changes: Any) -> StepConfig:
    return make_cfg(config or _config(), **({"tuning": FEW} | changes))


def _wide(**changes: Any) -> StepConfig:
    return make_cfg(make_config(layers=6), **changes)


def _lora(**given: Any) -> Lora:
    return LORA.model_copy(update=given)


def _alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[at % 2] for at in range(layers)]


CONFIGS: dict[str, StepConfig] = {
    "every linear layer adapted, all recomputed": _cfg(tuning=LORA, is_quick=True, levers={"recompute": 6}),
    "none recomputed": _cfg(),
    "6 of 11 recomputed": _cfg(_config(11), is_quick=True, levers={"recompute": 6}),
    "2 of 8 recomputed, too few to repeat": _cfg(_config(8), is_quick=True, levers={"recompute": 2}),
    "accumulating": _cfg(accumulates=True, levers={"recompute": 6}),
    "loss in chunks": _cfg(is_quick=True, levers={"loss_chunk": 128}),
    "inputs offloaded": _cfg(levers={"recompute": 6, "offload": True}),
    "6 of 11 recomputed and offloaded": _cfg(_config(11), is_quick=True, levers={"recompute": 6, "offload": True}),
    "attention kept": _cfg(is_quick=True, levers={"recompute": 6, "keep_attention": True}),
    "MLP in tiles": _cfg(is_quick=True, levers={"mlp_tiles": 4}),
    "full tuning": _cfg(tuning=FULL),
    "full tuning, tied": _cfg(_config(tied=True), tuning=FULL),
    "4 bits, optimizer in 8": _cfg(
        tuning=Lora(kind="lora", rank=8, targets=("q_proj",), base_bits=4), optimizer=AdamW(lr=1e-4, kind="adamw_8bit")
    ),
    "quick": _cfg(is_quick=True, levers={"recompute": 6}),
    "quick, accumulating": _cfg(is_quick=True, accumulates=True),
    "validated": _cfg(validation=(100, 99)),
    "processor": _cfg(device="cpu", capability=(0, 0), precision="fp32"),
    "processor, from a file in bf16": _cfg(
        _config(dtype="bfloat16"), device="cpu", capability=(0, 0), precision="fp32"
    ),
    "processor, packed from a file": _cfg(
        tuning=Lora(kind="lora", rank=8, targets=("q_proj",), base_bits=4),
        device="cpu",
        capability=(0, 0),
        precision="fp32",
    ),
    "kinds of layers alternate": _cfg(
        _config(10, **GEMMA, layer_types=_alternating(10)),
        tokens=128,
        supervised=127,
        is_quick=True,
        levers={"recompute": 10},
    ),
    "a period of six kinds": _cfg(
        _config(30, **GEMMA), tokens=128, supervised=127, is_quick=True, tuning=Lora(kind="lora", targets=("q_proj",))
    ),
    "experts": _cfg(_config(**MOE), tuning=LORA, is_quick=True, levers={"recompute": 6}),
    "experts in full": _cfg(_config(**MOE), tuning=FULL),
    "8 bits, recomputed": _wide(tuning=_lora(base_bits=8), levers={"recompute": 6}),
    "subset, recomputed": _wide(tuning=Subset(kind="subset", trainable=("layers.*.mlp",)), levers={"recompute": 6}),
    "8-bit moments": _wide(tuning=FULL, optimizer=AdamW(lr=1e-4, kind="adamw_8bit")),
    "paged moments": _wide(tuning=FULL, optimizer=AdamW(lr=1e-4, kind="paged_adamw_8bit")),
    "fp16": _wide(precision="fp16", tuning=_lora(weights="bf16")),
    "pairs": _wide(objective=Dpo(kind="dpo")),
    "pairs, recomputed": _wide(objective=Dpo(kind="dpo"), levers={"recompute": 6, "loss_chunk": 256}),
    "pairs, a cached reference": _wide(objective=Dpo(kind="dpo", reference="cached"), levers={"recompute": 6}),
    "pairs, an adapter continued": _wide(objective=Dpo(kind="dpo"), tuning=_lora(adapter="adapter")),
}


def kinds_of_events(trace: Trace) -> Counter[tuple[str, int, int, bool]]:
    """Every allocation and free by instant, size and layer, in any order. What the update makes for no layer in
    particular is a few bytes for each trained tensor, and the piece that loading takes first counts buffers or not:
    both are left out."""
    pairs = zip(trace.events, trace.instants, trace.units, strict=True)
    return Counter(
        (instant, unit, trace.blocks[ident].num_bytes, is_new)
        for (ident, is_new), instant, unit in pairs
        if trace.blocks[ident].operation != WARM_UP and (instant, unit) != ("update", OUTSIDE)
    )


@pytest.mark.parametrize(
    "cfg",
    slow_but(
        [
            *("none recomputed", "6 of 11 recomputed and offloaded", "full tuning", "kinds of layers alternate"),
            *("experts", "subset, recomputed", "8-bit moments", "pairs"),
        ],
        CONFIGS,
    ),
)
def test_a_stretched_rehearsal_is_the_whole_one(cfg: StepConfig) -> None:
    memo: dict[str, Rehearsal] = {}
    whole, stretched = rehearse(cfg), rehearse_extrapolated(cfg, memo)
    assert memo_key(cfg) not in memo  # fewer layers were executed
    assert replay(stretched.trace.stream()) == replay(whole.trace.stream())
    assert len(stretched.trace.events) == len(whole.trace.events)
    assert kinds_of_events(stretched.trace) == kinds_of_events(whole.trace)
    assert total_flops(stretched.trace) == total_flops(whole.trace)
    assert stretched.trace.host_bytes == whole.trace.host_bytes
    assert stretched.trace.peaks() == whole.trace.peaks()
    assert stretched.unreached == whole.unreached == ()
    assert not list(find_inconsistencies(stretched.trace))


def test_layers_whose_events_do_not_repeat_are_all_executed() -> None:
    cfg, memo = _wide(tuning=_lora(base_bits=4, dora=True)), dict[str, Rehearsal]()
    assert rehearse_extrapolated(cfg, memo) is memo[memo_key(cfg)]


def test_layers_without_rotary_embedding_are_not_taken_for_others() -> None:
    """Every fourth one of smollm3."""
    cfg = _cfg(
        _config(12, model_type="smollm3", pad_token_id=0), tuning=FULL, is_quick=True, tokens=128, supervised=127
    )
    assert replay(rehearse_extrapolated(cfg).trace.stream()) == replay(rehearse(cfg).trace.stream())


def test_a_depth_below_four_periods_is_executed_as_it_is() -> None:
    """gemma3 repeats after six layers; of thirteen none can be left out."""
    cfg = _cfg(
        _config(13, **GEMMA), tokens=128, supervised=127, is_quick=True, tuning=Lora(kind="lora", targets=("q_proj",))
    )
    memo: dict[str, Rehearsal] = {}
    found = rehearse_extrapolated(cfg, memo)
    assert layer_runs(layer_kinds(read_config(cfg.config)), 0) == (LayerRun(13, 6),)
    assert list(memo) == [memo_key(cfg)]
    assert found is memo[memo_key(cfg)]


def test_another_depth_or_number_of_recomputed_layers_executes_nothing_new() -> None:
    memo: dict[str, Rehearsal] = {}
    shallow = rehearse_extrapolated(_cfg(_config(8), levers={"recompute": 4}, is_quick=True), memo)
    for layers, recompute in ((10, 4), (12, 6), (40, 20)):
        deep = rehearse_extrapolated(_cfg(_config(layers), levers={"recompute": recompute}, is_quick=True), memo)
        assert len(deep.trace.events) > len(shallow.trace.events)
    assert len(memo) == 1


@pytest.mark.parametrize(
    ("first", "second", "head", "num_executed"),
    [
        ((8, 6), (8, 9), 64, 1),
        ((8, 0), (8, 9), 64, 1),  # differ in the widest head alone
        ((8, 0), (8, 9), 256, 2),
        ((8, 9), (12, 0), 64, 1),  # differ in the size of workspaces
        ((9, 0), (12, 0), 64, 2),  # differ in the kernel of attention
    ],
)
def test_cards_whose_kernels_do_the_same_share_what_was_executed(
    first: tuple[int, int], second: tuple[int, int], head: int, num_executed: int
) -> None:
    """And what they share is what each would have executed itself."""
    memo: dict[str, Rehearsal] = {}
    config = _config(2, head_dim=head)
    for capability in (first, second, first):
        cfg = _cfg(config, capability=capability, is_quick=True, levers={"packing": True})
        assert rehearse_extrapolated(cfg, memo).trace == rehearse(cfg).trace
    assert len(memo) == num_executed


def test_what_is_in_the_memo_is_not_changed_by_stretching_it() -> None:
    memo: dict[str, Rehearsal] = {}
    cfg = _cfg(is_quick=True)
    first, second = (rehearse_extrapolated(cfg, memo).trace for _ in range(2))
    assert first == second
    short = next(iter(memo.values())).trace
    rehearse_extrapolated(_cfg(_config(4), is_quick=True), memo)
    assert next(iter(memo.values())).trace is short
    assert max(short.units) == REHEARSED_PERIODS - 1


@pytest.mark.parametrize(
    ("num_layers", "period", "missing", "rehearsed"),
    [
        (1, 1, 0, 1),
        (4, 1, 0, 4),
        (5, 1, 1, 4),
        (28, 1, 24, 4),
        (13, 6, 0, 13),
        (24, 6, 0, 24),
        (30, 6, 1, 24),
        (34, 6, 1, 28),
        (9, 2, 0, 9),
        (11, 2, 1, 9),
    ],
)
def test_a_run_leaves_out_whole_periods_beyond_four(num_layers: int, period: int, missing: int, rehearsed: int) -> None:
    run = LayerRun(num_layers, period)
    assert (run.missing, run.rehearsed) == (missing, rehearsed)
    assert run.rehearsed + run.missing * period == num_layers


def test_recomputed_and_kept_layers_are_two_runs() -> None:
    assert layer_runs(["layer"] * 9, 4) == (LayerRun(4), LayerRun(5))
    assert layer_runs(["layer"] * 9, 0) == layer_runs(["layer"] * 9, 9) == (LayerRun(9),)
    assert layer_runs(["local", "local", "global"] * 3, 0) == (LayerRun(9, 3),)
    assert layer_runs(["dense", "sparse", "sparse", "sparse"], 0) == (
        LayerRun(4, 4),
    )  # a first layer unlike the rest never repeats


def test_a_cut_config_keeps_the_kinds_of_its_layers() -> None:
    whole = {"num_hidden_layers": 4, "layer_types": _alternating(4), "mlp_only_layers": [1]}
    short = with_layers(whole, ["sliding_attention", "full_attention dense"])
    assert short == {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_only_layers": [1],
    }


def test_one_dense_layer_among_experts_is_rehearsed_in_full() -> None:
    cfg = _cfg(_config(**MOE, mlp_only_layers=[0]), tuning=FULL, is_quick=True)
    memo: dict[str, Rehearsal] = {}
    found = rehearse_extrapolated(cfg, memo)
    assert list(memo) == [memo_key(cfg)]
    assert replay(found.trace.stream()) == replay(rehearse(cfg).trace.stream())


def _layers_that(sizes: list[int]) -> Trace:
    """Each layer makes one block in forward, in order, and frees it in backward, in reverse."""
    trace = Trace()
    for layer, size in enumerate(sizes):
        trace.allocate(Block(size, "forward", f"layers.{layer}", "aten::mm", layer), layer)
        trace.costs["forward", layer] = Counter({Cost(1.0, 1.0, True): 1})
    for layer in reversed(range(len(sizes))):
        trace.free(layer, layer, "backward")
    return trace


def test_layers_in_a_row_are_written_again_in_their_order() -> None:
    found = extrapolate(_layers_that([512] * 4), (LayerRun(7),))
    assert found.units == [*range(7), *reversed(range(7))]
    assert found.blocks[found.events[6][0]].unit == 6
    assert total_flops(found) == 7
    assert not list(find_inconsistencies(found))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([512, 1024, 1024, 1024], id="first and second"),
        pytest.param([512, 512, 1024, 512], id="second and third"),
    ],
)
def test_layers_that_do_not_repeat_are_an_error_and_never_an_estimate(sizes: list[int]) -> None:
    with pytest.raises(LayersDiffer, match=r"differ"):
        extrapolate(_passed_on(sizes), (LayerRun(7),))


def _passed_on(sizes: list[int]) -> Trace:
    """Each layer frees what the layer before it made."""
    trace = Trace()
    for layer, size in enumerate(sizes):
        trace.allocate(Block(size, "forward", f"layers.{layer}", "aten::mm", layer), layer)
        if layer:
            trace.free(layer - 1, layer, "forward")
    return trace


def test_layers_that_are_visited_out_of_order_are_an_error() -> None:
    trace = Trace()
    for layer in (1, OUTSIDE, 1, OUTSIDE, 2, OUTSIDE, 2):
        trace.allocate(Block(512, "forward", "", "aten::mm", layer), layer)
        trace.allocate(Block(512, "loss", "", "aten::mm", OUTSIDE), OUTSIDE)
    with pytest.raises(LayersDiffer, match="differ"):
        extrapolate(trace, (LayerRun(7),))


def test_a_block_that_is_freed_twice_is_found() -> None:
    trace = _layers_that([512, 512])
    assert not list(find_inconsistencies(trace))
    trace.free(0, OUTSIDE, "update")
    assert len(list(find_inconsistencies(trace))) == 1
    assert len(list(find_inconsistencies(replace(trace, events=[(0, True), (0, True)])))) == 1


# A few layers of a vision tower stretched to its depth give what all of them give: memory to the byte, work to the
# operation.

GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "qwen2_vl": ((1, 4, 8),),
    "qwen2_5_vl": ((1, 8, 8), (1, 8, 4)),
    "qwen3_vl": ((1, 4, 8),),
    "llava": ((1,),),
    "llava_next": ((1, 2, 4, 8),),
    "idefics3": ((1, 2),),
    "smolvlm": ((1, 2),),
    "gemma3": ((1,),),
    "paligemma": ((1,),),
}
TOWERS: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 7},
    "qwen2_5_vl": {"depth": 9, "fullatt_block_indexes": [3, 7]},
    "qwen3_vl": {"depth": 8, "deepstack_visual_indexes": [5]},
}
LANGUAGE = Lora(kind="lora", rank=4, targets=("q_proj",))
BOTH = Lora(kind="lora", rank=4, targets={"language": ("q_proj",), "vision": "all-linear"})
PROJECTOR = Subset(kind="subset", trainable=("projector",))


def _config_towers(family: str, layers: int = 1, **vision: Any) -> dict[str, Any]:
    tower = TOWERS.get(family, {"num_hidden_layers": 7}) | vision
    values: dict[str, Any] = vlm_config(
        family, vision_config=tower, text_config={"num_hidden_layers": layers} | _kinds(family, layers)
    ).to_dict()
    return values


def _kinds(family: str, layers: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * layers} if family == "gemma3" else {}


def _cfg_towers(family: str, tuning: Tuning = BOTH, config: dict[str, Any] | None = None, **changes: Any) -> StepConfig:
    levers = changes.pop("levers", {})
    plain: dict[str, Any] = {
        "config": config or _config_towers(family),
        "tuning": tuning,
        "optimizer": AdamW(lr=1e-4),
        "device": "cuda",
        "capability": (9, 0),
        "precision": "bf16",
        "levers": Levers(**({"micro_batch": 2, "loss_chunk": 16, "adapter_inputs": "bf16"} | levers)),
        "tokens": 100,
        "supervised": 20,
        "accumulates": False,
        "grids": GRIDS[family],
        "is_quick": True,
    }
    return StepConfig(**(plain | changes))


AGAIN: dict[str, Any] = {"recompute": 1}
APART = _config_towers("qwen2_5_vl", depth=12, fullatt_block_indexes=[5, 11])
CONFIGS_TOWERS: dict[str, StepConfig] = {
    "Qwen2-VL": _cfg_towers("qwen2_vl", levers=AGAIN),
    "Qwen2.5-VL, the tower frozen": _cfg_towers("qwen2_5_vl", LANGUAGE),
    "Qwen2.5-VL, the tower trained": _cfg_towers("qwen2_5_vl", is_quick=False, accumulates=True, validation=(90, 5)),
    "Qwen2.5-VL, computed again": _cfg_towers("qwen2_5_vl", levers=AGAIN),
    "Qwen2.5-VL, both towers deep": _cfg_towers(
        "qwen2_5_vl", config=_config_towers("qwen2_5_vl", 6), levers={"recompute": 6}
    ),
    "Qwen2.5-VL, images looked at one by one": _cfg_towers("qwen2_5_vl", config=APART, is_deterministic=True),
    "Qwen2.5-VL, nothing shown": _cfg_towers("qwen2_5_vl", LANGUAGE, grids=()),
    "Qwen3-VL": _cfg_towers("qwen3_vl"),
    "LLaVA": _cfg_towers("llava", is_quick=False),
    "LLaVA, several layers read": _cfg_towers(
        "llava", config=_config_towers("llava", num_hidden_layers=14) | {"vision_feature_layer": [-2, 6]}
    ),
    "LLaVA, the projector": _cfg_towers("llava", PROJECTOR, levers=AGAIN),
    "LLaVA-NeXT": _cfg_towers("llava_next", levers=AGAIN),
    "Idefics3": _cfg_towers("idefics3", is_quick=False, levers=AGAIN),
    "SmolVLM, fused": _cfg_towers("smolvlm", levers={"kernels": "fused"}),
    "Gemma 3": _cfg_towers("gemma3"),
    "PaliGemma": _cfg_towers("paligemma", levers=AGAIN),
    "PaliGemma on a processor": _cfg_towers(
        "paligemma", device="cpu", capability=(0, 0), precision="fp32", levers={"adapter_inputs": "fp32"}
    ),
}


@pytest.mark.parametrize(
    "cfg",
    slow_but(["Qwen2.5-VL, both towers deep", "Qwen3-VL", "SmolVLM, fused", "LLaVA, the projector"], CONFIGS_TOWERS),
)
def test_a_stretched_tower_is_the_whole_one(cfg: StepConfig) -> None:
    config, memo = read_config(cfg.config), dict[str, Rehearsal]()
    whole, stretched = rehearse(cfg).trace.beyond(len(layer_kinds(config))), rehearse_extrapolated(cfg, memo).trace
    assert memo_key(cfg) not in memo  # fewer layers were executed
    assert replay(stretched.stream()) == replay(whole.stream())
    assert len(stretched.events) == len(whole.events)
    assert kinds_of_events(stretched) == kinds_of_events(whole)
    assert stretched.peaks() == whole.peaks()
    assert total_flops(stretched) == total_flops(whole)
    assert phase_seconds(stretched, TYPICAL_RATES) == pytest.approx(phase_seconds(whole, TYPICAL_RATES), rel=1e-5)
    assert {block.module for block in stretched.blocks} >= {
        block.module for block in whole.blocks if block.instant == "forward"
    }
    assert not list(find_inconsistencies(stretched))


def test_windows_of_images_cost_four_layers_where_one_kernel_takes_pieces_of_any_length() -> None:
    memo: dict[str, Rehearsal] = {}
    rehearse_extrapolated(_cfg_towers("qwen2_5_vl", LANGUAGE), memo)
    (short,) = memo
    assert "'depth': 4" in short


def test_single_layers_that_are_named_are_rehearsed_as_they_are() -> None:
    """Layers of one kind are then unlike one another, and one that is named may be among those left out."""
    deep = Lora(kind="lora", rank=4, targets={"language": ("q_proj",), "vision": ("layers.5.self_attn.q_proj",)})
    cfg = _cfg_towers("llava", deep)
    assert replay(rehearse_extrapolated(cfg).trace.stream()) == replay(rehearse(cfg).trace.stream())


@pytest.mark.parametrize(
    ("tuning", "is_named"),
    [
        (LANGUAGE, False),
        (BOTH, False),
        (PROJECTOR, False),
        (Lora(kind="lora", targets=("layers.0.self_attn.q_proj",)), True),
        (Lora(kind="lora", targets={"vision": ("blocks.3.attn.qkv",)}), True),
        (Subset(kind="subset", trainable=("layers.*.mlp",)), False),
        (Subset(kind="subset", trainable=("layers.*.mlp", "layers.7")), True),
    ],
)
def test_a_layer_is_named_by_its_number(tuning: Tuning, *, is_named: bool) -> None:
    assert names_layers(_cfg_towers("llava", tuning)) is is_named


@pytest.mark.parametrize(
    ("family", "changes", "kinds"),
    [
        ("qwen2_5_vl", {}, "layer layer layer whole layer layer layer whole layer"),
        ("qwen3_vl", {}, "layer layer layer layer layer tapped layer layer"),
        ("llava", {}, "layer layer layer layer layer layer unused"),
        ("llava", {"vision_feature_layer": [-2, 3, 0]}, "layer layer tapped layer layer layer unused"),
        ("idefics3", {}, "layer layer layer layer layer layer layer"),
    ],
)
def test_kinds_of_layers_are_read_from_the_config_and_a_cut_one_keeps_them(
    family: str, changes: dict[str, Any], kinds: str
) -> None:
    values = _config_towers(family) | changes
    config = read_config(values)
    assert tower_kinds(config) == kinds.split()
    for runs, kept in tower_cuts(tower_kinds(config)):
        assert sum(run.num_layers for run in runs) == len(kinds.split())
        assert tower_kinds(read_config(with_tower_layers(values, config, kept))) == kept


def test_features_are_taken_behind_the_same_layers_of_a_cut_tower() -> None:
    values = _config_towers("llava") | {"vision_feature_layer": [-2, 3, 0, 3]}
    short = with_tower_layers(values, read_config(values), ["layer", "tapped", "layer", "unused"])
    assert short["vision_feature_layer"] == [3, 2, 0, 2]


def test_a_model_of_text_has_no_tower() -> None:
    assert tower_kinds(read_config({"model_type": "llama"})) == []


def test_what_an_answer_takes_is_found_by_a_few_layers_of_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, depths, built = _cfg_towers("qwen2_5_vl"), list[int](), build_on_meta

    def noted(given: StepConfig, kernels: DeviceKernels, *, answers: bool) -> nn.Module:
        depths.append(given.config["vision_config"]["depth"])
        return built(given, kernels, answers=answers)

    monkeypatch.setattr(generation, "build_on_meta", noted)

    def answered(given: StepConfig) -> GenerationRehearsal:
        return rehearse_answers(given, rows=2, prompt_tokens=90, new_tokens=8)

    assert extrapolated_bytes(cfg, answered) == answered(cfg).allocated_bytes
    assert depths == [4, 9]


# layers of two kinds


def _layers_that_towers(sizes: list[int], *, odd: bool = False) -> Trace:
    """Each makes one block that stays to the backward, and one of `size` that goes at once; then another stack has a
    layer."""
    trace = Trace()
    for at, size in enumerate(sizes, start=1):
        trace.allocate(Block(512, "forward", f"tower.{at - 1}", "aten::mm", at), at)
        for _ in range(2 if odd and size > 1024 else 1):
            trace.free(trace.allocate(Block(size, "forward", f"tower.{at - 1}", "aten::mm", at), at), at, "forward")
        trace.costs["forward", at] = {Cost(float(size), 1.0, True): 1}  # type: ignore[assignment]
    trace.allocate(Block(512, "forward", "layers.0", "aten::mm", 0), 0)
    for ident in reversed(
        [ident for ident, block in enumerate(trace.blocks) if block.num_bytes == 512 and block.unit > 0]
    ):
        trace.free(ident, trace.blocks[ident].unit, "backward")
    return trace


def test_each_layer_is_written_as_the_one_that_it_is_like() -> None:
    small, large = 1024, 4096
    wanted = [small, small, large, small, large, small, large]
    like = tuple(int(size == large) for size in wanted[1:-1])
    found = extrapolate(_layers_that_towers([small, small, large, large]), (LayerRun(1),), (LayerRun(7, like=like),))
    whole = _layers_that_towers(wanted)
    assert [size for _, size in found.stream()] == [size for _, size in whole.stream()]
    assert found.units == whole.units
    assert [found.blocks[ident].module for ident, _ in found.events] == [
        whole.blocks[ident].module for ident, _ in whole.events
    ]
    assert total_flops(found) == sum(wanted)
    assert not list(find_inconsistencies(found))


def test_layers_of_two_kinds_that_do_different_things_are_an_error() -> None:
    with pytest.raises(LayersDiffer, match="differ"):
        extrapolate(
            _layers_that_towers([1024, 1024, 4096, 4096], odd=True),
            (LayerRun(1),),
            (LayerRun(7, like=(0, 1, 0, 1, 0)),),
        )


def test_layers_that_are_nowhere_in_the_trace_are_an_error() -> None:
    with pytest.raises(LayersDiffer, match="no events"):
        extrapolate(_layers_that_towers([1024] * 4), (LayerRun(1),), (LayerRun(4),), (LayerRun(9),))


def test_what_is_beyond_the_counted_layers_is_of_none() -> None:
    found = _layers_that_towers([1024] * 4).beyond(1)
    assert set(found.units) == {0, OUTSIDE} == {block.unit for block in found.blocks}
    assert set(found.costs) == {("forward", OUTSIDE)}
    assert total_flops(found) == total_flops(_layers_that_towers([1024] * 4)) == 4096
