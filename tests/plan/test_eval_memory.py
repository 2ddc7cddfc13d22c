"""How much an evaluation may hold at once."""

from dataclasses import replace
from typing import Any

import pytest

from finefit.plan.eval_memory import held_bytes, make_eval_limits, step_config
from finefit.plan.target import Target
from finefit.rehearse.generation import rehearse_answers, rehearse_likelihood
from finefit.spec.models import Full
from finefit.spec.schema import Evaluation
from tests.rehearse.conftest import make_config
from tests.vision_models import vlm_config

CARD = Target(
    name="small",
    device="cuda",
    capability=(8, 9),
    precision="bf16",
    budget_bytes=4 << 30,
    count=1,
    rates=None,
    host_bytes_per_second=1e10,
    price_per_hour=None,
    context_bytes=500 << 20,
    margin=0.0125,
    margin_bytes=80 << 20,
    notes=(),
)
CONFIG = make_config(layers=4)


def evaluation(task: Any = "rouge", **more: Any) -> Evaluation:
    return Evaluation.model_validate({"task": task, "max_new_tokens": 64, **more})


def batch_limit(
    target: Target = CARD, *, prompt_tokens: int = 512, devices: int = 1, config: dict[str, Any] = CONFIG, **more: Any
) -> Any:
    asked = evaluation(**more)
    cfg = step_config(config, Full(kind="full"), target)
    return make_eval_limits(cfg, target, [asked], prompt_tokens=prompt_tokens, devices=devices)[asked.label]


def test_the_limit_fits_and_twice_as_many_rows_would_not() -> None:
    tight = replace(CARD, budget_bytes=int(1.1 * 2**30))
    found = batch_limit(tight)
    assert held_bytes(tight, found.reserved_bytes) <= tight.budget_bytes
    rows = found.tokens // (512 + 64)
    assert 1 < rows < 64
    twice = rehearse_answers(
        step_config(CONFIG, Full(kind="full"), tight), rows=2 * rows, prompt_tokens=512, new_tokens=64
    )
    assert held_bytes(tight, twice.reserved_bytes) > tight.budget_bytes


def test_shorter_prompts_are_answered_by_more_rows_within_the_same_tokens() -> None:
    found = batch_limit()
    assert (found.rows, found.tokens) == (256, 64 * (512 + 64))
    longest = found.tokens // found.rows - 64
    corner = rehearse_answers(
        step_config(CONFIG, Full(kind="full"), CARD), rows=256, prompt_tokens=longest, new_tokens=64
    )
    assert (
        found.reserved_bytes >= 0.97 * corner.reserved_bytes
    )  # the allocator beyond what is allocated is taken to be as for the longest


def test_a_batch_that_is_asked_for_is_taken_as_it_is() -> None:
    tight = replace(CARD, budget_bytes=1 << 30)
    found = batch_limit(tight, batch=48)
    assert (found.rows, found.tokens) == (48, 48 * (512 + 64))
    assert held_bytes(tight, found.reserved_bytes) > tight.budget_bytes


def test_a_processor_answers_at_most_sixteen_at_a_time() -> None:
    cpu = replace(CARD, device="cpu", capability=(0, 0), precision="fp32", margin_bytes=0)
    assert batch_limit(cpu).rows == 16


def test_a_long_prompt_passes_the_mlp_in_pieces_only_where_it_must() -> None:
    wide = make_config(layers=4, intermediate_size=16384)
    assert batch_limit(replace(CARD, budget_bytes=8 << 30), prompt_tokens=32768, config=wide).mlp_tiles == 1
    tight = batch_limit(replace(CARD, budget_bytes=4 << 30), prompt_tokens=32768, config=wide)
    assert tight.mlp_tiles > 1
    assert held_bytes(CARD, tight.reserved_bytes) <= 4 << 30


def test_a_copy_that_fits_on_no_card_is_split_over_them() -> None:
    small = replace(CARD, budget_bytes=760 << 20)
    whole = batch_limit(small, prompt_tokens=8192)
    assert not whole.is_split_over_cards
    assert held_bytes(small, whole.reserved_bytes) > small.budget_bytes
    spread = batch_limit(small, prompt_tokens=8192, devices=4)
    assert (spread.is_split_over_cards, spread.devices) == (True, 4)
    assert held_bytes(small, spread.reserved_bytes) <= small.budget_bytes


def test_items_are_shared_over_cards_where_a_copy_fits_on_each() -> None:
    found = batch_limit(devices=4)
    assert (found.is_split_over_cards, found.devices, found.rows) == (False, 4, 256)


def test_tasks_that_only_read_are_sized_by_what_reading_takes() -> None:
    tight = replace(CARD, budget_bytes=int(1.1 * 2**30))
    assert batch_limit(tight, task="perplexity").tokens >= batch_limit(tight).tokens


def test_a_window_of_plain_text_that_is_longer_than_any_prompt_is_rehearsed() -> None:
    asked = [
        evaluation({"kind": "perplexity", "window": window}, name=name, batch=2)
        for name, window in (("short", 512), ("long", 8192))
    ]
    eval_limits = make_eval_limits(
        step_config(CONFIG, Full(kind="full"), CARD), CARD, asked, prompt_tokens=512, devices=1
    )
    window = rehearse_likelihood(step_config(CONFIG, Full(kind="full"), CARD), rows=1, tokens=8192, counted=8191)
    assert eval_limits["long"].reserved_bytes == window.reserved_bytes
    assert eval_limits["short"].reserved_bytes < window.reserved_bytes  # type: ignore[operator]
    assert eval_limits["long"].tokens == eval_limits["short"].tokens


@pytest.mark.slow
def test_a_long_window_passes_the_mlp_in_pieces_where_it_must() -> None:
    wide, task = make_config(layers=4, intermediate_size=16384), {"kind": "perplexity", "window": 65536}
    found = batch_limit(replace(CARD, budget_bytes=4 << 30), config=wide, task=task)
    assert found.mlp_tiles > 1
    assert held_bytes(CARD, found.reserved_bytes) <= 4 << 30


def test_tasks_of_the_harness_leave_the_limits_of_others_alone() -> None:
    asked = [evaluation({"kind": "lm_eval", "tasks": ["x"]}), evaluation()]
    eval_limits = make_eval_limits(
        step_config(CONFIG, Full(kind="full"), CARD), CARD, asked, prompt_tokens=512, devices=1
    )
    assert eval_limits["lm_eval"].reserved_bytes is None
    assert eval_limits["rouge"].reserved_bytes is not None


@pytest.mark.parametrize("rates", [None, "usual"])
def test_seconds_are_predicted_where_the_rates_are_known(rates: str | None) -> None:
    from finefit.plan.search import TYPICAL_RATES

    found = batch_limit(replace(CARD, rates=TYPICAL_RATES if rates else None))
    assert (found.batch_seconds is not None) is (rates is not None)


def _limit_with(grids: tuple[tuple[int, ...], ...], target: Target = CARD, **more: Any) -> Any:
    """A tower that is large beside its language model, and prompts of one image's tokens."""
    config = vlm_config(
        "llava", vision_config={"hidden_size": 512, "intermediate_size": 2048, "image_size": 448}, image_seq_length=3136
    ).to_dict()
    asked = evaluation(**more)
    cfg = step_config(config, Full(kind="full"), target)
    return make_eval_limits(cfg, target, [asked], prompt_tokens=200, devices=1, grids=grids)[asked.label]


def test_images_take_their_part_of_the_memory_and_lengthen_the_prompt_to_their_tokens() -> None:
    tight = replace(CARD, budget_bytes=int(1.2 * 2**30))
    without_images, with_images = _limit_with((), tight), _limit_with(((1,),), tight)
    assert without_images.tokens // (200 + 64) > with_images.tokens // (3136 + 2 + 64) >= 1
    assert held_bytes(tight, with_images.reserved_bytes) <= tight.budget_bytes


def test_a_batch_shows_no_more_numbers_than_the_machine_should_hold_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.plan.eval_memory._MOST_VALUES", 2 * 3 * 448**2)
    found = _limit_with(((1,),))
    assert found.tokens == 2 * (3136 + 2 + 64)
    assert found.rows * found.tokens // found.rows >= 2 * 3138
