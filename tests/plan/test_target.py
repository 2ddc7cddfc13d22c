"""What a plan is made for: a named card, a bare size, the card that is here, the processor."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, Lengths, RehearsalRequest
from finefit.errors import SpecError, UserError
from finefit.facts.cards import CARD_KINDS, CardKind, parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.facts.nvml import Card
from finefit.plan.eval_memory import SharedRehearsals
from finefit.plan.forecast import make_forecast
from finefit.plan.search import decide_kernels
from finefit.plan.target import (
    CPU_LEAST_BYTES,
    NCCL_BYTES,
    Target,
    decide_engine,
    devices_of,
    find_target,
    for_devices,
    nodes_of,
    rates_of,
    require_same_count,
    shardings_of,
)
from finefit.plan.worker import rehearse
from finefit.spec.load import parse_spec, spec_to_json
from finefit.spec.schema import (
    AutoEngine,
    Ddp,
    DeepSpeed,
    Engine,
    Fsdp2,
    LeverSettings,
    LocalLauncher,
    Single,
    SlurmLauncher,
)
from tests.rehearse.conftest import make_config

GIB = 2**30
TURING = ("T4", "RTX 2080 Ti")


def _machine(*cards: Card) -> Machine:
    return Machine(
        host="here",
        platform="Linux",
        python="3.12",
        cpu_model="a processor",
        num_cores=2,
        memory_bytes=16 * GIB,
        cards=cards,
        cards_problem=None,
        versions={},
    )


def _card(
    name: str = "NVIDIA GeForce RTX 4090",
    free_bytes: int | None = 20 * GIB,
    capability: str = "8.9",
    memory_bytes: int = 24564 << 20,
) -> Card:
    return Card(
        name=name, memory_bytes=memory_bytes, free_bytes=free_bytes, driver="570.1", compute_capability=capability
    )


def _target(card: str, *, precision: str = "auto", machine: Machine | None = None) -> Target:
    return find_target(parse_card(card), machine or _machine(), precision)


@pytest.mark.parametrize("kind", CARD_KINDS, ids=lambda kind: kind.name)
def test_a_named_card_gives_98_percent_of_the_tables_memory(kind: CardKind) -> None:
    found = _target(kind.name)
    assert (found.device, found.count, found.name) == ("cuda", 1, kind.name)
    assert found.budget_bytes == int(kind.memory_bytes * 0.98)


def test_a_named_card_has_the_rates_of_the_table() -> None:
    kind = parse_card("A100-80GB").kind
    assert kind is not None
    found = _target("A100-80GB").rates
    assert found == rates_of(kind)
    turing = _target("T4").rates
    assert turing is not None
    assert turing.half_flops > 4 * turing.full_flops
    assert found.full_flops < found.half_flops < (kind.bf16_flops or 0)
    assert found.bytes_per_second == kind.bandwidth_bytes_per_second


def test_a_bare_size_is_taken_as_it_is_and_has_no_rates() -> None:
    found = _target("24GiB")
    assert found.budget_bytes == 24 * GIB
    assert found.rates is None
    assert found.precision == "bf16"
    assert any("assumed" in note for note in found.notes)


@pytest.mark.parametrize("name", TURING)
def test_a_turing_card_is_planned_in_fp16_and_says_what_it_lacks(name: str) -> None:
    found = _target(name)
    assert (found.capability, found.precision) == ((7, 5), "fp16")
    notes = " ".join(found.notes)
    assert name in notes
    assert "no bf16: products are computed in fp16, with loss scaling" in notes
    assert "flash attention" in notes
    assert "weights and products are fp32" in " ".join(_target(name, precision="fp32").notes)


@pytest.mark.parametrize("name", TURING)
def test_bf16_on_a_turing_card_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="bf16") as refused:
        _target(name, precision="bf16")
    assert "fp16, fp32" in refused.value.remedy


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("card", ["RTX 4090", "T4", "24GiB", "cpu"])
def test_fp16_and_fp32_are_never_refused_and_fp16_on_a_processor_is_called_slow(card: str, precision: str) -> None:
    found = _target(card, precision=precision)
    assert found.precision == precision
    assert any("more slowly" in note for note in found.notes) is (card == "cpu" and precision == "fp16")


def test_an_ampere_card_is_planned_in_bf16_and_lacks_nothing() -> None:
    found = _target("RTX 4090")
    assert (found.precision, found.notes) == ("bf16", ())


def test_count_and_price_are_carried() -> None:
    found = _target("8xA100-40GB@12.50/h")
    assert (found.count, found.price_per_hour) == (8, 12.5)
    assert found.budget_bytes == _target("A100-40GB").budget_bytes  # of one card
    assert found.name == "8xA100-40GB"
    assert _target("A100-40GB").price_per_hour is None


def test_the_processor_has_the_machines_memory_and_measured_rates() -> None:
    found = _target("cpu@0.10/h")
    assert (found.device, found.precision, found.count, found.price_per_hour) == ("cpu", "fp32", 1, 0.1)
    assert found.budget_bytes == 16 * GIB
    assert found.rates is not None
    assert min(found.rates.full_flops, found.rates.half_flops, found.rates.bytes_per_second) > 1e6
    assert 0 < found.context_bytes < found.budget_bytes
    assert _target("cpu", precision="bf16").precision == "bf16"


def test_a_mac_is_planned_as_its_processor_with_a_word_about_its_gpu() -> None:
    found = _target("auto", machine=replace(_machine(), platform="macOS-15.6-arm64-arm-64bit"))
    assert found.device == "cpu"
    assert "finefit does not use Apple's GPU (MPS): this is a plan for the CPU" in found.notes


def test_a_budget_is_compared_at_the_rates_of_the_card_that_is_here() -> None:
    """The run trains on that one; its memory is still no more than what was asked for."""
    found = _target("24GiB", machine=_machine(_card()))
    assert (found.rates, found.budget_bytes) == (_target("RTX 4090").rates, _target("24GiB").budget_bytes)
    assert found.notes[-1] == "times are those of a budget of 24GiB on the RTX 4090 of this machine"
    assert _target("24GiB", machine=_machine(_card("a card of tomorrow"))).rates is None


def test_only_a_card_in_this_machine_has_this_hosts_speed() -> None:
    def factor(card: str) -> float | None:
        found = find_target(parse_card(card), _machine(_card()), "auto", host_factor=1.7)
        return None if found.rates is None else found.rates.host_factor

    assert [factor(card) for card in ("auto", "24GiB", "A100-80GB")] == [1.7, 1.7, 1.0]


def test_auto_takes_what_the_card_here_has_free() -> None:
    found = _target("auto", machine=_machine(_card(free_bytes=20 * GIB)))
    assert (found.device, found.capability, found.count) == ("cuda", (8, 9), 1)
    assert 0.97 * 20 * GIB < found.budget_bytes <= 20 * GIB
    assert found.rates == _target("RTX 4090").rates
    less = _target("auto", machine=_machine(_card(free_bytes=5 * GIB)))
    assert less.budget_bytes == pytest.approx(found.budget_bytes / 4, abs=1)


def test_the_processor_is_taken_without_a_card_or_where_it_is_asked_for() -> None:
    assert _target("auto").device == _target("cpu", machine=_machine(_card())).device == "cpu"


def test_a_named_card_is_planned_for_as_it_is_sold_whatever_is_here() -> None:
    assert _target("A100-80GB", machine=_machine(_card())) == _target("A100-80GB")


def test_a_driver_that_does_not_say_what_is_free_asks_for_a_budget() -> None:
    with pytest.raises(UserError, match="RTX 4090") as refused:
        _target("auto", machine=_machine(_card(free_bytes=None)))
    assert "--card" in refused.value.remedy


@pytest.mark.parametrize(("capability", "precision"), [("7.5", "fp16"), ("9.0", "bf16")])
def test_a_card_here_that_no_table_knows_has_the_generation_that_its_driver_reports(
    capability: str, precision: str
) -> None:
    found = _target("auto", machine=_machine(_card("NVIDIA Nonesuch 9000", capability=capability)))
    assert found.capability == tuple(int(part) for part in capability.split("."))
    assert (found.precision, found.rates) == (precision, None)
    assert found.budget_bytes > 19 * GIB


# several devices


def test_an_engine_that_names_its_devices_means_so_many_of_the_card() -> None:
    one, four = _target("A100-40GB"), find_target(parse_card("A100-40GB"), _machine(), "auto", devices=4)
    assert (four.count, four.name, four.budget_bytes) == (4, "4xA100-40GB", one.budget_bytes)
    assert four == find_target(parse_card("4xA100-40GB"), _machine(), "auto", devices=4)
    assert four.context_bytes > one.context_bytes  # what the cards exchange their gradients through


def test_a_card_and_an_engine_that_name_other_numbers_contradict_each_other() -> None:
    with pytest.raises(SpecError, match=r"8xA100-40GB and engine.devices: 4 contradict"):
        find_target(parse_card("8xA100-40GB"), _machine(), "auto", devices=4)


def test_processes_on_a_processor_share_its_memory_and_its_rates() -> None:
    request = parse_card("cpu")
    one = find_target(request, _machine(), "auto", devices=1)
    two = for_devices(one, request, _machine(), 2)  # measured once: rates of a busy machine vary
    assert (two.count, two.name, two.budget_bytes) == (2, "cpu", one.budget_bytes // 2)
    assert one.rates is not None
    assert two.rates is not None
    assert (two.rates.full_flops, two.rates.bytes_per_second) == (
        one.rates.full_flops / 2,
        one.rates.bytes_per_second / 2,
    )
    assert any("2 processes share" in note for note in two.notes)


def test_the_fullest_of_the_cards_here_sets_the_budget() -> None:
    machine = _machine(_card(free_bytes=20 * GIB), _card(free_bytes=5 * GIB), _card(free_bytes=1 * GIB))
    found = find_target(parse_card("auto"), machine, "auto", devices=2)
    assert (found.count, found.budget_bytes) == (2, int(5 * GIB * 0.98))


def test_more_devices_than_cards_are_refused() -> None:
    with pytest.raises(SpecError, match=r"engine.devices is 2, but this machine has 1"):
        find_target(parse_card("auto"), _machine(_card()), "auto", devices=2)


def test_nodes_multiply_what_one_of_them_has() -> None:
    found = find_target(parse_card("4xA100-40GB"), _machine(), "auto", nodes=2)
    assert (found.count, found.name) == (8, "8xA100-40GB")
    assert "2 nodes with 4 each" in found.notes


# a setting of the user's own


@pytest.mark.parametrize(
    ("setting", "expandable"),
    [
        (None, True),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128,expandable_segments: true", True),
        ("max_split_size_mb:128", False),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
def test_an_allocator_of_the_users_own_is_planned_for_on_this_machine(setting: str | None, expandable: bool) -> None:
    here = find_target(parse_card("auto"), _machine(_card()), "auto", allocator=setting)
    assert here.expandable is expandable
    assert any("PYTORCH_CUDA_ALLOC_CONF" in note for note in here.notes) is not expandable
    assert find_target(parse_card("RTX 4090"), _machine(_card()), "auto", allocator=setting).expandable


# One device or several: what auto comes to, what is planned as it was asked for, and what a forecast says of pairs and
# processes.

CONFIG = make_config("llama-3.2-1b", layers=2, vocab_size=8192)
SHARED = SharedRehearsals()
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
    "ddp": Ddp(kind="ddp", devices=2),
    "fsdp2": Fsdp2(kind="fsdp2", devices=2),
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
    return make_forecast(spec, CONFIG | {"num_hidden_layers": layers}, replace(LENGTHS, sides=sides), target, SHARED)


# what an engine means


def test_an_engine_or_else_the_card_says_how_many_devices_and_only_a_scheduler_has_nodes() -> None:
    engines = (AUTO, TWO, ENGINES["single"], ENGINES["ddp"], ENGINES["zero3"])
    assert [devices_of(engine) for engine in engines] == [None, 2, 1, 2, 2]
    assert (nodes_of(LocalLauncher(kind="local")), nodes_of(SlurmLauncher(kind="slurm", nodes=3))) == (1, 3)


def test_auto_tries_the_mildest_sharding_first_and_divides_only_what_can_be() -> None:
    assert shardings_of(AUTO, 1) == ("none",)
    assert shardings_of(AUTO, 4) == ("ddp", "fsdp2")
    assert shardings_of(AUTO, 4, can_divide=False) == ("ddp",)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_named_is_planned_as_it_was_asked_for(name: str) -> None:
    (sharding,) = shardings_of(ENGINES[name], 2)
    assert sharding == {"single": "none"}.get(name, name)
    assert decide_engine(ENGINES[name], sharding, 2, fits=False) == (ENGINES[name], "requested")


# what a forecast makes of it


def test_one_device_is_one_process() -> None:
    found = _forecast()
    assert (found.engine, found.devices, found.reasons["engine"]) == (Single(kind="single"), 1, "one device")


def test_auto_copies_the_model_where_a_copy_fits_and_divides_it_where_none_does() -> None:
    roomy = _forecast("engine={kind: auto, devices: 2}")
    assert roomy.fits
    assert roomy.engine == Ddp(kind="ddp", devices=2)
    narrow = (roomy.peak_bytes - (1 << 28)) / GIB
    tight = _forecast("engine={kind: auto, devices: 2}", budget_gib=narrow)
    assert tight.fits
    assert tight.engine == Fsdp2(kind="fsdp2", devices=2)
    assert tight.reasons["engine"] == "a whole copy does not fit on one"
    assert tight.peak_bytes < roomy.peak_bytes


def test_a_card_with_a_number_asks_for_so_many_processes() -> None:
    found = _forecast(card="4xA100-80GB")
    assert (found.devices, found.engine, found.card) == (4, Ddp(kind="ddp", devices=4), "4xA100-80GB")


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
    (note,) = [note for note in found.notes if "sharded over" in note]
    assert note == "sharded over 2 of these cards it fits as it is: engine={kind: fsdp2, devices: 2}"
    followed = _forecast(note[note.index("engine=") :], budget_gib=budget, layers=8)
    assert followed.fits
    assert followed.engine == Fsdp2(kind="fsdp2", devices=2)


def test_nobody_is_told_to_divide_what_cannot_be() -> None:
    budget = (_forecast(layers=8).peak_bytes / GIB) * 0.5
    found = _forecast("optimizer.kind=adamw_8bit", budget_gib=budget, layers=8)
    assert not found.fits
    assert not any("sharded over" in note for note in found.notes)


@pytest.mark.parametrize("engine", ["{kind: fsdp2, devices: 1}", "{kind: deepspeed, devices: 1}"])
def test_one_device_has_nothing_to_divide_over(engine: str) -> None:
    with pytest.raises(SpecError, match=r"shards over devices, but there is one") as refused:
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
        (Ddp(kind="ddp", devices=1), "engine.devices: 1"),
        (TWO, "engine.devices: 2"),
    ],
)
def test_a_card_with_another_number_contradicts_the_engine_by_its_own_words(engine: Engine, words: str) -> None:
    with pytest.raises(SpecError, match=f"card: 4xA100-80GB and {words} contradict"):
        require_same_count(parse_card("4xA100-80GB"), engine)
    for sound in (AUTO, Ddp(kind="ddp", devices=4)):
        require_same_count(parse_card("4xA100-80GB"), sound)
    require_same_count(parse_card("A100-80GB"), engine)


def test_the_rehearsing_process_tells_it_too() -> None:
    spec = parse_spec(SPEC, where="spec.yaml", overrides=("engine={kind: single}",))
    question = RehearsalRequest(spec=spec_to_json(spec), config=CONFIG, cards=("4xA100-80GB",), lengths=LENGTHS)
    with pytest.raises(SpecError, match=r"engine.kind: single"):
        rehearse(question)


def test_processes_on_a_processor_each_have_their_own_copy() -> None:
    two = _forecast("engine={kind: ddp, devices: 2}", card="cpu")
    assert (two.card, two.devices) == ("cpu", 2)
    assert two.host_bytes == 2 * two.peak_bytes
    assert two.budget_bytes == read_machine().memory_bytes // 2


def test_zero3_is_planned_without_the_kernels_that_it_cannot_have() -> None:
    zero2, zero3 = (_forecast(f"engine={{kind: deepspeed, devices: 2, stage: {stage}}}") for stage in (2, 3))
    assert (zero2.levers.kernels, zero3.levers.kernels) == ("fused", "torch")
    assert zero3.reasons["kernels"] == "the weights are sharded over the devices"


def test_compiled_layers_and_fused_kernels_contradict_each_other() -> None:
    target = find_target(parse_card("A100-80GB"), read_machine(), "auto")
    with pytest.raises(SpecError, match=r"levers.kernels: fused and levers.compile: true contradict"):
        decide_kernels(LeverSettings(kernels="fused", compile=True), target, "none", has_experts=False)
    assert decide_kernels(LeverSettings(compile=True), target, "none", has_experts=False)[0] == "torch"
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


def test_on_a_cpu_small_blocks_need_a_margin() -> None:
    target, card = _target("cpu"), _target("RTX 4090")
    assert target.margin_of(0) == CPU_LEAST_BYTES
    assert target.margin_of(0, 100 << 20) == CPU_LEAST_BYTES + (50 << 20)
    assert target.margin_of(100 << 30) == 3 << 30
    assert card.margin_of(1 << 30, 1 << 30) == card.margin_of(1 << 30)


def test_the_prediction_of_a_training_on_a_cpu_is_its_own_where_an_evaluation_needs_more() -> None:
    plain = _forecast(card="cpu")
    found = _forecast("evaluate=[{task: exact_match, batch: 512, max_new_tokens: 64}]", card="cpu")
    assert found.peak_instant == "generation"
    assert found.peak_bytes > 1.1 * found.predicted_bytes("cpu")
    assert found.predicted_bytes("cpu") == pytest.approx(plain.peak_bytes, rel=0.05)
    assert found.predicted_bytes("cuda") == found.reserved_bytes
