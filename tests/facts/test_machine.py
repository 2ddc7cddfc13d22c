import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from finefit.facts.machine import (
    PACKAGES,
    Card,
    Machine,
    parse_cards,
    read_cards,
    read_cpu_model,
    read_free_memory_bytes,
    read_machine,
    read_memory_bytes,
    read_version,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def _install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_machine_survives_json() -> None:
    machine = read_machine()
    adapter = TypeAdapter(Machine)
    assert adapter.validate_json(adapter.dump_json(machine)) == machine
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28


def test_cards_are_read_in_bytes_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, monkeypatch, 'echo "NVIDIA H200, 143771, 143000, 580.65.06, 9.0"')
    card = Card(
        name="NVIDIA H200",
        memory_bytes=143771 * 2**20,
        free_bytes=143000 * 2**20,
        driver="580.65.06",
        compute_capability="9.0",
    )
    assert read_cards() == ((card,), None)


def test_a_failing_nvidia_smi_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(
        tmp_path, monkeypatch, 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18'
    )
    assert read_cards() == ((), "nvidia-smi ended with 18: Failed to initialize NVML: Driver/library version mismatch")


def test_a_program_that_cannot_start_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, monkeypatch, "")
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
    cards, problem = read_cards()
    assert cards == ()
    assert problem is not None
    assert problem.startswith("nvidia-smi could not be started: ")


def test_a_hanging_nvidia_smi_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, monkeypatch, "while :; do :; done")
    monkeypatch.setattr("finefit.facts.machine.CARD_TIMEOUT_SECONDS", 0.2)
    assert read_cards() == ((), "nvidia-smi gave no answer within 0.2 s")


def test_without_nvidia_smi_there_is_neither_card_nor_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_cards() == ((), None)


def test_memory_that_the_driver_does_not_know_is_none() -> None:
    cards, problem = parse_cards("NVIDIA GB10, [N/A], [N/A], 580.95.05, 12.1\n")
    assert problem is None
    assert (cards[0].memory_bytes, cards[0].free_bytes, cards[0].compute_capability) == (None, None, "12.1")


def test_an_answer_that_is_no_list_of_cards_is_kept_as_the_problem() -> None:
    cards, problem = parse_cards("No devices were found\n")
    assert cards == ()
    assert problem is not None
    assert "'No devices were found'" in problem


def test_a_container_limit_lowers_the_memory(tmp_path: Path) -> None:
    limit, unset = tmp_path / "memory.max", tmp_path / "unset"
    limit.write_text("1073741824\n")
    unset.write_text("max\n")
    assert read_memory_bytes((limit, unset)) == 2**30
    assert read_memory_bytes((unset, tmp_path / "absent")) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "anon 5000\nactive_file 100\ninactive_file 200\n"),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "active_file 1\ninactive_file 2\ntotal_active_file 100\ntotal_inactive_file 200\n",
        ),
    ],
    ids=["v2", "v1"],
)
def test_what_a_container_may_still_take_is_its_limit_less_what_it_holds_but_for_pages_of_files(
    tmp_path: Path, limit: str, used: str, stat: str
) -> None:
    (tmp_path / limit).write_text("10000\n")
    (tmp_path / used).write_text("7000\n")
    assert read_free_memory_bytes((tmp_path / limit,)) == 3000
    (tmp_path / "memory.stat").write_text(stat)
    assert read_free_memory_bytes((tmp_path / limit,)) == 3300
    (tmp_path / used).write_text("12000\n")
    assert read_free_memory_bytes((tmp_path / limit,)) == 0


def test_without_a_limit_the_free_memory_is_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    limits = tuple(tmp_path / name for name in ("memory.max", "memory.limit_in_bytes"))
    assert read_free_memory_bytes(limits) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_processor_is_named_by_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 9654\nprocessor\t: 1\nmodel name\t: AMD EPYC 9654\n"
    )
    assert read_cpu_model(tmp_path / "cpuinfo") == "AMD EPYC 9654"
    assert read_cpu_model(tmp_path / "absent")


def test_an_absent_package_has_no_version() -> None:
    assert read_version("no-such-package-as-this") is None
    assert read_version("pydantic") is not None


def test_every_required_package_is_looked_for() -> None:
    required = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    names = {line.split(">=")[0].split("==")[0].strip() for line in required}
    assert names <= set(PACKAGES)


def test_facts_load_no_torch() -> None:
    code = "import sys, finefit.facts.machine, finefit.facts.model; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
