"""One device or several: what auto comes to, what is planned as it was asked for, and what a forecast says of pairs and processes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, Lengths, Question
from finefit.errors import SpecError
from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.plan.engine import decide_engine, devices_of, nodes_of, require_same_count, shardings_of
from finefit.plan.forecast import make_forecast
from finefit.plan.kernels import decide_kernels
from finefit.plan.target import NCCL_BYTES, find_target
from finefit.plan.worker import answer
from finefit.rehearse.rehearsal import Rehearsed
from finefit.spec.load import parse_spec, spec_to_json
from finefit.spec.schema import (
    AutoEngine,
    DeepSpeed,
    Engine,
    FullyShard,
    Levers,
    LocalLauncher,
    Parallel,
    Single,
    SlurmLauncher,
)
from tests.rehearse.conftest import make_config

GIB = 2**30
CONFIG = make_config("llama-3.2-1b", layers=2, vocab_size=8192)
MEMO: dict[str, Rehearsed] = {}
SPEC = """\
name: planned
model: {kind: folder, path: model}
tuning: {kind: full}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
schedule: {epochs: 3}
global_batch: 8
levers: {micro_batch: 1, recompute: all, keep_attention: false, loss_chunk: 256, offload: none, mlp_tiles: 1}
"""
AUTO, TWO = AutoEngine(kind="auto"), AutoEngine(kind="auto", devices=2)
ENGINES: dict[str, Engine] = {
    "single": Single(kind="single"),
    "ddp": Parallel(kind="ddp", devices=2),
    "fsdp2": FullyShard(kind="fsdp2", devices=2),
    "zero2": DeepSpeed(kind="deepspeed", devices=2),
    "zero3": DeepSpeed(kind="deepspeed", devices=2, stage=3),
}


LENGTHS = Lengths(num_rows=80, longest=256, mean=256.0, supervised=200, mean_supervised=200.0, source="counted")


@cache
def _forecast(
    *overrides: str, card: str = "A100-80GB", budget_gib: float | None = None, sides: int = 1, layers: int = 2
) -> Forecast:
    spec = parse_spec(SPEC, where="spec.yaml", overrides=overrides)
    target = find_target(
        parse_card(card), read_machine(), "auto", devices=devices_of(spec.engine), nodes=nodes_of(spec.launcher)
    )
    if budget_gib is not None:
        target = replace(target, budget_bytes=int(budget_gib * GIB))
    return make_forecast(spec, CONFIG | {"num_hidden_layers": layers}, replace(LENGTHS, sides=sides), target, MEMO)


# what an engine means


@pytest.mark.parametrize(
    ("engine", "devices"), [(AUTO, None), (TWO, 2), (ENGINES["single"], 1), (ENGINES["ddp"], 2), (ENGINES["zero3"], 2)]
)
def test_an_engine_says_how_many_devices_it_takes_or_leaves_it_to_the_card(engine: Engine, devices: int | None) -> None:
    assert devices_of(engine) == devices


def test_only_a_scheduler_has_nodes() -> None:
    assert (nodes_of(LocalLauncher(kind="local")), nodes_of(SlurmLauncher(kind="slurm", nodes=3))) == (1, 3)


def test_auto_tries_the_mildest_sharding_first_and_divides_only_what_can_be() -> None:
    assert shardings_of(AUTO, 1) == ("none",)
    assert shardings_of(AUTO, 4) == ("ddp", "fsdp2")
    assert shardings_of(AUTO, 4, can_divide=False) == ("ddp",)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_named_is_planned_as_it_was_asked_for(name: str) -> None:
    (sharding,) = shardings_of(ENGINES[name], 2)
    assert sharding == {"single": "none"}.get(name, name)
    assert decide_engine(ENGINES[name], sharding, 2, fits=False) == (ENGINES[name], "asked for")


# what a forecast makes of it


def test_one_device_is_one_process() -> None:
    found = _forecast()
    assert (found.engine, found.devices, found.reasons["engine"]) == (Single(kind="single"), 1, "one device")


def test_auto_copies_the_model_where_a_copy_fits_and_divides_it_where_none_does() -> None:
    roomy = _forecast("engine={kind: auto, devices: 2}")
    assert roomy.fits
    assert roomy.engine == Parallel(kind="ddp", devices=2)
    narrow = (roomy.peak_bytes - (1 << 28)) / GIB
    tight = _forecast("engine={kind: auto, devices: 2}", budget_gib=narrow)
    assert tight.fits
    assert tight.engine == FullyShard(kind="fsdp2", devices=2)
    assert tight.reasons["engine"] == "a whole copy does not fit on one"
    assert tight.peak_bytes < roomy.peak_bytes


def test_a_card_with_a_number_asks_for_so_many_processes() -> None:
    found = _forecast(card="4xA100-80GB")
    assert (found.devices, found.engine, found.card) == (4, Parallel(kind="ddp", devices=4), "4xA100-80GB")


def test_a_step_is_the_global_batch_whatever_the_number_of_processes() -> None:
    one, two = _forecast(), _forecast("engine={kind: ddp, devices: 2}")
    assert one.tokens_per_step == two.tokens_per_step == 8 * 256
    assert (one.accumulation, two.accumulation) == (8, 4)
    assert one.total_steps == two.total_steps == 30
    assert one.flops_per_step == pytest.approx(two.flops_per_step)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_holds_an_fp32_copy_of_its_part_of_the_trained_weights(stage: int) -> None:
    """Beside moments and gradients in parts; ZeRO-3 leaves weights whole up to a limit."""
    ddp, zero = (
        _forecast(f"engine={engine}")
        for engine in ("{kind: ddp, devices: 2}", f"{{kind: deepspeed, devices: 2, stage: {stage}}}")
    )
    weights = 4 * ddp.parameters
    saved = ddp.components["gradients"] / 2 + ddp.components["optimizer"] / 2
    assert zero.components["gradients"] == pytest.approx(ddp.components["gradients"] / 2, rel=0.01)
    assert zero.components["workspace"] - ddp.components["workspace"] >= weights / 2
    assert ddp.allocated_bytes - zero.allocated_bytes < saved
    assert any(f"ZeRO-{stage}" in note for note in zero.notes)


def test_more_than_one_card_is_told_what_was_assumed() -> None:
    found = _forecast("engine={kind: ddp, devices: 2}")
    assert found.context_bytes - _forecast().context_bytes == NCCL_BYTES
    assert any("NCCL" in note for note in found.notes)
    assert not any("NCCL" in note for note in _forecast().notes)


def test_what_fits_on_no_card_of_its_kind_is_told_on_how_many_it_would() -> None:
    budget = (_forecast(layers=8).peak_bytes / GIB) * 0.8
    found = _forecast(budget_gib=budget, layers=8)
    assert not found.fits
    (note,) = [note for note in found.notes if "divided over" in note]
    assert note == "divided over 2 of these cards it fits as it is: engine={kind: fsdp2, devices: 2}"
    followed = _forecast(note[note.index("engine=") :], budget_gib=budget, layers=8)
    assert followed.fits
    assert followed.engine == FullyShard(kind="fsdp2", devices=2)


def test_nobody_is_told_to_divide_what_cannot_be() -> None:
    budget = (_forecast(layers=8).peak_bytes / GIB) * 0.5
    found = _forecast("optimizer.kind=adamw_8bit", budget_gib=budget, layers=8)
    assert not found.fits
    assert not any("divided over" in note for note in found.notes)


@pytest.mark.parametrize("engine", ["{kind: fsdp2, devices: 1}", "{kind: deepspeed, devices: 1}"])
def test_one_device_has_nothing_to_divide_over(engine: str) -> None:
    with pytest.raises(SpecError, match=r"divides over devices, and there is one") as refused:
        _forecast(f"engine={engine}")
    assert refused.value.remedy == "set engine.kind: single"
    assert _forecast(f"engine={engine}", "launcher={kind: slurm, nodes: 2}").devices == 2


@pytest.mark.parametrize(("name", "is_whole"), [("zero2", False), ("fsdp2", True), ("zero3", True)])
def test_weights_that_are_divided_lie_whole_in_the_host_memory_of_every_process_first(
    name: str, is_whole: bool
) -> None:
    ddp, found = (_forecast(f"engine={ENGINES[kind].model_dump_json(exclude_none=True)}") for kind in ("ddp", name))
    assert found.host_bytes - ddp.host_bytes == (2 * 4 * found.parameters if is_whole else 0)


def test_processes_on_a_processor_have_room_to_load_what_they_divide() -> None:
    found = _forecast("engine={kind: fsdp2, devices: 8}", "tuning={kind: lora}", card="cpu")
    assert found.host_bytes >= 8 * 4 * (found.parameters - found.trainable_parameters)


def test_a_plan_tells_what_its_engine_would_refuse() -> None:
    found = _forecast("engine={kind: fsdp2, devices: 2}", "optimizer.kind=adamw_8bit")
    (note,) = [note for note in found.notes if note.startswith("a run would be refused")]
    assert "optimizer.kind adamw_8bit" in note
    assert not any("refused" in note for note in _forecast("engine={kind: fsdp2, devices: 2}").notes)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (ENGINES["single"], "engine.kind: single"),
        (Parallel(kind="ddp", devices=1), "engine.devices: 1"),
        (TWO, "engine.devices: 2"),
    ],
)
def test_a_card_with_another_number_contradicts_the_engine_by_its_own_words(engine: Engine, words: str) -> None:
    with pytest.raises(SpecError, match=f"card: 4xA100-80GB and {words} contradict"):
        require_same_count(parse_card("4xA100-80GB"), engine)
    for sound in (AUTO, Parallel(kind="ddp", devices=4)):
        require_same_count(parse_card("4xA100-80GB"), sound)
    require_same_count(parse_card("A100-80GB"), engine)


def test_the_rehearsing_process_tells_it_too() -> None:
    spec = parse_spec(SPEC, where="spec.yaml", overrides=("engine={kind: single}",))
    question = Question(spec=spec_to_json(spec), config=CONFIG, cards=("4xA100-80GB",), lengths=LENGTHS)
    with pytest.raises(SpecError, match=r"engine.kind: single"):
        answer(question)


def test_processes_on_a_processor_each_have_their_own_copy() -> None:
    two = _forecast("engine={kind: ddp, devices: 2}", card="cpu")
    assert (two.card, two.devices) == ("cpu", 2)
    assert two.host_bytes == 2 * two.peak_bytes
    assert two.budget_bytes == read_machine().memory_bytes // 2


def test_zero3_is_planned_without_the_kernels_that_it_cannot_have() -> None:
    zero2, zero3 = (_forecast(f"engine={{kind: deepspeed, devices: 2, stage: {stage}}}") for stage in (2, 3))
    assert (zero2.levers.kernels, zero3.levers.kernels) == ("fused", "torch")
    assert zero3.reasons["kernels"] == "the weights are divided over the devices"


def test_compiled_layers_and_fused_kernels_contradict_each_other() -> None:
    target = find_target(parse_card("A100-80GB"), read_machine(), "auto")
    with pytest.raises(SpecError, match=r"levers.kernels: fused and levers.compile: true contradict"):
        decide_kernels(Levers(kernels="fused", compile=True), target, "none", has_experts=False)
    assert decide_kernels(Levers(compile=True), target, "none", has_experts=False)[0] == "torch"
    with pytest.raises(SpecError, match=r"levers.compile"):
        _forecast("levers.kernels=fused", "levers.compile=true")


# pairs


def test_a_pair_has_the_tokens_of_both_sides() -> None:
    pairs = _forecast("objective={kind: dpo}", "tuning={kind: lora}", sides=2)
    assert pairs.tokens_per_step == 8 * 2 * 256
    assert list(pairs.instants)[:3] == ["load", "reference", "forward"]


def test_a_reference_in_every_step_is_told_what_keeping_it_would_spare() -> None:
    lora: Any = "tuning={kind: lora}"
    live = _forecast("objective={kind: dpo}", lora, sides=2)
    kept = _forecast("objective={kind: dpo, reference: cached}", lora, sides=2)
    assert any("objective.reference=cached" in note for note in live.notes)
    assert not any("objective.reference=cached" in note for note in kept.notes)
    assert not any(
        "reference" in note for note in _forecast("objective={kind: dpo}", lora, "schedule.epochs=1", sides=2).notes
    )
    assert live.step_seconds is not None
    assert kept.step_seconds is not None
    assert kept.step_seconds < 0.9 * live.step_seconds
    assert kept.total_seconds is not None
    assert kept.total_seconds > 30 * kept.step_seconds  # the pass before the first step
    assert live.total_seconds == pytest.approx(30 * live.step_seconds)


# what was asked for


@pytest.mark.parametrize(
    ("kind", "each"), [("adamw", 8), ("adamw_8bit", 2), ("paged_adamw", 8), ("paged_adamw_8bit", 2)]
)
def test_a_checkpoint_holds_the_moments_as_they_are_kept(kind: str, each: int) -> None:
    found = _forecast(f"optimizer.kind={kind}", "save={keep: 1, every: 1 steps}")
    assert found.disk_bytes == 4 * (4 + each) * found.parameters


@pytest.mark.parametrize(
    ("save", "count"),
    [
        ("{}", 2),
        ("{every: 10 steps}", 4),
        ("{every: 5 steps}", 6),
        ("{every: epoch}", 6),
        ("{keep: 1, every: 1 steps}", 4),
    ],
)
def test_no_more_checkpoints_are_counted_than_are_ever_saved_and_one_that_a_stop_leaves(save: str, count: int) -> None:
    found = _forecast("schedule={steps: 30}", f"save={save}")
    assert found.disk_bytes == count * 12 * found.parameters


def test_paged_moments_are_counted_to_the_host() -> None:
    plain, paged = _forecast(), _forecast("optimizer.kind=paged_adamw")
    assert paged.host_bytes - plain.host_bytes == pytest.approx(8 * plain.parameters, rel=0.01)
    assert paged.peak_bytes < plain.peak_bytes
    assert any("paged moments" in note for note in paged.notes)


def test_bf16_adapters_are_saved_with_moments_in_bf16() -> None:
    wide, narrow = (_forecast(f"tuning={{kind: lora, weights: {kind}}}", "save={keep: 1}") for kind in ("fp32", "bf16"))
    assert narrow.disk_bytes == wide.disk_bytes // 2


def test_eight_bits_say_that_inputs_are_kept() -> None:
    assert any("in 8 bits" in note for note in _forecast("tuning={kind: lora, base_bits: 8}").notes)
