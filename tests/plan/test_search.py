"""The levers that a budget asks for, on invented cards; one model, few layers executed, each candidate rehearsed
once."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import pytest

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.errors import ModelError, SpecError
from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.moe.build import moe_config
from finefit.plan.eval_memory import SharedRehearsals
from finefit.plan.forecast import decide_packing, make_forecast
from finefit.plan.search import CandidateEvaluator, SearchResult, choose, make_search_space
from finefit.plan.suggest import releasable, suggest
from finefit.plan.target import Target, find_target
from finefit.rehearse.allocator import replay
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.trace import Sharding, sharded
from finefit.spec.load import parse_spec
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import LeverSettings
from tests.families import family_config
from tests.mixtures import mixture_config
from tests.rehearse.conftest import FULL, make_cfg, make_config

GIB = 2**30
ROWS, LAYERS, TOKENS = 2, 9, 2048
CONFIG = make_config("llama-3.2-1b", layers=LAYERS)
ADAPTED = Lora(kind="lora", rank=64, targets=("q_proj", "down_proj"))
SHARED = SharedRehearsals()
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


def _cfg(tuning: Tuning = ADAPTED) -> StepConfig:
    return make_cfg(CONFIG, tuning=tuning, tokens=TOKENS, supervised=1024)


def _evaluator(
    budget_gib: float,
    tuning: Tuning = ADAPTED,
    *,
    has_rates: bool = True,
    sharding: Sharding = "none",
    has_liger: bool = True,
) -> CandidateEvaluator:
    target = replace(
        _target(budget_gib, has_rates=has_rates), has_liger=has_liger, count=1 if sharding == "none" else 2
    )
    return CandidateEvaluator(cfg=_cfg(tuning), target=target, rows_per_step=ROWS, shared=SHARED, sharding=sharding)


@cache
def _chosen(
    budget_gib: float, tuning: Tuning = ADAPTED, has_rates: bool = True, **asked: Any
) -> tuple[CandidateEvaluator, SearchResult]:
    evaluator = _evaluator(budget_gib, tuning, has_rates=has_rates)
    space = make_search_space(LeverSettings(**asked), evaluator.target, rows=ROWS, supervised=1024, num_layers=LAYERS)
    return evaluator, choose(evaluator, space)


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
    levers = choice.candidate.levers
    assert choice.fits
    assert (levers.micro_batch, levers.recompute, levers.loss_chunk) == (ROWS, 0, None)
    assert (levers.offload, levers.mlp_tiles, levers.keep_attention) == (False, 1, False)


def test_fused_kernels_gain_nothing_by_the_loss_in_one_piece() -> None:
    levers = _chosen(LADDER[0])[1].candidate.levers
    assert (levers.micro_batch, levers.recompute, levers.loss_chunk) == (ROWS, 0, 1024)


@pytest.mark.parametrize("budget", LADDER)
def test_a_choice_fits_where_it_says_so_by_a_whole_rehearsal(budget: float) -> None:
    evaluator, choice = _chosen(budget)
    assert choice.fits == (choice.candidate.peak_bytes <= evaluator.target.budget_bytes)
    assert not choice.candidate.cfg.is_quick
    assert choice.candidate.replay.reserved_bytes + evaluator.target.context_bytes <= choice.candidate.peak_bytes


def test_the_fewest_recomputed_layers_that_fit_are_found_in_a_few_tries() -> None:
    """The memory of two depths points to the border; of 33 depths, bisection would try five."""
    layers, depth = 40, 17
    fixed = LeverSettings(micro_batch=1, keep_attention=False, loss_chunk="none", offload="none", mlp_tiles=1)
    cfg = replace(_cfg(), config=make_config("llama-3.2-1b", layers=layers))
    evaluator = CandidateEvaluator(cfg=cfg, target=_target(1), rows_per_step=ROWS, shared=SHARED)
    space = make_search_space(fixed, evaluator.target, rows=ROWS, supervised=1024, num_layers=layers)
    above, fitting = (evaluator.evaluate(space.levers(1, depth - at)).peak_bytes for at in (1, 0))
    exact = replace(evaluator.target, budget_bytes=(above + fitting) // 2)
    searching = replace(evaluator, target=exact, known={})
    assert choose(searching, space).candidate.levers.recompute == depth
    tried = {one.levers.recompute for one in searching.known.values() if one.cfg.is_quick}
    assert tried >= {0, depth - 1, depth, layers}
    assert len(tried - {0, layers, depth, depth - 1, *range(depth, depth + 4)}) <= 1


def test_the_ladder_ends_with_a_budget_that_nothing_fits() -> None:
    assert [_chosen(budget)[1].fits for budget in LADDER] == [True] * (len(LADDER) - 1) + [False]


def test_smaller_budgets_are_met_with_smaller_plans() -> None:
    peaks = [_chosen(budget)[1].candidate.peak_bytes for budget in LADDER]
    assert peaks == sorted(peaks, reverse=True)


def test_cheap_levers_are_pulled_before_dear_ones() -> None:
    """Rows and recomputed layers first; offloading and tiles only where every layer of a single row is computed again,
    in the smallest chunks."""
    chosen = [_chosen(budget)[1].candidate.levers for budget in LADDER]
    assert chosen[1].micro_batch < chosen[0].micro_batch or chosen[1].recompute > chosen[0].recompute
    assert all(
        more.micro_batch >= less.micro_batch or more.recompute < less.recompute for more, less in pairwise(chosen)
    )
    dear = [levers for levers in chosen if levers.offload or levers.mlp_tiles > 1]
    assert dear
    assert {(levers.micro_batch, levers.recompute, levers.loss_chunk) for levers in dear} == {(1, LAYERS, 256)}


def test_frugal_levers_cost_time() -> None:
    seconds = [_chosen(budget)[1].candidate.step_seconds for budget in LADDER]
    assert seconds == sorted(seconds)


def test_more_memory_is_never_slower() -> None:
    assert _chosen(5)[1].candidate.step_seconds <= 1.01 * _chosen(4.5)[1].candidate.step_seconds


@pytest.mark.parametrize("budget", LADDER)
def test_the_global_batch_is_never_changed(budget: float) -> None:
    candidate = _chosen(budget)[1].candidate
    assert candidate.accumulation == -(-ROWS // candidate.levers.micro_batch)
    assert candidate.levers.micro_batch <= ROWS <= candidate.levers.micro_batch * candidate.accumulation
    assert candidate.cfg.accumulates == (candidate.accumulation > 1)


@pytest.mark.parametrize("budget", LADDER)
def test_candidates_to_be_timed_fit_and_have_other_micro_batches(budget: float) -> None:
    """At most two beside the chosen one, by predicted time."""
    evaluator, choice = _chosen(budget)
    assert len(choice.others) <= 2
    assert all(evaluator.fits(one) for one in choice.others)
    micro_batches = [one.levers.micro_batch for one in (choice.candidate, *choice.others)]
    assert len(set(micro_batches)) == len(micro_batches)
    seconds = [one.step_seconds for one in choice.others]
    assert seconds == sorted(seconds)
    if budget == max(LADDER):
        assert len(choice.others) == 1  # of steps with two rows


@pytest.mark.parametrize("budget", LADDER)
def test_lossy_levers_are_never_pulled_by_themselves(budget: float) -> None:
    cfg = _chosen(budget)[1].candidate.cfg
    assert (cfg.tuning, cfg.optimizer, cfg.tokens, cfg.supervised) == (
        ADAPTED,
        _cfg().optimizer,
        TOKENS,
        1024,
    )
    assert (cfg.precision, cfg.config) == ("bf16", CONFIG)


@pytest.mark.parametrize("budget", [40, 4.2])
def test_fixed_levers_stay_as_they_are_asked_for(budget: float) -> None:
    """Also where they do not fit; what is free is still searched."""
    _, choice = _chosen(budget, **FIXED)
    levers = choice.candidate.levers
    assert (levers.micro_batch, levers.recompute, levers.offload, levers.mlp_tiles, levers.keep_attention) == (
        2,
        0,
        False,
        1,
        False,
    )
    assert {choice.reasons[name] for name in FIXED} == {"requested"}
    assert choice.reasons["loss_chunk"].startswith("searched")
    assert choice.fits == (budget == 40)


def test_every_lever_has_a_reason() -> None:
    reasons = _chosen(LADDER[0])[1].reasons
    assert set(reasons) >= set(LeverSettings.model_fields) - {"adapter_inputs"}
    assert all(reasons.values())


def test_a_card_without_rates_is_searched_too() -> None:
    _, choice = _chosen(LADDER[0], has_rates=False)
    assert choice.fits
    assert choice.candidate.levers == _chosen(LADDER[0])[1].candidate.levers


def test_the_choice_is_what_the_whole_depth_takes() -> None:
    """Rehearsal anew, with nothing remembered."""
    candidate = _chosen(LADDER[1])[1].candidate
    assert replay(rehearse_extrapolated(candidate.cfg).trace.stream()) == candidate.replay


# suggestions


def test_a_plan_that_fits_has_no_suggestions() -> None:
    _, choice = _chosen(LADDER[0])
    assert suggest(choice) == ()


def test_fixed_levers_are_suggested_to_be_let_go_before_anything_lossy() -> None:
    _, choice = _chosen(4.2, **FIXED)
    found = suggest(choice)
    assert found[0].fits
    assert found[0].is_exact
    assert all(
        change.startswith("levers.") for suggestion in found if suggestion.is_exact for change in suggestion.changes
    )


def test_what_fits_stands_before_what_does_not_and_exact_before_lossy() -> None:
    _, choice = _chosen(4.2, **FIXED)
    for found in (suggest(choice), suggest(_chosen(LADDER[-1])[1])):
        order = [(not suggestion.fits, not suggestion.is_exact) for suggestion in found]
        assert order
        assert order == sorted(order)


def test_where_no_exact_lever_is_left_lossy_changes_are_suggested() -> None:
    found = suggest(_chosen(LADDER[-1])[1])
    assert any(suggestion.fits for suggestion in found)
    assert not any(suggestion.is_exact for suggestion in found)


def test_a_budget_below_the_weights_does_not_fit_and_nothing_is_said_to_make_it_fit() -> None:
    """Not even packed weights: what is suggested brings it nearer, and says that it does not fit."""
    budget = measure_size(_cfg()).weight_bytes / GIB / 2
    _, choice = _chosen(budget)
    assert not choice.fits
    assert not any(suggestion.fits for suggestion in suggest(choice))


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
    evaluator, choice = _chosen(budget, tuning, **asked)
    found = suggest(choice)
    assert found
    plain = parse_spec(spec, where="spec")
    for suggestion in found:
        assert parse_spec(spec, where="spec", overrides=suggestion.changes) != plain
        assert suggestion.saves_bytes == choice.candidate.peak_bytes - suggestion.peak_bytes
        assert suggestion.fits == (suggestion.peak_bytes <= evaluator.target.budget_bytes)
        assert suggestion.price
        assert suggestion.is_exact == all(change.startswith("levers.") for change in suggestion.changes)


def _offered(evaluator: CandidateEvaluator, **asked: Any) -> set[str]:
    """Single changes of all suggestions, by what is set."""
    space = make_search_space(LeverSettings(**asked), evaluator.target, rows=ROWS, supervised=1024, num_layers=LAYERS)
    found = suggest(choose(evaluator, space))
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
    offered = _offered(_evaluator(1.2, sharding=sharding), **FRUGAL | {"mlp_tiles": 1})
    assert offered & LOSSY == possible
    assert "tuning.rank" in offered


def test_tiles_are_not_suggested_where_zero3_would_gather_for_each() -> None:
    asked = FRUGAL | {"offload": "none", "mlp_tiles": 1}
    assert "levers.mlp_tiles" in _offered(_evaluator(2, sharding="fsdp2"), **asked)
    assert "levers.mlp_tiles" not in _offered(_evaluator(2, sharding="zero3"), **asked)


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
    evaluator, choice = _chosen(4.2, **FIXED)
    cfg = replace(choice.candidate.cfg, levers=replace(choice.candidate.levers, **changes))
    asked = replace(
        choice,
        candidate=replace(choice.candidate, cfg=cfg),
        reasons=choice.reasons | dict.fromkeys(changes, "requested"),
    )
    frugal = make_search_space(
        LeverSettings(), evaluator.target, rows=ROWS, supervised=1024, num_layers=LAYERS
    ).most_frugal()
    found = set(releasable(asked, frugal))
    assert "recompute" in found
    assert not left_out & found


@pytest.mark.slow
def test_no_other_optimizer_is_suggested_to_an_update_inside_backward() -> None:
    assert "optimizer.kind" not in _offered(
        _evaluator(1.2), **FRUGAL | {"mlp_tiles": 1, "micro_batch": ROWS, "update": "inside"}
    )


@pytest.mark.parametrize(
    ("has_liger", "sharding", "is_offered"), [(True, "none", True), (False, "none", False), (True, "fsdp2", False)]
)
def test_fused_kernels_are_suggested_only_where_they_would_be_chosen(
    has_liger: bool, sharding: Sharding, is_offered: bool
) -> None:
    asked = FRUGAL | {"recompute": "none", "offload": "none", "mlp_tiles": 1}
    assert ("levers.kernels" in _offered(_evaluator(3, sharding=sharding, has_liger=has_liger), **asked)) is is_offered


@pytest.mark.parametrize(
    ("tuning", "gathers_halves"),
    [(FULL, True), (Subset(kind="subset", trainable=("down_proj",)), False), (ADAPTED, False)],
)
def test_only_whole_fp32_weights_are_gathered_in_halves(tuning: Tuning, gathers_halves: bool) -> None:
    """A subset lies in halves but for what it trains."""
    evaluator = _evaluator(40, tuning, sharding="fsdp2")
    candidate = evaluator.evaluate(_chosen(40)[1].candidate.levers)
    wanted = {
        halves: sharded(
            rehearse_extrapolated(candidate.cfg, SHARED.steps).trace, "fsdp2", 2, gathers_halves=halves
        ).blocks[-1]
        for halves in (True, False)
    }
    assert candidate.rehearsed.trace.blocks[-1] == wanted[gathers_halves]
    assert wanted[True].num_bytes < wanted[False].num_bytes


# Dense models of half a billion parameters made into mixtures of two and of thirty-two experts, planned for a card of
# 80 GB.

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
SPEC_MIXTURES = """\
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
    spec = parse_spec(SPEC_MIXTURES.replace("{kind: full}", tuning), where="spec.yaml", overrides=())
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
    assert any(f"{many.active_parameters:,} of {many.parameters:,} parameters" in note for note in many.notes)
    assert any("the host waits for the card" in note for note in many.notes)


def test_experts_that_stay_as_they_are_under_four_bits_are_named() -> None:
    found = _planned(2, "{kind: lora, rank: 8, targets: [q_proj], base_bits: 4}")
    assert any("are not quantised to 4 bits" in note for note in found.notes)


def test_experts_without_an_adapter_are_told_where_adapters_are_planned() -> None:
    words = "the experts carry no adapter"
    assert any(words in note for note in _planned(2, "{kind: lora, rank: 8, targets: [q_proj], base_bits: 4}").notes)
    assert not any(words in note for note in _planned(2).notes)
    assert not any(words in note for note in _family_notes("qwen3_moe", "[q_proj], experts: true"))


def _family_notes(kind: str, targets: str = "all-linear") -> list[str]:
    tuning = f"{{kind: lora, rank: 8, targets: {targets}}}"
    spec = parse_spec(SPEC_MIXTURES.replace("{kind: full}", tuning), where="spec.yaml", overrides=())
    target = find_target(parse_card("A100-80GB"), read_machine(), "auto")
    return list(make_forecast(spec, family_config(kind), LENGTHS, target).notes)


def test_layers_that_all_linear_leaves_out_are_named_with_the_reason() -> None:
    words = "carry no adapter and are not trained: peft takes these names for those of the experts"
    (note,) = (note for note in _family_notes("deepseek_v2") if words in note)
    assert "model.layers.0.mlp.gate_proj" in note
    assert "model.layers.{1..3}.mlp.shared_experts.down_proj" in note
    assert not any(words in note for note in _family_notes("deepseek_v2", "[q_proj]"))


def test_recurrent_layers_are_planned_as_torch_computes_them_and_the_plan_says_so() -> None:
    words = "layers of kind linear_attention are planned as torch computes them"
    assert any(words in note for note in _family_notes("mamba2"))
    assert not any(words in note for note in _family_notes("deepseek_v2", "[q_proj]"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_compiled_layers_are_refused_for_a_mixture_before_anything_is_run(precision: str) -> None:
    config = mixture_config("llama")
    spec = parse_spec(SPEC_MIXTURES, where="spec.yaml", overrides=("levers.compile=true", f"precision={precision}"))
    with pytest.raises(SpecError, match=r"levers\.compile: true excludes mixtures of experts"):
        make_forecast(spec, config, LENGTHS, find_target(parse_card("A100-80GB"), read_machine(), precision))


def test_tiles_are_not_tried_on_experts_which_are_left_whole() -> None:
    for has_experts in (False, True):
        space = make_search_space(
            LeverSettings(), _target(1), rows=4, supervised=100, num_layers=8, has_experts=has_experts
        )
        assert (space.most_frugal().mlp_tiles == 1) == has_experts


def test_a_checkpoint_of_the_routers_has_the_experts_as_their_base_stores_them() -> None:
    """In bf16 they are computed with, whatever they are stored in."""
    spec = parse_spec(
        SPEC_MIXTURES.replace("{kind: full}", "{kind: subset, trainable: [mlp.gate]}")
        + "save: {keep: 1, every: 10 steps}\n",
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
        SPEC_MIXTURES.replace("{kind: full}", "{kind: subset, trainable: [mlp.gate]}") + engine,
        where="spec.yaml",
        overrides=(),
    )
    with pytest.raises(SpecError, match="stage 3 loses the gradient of a router") as caught:
        make_forecast(
            spec, mixture_config("qwen2"), LENGTHS, find_target(parse_card("2xA100-80GB"), read_machine(), "auto")
        )
    assert "fsdp2" in caught.value.remedy


# Whether rows are packed: by what data.packing asks for and what the model allows, with the reason in the plan.

LLAMA = make_config(layers=2)
NARROW = make_config("mistral-7b", layers=2) | {"sliding_window": 64}
SPEC_PACKING = """\
name: packed
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 8}
data: {train: [{path: train.jsonl}], packing: ASKED}
optimizer: {lr: 1e-4}
"""
Asked = Literal["auto", "best_fit", "none"]


@pytest.mark.parametrize(
    ("asked", "config", "device", "packs", "reason"),
    [
        ("auto", LLAMA, "cpu", True, "no padding, the same gradient"),
        ("auto", LLAMA, "cuda", True, "no padding, the same gradient"),
        ("best_fit", LLAMA, "cuda", True, "requested by data.packing"),
        ("none", LLAMA, "cpu", False, "data.packing is none"),
        ("auto", NARROW, "cpu", False, "the longest row has 65 tokens, the model's window 64"),
        ("none", NARROW, "cpu", False, "data.packing is none"),
    ],
    ids=["auto", "auto on a card", "requested", "none", "auto, not possible", "none, not possible"],
)
def test_rows_are_packed_where_that_is_asked_for_and_exact(
    asked: Asked, config: dict[str, Any], device: str, packs: bool, reason: str
) -> None:
    assert decide_packing(asked, config, 65, device) == (packs, reason)


def test_packing_that_is_asked_for_and_not_exact_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="best_fit, but the longest row has 65 tokens") as refused:
        decide_packing("best_fit", NARROW, 65, "cpu")
    assert "auto" in refused.value.remedy


@pytest.mark.parametrize("asked", ["best_fit", "none"])
def test_a_forecast_rehearses_and_names_the_packing_that_was_decided(asked: Asked) -> None:
    lengths = Lengths(num_rows=100, longest=256, mean=90.0, supervised=80, mean_supervised=30.0, source="counted")
    target = find_target(parse_card("RTX 4090"), read_machine(), "auto")
    found = make_forecast(parse_spec(SPEC_PACKING.replace("ASKED", asked), where="spec.yaml"), LLAMA, lengths, target)
    assert found.levers.packing == (asked == "best_fit")
    assert "data.packing" in found.reasons["packing"]
    assert found.fits
