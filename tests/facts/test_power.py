from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from finefit.facts.power import Power, read_power


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
