"""Models that see, rehearsed: which towers gradients reach and why not, what is kept, and a few layers standing for
all."""

from dataclasses import replace
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.rehearse.allocator import replay
from finefit.rehearse.fake_model import StepConfig, fake_images, fitting, image_tokens, measure_size, num_tokens
from finefit.rehearse.layer_kinds import memo_key, rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import AdamW
from tests.slow_cases import slow_but
from tests.vision_batches import EVERYWHERE, GRIDS
from tests.vision_models import vlm_config

LANGUAGE = Lora(kind="lora", rank=4)


def _cfg(family: str, tuning: Tuning = EVERYWHERE, *, layers: int = 2, **changes: Any) -> StepConfig:
    cfg = StepConfig(
        config=vlm_config(family, text_config={"num_hidden_layers": layers}).to_dict(),
        tuning=tuning,
        optimizer=AdamW(lr=1e-4),
        device="cuda",
        capability=(9, 0),
        precision="bf16",
        levers=Levers(micro_batch=2, loss_chunk=16),
        tokens=64,
        supervised=20,
        accumulates=False,
        grids=GRIDS[family],
    )
    return replace(cfg, **changes)


def _peak(found: Rehearsal) -> tuple[int, int]:
    answer = replay(found.trace.stream())
    return answer.allocated_bytes, answer.reserved_bytes


@pytest.mark.parametrize("family", [*GRIDS])
def test_gradients_reach_all_towers_of_rows_that_show_something(family: str) -> None:
    cfg = _cfg(family, validation=(30, 5))
    assert rehearse(cfg).unreached == ()
    assert all(tower.tensors for tower in measure_size(cfg).towers.values())


def test_a_vision_adapter_on_rows_without_images_is_found_with_its_reason() -> None:
    cfg = _cfg("qwen2_5_vl", grids=())
    found = rehearse(cfg)
    assert {name.split(".")[3] for name in found.unreached} == {"visual"}
    (cause,) = found.causes
    assert cause.startswith(
        ("the tower projector, the tower vision: no row has an image", "the tower vision, the tower projector: no row")
    )
    assert rehearse(replace(cfg, tuning=LANGUAGE)).unreached == ()


def test_only_what_looks_is_trained_and_nothing_is_shown() -> None:
    found = rehearse(_cfg("llava", Subset(kind="subset", trainable=("projector",)), grids=()))
    assert len(found.unreached) == 4
    assert "no row has an image" in found.causes[0]


@pytest.mark.parametrize(
    ("family", "recompute"),
    slow_but([("llava", 5)], [("qwen2_5_vl", 0), ("qwen2_5_vl", 10), ("llava", 5), ("qwen3_vl", 0)]),
)
def test_a_few_layers_stand_for_all_of_the_language_tower(family: str, recompute: int) -> None:
    cfg = _cfg(family, layers=10, levers=Levers(micro_batch=2, recompute=recompute, loss_chunk=16))
    memo: dict[str, Rehearsal] = {}
    assert _peak(rehearse_extrapolated(cfg, memo)) == _peak(rehearse(cfg))
    assert memo
    assert memo_key(cfg) not in memo


@pytest.mark.slow
def test_a_frozen_tower_keeps_nothing_and_a_trained_one_less_where_it_is_computed_again() -> None:
    config = vlm_config("qwen2_5_vl", vision_config={"depth": 8}).to_dict()
    again = Levers(micro_batch=2, recompute=2, loss_chunk=16)

    def kept(tuning: Tuning, levers: Levers) -> int:
        trace = rehearse(
            _cfg("qwen2_5_vl", tuning, config=config, grids=((1, 16, 16),), tokens=100, levers=levers)
        ).trace
        alive, blocks = set[int](), trace.blocks
        for ident, is_new in trace.events:
            if is_new and blocks[ident].instant == "loss":
                break  # all of the forward has been, nothing of the backward
            (alive.add if is_new else alive.discard)(ident)
        return sum(
            blocks[ident].num_bytes
            for ident in alive
            if ".visual.blocks." in blocks[ident].module and blocks[ident].instant == "forward"
        )

    assert kept(LANGUAGE, Levers(micro_batch=2, loss_chunk=16)) == 0
    whole, less = kept(EVERYWHERE, Levers(micro_batch=2, loss_chunk=16)), kept(EVERYWHERE, again)
    assert 0 < less < whole / 3


def test_what_a_batch_shows_has_the_shapes_of_real_pixels_and_no_values() -> None:
    config = vlm_config("qwen2_5_vl").to_dict()
    extra = fake_images(config, rows=3, tokens=64, grids=((1, 8, 8),))
    assert extra is not None
    assert all(tensor.is_meta for tensor in extra.tensors.values())
    assert extra.tensors["places_I"].numel() == 3 * 16 == 3 * image_tokens(config, ((1, 8, 8),))
    assert extra.tensors["pixel_values"].shape[0] == 3 * 64
    assert fake_images({"model_type": "llama"}, rows=1, tokens=8, grids=()) is None


def test_a_shorter_row_shows_as_many_images_as_it_has_room_for() -> None:
    config, grids = vlm_config("qwen2_5_vl").to_dict(), ((1, 8, 8), (1, 4, 4))
    assert num_tokens(config, grids) == 16 + 4 + 2 + 1
    assert [len(fitting(config, grids, tokens)) for tokens in (23, 22, 18, 17)] == [2, 1, 1, 0]


def test_four_bits_pack_the_language_tower_alone() -> None:
    packed, whole = (measure_size(_cfg("qwen2_5_vl", Lora(kind="lora", rank=4, base_bits=bits))) for bits in (4, None))
    assert packed.towers == whole.towers
    assert packed.weight_bytes < whole.weight_bytes
    language = whole.towers["language"].parameters - whole.towers["language"].trainable
    assert whole.weight_bytes - packed.weight_bytes < 2 * language


def test_layer_norms_under_the_autocast_of_a_card_answer_in_fp32_and_keep_their_input_so() -> None:
    trace = rehearse(_cfg("llava")).trace
    norms = [block for block in trace.blocks if block.module.endswith("layer_norm1") and block.instant == "forward"]
    rows, patches, width = 2 * len(GRIDS["llava"]), 17, 32
    assert [block.num_bytes for block in norms if block.num_bytes == 4 * rows * patches * width]
    assert not [block for block in norms if block.num_bytes == 2 * rows * patches * width]
