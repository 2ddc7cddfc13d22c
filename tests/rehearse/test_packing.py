"""What is rehearsed of packed rows is what runs: the kernel for rows of any length on a card, a call for each row elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import total_flops
from finefit.rehearse.depth import rehearse_depth
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from tests.rehearse.conftest import FULL, make_config, make_scene

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


def _scene(*, packing: bool = True, levers: dict[str, Any] | None = None, **changes: Any) -> Scene:
    plain = {"tokens": TOKENS, "supervised": 100, "rows_per_step": ROWS, "tuning": FULL}
    return make_scene(
        make_config(layers=LAYERS),
        levers={"micro_batch": ROWS, "packing": packing} | (levers or {}),
        **(plain | changes),
    )


def _blocks(found: Rehearsed, operation: str, instant: str) -> list[int]:
    """Sizes in the order in which they were made, of the steady step."""
    start = found.trace.marks["step"]
    blocks = [found.trace.blocks[ident] for ident, is_new in found.trace.events[start:] if is_new]
    return [block.num_bytes for block in blocks if (block.operation, block.instant) == (operation, instant)]


def _peak(scene: Scene) -> int:
    return replay(rehearse(scene).trace.stream()).allocated_bytes


@pytest.mark.parametrize("card", ON_CARDS.values(), ids=ON_CARDS)
def test_on_a_card_one_kernel_makes_one_answer_and_its_sums(card: dict[str, Any]) -> None:
    found = rehearse(_scene(**card))
    answer, sums, seeds = ROWS * TOKENS * HEADS * WIDTH * 2, HEADS * ROWS * TOKENS * 4, 2 * 8
    made = _blocks(found, KEPT, "forward")
    assert sorted(size for size in made if size > 8) == sorted([answer, sums, seeds] * LAYERS)
    assert not {block.operation for block in found.trace.blocks if "dot_product" in block.operation}
    padded = rehearse(_scene(packing=False, **card))
    joined, usual = (_blocks(run, "aten::cat", "forward").count(answer) for run in (found, padded))
    assert joined == usual == LAYERS  # of rotated queries; answers are not joined


@pytest.mark.parametrize("rows_per_step", [ROWS, 40])
def test_backward_takes_a_tile_more_for_every_row_that_a_pack_may_have(rows_per_step: int) -> None:
    found = rehearse(_scene(rows_per_step=rows_per_step))
    padded = ROWS * TOKENS + 128 * rows_per_step
    hidden = [HEADS * padded * 4, HEADS * padded * WIDTH * 4, *[ROWS * TOKENS * HEADS * WIDTH * 2] * 2]
    made = _blocks(found, "aten::_flash_attention_backward", "backward")
    gradients = [ROWS * TOKENS * heads * WIDTH * 2 for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert sorted(made) == sorted((hidden + gradients) * LAYERS)


@pytest.mark.parametrize("place", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_elsewhere_every_row_is_attended_by_itself(place: dict[str, Any]) -> None:
    found = rehearse(_scene(**place))
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
                make_scene(wide, levers={"micro_batch": 2, "packing": True}, capability=capability)
            ).trace.blocks
        }
        for capability in ((8, 9), (9, 0))
    }
    assert KEPT in operations[9, 0]
    assert KEPT not in operations[8, 9]


def test_attention_that_is_kept_is_not_computed_again() -> None:
    again, kept = (rehearse(_scene(levers={"recompute": LAYERS, "keep_attention": keep})) for keep in (False, True))
    answer = ROWS * TOKENS * HEADS * WIDTH * 2
    assert _blocks(again, KEPT, "backward").count(answer) == LAYERS
    assert _blocks(kept, KEPT, "backward").count(answer) == 0


@pytest.mark.parametrize("place", [*ON_CARDS.values(), *ONE_BY_ONE.values()], ids=[*ON_CARDS, *ONE_BY_ONE])
def test_full_packs_cost_what_full_padded_micro_batches_do(place: dict[str, Any]) -> None:
    """Within the buffers of attention: the worst pack holds the tokens of the worst padded micro-batch."""
    packed, padded = (_peak(_scene(packing=packing, **place)) for packing in (True, False))
    assert packed == pytest.approx(padded, rel=0.05)
    packed_flops, padded_flops = (
        total_flops(rehearse(_scene(packing=packing, **place)).trace) for packing in (True, False)
    )
    assert packed_flops == pytest.approx(padded_flops, rel=0.01)


@pytest.mark.parametrize("place", [ON_CARDS["Ada"], ONE_BY_ONE["processor"]], ids=["card", "processor"])
def test_packed_layers_repeat_so_that_a_few_stand_for_all(place: dict[str, Any]) -> None:
    whole = replace(_scene(validation=(TOKENS, 10), **place), config=make_config(layers=9))
    assert replay(rehearse_depth(whole).trace.stream()).allocated_bytes == _peak(whole)
