"""The cards that people train on, with published figures. Cards are found by name: the one that a user wants to plan
for, or the one that the driver reports.

`memory_bytes` is nvidia-smi's memory.total as public logs show it under drivers from 510 on (older ones report 1 to 2 %
less), unless `source` says otherwise. CUDA's own total is 0.4 to 2 % lower. Matrix rates are dense and accumulate in
fp32, which GeForce cards do at half the advertised rate.
"""

import difflib
import math
import re
from dataclasses import dataclass

from finefit.errors import UserError

PCIE_3, PCIE_4, PCIE_5 = 12e9, 25e9, 50e9
"""Bytes per second of a pinned copy over 16 lanes in one direction: about 80 % of the nominal rate."""
C2C = 300e9
"""Rate of copies to the host over GH200's NVLink-C2C; 450e9 is published."""
MATRIX_EFFICIENCY = 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class CardKind:
    """Rates are per second, flops without sparsity."""

    name: str
    memory_bytes: int
    """The total as the driver reports it, with optional ECC on if servers usually run the card so."""
    bandwidth_bytes_per_second: float
    bf16_flops: float | None
    """The rate of tensor cores with fp32 accumulation; None if the card has no bf16."""
    fp16_flops: float
    """Like bf16_flops; on a card without tensor cores, the rate of fp32."""
    fp32_flops: float
    """The rate of the CUDA cores."""
    host_bytes_per_second: float
    """The rate of a pinned copy to or from host memory, in one direction."""
    compute_capability: tuple[int, int]
    matrix_efficiency: float
    """Share of the matrix rate that a large GEMM reaches."""
    source: str
    spellings: tuple[str, ...] = ()
    """Other names of exactly this card, such as nvidia-smi's if it is not the maker's words followed by `name`."""

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class _Family:
    """Cards of one generation, slot and source of figures."""

    compute_capability: tuple[int, int]
    host: float
    source: str

    def card(
        self,
        name: str,
        memory_mib: int,
        bandwidth_gb: float,
        matrix_tflops: float,
        fp32_tflops: float,
        *spellings: str,
        host: float | None = None,
        efficiency: float = MATRIX_EFFICIENCY,
        note: str = "",
    ) -> CardKind:
        """Every card with bf16 runs it as fast as fp16."""
        has_bf16 = self.compute_capability >= (8, 0)
        return CardKind(
            name=name,
            memory_bytes=memory_mib * 2**20,
            bandwidth_bytes_per_second=bandwidth_gb * 1e9,
            bf16_flops=matrix_tflops * 1e12 if has_bf16 else None,
            fp16_flops=matrix_tflops * 1e12,
            fp32_flops=fp32_tflops * 1e12,
            host_bytes_per_second=host or self.host,
            compute_capability=self.compute_capability,
            matrix_efficiency=efficiency,
            source=f"{self.source}; {note}" if note else self.source,
            spellings=spellings,
        )


_GEFORCE_20 = _Family((7, 5), PCIE_3, "NVIDIA Turing GPU architecture whitepaper, reference clocks")
_GEFORCE_30 = _Family((8, 6), PCIE_4, "NVIDIA Ampere GA102 GPU architecture whitepaper v2.1")
_GEFORCE_40 = _Family((8, 9), PCIE_4, "NVIDIA Ada GPU architecture whitepaper v2.1")
_GEFORCE_50 = _Family((12, 0), PCIE_5, "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1")
_QUADRO = _Family((7, 5), PCIE_3, "NVIDIA Turing GPU architecture whitepaper")
_RTX_A = _Family((8, 6), PCIE_4, "NVIDIA RTX A-series datasheet, half of the rate with sparsity")
_RTX_ADA = _Family((8, 9), PCIE_4, "NVIDIA RTX Ada datasheet, a quarter of the FP8 rate with sparsity")
_RTX_PRO = _Family((12, 0), PCIE_5, "NVIDIA RTX PRO Blackwell GPU architecture whitepaper v1.0")
_PASCAL = _Family((6, 0), PCIE_3, "NVIDIA Tesla P100 datasheet")
_VOLTA = _Family((7, 0), PCIE_3, "NVIDIA V100 datasheet")
_T4 = _Family((7, 5), PCIE_3, "NVIDIA T4 datasheet, memory with ECC")
_AMPERE_SMALL = _Family((8, 6), PCIE_4, "datasheet of the card, memory with ECC")
_AMPERE = _Family((8, 0), PCIE_4, "NVIDIA A100 datasheet")
_A30 = _Family((8, 0), PCIE_4, "NVIDIA A30 datasheet")
_ADA_SERVER = _Family((8, 9), PCIE_4, "datasheet of the card, half of the rate with sparsity, memory with ECC")
_HOPPER = _Family((9, 0), PCIE_5, "NVIDIA H100 datasheet, half of the rate with sparsity")
_H200 = _Family((9, 0), PCIE_5, "NVIDIA H200 datasheet, half of the rate with sparsity")
_GH200 = _Family((9, 0), C2C, "NVIDIA GH200 datasheet")
_BLACKWELL = _Family((10, 0), PCIE_5, "NVIDIA HGX B200 datasheet, dense")

_BOOST = "fp32 from cores and boost clock on the product page, matrix rate in the generation's ratio"
_NO_TENSOR_CORES = "no tensor cores: fp16 with fp32 accumulation runs at the rate of fp32"
_FULL_TU102 = "product page: the full TU102, fp32 accumulation at the full rate"
_MAX_Q = "Max-Q datasheet, an eighth of the FP4 rate with sparsity"
_SERVER_EDITION = "server datasheet, matrix rate as four times fp32, the ratio of the whitepaper"
_MEASURED = "matrix efficiency measured: 800 of 989 TFLOP/s"
_CUDA_TOTAL = "memory is CUDA's total, the driver's being unpublished"
_LAPTOP = "from cores and the lowest published boost clock, as the maker's power limit decides"
_WORKSTATION = ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Workstation")
_WORKSTATION_MAX_Q = ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",)

# name, MiB, GB/s, matrix TFLOP/s (dense, fp32 accumulation), fp32 TFLOP/s, further spellings
CARD_KINDS: tuple[CardKind, ...] = (
    _GEFORCE_20.card("RTX 2060", 6144, 336, 25.8, 6.5),
    _GEFORCE_20.card("RTX 2060 Super", 8192, 448, 28.7, 7.2, note=_BOOST),
    _GEFORCE_20.card("RTX 2070", 8192, 448, 29.9, 7.5),
    _GEFORCE_20.card("RTX 2070 Super", 8192, 448, 36.3, 9.1, note=_BOOST),
    _GEFORCE_20.card("RTX 2080", 8192, 448, 40.3, 10.1),
    _GEFORCE_20.card("RTX 2080 Super", 8192, 496, 44.6, 11.2, note=_BOOST),
    _GEFORCE_20.card("RTX 2080 Ti", 11264, 616, 53.8, 13.4),
    _QUADRO.card("Titan RTX", 24576, 672, 130.5, 16.3, note=_FULL_TU102),
    _GEFORCE_30.card("RTX 3060", 12288, 360, 25.4, 12.7, note=_BOOST),
    _GEFORCE_30.card("RTX 3060 Ti", 8192, 448, 32.4, 16.2),
    _GEFORCE_30.card("RTX 3070", 8192, 448, 40.6, 20.3),
    _GEFORCE_30.card("RTX 3070 Ti", 8192, 608, 43.5, 21.7, note=_BOOST),
    _GEFORCE_30.card("RTX 3080 10GB", 10240, 760, 59.5, 29.8),
    _GEFORCE_30.card("RTX 3080 12GB", 12288, 912, 61.3, 30.6, note=_BOOST),
    _GEFORCE_30.card("RTX 3080 Ti", 12288, 912, 68.2, 34.1, note=_BOOST),
    _GEFORCE_30.card("RTX 3080 Laptop 16GB", 16384, 448, 30.6, 15.3, note=_LAPTOP),
    _GEFORCE_30.card("RTX 3090", 24576, 936, 71, 35.6),
    _GEFORCE_30.card("RTX 3090 Ti", 24564, 1008, 80, 40.0, note=_BOOST),
    _GEFORCE_40.card("RTX 4060", 8188, 272, 30.2, 15.1, host=PCIE_4 / 2, note=_BOOST),
    _GEFORCE_40.card("RTX 4060 Ti 8GB", 8188, 288, 44.1, 22.1, host=PCIE_4 / 2, note=_BOOST),
    _GEFORCE_40.card("RTX 4060 Ti 16GB", 16380, 288, 44.1, 22.1, host=PCIE_4 / 2, note=_BOOST),
    _GEFORCE_40.card("RTX 4070", 12282, 504, 58.3, 29.1, note=_BOOST),
    _GEFORCE_40.card("RTX 4070 Super", 12282, 504, 70.9, 35.5, note=_BOOST),
    _GEFORCE_40.card("RTX 4070 Ti", 12282, 504, 80.2, 40.1),
    _GEFORCE_40.card("RTX 4070 Ti Super", 16376, 672, 88.2, 44.1, note=_BOOST),
    _GEFORCE_40.card("RTX 4080", 16376, 716.8, 97.5, 48.7),
    _GEFORCE_40.card("RTX 4080 Super", 16376, 736, 104.4, 52.2, note=_BOOST),
    _GEFORCE_40.card("RTX 4090", 24564, 1008, 165.2, 82.6),
    _GEFORCE_40.card("RTX 4090 Laptop", 16376, 576, 56.6, 28.3, note=_LAPTOP),
    _GEFORCE_50.card("RTX 5060 Ti 8GB", 8151, 448, 47.4, 23.7, host=PCIE_5 / 2, note=_BOOST),
    _GEFORCE_50.card("RTX 5060 Ti 16GB", 16311, 448, 47.4, 23.7, host=PCIE_5 / 2, note=_BOOST),
    _GEFORCE_50.card("RTX 5070", 12227, 672, 61.7, 30.9),
    _GEFORCE_50.card("RTX 5070 Ti", 16303, 896, 87.9, 43.9),
    _GEFORCE_50.card("RTX 5080", 16303, 960, 112.6, 56.3),
    _GEFORCE_50.card("RTX 5090", 32607, 1792, 209.5, 104.8),
    _QUADRO.card("Quadro RTX 6000", 23040, 672, 130.5, 16.3, note="memory with ECC, 24576 MiB without"),
    _QUADRO.card("Quadro RTX 8000", 46080, 672, 130.5, 16.3, note="memory with ECC, 49152 MiB without"),
    _RTX_A.card("RTX A4000", 16376, 448, 76.7, 19.2),
    _RTX_A.card("RTX A5000", 24564, 768, 111.1, 27.8),
    _RTX_A.card("RTX A6000", 49140, 768, 154.8, 38.7, note="memory without ECC, as shipped"),
    _RTX_ADA.card("RTX 4000 Ada", 20475, 360, 81.9, 26.7, note="memory without ECC"),
    _RTX_ADA.card("RTX 6000 Ada", 49140, 960, 364.2, 91.1, note="memory without ECC"),
    _RTX_PRO.card("RTX PRO 6000 Blackwell", 97887, 1792, 503.8, 126.0, *_WORKSTATION),
    _RTX_PRO.card("RTX PRO 6000 Blackwell Max-Q", 97887, 1792, 438.9, 110, *_WORKSTATION_MAX_Q, note=_MAX_Q),
    _RTX_PRO.card("RTX PRO 6000 Blackwell Server", 97887, 1597, 480, 120, note=_SERVER_EDITION),
    _PASCAL.card("P100", 16384, 732, 9.3, 9.3, "P100-PCIE-16GB", note=_NO_TENSOR_CORES),
    _PASCAL.card("P100-SXM2", 16384, 732, 10.6, 10.6, "P100-SXM2-16GB", note=_NO_TENSOR_CORES),
    _VOLTA.card("V100-16GB", 16384, 900, 125, 15.7, "V100-SXM2-16GB"),
    _VOLTA.card("V100-32GB", 32768, 900, 125, 15.7, "V100-SXM2-32GB", "V100-SXM3-32GB"),
    _VOLTA.card("V100-16GB PCIe", 16384, 900, 112, 14, "V100-PCIE-16GB"),
    _VOLTA.card("V100-32GB PCIe", 32768, 900, 112, 14, "V100-PCIE-32GB"),
    _T4.card("T4", 15360, 320, 65, 8.1),
    _AMPERE_SMALL.card("A10", 23028, 600, 125, 31.2),
    _AMPERE_SMALL.card("A10G", 23028, 600, 70, 35),
    _AMPERE_SMALL.card("A40", 46068, 696, 149.7, 37.4),
    _A30.card("A30", 24576, 933, 165, 10.3),
    _AMPERE.card("A100-40GB", 40960, 1555, 312, 19.5, "A100-SXM4-40GB", "A100-SXM-40GB"),
    _AMPERE.card("A100-80GB", 81920, 2039, 312, 19.5, "A100-SXM4-80GB", "A100-SXM-80GB"),
    _AMPERE.card("A100-40GB PCIe", 40960, 1555, 312, 19.5, "A100-PCIE-40GB"),
    _AMPERE.card("A100-80GB PCIe", 81920, 1935, 312, 19.5, "A100-PCIE-80GB"),
    _ADA_SERVER.card("L4", 23034, 300, 121, 30.3),
    _ADA_SERVER.card("L40", 46068, 864, 181, 90.5),
    _ADA_SERVER.card("L40S", 46068, 864, 362, 91.6),
    _HOPPER.card("H100-80GB", 81559, 3350, 989.4, 66.9, "H100 80GB HBM3", "H100 SXM", "H100 SXM5"),
    _HOPPER.card("H100 PCIe", 81559, 2000, 756, 51.2, "H100 80GB PCIe"),
    _HOPPER.card("H100 NVL", 95830, 3938, 835.5, 60, note="cards sold as bridged pairs"),
    _H200.card("H200", 143771, 4800, 989.4, 66.9, "H200 SXM", efficiency=0.81, note=_MEASURED),
    _H200.card("H200 NVL", 143771, 4800, 835.5, 60),
    _GH200.card("GH200-96GB", 97871, 4000, 989.4, 66.9, "GH200 480GB", "GH200 120GB"),
    _GH200.card("GH200-144GB", 145920, 4900, 989.4, 66.9, "GH200 144G HBM3e", note=_CUDA_TOTAL),
    _BLACKWELL.card("B200", 183359, 7700, 2250, 75),
)

ACCEPTED = (
    "a card (RTX 4090, A100-80GB), a memory size (24GiB, 24GB), several (8xA100-40GB, 2x24GiB), cpu or auto; a "
    "price may follow: RTX 4090@1.10/h"
)
MAX_COUNT = 1024
NUM_NEAREST = 4
_NEAR = 0.54
"""Below this similarity a name belongs to another card: MI300X is not A100."""
SIZE_RANGE_BYTES = (2**20, 2**42)
UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}

_MAKERS_WORDS = {"nvidia", "geforce", "tesla", "gpu", "generation", "edition"}
"""Words that nvidia-smi adds and people omit; no two cards differ only in them."""
_OTHER_MAKERS = re.compile(
    r"\b(amd|radeon|instinct|rx|mi[0-9]+x?|intel|arc|gaudi|tpu|apple|mac\w*|m[1-5]|[0-9]{4} ?xtx?)\b", re.IGNORECASE
)
_COUNT = re.compile(r"([+-]?[0-9.]+)\s*[x×*](?!tx?\b)\s*(.*)", re.IGNORECASE | re.DOTALL)
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE)
_PRICE = re.compile(rf"({_NUMBER})\s*(?:/\s*h)?", re.IGNORECASE)
_STATED_SIZE = re.compile(r"(?<![a-z0-9])([0-9]{1,4})\s*gi?b(?![a-z0-9])")
_STATED_SHARE = 0.88
"""A card reports at least this share of the size on its box: ECC takes 1/16, old drivers up to 2 % more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRequest:
    text: str
    """The text that the user wrote."""
    kind: CardKind | None
    """None for a bare size, `cpu` and `auto`: without known rates, time cannot be predicted."""
    count: int
    """1 for `cpu` and `auto`."""
    memory_bytes: int | None
    """The memory of one card; None for `cpu` and `auto`, which are read from the machine."""
    is_cpu: bool
    is_auto: bool
    price_per_hour: float | None
    """The number after the @, in the user's currency."""


def parse_card(text: str) -> CardRequest:
    """Reads `[COUNT x] (CARD | SIZE | cpu | auto) [@ PRICE [/h]]`. GiB and MiB are binary, GB and MB decimal: 24GB is
    22.35 GiB."""
    wanted, at, price = (part.strip() for part in text.partition("@"))
    count, name, price_per_hour = None, wanted, None
    if counted := _COUNT.fullmatch(wanted):
        digits, name = counted[1], counted[2].strip()
        if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_COUNT:
            problem = f"card {text!r} asks for {digits} cards; a count is a whole number from 1 to {MAX_COUNT}"
            raise UserError(problem, "write it as in 2x24GiB")
        count = int(digits)
    if at:
        priced = _PRICE.fullmatch(price)
        price_per_hour = float(priced[1]) if priced else math.nan
        if not (math.isfinite(price_per_hour) and price_per_hour > 0):
            problem = f"card {text!r} has the price {price!r}, which is not an amount above 0 per hour"
            raise UserError(problem, "write it as in RTX 4090@1.10/h, or leave it out")
    word, kind, memory_bytes = name.casefold(), None, None
    if word not in ("cpu", "auto"):
        kind, memory_bytes = _read_card(name, text)
    elif count is not None:
        raise UserError(f"card {text!r} counts {name}, which means all of this machine", f"write {word} alone")
    return CardRequest(
        text=text,
        kind=kind,
        count=count or 1,
        memory_bytes=memory_bytes,
        is_cpu=word == "cpu",
        is_auto=word == "auto",
        price_per_hour=price_per_hour,
    )


def find_kind(driver_name: str, memory_bytes: int | None) -> CardKind | None:
    """The only card of that name with about that memory (ECC and old drivers take some of it); None if none or several
    match."""
    kinds = _kinds_named(driver_name)
    if memory_bytes is not None:
        kinds = tuple(kind for kind in kinds if _STATED_SHARE <= memory_bytes / kind.memory_bytes <= 1 / _STATED_SHARE)
    return kinds[0] if len(kinds) == 1 else None


def _read_card(name: str, text: str) -> tuple[CardKind | None, int]:
    if not name:
        raise UserError(f"card {text!r} names no card", f"give {ACCEPTED}")
    kinds = _kinds_named(name)
    if len(kinds) == 1:
        return kinds[0], kinds[0].memory_bytes
    if kinds:
        names = ", ".join(kind.name for kind in kinds)
        problem = f"card {text!r} may be any of {len(kinds)} cards that differ in memory or speed"
        raise UserError(problem, f"say which: {names}")
    size = _SIZE.fullmatch(name)
    if size is None or _OTHER_MAKERS.search(name):
        near = _nearest(name)
        problem = f"card {text!r} is not known; finefit plans for NVIDIA cards with CUDA, and for the CPU"
        raise UserError(problem, f"{f'nearest known: {near}; ' if near else ''}give {ACCEPTED}")
    number, unit = size.groups()
    if not unit:
        problem = f"card {text!r} is neither a known card nor a size: {number} has no unit"
        near = _nearest(number)
        raise UserError(problem, f"{f'nearest known: {near}; ' if near else ''}a size is 24GiB or 24GB")
    if unit.casefold() not in UNITS:
        problem = f"card {text!r} has a size in {unit!r}, which is not a known unit"
        raise UserError(problem, f"write {number}GiB (binary) or {number}GB (decimal)")
    num_bytes = float(number) * UNITS[unit.casefold()]
    lowest, highest = SIZE_RANGE_BYTES
    if not lowest <= num_bytes <= highest:
        problem = f"card {text!r} has {number} {unit} of memory; a card has between 1 MiB and 4096 GiB"
        raise UserError(problem, "write the memory of one card, such as 24GiB")
    return None, int(num_bytes)


def _nearest(name: str) -> str:
    """Cards with the same model number first (RTX 6000 is part of three names), then similar ones; may be empty."""
    if _OTHER_MAKERS.search(name):
        return ""
    wanted = _key(name)[:40]
    numbers = set(re.findall(r"[0-9]{2,}", wanted))
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(kind: CardKind) -> tuple[bool, float]:
        matcher.set_seq1(_key(kind.name))
        return not numbers.isdisjoint(re.findall(r"[0-9]{2,}", kind.name)), matcher.ratio()

    ranked = sorted(((likeness(kind), kind.name) for kind in CARD_KINDS), key=lambda found: found[0], reverse=True)
    near = [name for (has_number, ratio), name in ranked if has_number or ratio >= _NEAR]
    return ", ".join(near[:NUM_NEAREST])


def _kinds_named(name: str) -> tuple[CardKind, ...]:
    """Cards of exactly that name, else those that the name abbreviates, narrowed by a stated size: RTX 3080 12GB."""
    if exact := _EXACT.get(_key(name)):
        return (exact,)
    stated = _STATED_SIZE.search(name.casefold())
    kinds = _SHORT.get(_key(_without_size(name)), ())
    if stated is None:
        return kinds
    box_bytes = int(stated[1]) * 2**30
    return tuple(kind for kind in kinds if _STATED_SHARE * box_bytes <= kind.memory_bytes <= box_bytes)


def _key(name: str) -> str:
    """The same key for NVIDIA GeForce RTX 4090, RTX-4090 and rtx4090."""
    return "".join(word for word in re.split(r"[^a-z0-9]+", name.casefold()) if word not in _MAKERS_WORDS)


def _without_size(name: str) -> str:
    return _STATED_SIZE.sub(" ", name.casefold())


def _short_names() -> dict[str, tuple[CardKind, ...]]:
    """The name without the parts that people omit: the size, RTX at the front, the slot."""
    index: dict[str, tuple[CardKind, ...]] = {}
    for kind in CARD_KINDS:
        bare = [_without_size(name) for name in (kind.name, *kind.spellings)]
        short = [*bare, *(re.sub(r"\b(pcie|nvl|sxm2|blackwell)\b", " ", name) for name in bare), kind.name.casefold()]
        keys = {_key(form) for name in short for form in (name, re.sub(r"^\s*rtx\b", " ", name))}
        index |= {key: (*index.get(key, ()), kind) for key in keys}
    return index


_EXACT = {_key(name): kind for kind in CARD_KINDS for name in (kind.name, *kind.spellings)}
_SHORT = _short_names()
