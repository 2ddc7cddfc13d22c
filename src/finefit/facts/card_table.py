"""Published figures of the cards that people train on: memory, rates and links.

`memory_bytes` is nvidia-smi's memory.total as public logs show it under drivers from 510 on (older ones report 1 to 2 %
less), unless `source` says otherwise. CUDA's own total is 0.4 to 2 % lower. Matrix rates are dense and accumulate in
fp32, which GeForce cards do at half the rate on the box.
"""

from dataclasses import dataclass

PCIE_3, PCIE_4, PCIE_5 = 12e9, 25e9, 50e9
"""Bytes per second of a pinned copy over 16 lanes in one direction: about 80 % of the nominal rate."""
NVLINK_SHARE = 0.8
"""Share of the published one-way NVLink rate that collectives reach."""
C2C = 300e9
"""Rate of copies to the host over GH200's NVLink-C2C; 450e9 is published."""
MATRIX_EFFICIENCY = 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class CardKind:
    """Rates are per second, flops without sparsity."""

    name: str
    memory_bytes: int
    """As the driver reports it; with optional ECC on, if servers usually run the card so."""
    bandwidth_bytes_per_second: float
    bf16_flops: float | None
    """Tensor cores with fp32 accumulation; None if the card has no bf16."""
    fp16_flops: float
    """As bf16_flops; without tensor cores the rate of fp32."""
    fp32_flops: float
    """Of the CUDA cores."""
    tf32_flops: float | None
    host_bytes_per_second: float
    """Of a pinned copy to or from host memory, in one direction."""
    link_bytes_per_second: float
    """To another card of the machine, in one direction: built-in NVLink, but no bridges that must be bought."""
    compute_capability: tuple[int, int]
    matrix_efficiency: float
    """Share of the matrix rate that a large GEMM reaches."""
    source: str
    spellings: tuple[str, ...] = ()
    """Further names of exactly this card, such as nvidia-smi's if it is not `name` after the maker's words."""

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_flash_attention(self) -> bool:
        """FlashAttention 2 needs Ampere or newer."""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class _Family:
    """Cards of one generation, slot and source of figures."""

    compute_capability: tuple[int, int]
    host: float
    link: float
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
        link: float | None = None,
        efficiency: float = MATRIX_EFFICIENCY,
        note: str = "",
    ) -> CardKind:
        """Every card with bf16 runs it as fast as fp16, and TF32 at half that rate."""
        has_bf16 = self.compute_capability >= (8, 0)
        return CardKind(
            name=name,
            memory_bytes=memory_mib * 2**20,
            bandwidth_bytes_per_second=bandwidth_gb * 1e9,
            bf16_flops=matrix_tflops * 1e12 if has_bf16 else None,
            fp16_flops=matrix_tflops * 1e12,
            fp32_flops=fp32_tflops * 1e12,
            tf32_flops=matrix_tflops / 2 * 1e12 if has_bf16 else None,
            host_bytes_per_second=host or self.host,
            link_bytes_per_second=link or self.link,
            compute_capability=self.compute_capability,
            matrix_efficiency=efficiency,
            source=f"{self.source}; {note}" if note else self.source,
            spellings=spellings,
        )


def _nvlink(both_ways_gb: float) -> float:
    """Published NVLink rates add the two directions."""
    return both_ways_gb / 2 * 1e9 * NVLINK_SHARE


# GeForce cards have no peer access over PCIe (the 30 series rarely): bytes between them pass through the host at half
# its rate.
_GEFORCE_20 = _Family((7, 5), PCIE_3, PCIE_3 / 2, "NVIDIA Turing GPU architecture whitepaper, reference clocks")
_GEFORCE_30 = _Family((8, 6), PCIE_4, PCIE_4 / 2, "NVIDIA Ampere GA102 GPU architecture whitepaper v2.1")
_GEFORCE_40 = _Family((8, 9), PCIE_4, PCIE_4 / 2, "NVIDIA Ada GPU architecture whitepaper v2.1")
_GEFORCE_50 = _Family((12, 0), PCIE_5, PCIE_5 / 2, "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1")
_QUADRO = _Family((7, 5), PCIE_3, PCIE_3, "NVIDIA Turing GPU architecture whitepaper")
_RTX_A = _Family((8, 6), PCIE_4, PCIE_4, "NVIDIA RTX A-series datasheet, half of the rate with sparsity")
_RTX_ADA = _Family((8, 9), PCIE_4, PCIE_4, "NVIDIA RTX Ada datasheet, a quarter of the FP8 rate with sparsity")
_RTX_PRO = _Family((12, 0), PCIE_5, PCIE_5, "NVIDIA RTX PRO Blackwell GPU architecture whitepaper v1.0")
_PASCAL = _Family((6, 0), PCIE_3, PCIE_3, "NVIDIA Tesla P100 datasheet")
_VOLTA = _Family((7, 0), PCIE_3, PCIE_3, "NVIDIA V100 datasheet")
_T4 = _Family((7, 5), PCIE_3, PCIE_3, "NVIDIA T4 datasheet, memory with ECC")
_AMPERE_SMALL = _Family((8, 6), PCIE_4, PCIE_4, "datasheet of the card, memory with ECC")
_AMPERE = _Family((8, 0), PCIE_4, PCIE_4, "NVIDIA A100 datasheet")
_A30 = _Family((8, 0), PCIE_4, PCIE_4, "NVIDIA A30 datasheet")
_ADA_SERVER = _Family((8, 9), PCIE_4, PCIE_4, "datasheet of the card, half of the rate with sparsity, memory with ECC")
_HOPPER = _Family((9, 0), PCIE_5, _nvlink(900), "NVIDIA H100 datasheet, half of the rate with sparsity")
_H200 = _Family((9, 0), PCIE_5, _nvlink(900), "NVIDIA H200 datasheet, half of the rate with sparsity")
_GH200 = _Family((9, 0), C2C, PCIE_5, "NVIDIA GH200 datasheet; no NVLink between single superchips is assumed")
_BLACKWELL = _Family((10, 0), PCIE_5, _nvlink(1800), "NVIDIA HGX B200 datasheet, dense")

_BOOST = "fp32 from cores and boost clock on the product page, matrix rate in the generation's ratio"
_NO_TENSOR_CORES = "no tensor cores: fp16 with fp32 accumulation runs at the rate of fp32"
_LAPTOP = "from cores and the lowest published boost clock, as the maker's power limit decides"

# name, MiB, GB/s, matrix TFLOP/s (dense, fp32 accumulation), fp32 TFLOP/s, further spellings
CARD_KINDS: tuple[CardKind, ...] = (
    _GEFORCE_20.card("RTX 2060", 6144, 336, 25.8, 6.5),
    _GEFORCE_20.card("RTX 2060 Super", 8192, 448, 28.7, 7.2, note=_BOOST),
    _GEFORCE_20.card("RTX 2070", 8192, 448, 29.9, 7.5),
    _GEFORCE_20.card("RTX 2070 Super", 8192, 448, 36.3, 9.1, note=_BOOST),
    _GEFORCE_20.card("RTX 2080", 8192, 448, 40.3, 10.1),
    _GEFORCE_20.card("RTX 2080 Super", 8192, 496, 44.6, 11.2, note=_BOOST),
    _GEFORCE_20.card("RTX 2080 Ti", 11264, 616, 53.8, 13.4),
    _QUADRO.card(
        "Titan RTX", 24576, 672, 130.5, 16.3, note="product page: the full TU102, fp32 accumulation at the full rate"
    ),
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
    _GEFORCE_40.card("RTX 4060", 8188, 272, 30.2, 15.1, host=PCIE_4 / 2, link=PCIE_4 / 4, note=_BOOST),
    _GEFORCE_40.card("RTX 4060 Ti 8GB", 8188, 288, 44.1, 22.1, host=PCIE_4 / 2, link=PCIE_4 / 4, note=_BOOST),
    _GEFORCE_40.card("RTX 4060 Ti 16GB", 16380, 288, 44.1, 22.1, host=PCIE_4 / 2, link=PCIE_4 / 4, note=_BOOST),
    _GEFORCE_40.card("RTX 4070", 12282, 504, 58.3, 29.1, note=_BOOST),
    _GEFORCE_40.card("RTX 4070 Super", 12282, 504, 70.9, 35.5, note=_BOOST),
    _GEFORCE_40.card("RTX 4070 Ti", 12282, 504, 80.2, 40.1),
    _GEFORCE_40.card("RTX 4070 Ti Super", 16376, 672, 88.2, 44.1, note=_BOOST),
    _GEFORCE_40.card("RTX 4080", 16376, 716.8, 97.5, 48.7),
    _GEFORCE_40.card("RTX 4080 Super", 16376, 736, 104.4, 52.2, note=_BOOST),
    _GEFORCE_40.card("RTX 4090", 24564, 1008, 165.2, 82.6),
    _GEFORCE_40.card("RTX 4090 Laptop", 16376, 576, 56.6, 28.3, note=_LAPTOP),
    _GEFORCE_50.card("RTX 5060 Ti 8GB", 8151, 448, 47.4, 23.7, host=PCIE_5 / 2, link=PCIE_5 / 4, note=_BOOST),
    _GEFORCE_50.card("RTX 5060 Ti 16GB", 16311, 448, 47.4, 23.7, host=PCIE_5 / 2, link=PCIE_5 / 4, note=_BOOST),
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
    _RTX_PRO.card(
        "RTX PRO 6000 Blackwell",
        97887,
        1792,
        503.8,
        126.0,
        "RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Workstation",
    ),
    _RTX_PRO.card(
        "RTX PRO 6000 Blackwell Max-Q",
        97887,
        1792,
        438.9,
        110,
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        note="Max-Q datasheet, an eighth of the FP4 rate with sparsity",
    ),
    _RTX_PRO.card(
        "RTX PRO 6000 Blackwell Server",
        97887,
        1597,
        480,
        120,
        note="server datasheet, matrix rate as four times fp32, the ratio of the whitepaper",
    ),
    _PASCAL.card("P100", 16384, 732, 9.3, 9.3, "P100-PCIE-16GB", note=_NO_TENSOR_CORES),
    _PASCAL.card("P100-SXM2", 16384, 732, 10.6, 10.6, "P100-SXM2-16GB", link=_nvlink(160), note=_NO_TENSOR_CORES),
    _VOLTA.card("V100-16GB", 16384, 900, 125, 15.7, "V100-SXM2-16GB", link=_nvlink(300)),
    _VOLTA.card("V100-32GB", 32768, 900, 125, 15.7, "V100-SXM2-32GB", "V100-SXM3-32GB", link=_nvlink(300)),
    _VOLTA.card("V100-16GB PCIe", 16384, 900, 112, 14, "V100-PCIE-16GB"),
    _VOLTA.card("V100-32GB PCIe", 32768, 900, 112, 14, "V100-PCIE-32GB"),
    _T4.card("T4", 15360, 320, 65, 8.1),
    _AMPERE_SMALL.card("A10", 23028, 600, 125, 31.2),
    _AMPERE_SMALL.card("A10G", 23028, 600, 70, 35),
    _AMPERE_SMALL.card("A40", 46068, 696, 149.7, 37.4),
    _A30.card("A30", 24576, 933, 165, 10.3),
    _AMPERE.card("A100-40GB", 40960, 1555, 312, 19.5, "A100-SXM4-40GB", "A100-SXM-40GB", link=_nvlink(600)),
    _AMPERE.card("A100-80GB", 81920, 2039, 312, 19.5, "A100-SXM4-80GB", "A100-SXM-80GB", link=_nvlink(600)),
    _AMPERE.card("A100-40GB PCIe", 40960, 1555, 312, 19.5, "A100-PCIE-40GB"),
    _AMPERE.card("A100-80GB PCIe", 81920, 1935, 312, 19.5, "A100-PCIE-80GB"),
    _ADA_SERVER.card("L4", 23034, 300, 121, 30.3),
    _ADA_SERVER.card("L40", 46068, 864, 181, 90.5),
    _ADA_SERVER.card("L40S", 46068, 864, 362, 91.6),
    _HOPPER.card("H100-80GB", 81559, 3350, 989.4, 66.9, "H100 80GB HBM3", "H100 SXM", "H100 SXM5"),
    _HOPPER.card("H100 PCIe", 81559, 2000, 756, 51.2, "H100 80GB PCIe", link=PCIE_5),
    _HOPPER.card("H100 NVL", 95830, 3938, 835.5, 60, link=_nvlink(600), note="cards sold as bridged pairs"),
    _H200.card(
        "H200",
        143771,
        4800,
        989.4,
        66.9,
        "H200 SXM",
        efficiency=0.81,
        note="matrix efficiency measured: 800 of 989 TFLOP/s",
    ),
    _H200.card("H200 NVL", 143771, 4800, 835.5, 60, link=PCIE_5),
    _GH200.card("GH200-96GB", 97871, 4000, 989.4, 66.9, "GH200 480GB", "GH200 120GB"),
    _GH200.card(
        "GH200-144GB",
        145920,
        4900,
        989.4,
        66.9,
        "GH200 144G HBM3e",
        note="memory is CUDA's total, the driver's being unpublished",
    ),
    _BLACKWELL.card("B200", 183359, 7700, 2250, 75),
)
