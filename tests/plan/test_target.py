"""What a plan is made for: a named card, a bare size, the card that is here, the processor."""

import pytest

from finefit.errors import SpecError, UserError
from finefit.facts.cards import CARD_KINDS, CardKind, parse_card
from finefit.facts.machine import Card, Machine
from finefit.plan.target import Target, find_target, rates_of

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
    assert "no bf16: products are taken in fp16, with loss scaling" in notes
    assert "flash attention" in notes
    assert "weights and products are fp32" in " ".join(_target(name, precision="fp32").notes)


def test_a_turing_card_has_the_rate_of_its_fp16() -> None:
    rates = _target("T4").rates
    assert rates is not None
    assert rates.half_flops > 4 * rates.full_flops


@pytest.mark.parametrize("name", TURING)
def test_bf16_on_a_turing_card_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="bf16") as refused:
        _target(name, precision="bf16")
    assert "fp16, fp32" in refused.value.remedy


@pytest.mark.parametrize("card", ["RTX 4090", "T4", "24GiB", "cpu"])
def test_fp16_is_never_refused(card: str) -> None:
    assert _target(card, precision="fp16").precision == "fp16"


def test_fp16_on_a_processor_is_told_to_be_slow() -> None:
    assert any("more slowly" in note for note in _target("cpu", precision="fp16").notes)


def test_an_ampere_card_is_planned_in_bf16_and_lacks_nothing() -> None:
    found = _target("RTX 4090")
    assert (found.precision, found.notes) == ("bf16", ())


@pytest.mark.parametrize("card", ["RTX 4090", "T4", "24GiB", "cpu"])
def test_fp32_is_never_refused(card: str) -> None:
    assert _target(card, precision="fp32").precision == "fp32"


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


def test_the_processor_may_be_asked_for_bf16() -> None:
    assert _target("cpu", precision="bf16").precision == "bf16"


def test_auto_takes_what_the_card_here_has_free() -> None:
    found = _target("auto", machine=_machine(_card(free_bytes=20 * GIB)))
    assert (found.device, found.capability, found.count) == ("cuda", (8, 9), 1)
    assert 0.97 * 20 * GIB < found.budget_bytes <= 20 * GIB
    assert found.rates == _target("RTX 4090").rates
    less = _target("auto", machine=_machine(_card(free_bytes=5 * GIB)))
    assert less.budget_bytes == pytest.approx(found.budget_bytes / 4, abs=1)


def test_auto_without_a_card_falls_to_the_processor() -> None:
    assert _target("auto").device == "cpu"


def test_the_processor_is_taken_where_it_is_asked_for_beside_a_card() -> None:
    assert _target("cpu", machine=_machine(_card())).device == "cpu"


def test_a_named_card_is_planned_for_as_it_is_sold_whatever_is_here() -> None:
    assert _target("A100-80GB", machine=_machine(_card())) == _target("A100-80GB")


def test_a_driver_that_does_not_say_what_is_free_asks_for_a_budget() -> None:
    with pytest.raises(UserError, match="RTX 4090") as refused:
        _target("auto", machine=_machine(_card(free_bytes=None)))
    assert "--card" in refused.value.remedy


def test_a_card_here_that_no_table_knows_has_a_budget_and_no_rates() -> None:
    found = _target("auto", machine=_machine(_card("NVIDIA Nonesuch 9000", capability="9.0")))
    assert found.rates is None
    assert found.budget_bytes > 19 * GIB


@pytest.mark.parametrize(("capability", "precision"), [("7.5", "fp16"), ("9.0", "bf16")])
def test_a_card_here_that_no_table_knows_has_the_generation_that_its_driver_reports(
    capability: str, precision: str
) -> None:
    found = _target("auto", machine=_machine(_card("NVIDIA Nonesuch 9000", capability=capability)))
    assert found.capability == tuple(int(part) for part in capability.split("."))
    assert found.precision == precision


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
    one, two = (find_target(parse_card("cpu"), _machine(), "auto", devices=devices) for devices in (1, 2))
    assert (two.count, two.name, two.budget_bytes) == (2, "cpu", one.budget_bytes // 2)
    assert one.rates is not None
    assert two.rates is not None
    assert two.rates.full_flops < 0.9 * one.rates.full_flops
    assert any("2 processes share" in note for note in two.notes)


def test_the_fullest_of_the_cards_here_sets_the_budget() -> None:
    machine = _machine(_card(free_bytes=20 * GIB), _card(free_bytes=5 * GIB), _card(free_bytes=1 * GIB))
    found = find_target(parse_card("auto"), machine, "auto", devices=2)
    assert (found.count, found.budget_bytes) == (2, int(5 * GIB * 0.98))


def test_more_devices_than_cards_are_refused() -> None:
    with pytest.raises(SpecError, match=r"engine.devices is 2, this machine has 1"):
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
