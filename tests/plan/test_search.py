"""The levers that a budget asks for, on invented cards; one model, few layers executed, each candidate rehearsed once."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.plan.look import Looker
from finefit.plan.search import Choice, choose, freedom_of
from finefit.plan.suggest import releasable, suggest
from finefit.plan.target import Target, find_target
from finefit.rehearse.allocator import replay
from finefit.rehearse.depth import rehearse_depth
from finefit.rehearse.rehearsal import Rehearsed
from finefit.rehearse.scene import Scene
from finefit.rehearse.shard import Sharding, sharded
from finefit.rehearse.size import survey
from finefit.spec.load import parse_spec
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import Levers
from tests.rehearse.conftest import FULL, make_config, make_scene

GIB = 2**30
ROWS, LAYERS, TOKENS = 2, 9, 2048
CONFIG = make_config("llama-3.2-1b", layers=LAYERS)
ADAPTED = Lora(kind="lora", rank=64, targets=("q_proj", "down_proj"))
MEMO: dict[str, Rehearsed] = {}
SPEC = """\
name: searched
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 64, alpha: 128, targets: [q_proj, down_proj]}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
"""
FULL_SPEC = SPEC.replace("{kind: lora, rank: 64, alpha: 128, targets: [q_proj, down_proj]}", "{kind: full}")


def _target(budget_gib: float, *, has_rates: bool = True) -> Target:
    """A card that only has more or less memory than an RTX 4090."""
    card = find_target(parse_card("RTX 4090"), read_machine(), "auto")
    return replace(card, budget_bytes=int(budget_gib * GIB), rates=card.rates if has_rates else None)


def _scene(tuning: Tuning = ADAPTED) -> Scene:
    return make_scene(CONFIG, tuning=tuning, tokens=TOKENS, supervised=1024)


def _looker(
    budget_gib: float,
    tuning: Tuning = ADAPTED,
    *,
    has_rates: bool = True,
    sharding: Sharding = "none",
    has_liger: bool = True,
) -> Looker:
    target = replace(
        _target(budget_gib, has_rates=has_rates), has_liger=has_liger, count=1 if sharding == "none" else 2
    )
    return Looker(scene=_scene(tuning), target=target, rows_per_step=ROWS, memo=MEMO, sharding=sharding)


@cache
def _chosen(budget_gib: float, tuning: Tuning = ADAPTED, has_rates: bool = True, **asked: Any) -> tuple[Looker, Choice]:
    looker = _looker(budget_gib, tuning, has_rates=has_rates)
    freedom = freedom_of(
        Levers(**asked), rows=ROWS, supervised=1024, num_layers=LAYERS, precision="bf16", device="cuda"
    )
    return looker, choose(looker, freedom)


LADDER = (40, 5.5, 4.5, 3.6, 3)
"""GiB: from room for everything to less than the most frugal levers need."""
FIXED: dict[str, Any] = {
    "micro_batch": 2,
    "recompute": "none",
    "offload": "none",
    "mlp_tiles": 1,
    "keep_attention": False,
}


def test_a_large_budget_keeps_all_layers_and_the_loss_in_one_piece() -> None:
    _, choice = _chosen(LADDER[0], kernels="torch")
    levers = choice.look.levers
    assert choice.fits
    assert (levers.micro_batch, levers.recompute, levers.loss_chunk) == (ROWS, 0, None)
    assert (levers.offload, levers.mlp_tiles, levers.keep_attention) == (False, 1, False)


def test_fused_kernels_gain_nothing_by_the_loss_in_one_piece() -> None:
    levers = _chosen(LADDER[0])[1].look.levers
    assert (levers.micro_batch, levers.recompute, levers.loss_chunk) == (ROWS, 0, 1024)


@pytest.mark.parametrize("budget", LADDER)
def test_a_choice_fits_where_it_says_so_by_a_whole_rehearsal(budget: float) -> None:
    looker, choice = _chosen(budget)
    assert choice.fits == (choice.look.peak_bytes <= looker.target.budget_bytes)
    assert not choice.look.scene.is_quick
    assert choice.look.replay.reserved_bytes + looker.target.context_bytes <= choice.look.peak_bytes


def test_the_ladder_ends_with_a_budget_that_nothing_fits() -> None:
    assert [_chosen(budget)[1].fits for budget in LADDER] == [True] * (len(LADDER) - 1) + [False]


def test_smaller_budgets_are_met_with_smaller_plans() -> None:
    peaks = [_chosen(budget)[1].look.peak_bytes for budget in LADDER]
    assert peaks == sorted(peaks, reverse=True)


def test_cheap_levers_are_pulled_before_dear_ones() -> None:
    """Rows and recomputed layers first; offloading and tiles only where every layer of a single row is computed again, in the smallest chunks."""
    chosen = [_chosen(budget)[1].look.levers for budget in LADDER]
    assert chosen[1].micro_batch < chosen[0].micro_batch or chosen[1].recompute > chosen[0].recompute
    assert all(
        more.micro_batch >= less.micro_batch or more.recompute < less.recompute for more, less in pairwise(chosen)
    )
    dear = [levers for levers in chosen if levers.offload or levers.mlp_tiles > 1]
    assert dear
    assert {(levers.micro_batch, levers.recompute, levers.loss_chunk) for levers in dear} == {(1, LAYERS, 256)}


def test_frugal_levers_cost_time() -> None:
    seconds = [_chosen(budget)[1].look.step_seconds for budget in LADDER]
    assert seconds == sorted(seconds)


def test_more_memory_is_never_slower() -> None:
    assert _chosen(5)[1].look.step_seconds <= 1.01 * _chosen(4.5)[1].look.step_seconds


@pytest.mark.parametrize("budget", LADDER)
def test_the_global_batch_is_never_changed(budget: float) -> None:
    look = _chosen(budget)[1].look
    assert look.accumulation == -(-ROWS // look.levers.micro_batch)
    assert look.levers.micro_batch <= ROWS <= look.levers.micro_batch * look.accumulation
    assert look.scene.accumulates == (look.accumulation > 1)


@pytest.mark.parametrize("budget", LADDER)
def test_lossy_levers_are_never_pulled_by_themselves(budget: float) -> None:
    scene = _chosen(budget)[1].look.scene
    assert (scene.tuning, scene.optimizer, scene.tokens, scene.supervised) == (
        ADAPTED,
        _scene().optimizer,
        TOKENS,
        1024,
    )
    assert (scene.precision, scene.config) == ("bf16", CONFIG)


@pytest.mark.parametrize("budget", [40, 4.2])
def test_fixed_levers_stay_as_they_are_asked_for(budget: float) -> None:
    """Also where they do not fit; what is free is still searched."""
    _, choice = _chosen(budget, **FIXED)
    levers = choice.look.levers
    assert (levers.micro_batch, levers.recompute, levers.offload, levers.mlp_tiles, levers.keep_attention) == (
        2,
        0,
        False,
        1,
        False,
    )
    assert {choice.reasons[name] for name in FIXED} == {"asked for"}
    assert choice.reasons["loss_chunk"].startswith("searched")
    assert choice.fits == (budget == 40)


def test_every_lever_has_a_reason() -> None:
    reasons = _chosen(LADDER[0])[1].reasons
    assert set(reasons) >= set(Levers.model_fields) - {"adapter_inputs"}
    assert all(reasons.values())


def test_a_card_without_rates_is_searched_too() -> None:
    _, choice = _chosen(LADDER[0], has_rates=False)
    assert choice.fits
    assert choice.look.levers == _chosen(LADDER[0])[1].look.levers


def test_the_choice_is_what_the_whole_depth_takes() -> None:
    """Rehearsed anew, with nothing remembered."""
    look = _chosen(LADDER[1])[1].look
    assert replay(rehearse_depth(look.scene).trace.stream()) == look.replay


# suggestions


def test_a_plan_that_fits_has_no_suggestions() -> None:
    looker, choice = _chosen(LADDER[0])
    assert suggest(looker, choice) == ()


def test_fixed_levers_are_suggested_to_be_let_go_before_anything_lossy() -> None:
    looker, choice = _chosen(4.2, **FIXED)
    found = suggest(looker, choice)
    assert found[0].fits
    assert found[0].is_exact
    assert all(
        change.startswith("levers.") for suggestion in found if suggestion.is_exact for change in suggestion.changes
    )


def test_what_fits_stands_before_what_does_not_and_exact_before_lossy() -> None:
    looker, choice = _chosen(4.2, **FIXED)
    for found in (suggest(looker, choice), suggest(*_chosen(LADDER[-1]))):
        order = [(not suggestion.fits, not suggestion.is_exact) for suggestion in found]
        assert order
        assert order == sorted(order)


def test_where_no_exact_lever_is_left_lossy_changes_are_suggested() -> None:
    found = suggest(*_chosen(LADDER[-1]))
    assert any(suggestion.fits for suggestion in found)
    assert not any(suggestion.is_exact for suggestion in found)


def test_a_budget_below_the_weights_does_not_fit_and_nothing_is_said_to_make_it_fit() -> None:
    """Not even packed weights: what is suggested brings it nearer, and says that it does not fit."""
    budget = survey(_scene()).weight_bytes / GIB / 2
    looker, choice = _chosen(budget)
    assert not choice.fits
    assert not any(suggestion.fits for suggestion in suggest(looker, choice))


@pytest.mark.parametrize(
    ("budget", "tuning", "asked", "spec"),
    [
        (3, ADAPTED, {}, SPEC),
        (4.2, ADAPTED, FIXED, SPEC),
        (10, FULL, FIXED | {"micro_batch": 1, "recompute": "all", "loss_chunk": "none"}, FULL_SPEC),
    ],
    ids=["free", "fixed", "full"],
)
def test_every_suggestion_can_be_set_and_says_what_it_saves(
    budget: float, tuning: Tuning, asked: dict[str, Any], spec: str
) -> None:
    looker, choice = _chosen(budget, tuning, **asked)
    found = suggest(looker, choice)
    assert found
    plain = parse_spec(spec, where="spec")
    for suggestion in found:
        assert parse_spec(spec, where="spec", overrides=suggestion.changes) != plain
        assert suggestion.saves_bytes == choice.look.peak_bytes - suggestion.peak_bytes
        assert suggestion.fits == (suggestion.peak_bytes <= looker.target.budget_bytes)
        assert suggestion.price
        assert suggestion.is_exact == all(change.startswith("levers.") for change in suggestion.changes)


def _offered(looker: Looker, **asked: Any) -> set[str]:
    """Single changes of all suggestions, by what is set."""
    freedom = freedom_of(
        Levers(**asked), rows=ROWS, supervised=1024, num_layers=LAYERS, precision="bf16", device="cuda"
    )
    found = suggest(looker, choose(looker, freedom))
    assert found
    assert all(suggestion.saves_bytes > 0 for suggestion in found)
    return {change.partition("=")[0] for suggestion in found for change in suggestion.changes}


FRUGAL: dict[str, Any] = {
    "micro_batch": 1,
    "recompute": "all",
    "keep_attention": False,
    "loss_chunk": 256,
    "offload": "inputs",
    "kernels": "torch",
}
LOSSY = {"tuning.base_bits", "tuning.weights", "optimizer.kind"}


@pytest.mark.parametrize(
    ("sharding", "possible"),
    [("none", LOSSY), ("ddp", LOSSY), ("fsdp2", {"tuning.weights"}), ("zero2", {"tuning.base_bits"}), ("zero3", set())],
)
def test_what_the_engine_refuses_is_not_suggested(sharding: Sharding, possible: set[str]) -> None:
    offered = _offered(_looker(1.2, sharding=sharding), **FRUGAL | {"mlp_tiles": 1})
    assert offered & LOSSY == possible
    assert "tuning.rank" in offered


def test_tiles_are_not_suggested_where_zero3_would_gather_for_each() -> None:
    asked = FRUGAL | {"offload": "none", "mlp_tiles": 1}
    assert "levers.mlp_tiles" in _offered(_looker(2, sharding="fsdp2"), **asked)
    assert "levers.mlp_tiles" not in _offered(_looker(2, sharding="zero3"), **asked)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"compile": True, "kernels": "torch"}, {"compile", "kernels"}),
        ({"update": "inside", "micro_batch": 2}, {"update", "micro_batch"}),
    ],
)
def test_levers_that_save_nothing_or_cannot_be_let_go_alone_are_left_alone(
    changes: dict[str, Any], left_out: set[str]
) -> None:
    looker, choice = _chosen(4.2, **FIXED)
    scene = replace(choice.look.scene, levers=replace(choice.look.levers, **changes))
    asked = replace(
        choice, look=replace(choice.look, scene=scene), reasons=choice.reasons | dict.fromkeys(changes, "asked for")
    )
    frugal = freedom_of(
        Levers(), rows=ROWS, supervised=1024, num_layers=LAYERS, precision="bf16", device="cuda"
    ).most_frugal()
    found = set(releasable(looker, asked, frugal))
    assert "recompute" in found
    assert not left_out & found


def test_no_other_optimizer_is_suggested_to_an_update_inside_backward() -> None:
    assert "optimizer.kind" not in _offered(
        _looker(1.2), **FRUGAL | {"mlp_tiles": 1, "micro_batch": ROWS, "update": "inside"}
    )


@pytest.mark.parametrize(
    ("has_liger", "sharding", "is_offered"), [(True, "none", True), (False, "none", False), (True, "fsdp2", False)]
)
def test_fused_kernels_are_suggested_only_where_they_would_be_chosen(
    has_liger: bool, sharding: Sharding, is_offered: bool
) -> None:
    asked = FRUGAL | {"recompute": "none", "offload": "none", "mlp_tiles": 1}
    assert ("levers.kernels" in _offered(_looker(3, sharding=sharding, has_liger=has_liger), **asked)) is is_offered


@pytest.mark.parametrize(
    ("tuning", "gathers_halves"),
    [(FULL, True), (Subset(kind="subset", trainable=("down_proj",)), False), (ADAPTED, False)],
)
def test_only_whole_fp32_weights_are_gathered_in_halves(tuning: Tuning, gathers_halves: bool) -> None:
    """A subset lies in halves but for what it trains."""
    looker = _looker(40, tuning, sharding="fsdp2")
    look = looker.look(_chosen(40)[1].look.levers)
    wanted = {
        halves: sharded(rehearse_depth(look.scene, MEMO).trace, "fsdp2", 2, gathers_halves=halves).blocks[-1]
        for halves in (True, False)
    }
    assert look.rehearsed.trace.blocks[-1] == wanted[gathers_halves]
    assert wanted[True].num_bytes < wanted[False].num_bytes
