"""A few layers of a vision tower stretched to its depth give what all of them give: memory to the byte, work to the operation."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.data.eyes.eye import Grid
from finefit.plan.look import _USUAL
from finefit.rehearse import generation
from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import phase_seconds, total_flops
from finefit.rehearse.depth import layer_kinds, names_layers, rehearse_depth
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.generation import Generated, allocated_by_depth, generate
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.splice import NotRegular, Run, check_whole, stretch
from finefit.rehearse.tower import cut_tower, tower_cuts, tower_kinds
from finefit.rehearse.trace import OUTSIDE, Block, Cost, Trace
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import AdamW
from tests.rehearse.test_splice import kinds_of_events
from tests.vision import vlm_config

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


def _config(family: str, layers: int = 1, **vision: Any) -> dict[str, Any]:
    tower = TOWERS.get(family, {"num_hidden_layers": 7}) | vision
    values: dict[str, Any] = vlm_config(
        family, vision_config=tower, text_config={"num_hidden_layers": layers} | _kinds(family, layers)
    ).to_dict()
    return values


def _kinds(family: str, layers: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * layers} if family == "gemma3" else {}


def _scene(family: str, tuning: Tuning = BOTH, config: dict[str, Any] | None = None, **changes: Any) -> Scene:
    levers = changes.pop("levers", {})
    plain: dict[str, Any] = {
        "config": config or _config(family),
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
    return Scene(**(plain | changes))


AGAIN: dict[str, Any] = {"recompute": 1}
APART = _config("qwen2_5_vl", depth=12, fullatt_block_indexes=[5, 11])
SCENES: dict[str, Scene] = {
    "Qwen2-VL": _scene("qwen2_vl", levers=AGAIN),
    "Qwen2.5-VL, the tower frozen": _scene("qwen2_5_vl", LANGUAGE),
    "Qwen2.5-VL, the tower trained": _scene("qwen2_5_vl", is_quick=False, accumulates=True, validation=(90, 5)),
    "Qwen2.5-VL, computed again": _scene("qwen2_5_vl", levers=AGAIN),
    "Qwen2.5-VL, both towers deep": _scene("qwen2_5_vl", config=_config("qwen2_5_vl", 6), levers={"recompute": 6}),
    "Qwen2.5-VL, images looked at one by one": _scene("qwen2_5_vl", config=APART, is_deterministic=True),
    "Qwen2.5-VL, nothing shown": _scene("qwen2_5_vl", LANGUAGE, grids=()),
    "Qwen3-VL": _scene("qwen3_vl"),
    "LLaVA": _scene("llava", is_quick=False),
    "LLaVA, several layers read": _scene(
        "llava", config=_config("llava", num_hidden_layers=14) | {"vision_feature_layer": [-2, 6]}
    ),
    "LLaVA, the projector": _scene("llava", PROJECTOR, levers=AGAIN),
    "LLaVA-NeXT": _scene("llava_next", levers=AGAIN),
    "Idefics3": _scene("idefics3", is_quick=False, levers=AGAIN),
    "SmolVLM, fused": _scene("smolvlm", levers={"kernels": "fused"}),
    "Gemma 3": _scene("gemma3"),
    "PaliGemma": _scene("paligemma", levers=AGAIN),
    "PaliGemma on a processor": _scene(
        "paligemma", device="cpu", capability=(0, 0), precision="fp32", levers={"adapter_inputs": "fp32"}
    ),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_stretched_tower_is_the_whole_one(scene: Scene) -> None:
    config, memo = read_config(scene.config), dict[str, Rehearsed]()
    whole, stretched = rehearse(scene).trace.beyond(len(layer_kinds(config))), rehearse_depth(scene, memo).trace
    assert repr(scene) not in memo  # fewer layers were executed
    assert replay(stretched.stream()) == replay(whole.stream())
    assert len(stretched.events) == len(whole.events)
    assert kinds_of_events(stretched) == kinds_of_events(whole)
    assert stretched.peaks() == whole.peaks()
    assert total_flops(stretched) == total_flops(whole)
    assert phase_seconds(stretched, _USUAL) == pytest.approx(phase_seconds(whole, _USUAL), rel=1e-5)
    assert {block.module for block in stretched.blocks} >= {
        block.module for block in whole.blocks if block.instant == "forward"
    }
    assert not list(check_whole(stretched))


def test_windows_of_images_cost_four_layers_where_one_kernel_takes_pieces_of_any_length() -> None:
    memo: dict[str, Rehearsed] = {}
    rehearse_depth(_scene("qwen2_5_vl", LANGUAGE), memo)
    (short,) = memo
    assert "'depth': 4" in short


def test_single_layers_that_are_named_are_rehearsed_as_they_are() -> None:
    """Layers of one kind are then unlike one another, and one that is named may be among those left out."""
    deep = Lora(kind="lora", rank=4, targets={"language": ("q_proj",), "vision": ("layers.5.self_attn.q_proj",)})
    scene = _scene("llava", deep)
    assert replay(rehearse_depth(scene).trace.stream()) == replay(rehearse(scene).trace.stream())


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
    assert names_layers(tuning) is is_named


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
    values = _config(family) | changes
    config = read_config(values)
    assert tower_kinds(config) == kinds.split()
    for runs, kept in tower_cuts(tower_kinds(config)):
        assert sum(run.num_layers for run in runs) == len(kinds.split())
        assert tower_kinds(read_config(cut_tower(values, config, kept))) == kept


def test_features_are_taken_behind_the_same_layers_of_a_cut_tower() -> None:
    values = _config("llava") | {"vision_feature_layer": [-2, 3, 0, 3]}
    short = cut_tower(values, read_config(values), ["layer", "tapped", "layer", "unused"])
    assert short["vision_feature_layer"] == [3, 2, 0, 2]


def test_a_model_of_text_has_no_tower() -> None:
    assert tower_kinds(read_config({"model_type": "llama"})) == []


def test_what_an_answer_takes_is_found_by_a_few_layers_of_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, depths, acted = _scene("qwen2_5_vl"), list[int](), generation._acted

    def noted(given: Scene, act: Callable[..., None], mlp_tiles: int) -> Trace:
        depths.append(given.config["vision_config"]["depth"])
        return acted(given, act, mlp_tiles)

    monkeypatch.setattr(generation, "_acted", noted)

    def answered(given: Scene) -> Generated:
        return generate(given, rows=2, prompt_tokens=90, new_tokens=8)

    assert allocated_by_depth(scene, answered) == answered(scene).allocated_bytes
    assert depths == [4, 9]


# layers of two kinds


def _layers_that(sizes: list[int], *, odd: bool = False) -> Trace:
    """Each makes one block that stays to the backward, and one of `size` that goes at once; then another stack has a layer."""
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
    found = stretch(_layers_that([small, small, large, large]), (Run(1),), (Run(7, like=like),))
    whole = _layers_that(wanted)
    assert [size for _, size in found.stream()] == [size for _, size in whole.stream()]
    assert found.units == whole.units
    assert [found.blocks[ident].module for ident, _ in found.events] == [
        whole.blocks[ident].module for ident, _ in whole.events
    ]
    assert total_flops(found) == sum(wanted)
    assert not list(check_whole(found))


def test_layers_of_two_kinds_that_do_different_things_are_an_error() -> None:
    with pytest.raises(NotRegular, match="differ"):
        stretch(_layers_that([1024, 1024, 4096, 4096], odd=True), (Run(1),), (Run(7, like=(0, 1, 0, 1, 0)),))


def test_layers_that_are_nowhere_in_the_trace_are_an_error() -> None:
    with pytest.raises(NotRegular, match="nowhere"):
        stretch(_layers_that([1024] * 4), (Run(1),), (Run(4),), (Run(9),))


def test_what_is_beyond_the_counted_layers_is_of_none() -> None:
    found = _layers_that([1024] * 4).beyond(1)
    assert set(found.units) == {0, OUTSIDE} == {block.unit for block in found.blocks}
    assert set(found.costs) == {("forward", OUTSIDE)}
    assert total_flops(found) == total_flops(_layers_that([1024] * 4)) == 4096
