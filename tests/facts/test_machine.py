import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pydantic import TypeAdapter

from finefit.facts.machine import (
    PACKAGES,
    Machine,
    Power,
    read_cpu_model,
    read_free_memory_bytes,
    read_machine,
    read_memory_bytes,
    read_peak_resident_bytes,
    read_power,
    read_version,
)

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_machine_survives_json() -> None:
    machine = read_machine()
    adapter = TypeAdapter(Machine)
    assert adapter.validate_json(adapter.dump_json(machine)) == machine
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28


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


def _battery(percent: float, plugged: bool | None) -> Callable[[], SimpleNamespace]:
    return lambda: SimpleNamespace(percent=percent, power_plugged=plugged)


def test_an_unplugged_laptop_is_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", _battery(41, plugged=False))
    assert read_power() == Power(on_battery=True, has_battery=True, percent=41.0)


def test_a_battery_that_does_not_say_leaves_the_source_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", _battery(80, plugged=None))
    assert read_power() == Power(on_battery=None, has_battery=True, percent=80.0)


def test_a_container_without_power_supplies_has_no_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", absent)
    assert read_power() == Power(on_battery=False, has_battery=False, percent=None)


@pytest.mark.parametrize("text", [None, "Name:\tpython\nVmRSS:\t  8 kB\n"], ids=["no file", "without the peak"])
def test_the_peak_of_this_process_is_known_where_the_kernel_does_not_write_it(tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    assert read_peak_resident_bytes(status) >= psutil.Process().memory_info().rss / 2
    status.write_text("VmHWM:\t  12 kB\n")
    assert read_peak_resident_bytes(status) == 12 * 1024
