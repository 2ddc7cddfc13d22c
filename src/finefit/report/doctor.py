"""The facts of a machine as a table, with findings and a verdict."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finefit.artifacts.records import Finding
from finefit.facts.machine import Power
from finefit.preflight.machine import MachineFacts, is_ready
from finefit.report.layout import gib

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def verdict(found: MachineFacts, findings: tuple[Finding, ...]) -> str:
    if not is_ready(findings):
        num_errors = sum(finding.level == "error" for finding in findings)
        return f"not ready to train: fix the {'error' if num_errors == 1 else f'{num_errors} errors'} above first"
    cuda = [device for device in found.torch.devices if device.name.startswith("cuda")]
    if not cuda:
        return "ready to train on cpu"
    precision = "bf16" if cuda[0].has_bf16 else "fp32: this card has no bf16"
    return f"ready to train on {cuda[0].name} ({cuda[0].description}, {_gib(cuda[0].memory_bytes)}, {precision})"


def document(found: MachineFacts, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "machine": asdict(found.machine),
        "devices": [asdict(device) for device in found.torch.devices],
        "disks": [asdict(disk) for disk in found.disks],
        "power": asdict(found.power),
        "findings": [asdict(finding) for finding in findings],
        "ready": is_ready(findings),
    }


def show(found: MachineFacts, findings: tuple[Finding, ...], console: Console) -> None:
    """Text, not markup, because commands hold brackets; not wrapped, because they are copied."""
    console.print(_table(found))
    for finding in findings:
        line = Text.assemble((f"{finding.level}: ", STYLES[finding.level]), finding.problem, f"\n    {finding.remedy}")
        console.print(line, soft_wrap=True)
    console.print(
        Text(verdict(found, findings), style="bold green" if is_ready(findings) else "bold red"), soft_wrap=True
    )


def _table(found: MachineFacts) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (*_machine_rows(found), *_device_rows(found)):
        table.add_row(name, Text(value))
    for name, version in found.machine.versions.items():
        table.add_row(name, Text(version or "not installed", style="" if version else "yellow"))
    return table


def _machine_rows(found: MachineFacts) -> Iterator[tuple[str, str]]:
    machine = found.machine
    yield "python", machine.python
    yield "platform", machine.platform
    yield "processor", f"{machine.cpu_model}, {machine.num_cores} cores"
    yield "memory", _gib(machine.memory_bytes)
    for disk in found.disks:
        yield disk.use, f"{_gib(disk.free_bytes)} free in {disk.path}"
    yield "power", _power(found.power)


def _device_rows(found: MachineFacts) -> Iterator[tuple[str, str]]:
    for card in found.machine.cards:
        yield "card", f"{card.name}, {_gib(card.memory_bytes)}, {_gib(card.free_bytes)} free, driver {card.driver}"
    for device in found.torch.devices:
        precision = {True: ", bf16", False: ", no bf16", None: ""}[device.has_bf16]
        yield f"torch {device.name}", f"{device.description}, {_gib(device.memory_bytes)}{precision}"


def _power(power: Power) -> str:
    source = {True: "battery", False: "mains", None: "unknown"}[power.on_battery]
    return source if power.percent is None else f"{source}, battery at {power.percent:.0f} %"


def _gib(num_bytes: int | None) -> str:
    return "unknown size" if num_bytes is None else gib(num_bytes)
