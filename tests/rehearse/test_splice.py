"""A few layers stretched to the whole depth give what the whole depth gives: memory to the byte, work to the operation."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import total_flops
from finefit.rehearse.depth import cut, layer_kinds, rehearse_depth, runs_of
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.splice import REHEARSED, NotRegular, Run, check_whole, stretch
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block, Cost, Trace
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW
from tests.rehearse.conftest import FULL, LORA, make_config, make_scene

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


def _scene(config: dict[str, Any] | None = None, **changes: Any) -> Scene:
    return make_scene(config or _config(), **({"tuning": FEW} | changes))


def _alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[at % 2] for at in range(layers)]


SCENES: dict[str, Scene] = {
    "every linear layer adapted, all recomputed": _scene(tuning=LORA, is_quick=True, levers={"recompute": 6}),
    "none recomputed": _scene(),
    "6 of 11 recomputed": _scene(_config(11), is_quick=True, levers={"recompute": 6}),
    "2 of 8 recomputed, too few to repeat": _scene(_config(8), is_quick=True, levers={"recompute": 2}),
    "accumulating": _scene(accumulates=True, levers={"recompute": 6}),
    "loss in chunks": _scene(is_quick=True, levers={"loss_chunk": 128}),
    "inputs offloaded": _scene(levers={"recompute": 6, "offload": True}),
    "6 of 11 recomputed and offloaded": _scene(_config(11), is_quick=True, levers={"recompute": 6, "offload": True}),
    "attention kept": _scene(is_quick=True, levers={"recompute": 6, "keep_attention": True}),
    "MLP in tiles": _scene(is_quick=True, levers={"mlp_tiles": 4}),
    "full tuning": _scene(tuning=FULL),
    "full tuning, tied": _scene(_config(tied=True), tuning=FULL),
    "4 bits, optimizer in 8": _scene(
        tuning=Lora(kind="lora", rank=8, targets=("q_proj",), base_bits=4), optimizer=AdamW(lr=1e-4, kind="adamw_8bit")
    ),
    "quick": _scene(is_quick=True, levers={"recompute": 6}),
    "quick, accumulating": _scene(is_quick=True, accumulates=True),
    "validated": _scene(validation=(100, 99)),
    "processor": _scene(device="cpu", capability=(0, 0), precision="fp32"),
    "kinds of layers alternate": _scene(
        _config(10, **GEMMA, layer_types=_alternating(10)),
        tokens=128,
        supervised=127,
        is_quick=True,
        levers={"recompute": 10},
    ),
    "a period of six kinds": _scene(
        _config(30, **GEMMA), tokens=128, supervised=127, is_quick=True, tuning=Lora(kind="lora", targets=("q_proj",))
    ),
    "experts": _scene(_config(**MOE), tuning=LORA, is_quick=True, levers={"recompute": 6}),
    "experts in full": _scene(_config(**MOE), tuning=FULL),
}


def kinds_of_events(trace: Trace) -> Counter[tuple[str, int, int, bool]]:
    """Every allocation and free by instant, size and layer, in any order. What the update makes for no layer in particular is a few bytes for
    each trained tensor, and the piece that loading takes first counts buffers or not: both are left out."""
    pairs = zip(trace.events, trace.instants, trace.units, strict=True)
    return Counter(
        (instant, unit, trace.blocks[ident].num_bytes, is_new)
        for (ident, is_new), instant, unit in pairs
        if trace.blocks[ident].operation != WARM_UP and (instant, unit) != ("update", OUTSIDE)
    )


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_stretched_rehearsal_is_the_whole_one(scene: Scene) -> None:
    memo: dict[str, Rehearsed] = {}
    whole, stretched = rehearse(scene), rehearse_depth(scene, memo)
    assert repr(scene) not in memo  # fewer layers were executed
    assert replay(stretched.trace.stream()) == replay(whole.trace.stream())
    assert len(stretched.trace.events) == len(whole.trace.events)
    assert kinds_of_events(stretched.trace) == kinds_of_events(whole.trace)
    assert total_flops(stretched.trace) == total_flops(whole.trace)
    assert stretched.trace.host_bytes == whole.trace.host_bytes
    assert stretched.trace.peaks() == whole.trace.peaks()
    assert stretched.unreached == whole.unreached == ()
    assert not list(check_whole(stretched.trace))


def test_layers_without_rotary_embedding_are_not_taken_for_others() -> None:
    """Every fourth one of smollm3."""
    scene = _scene(
        _config(12, model_type="smollm3", pad_token_id=0), tuning=FULL, is_quick=True, tokens=128, supervised=127
    )
    assert replay(rehearse_depth(scene).trace.stream()) == replay(rehearse(scene).trace.stream())


def test_a_depth_below_four_periods_is_executed_as_it_is() -> None:
    """gemma3 repeats after six layers; of thirteen none can be left out."""
    scene = _scene(
        _config(13, **GEMMA), tokens=128, supervised=127, is_quick=True, tuning=Lora(kind="lora", targets=("q_proj",))
    )
    memo: dict[str, Rehearsed] = {}
    found = rehearse_depth(scene, memo)
    assert runs_of(layer_kinds(read_config(scene.config)), 0) == (Run(13, 6),)
    assert list(memo) == [repr(scene)]
    assert found is memo[repr(scene)]


def test_another_depth_or_number_of_recomputed_layers_executes_nothing_new() -> None:
    memo: dict[str, Rehearsed] = {}
    shallow = rehearse_depth(_scene(_config(8), levers={"recompute": 4}, is_quick=True), memo)
    for layers, recompute in ((10, 4), (12, 6), (40, 20)):
        deep = rehearse_depth(_scene(_config(layers), levers={"recompute": recompute}, is_quick=True), memo)
        assert len(deep.trace.events) > len(shallow.trace.events)
    assert len(memo) == 1


def test_what_is_in_the_memo_is_not_changed_by_stretching_it() -> None:
    memo: dict[str, Rehearsed] = {}
    scene = _scene(is_quick=True)
    first, second = (rehearse_depth(scene, memo).trace for _ in range(2))
    assert first == second
    short = next(iter(memo.values())).trace
    rehearse_depth(_scene(_config(4), is_quick=True), memo)
    assert next(iter(memo.values())).trace is short
    assert max(short.units) == REHEARSED - 1


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
    run = Run(num_layers, period)
    assert (run.missing, run.rehearsed) == (missing, rehearsed)
    assert run.rehearsed + run.missing * period == num_layers


def test_recomputed_and_kept_layers_are_two_runs() -> None:
    assert runs_of(["layer"] * 9, 4) == (Run(4), Run(5))
    assert runs_of(["layer"] * 9, 0) == runs_of(["layer"] * 9, 9) == (Run(9),)
    assert runs_of(["local", "local", "global"] * 3, 0) == (Run(9, 3),)
    assert runs_of(["dense", "sparse", "sparse", "sparse"], 0) == (
        Run(4, 4),
    )  # a first layer unlike the rest never repeats


def test_a_cut_config_keeps_the_kinds_of_its_layers() -> None:
    whole = {"num_hidden_layers": 4, "layer_types": _alternating(4), "mlp_only_layers": [1]}
    short = cut(whole, ["sliding_attention", "full_attention dense"])
    assert short == {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_only_layers": [1],
    }


def test_one_dense_layer_among_experts_is_rehearsed_in_full() -> None:
    scene = _scene(_config(**MOE, mlp_only_layers=[0]), tuning=FULL, is_quick=True)
    memo: dict[str, Rehearsed] = {}
    found = rehearse_depth(scene, memo)
    assert list(memo) == [repr(scene)]
    assert replay(found.trace.stream()) == replay(rehearse(scene).trace.stream())


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
    found = stretch(_layers_that([512] * 4), (Run(7),))
    assert found.units == [*range(7), *reversed(range(7))]
    assert found.blocks[found.events[6][0]].unit == 6
    assert total_flops(found) == 7
    assert not list(check_whole(found))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([512, 1024, 1024, 1024], id="first and second"),
        pytest.param([512, 512, 1024, 512], id="second and third"),
    ],
)
def test_layers_that_do_not_repeat_are_an_error_and_never_an_estimate(sizes: list[int]) -> None:
    with pytest.raises(NotRegular, match=r"differ"):
        stretch(_passed_on(sizes), (Run(7),))


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
    with pytest.raises(NotRegular, match="differ"):
        stretch(trace, (Run(7),))


def test_a_block_that_is_freed_twice_is_found() -> None:
    trace = _layers_that([512, 512])
    assert not list(check_whole(trace))
    trace.free(0, OUTSIDE, "update")
    assert len(list(check_whole(trace))) == 1
    assert len(list(check_whole(replace(trace, events=[(0, True), (0, True)])))) == 1
