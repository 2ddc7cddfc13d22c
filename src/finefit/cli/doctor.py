"""`finefit doctor`: reports whether this machine is ready to train, and if not, which command repairs it."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from finefit.cli.console import AsJson, open_console, print_json

if TYPE_CHECKING:
    from finefit.facts.machine import Machine, TorchView


def doctor(as_json: AsJson = False) -> None:
    """Report whether this machine is ready to train, and how to repair it if not.

    Exit code 0: ready. 1: something required is missing or wrong.
    """
    from finefit.facts.files import Disk, finefit_cache, free_bytes, hub_cache
    from finefit.facts.machine import read_machine, read_power, read_requirements
    from finefit.preflight.machine import MachineFacts, check_machine, is_ready
    from finefit.report.check import machine_document, show_machine

    machine = read_machine()
    torch = _read_torch(machine)
    places = {"current folder": Path.cwd(), "finefit cache": finefit_cache(), "hub cache": hub_cache()}
    found = MachineFacts(
        machine=machine,
        torch=torch,
        disks=tuple(Disk(use=use, path=str(path), free_bytes=free_bytes(path)) for use, path in places.items()),
        power=read_power(),
        requirements=read_requirements(),
        host_factor=_measure_host() if torch.problem is None else None,
    )
    findings = check_machine(found)
    if as_json:
        print_json(machine_document(found, findings))
    else:
        show_machine(found, findings, open_console())
    if not is_ready(findings):
        raise typer.Exit(1)


def _measure_host() -> float:
    """Afresh, because plans keep what they measured once."""
    from finefit.rehearse.host_speed import measure_host

    return round(measure_host().factor, 3)


def _read_torch(machine: "Machine") -> "TorchView":
    """torch explains why it sees no card in a warning, given once, when it first looks. A kernel is run on each card,
    because a torch built without the card's architecture still lists the card."""
    from finefit.facts.machine import Device, TorchView

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        return TorchView(devices=(), cuda_build=None, visible_devices=visible_devices, warning=None, problem=str(error))
    cpu, memory_bytes = machine.cpu_model, machine.memory_bytes
    devices = [Device(name="cpu", description=cpu, memory_bytes=memory_bytes, has_bf16=None, problem=None)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            problem, properties = None, torch.cuda.get_device_properties(index)
            try:
                torch.ones(1, device=f"cuda:{index}").add(1).cpu()
            except RuntimeError as error:
                problem = str(error)
            card = Device(
                name=f"cuda:{index}",
                description=properties.name,
                memory_bytes=properties.total_memory,
                has_bf16=properties.major >= 8,  # Ampere; older cards emulate it, slowly
                problem=problem,
            )
            devices.append(card)
    return TorchView(
        devices=tuple(devices),
        cuda_build=torch.version.cuda,
        visible_devices=visible_devices,
        warning="; ".join(str(warning.message) for warning in caught) or None,
        problem=None,
    )
