import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.errors import UserError
from finefit.facts.cards import CARD_KINDS, CardKind, find_kind, parse_card

MIB = 2**20
KINDS = {kind.name: kind for kind in CARD_KINDS}

NVIDIA_SMI = [  # name, memory.total in MiB, our name
    ("NVIDIA GeForce RTX 2060", 6144, "RTX 2060"),
    ("NVIDIA GeForce RTX 2060 SUPER", 8192, "RTX 2060 Super"),
    ("GeForce RTX 2080 Ti", 11019, "RTX 2080 Ti"),
    ("NVIDIA TITAN RTX", 24220, "Titan RTX"),
    ("NVIDIA GeForce RTX 3060", 12288, "RTX 3060"),
    ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080 10GB"),
    ("NVIDIA GeForce RTX 3080", 12288, "RTX 3080 12GB"),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384, "RTX 3080 Laptop 16GB"),
    ("NVIDIA GeForce RTX 3090", 24268, "RTX 3090"),
    ("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX 4060 Ti 8GB"),
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX 4060 Ti 16GB"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "RTX 4070 Ti Super"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "RTX 4090 Laptop"),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "RTX 5060 Ti 16GB"),
    ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("Quadro RTX 6000", 24576, "Quadro RTX 6000"),
    ("Quadro RTX 8000", 46080, "Quadro RTX 8000"),
    ("NVIDIA RTX A6000", 49140, "RTX A6000"),
    ("NVIDIA RTX A6000", 46068, "RTX A6000"),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "RTX 4000 Ada"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX 6000 Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX PRO 6000 Blackwell"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "RTX PRO 6000 Blackwell Max-Q"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTX PRO 6000 Blackwell Server"),
    ("Tesla T4", 15109, "T4"),
    ("Tesla P100-PCIE-16GB", 16280, "P100"),
    ("Tesla P100-SXM2-16GB", 16384, "P100-SXM2"),
    ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
    ("Tesla V100-SXM2-32GB", 32768, "V100-32GB"),
    ("Tesla V100-PCIE-32GB", 32768, "V100-32GB PCIe"),
    ("NVIDIA A10", 23028, "A10"),
    ("NVIDIA A10G", 23028, "A10G"),
    ("NVIDIA A30", 24576, "A30"),
    ("NVIDIA A40", 46068, "A40"),
    ("NVIDIA L4", 23034, "L4"),
    ("NVIDIA L40", 46068, "L40"),
    ("NVIDIA L40S", 46068, "L40S"),
    ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
    ("A100-SXM-80GB", 81251, "A100-80GB"),
    ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB PCIe"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB PCIe"),
    ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
    ("NVIDIA H100 PCIe", 81559, "H100 PCIe"),
    ("NVIDIA H100 NVL", 95830, "H100 NVL"),
    ("NVIDIA H200", 143771, "H200"),
    ("NVIDIA H200 NVL", 143771, "H200 NVL"),
    ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
    ("NVIDIA GH200 120GB", 97871, "GH200-96GB"),
    ("NVIDIA B200", 183359, "B200"),
]


def _refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_card(text)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return str(caught.value)


def test_the_table_is_large_and_its_names_are_unique() -> None:
    spelled = [name for kind in CARD_KINDS for name in (kind.name, *kind.spellings)]
    assert len(CARD_KINDS) >= 45
    assert len({re.sub("[^a-z0-9]", "", name.lower()) for name in spelled}) == len(spelled)


@pytest.mark.parametrize("card", CARD_KINDS, ids=lambda kind: kind.name)
def test_every_entry_is_plausible(card: CardKind) -> None:
    assert (card.bf16_flops is not None) == card.has_bf16 == (card.compute_capability >= (8, 0))
    assert card.bandwidth_bytes_per_second > card.host_bytes_per_second > 1e9
    assert 6e12 < card.fp32_flops <= card.fp16_flops < 3e15
    assert 0.5 < card.matrix_efficiency < 1
    assert 4 * 2**30 < card.memory_bytes < 300 * 2**30
    assert card.source


def test_memory_lies_at_most_a_tenth_below_the_size_in_the_name() -> None:
    stated = {kind: int(match[1]) for kind in CARD_KINDS if (match := re.search(r"(\d+)GB", kind.name))}
    assert len(stated) > 10
    for kind, gib in stated.items():
        assert 0.9 * gib * 2**30 <= kind.memory_bytes <= gib * 2**30, kind.name


def test_geforce_cards_multiply_at_twice_their_fp32_rate_and_not_at_the_headline_rate() -> None:
    assert KINDS["RTX 4090"].bf16_flops == pytest.approx(165.2e12)
    assert KINDS["RTX 3090"].bf16_flops == pytest.approx(71e12)
    assert KINDS["RTX 2080 Ti"].fp16_flops == pytest.approx(53.8e12)
    for kind in CARD_KINDS:
        if re.match(r"RTX [345]0[6-9]0", kind.name):
            assert kind.fp16_flops == pytest.approx(2 * kind.fp32_flops, rel=0.01), kind.name


@pytest.mark.parametrize(
    "text",
    ["RTX 4090", "rtx4090", "RTX-4090", "4090", "NVIDIA GeForce RTX 4090", " rtx_4090 ", "RTX 4090 24GB", "1x4090"],
)
def test_one_card_has_many_spellings(text: str) -> None:
    request = parse_card(text)
    assert request.text == text
    assert request.kind == KINDS["RTX 4090"]
    assert (request.count, request.memory_bytes, request.price_per_hour) == (1, 24564 * MIB, None)
    assert not request.is_cpu
    assert not request.is_auto


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("24564MiB", 24564 * MIB),
        ("500MB", 5 * 10**8),
    ],
)
def test_a_size_is_a_card_of_unknown_speed(text: str, memory_bytes: int) -> None:
    for count, request in ((1, parse_card(text)), (2, parse_card(f"2x{text}"))):
        assert (request.kind, request.count, request.memory_bytes) == (None, count, memory_bytes)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xA100-40GB", 8, "A100-40GB"),
        ("8 x A100-40GB", 8, "A100-40GB"),
        ("2X4090", 2, "RTX 4090"),
        ("4×H100 PCIe", 4, "H100 PCIe"),
        ("A6000", 1, "RTX A6000"),
        ("RTX PRO 6000", 1, "RTX PRO 6000 Blackwell"),
        ("3080 12GB", 1, "RTX 3080 12GB"),
        ("H100 80GB", 1, "H100-80GB"),
        ("H100 94GB", 1, "H100 NVL"),
        ("H200", 1, "H200"),
        ("rtx 3060 12gb", 1, "RTX 3060"),
    ],
)
def test_counts_and_short_names_are_read(text: str, count: int, name: str) -> None:
    request = parse_card(text)
    assert request.kind is not None
    assert (request.count, request.kind.name, request.memory_bytes) == (count, name, KINDS[name].memory_bytes)


def test_cpu_and_auto_leave_the_memory_to_be_read() -> None:
    cpu, auto = parse_card("cpu"), parse_card("AUTO")
    assert (cpu.is_cpu, cpu.is_auto, cpu.kind, cpu.count, cpu.memory_bytes) == (True, False, None, 1, None)
    assert (auto.is_cpu, auto.is_auto, auto.kind, auto.count, auto.memory_bytes) == (False, True, None, 1, None)


@pytest.mark.parametrize("card", ["RTX 4090", "24GiB", "8xA100-40GB", "2x24GiB", "cpu", "auto"])
@pytest.mark.parametrize("price", ["@1.10/h", "@1.10", " @ 1.1 / h"])
def test_a_price_may_follow_everything(card: str, price: str) -> None:
    request, bare = parse_card(card + price), parse_card(card)
    assert request.price_per_hour == pytest.approx(1.10)
    assert (request.kind, request.count, request.memory_bytes) == (bare.kind, bare.count, bare.memory_bytes)


@pytest.mark.parametrize("card", CARD_KINDS, ids=lambda kind: kind.name)
def test_every_name_of_the_table_is_accepted(card: CardKind) -> None:
    for name in (card.name, *card.spellings):
        assert parse_card(f"2x{name}@3").kind == card


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("A100", ["A100-40GB", "A100-80GB"]),
        ("H100", ["H100-80GB", "H100 PCIe", "H100 NVL"]),
        ("V100", ["V100-16GB", "V100-32GB"]),
        ("RTX 3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("4060 ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]),
    ],
)
def test_an_ambiguous_name_is_refused_with_its_choices(text: str, choices: list[str]) -> None:
    message = _refusal(text)
    assert repr(text) in message
    for choice in choices:
        assert choice in message


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("RTX 4095", "RTX 4090"),
        ("RTX 6000", "Quadro RTX 6000"),
        ("RTX 6000", "RTX 6000 Ada"),
        ("A100-64GB", "A100-80GB"),
        ("RTX 3060 8GB", "RTX 3060"),
        ("RTX 4090 D", "RTX 4090"),
        ("4091", "RTX 4090"),
        ("Qadro RTX 8000", "Quadro RTX 8000"),
    ],
)
def test_an_unknown_card_names_the_nearest(text: str, nearest: str) -> None:
    message = _refusal(text)
    assert repr(text) in message
    assert nearest in message.split("nearest known: ")[1].split(";")[0].split(", ")


@pytest.mark.parametrize(
    "text", ["MacBook", "M3 Max", "MI300X", "TPU v4", "7900 XTX", "2x 7900XTX", "Arc A770", "Gaudi2", "Radeon VII"]
)
def test_a_card_of_another_maker_is_not_answered_with_an_nvidia_card(text: str) -> None:
    message = _refusal(text)
    assert "CUDA" in message
    assert "nearest" not in message


def test_an_unknown_card_says_what_is_accepted() -> None:
    message = _refusal("Radeon VII")
    for form in ("RTX 4090", "24GiB", "8xA100-40GB", "cpu", "auto", "@1.10/h"):
        assert form in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no card"),
        ("   ", "names no card"),
        ("2x", "names no card"),
        ("@1", "names no card"),
        ("0xT4", "asks for 0 cards"),
        ("-2xT4", "asks for -2 cards"),
        ("1.5xT4", "asks for 1.5 cards"),
        ("99999999999999999999xT4", "a whole number from 1 to 1024"),
        ("2xcpu", "means all of this machine"),
        ("8xauto", "means all of this machine"),
        ("0GiB", "has 0 GiB of memory"),
        ("-24GiB", "has -24 GiB of memory"),
        ("1e400GiB", "has 1e400 GiB of memory"),
        ("1e-400GiB", "between 1 MiB and 4096 GiB"),
        ("9000GiB", "between 1 MiB and 4096 GiB"),
        ("24", "24 has no unit"),
        ("24G", "not a known unit"),
        ("24 bananas", "not a known unit"),
        ("T4@", "has the price ''"),
        ("T4@0", "has the price '0'"),
        ("T4@-1/h", "has the price '-1/h'"),
        ("T4@1e999", "has the price '1e999'"),
        ("T4@cheap", "has the price 'cheap'"),
        ("T4@1@2", "has the price '1@2'"),
        ("---", "is not known"),
        ("NVIDIA", "is not known"),
    ],
)
def test_each_bad_request_has_its_message(text: str, reason: str) -> None:
    assert reason in _refusal(text)


PIECES = [
    *("RTX", "4090", "A100", "H100 80GB", "x", "×", "@", "/h", "GiB", "gb", "cpu", "auto", " ", "-", ".", "0", "8"),
    *("1e400", "²", "٣", "NVIDIA", "\n"),
]


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        request = parse_card(text)
    except UserError:
        return
    assert request.count >= 1
    assert (request.memory_bytes is None) == (request.is_cpu or request.is_auto)
    assert request.price_per_hour is None or request.price_per_hour > 0


@pytest.mark.parametrize(("name", "mib", "ours"), NVIDIA_SMI)
def test_a_card_is_found_by_the_name_of_nvidia_smi(name: str, mib: int, ours: str) -> None:
    kind = find_kind(name, mib * MIB)
    assert kind is not None
    assert kind.name == ours


def test_memory_tells_variants_apart_and_without_it_none_is_chosen() -> None:
    assert find_kind("NVIDIA GeForce RTX 3080", None) is None
    assert find_kind("NVIDIA GeForce RTX 4090", None) == KINDS["RTX 4090"]


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA GeForce RTX 3060", 8192),
        ("NVIDIA GeForce RTX 2060", 12288),
        ("NVIDIA GeForce RTX 4090 D", 24564),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384),
        ("NVIDIA A100-SXM-64GB", 65536),
        ("NVIDIA GB10", None),
        ("NVIDIA Graphics Device", 95830),
        ("", None),
    ],
)
def test_a_card_outside_the_table_is_not_taken_for_another(name: str, mib: int | None) -> None:
    assert find_kind(name, None if mib is None else mib * MIB) is None
