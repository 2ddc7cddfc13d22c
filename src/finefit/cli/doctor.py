"""`finefit doctor`: is this machine ready to train, and if not, which command repairs it."""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from finefit.cli.console import AsJson, open_console

if TYPE_CHECKING:
    from finefit.facts.machine import Device, Machine, TorchView
    from finefit.preflight.machine import MachineFacts


def doctor(as_json: AsJson = False) -> None:
    """Report whether this machine is ready to train, and how to repair it if not.

    Exit code 0: ready. 1: something required is missing or wrong.
    """
    from finefit.preflight.machine import check_machine, is_ready
    from finefit.report.doctor import document, show

    found = read_facts()
    findings = check_machine(found)
    if as_json:
        typer.echo(json.dumps(document(found, findings), indent=2))
    else:
        show(found, findings, open_console())
    if not is_ready(findings):
        raise typer.Exit(1)


def read_facts() -> "MachineFacts":
    from finefit.facts.files import Disk, finefit_cache, free_bytes, hub_cache
    from finefit.facts.machine import read_machine, read_power, read_requirements
    from finefit.preflight.machine import MachineFacts

    machine = read_machine()
    places = {"current folder": Path.cwd(), "finefit cache": finefit_cache(), "hub cache": hub_cache()}
    return MachineFacts(
        machine=machine,
        torch=read_torch(machine),
        disks=tuple(Disk(use=use, path=str(path), free_bytes=free_bytes(path)) for use, path in places.items()),
        power=read_power(),
        requirements=read_requirements(),
    )


def read_torch(machine: "Machine") -> "TorchView":
    """torch's reason for seeing no card is a warning, given once, when it first looks."""
    from finefit.facts.machine import Device, TorchView

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        return TorchView(devices=(), cuda_build=None, visible_devices=visible_devices, warning=None, problem=str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cuda = tuple(read_cuda_device(index) for index in range(num_cuda))
    cpu = Device(
        name="cpu", description=machine.cpu_model, memory_bytes=machine.memory_bytes, has_bf16=None, problem=None
    )
    return TorchView(
        devices=(cpu, *cuda),
        cuda_build=torch.version.cuda,
        visible_devices=visible_devices,
        warning="; ".join(str(warning.message) for warning in caught) or None,
        problem=None,
    )


def read_cuda_device(index: int) -> "Device":
    """A kernel is run: a torch built without this card's architecture lists the card all the same."""
    import torch

    from finefit.facts.machine import Device

    name = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    try:
        torch.ones(1, device=name).add(1).cpu()
        problem = None
    except RuntimeError as error:
        problem = str(error)
    return Device(
        name=name,
        description=properties.name,
        memory_bytes=properties.total_memory,
        has_bf16=properties.major >= 8,  # Ampere; older cards emulate it, slowly
        problem=problem,
    )
