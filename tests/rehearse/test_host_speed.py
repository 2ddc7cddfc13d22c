"""The host's speed beside the reference's, measured once for each host and version of torch."""

import dataclasses

import pytest

from finefit.facts.machine import read_machine
from finefit.rehearse.host_speed import REFERENCE_OPERATION_SECONDS, HostSpeed, host_speed, measure_host

MACHINE = read_machine()


def test_the_probe_times_the_dispatch_of_operations() -> None:
    """An operation and its backward take microseconds, whichever host it is."""
    assert 1e-7 < measure_host(0.05).operation_seconds < 1e-3


@pytest.mark.parametrize(("share", "factor"), [(1.0, 1.0), (1.7, 1.7), (0.1, 0.5), (50.0, 3.0)])
def test_a_host_is_as_much_slower_as_its_operations_within_limits(share: float, factor: float) -> None:
    speed = HostSpeed(operation_seconds=share * REFERENCE_OPERATION_SECONDS)
    assert speed.factor == pytest.approx(factor)


def test_a_host_is_measured_once_so_that_plans_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = iter((HostSpeed(operation_seconds=4e-6), HostSpeed(operation_seconds=8e-6)))
    speeds = [host_speed(MACHINE, lambda: next(found)) for _ in range(2)]
    assert speeds[0] == speeds[1] == HostSpeed(operation_seconds=4e-6)
    other = dataclasses.replace(MACHINE, host="another")
    assert host_speed(other, lambda: next(found)) == HostSpeed(operation_seconds=8e-6)
