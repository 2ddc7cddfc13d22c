import subprocess

import pytest

from finefit.facts.power import Power
from finefit.pipeline import awake as room
from finefit.pipeline.awake import awake

BATTERY = Power(on_battery=True, has_battery=True, percent=41.0)
MAINS = Power(on_battery=False, has_battery=True, percent=99.0)
DESKTOP = Power(on_battery=False, has_battery=False, percent=None)


def _warnings(monkeypatch: pytest.MonkeyPatch, power: Power, command: list[str] | None) -> list[str]:
    monkeypatch.setattr(room, "read_power", lambda: power)
    monkeypatch.setattr(room, "_command", lambda: command)
    said: list[str] = []
    with awake(said.append):
        pass
    return said


def test_a_laptop_on_battery_that_cannot_be_kept_awake_is_warned_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    battery, sleep = _warnings(monkeypatch, BATTERY, None)
    assert "running on battery (41 %)" in battery
    assert "keep the lid open" in sleep


def test_an_inhibitor_that_refuses_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (sleep,) = _warnings(monkeypatch, MAINS, ["false"])
    assert "no way to inhibit sleep" in sleep


@pytest.mark.parametrize("command", [None, ["false"], ["cat"]])
def test_a_machine_without_a_battery_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch, command: list[str] | None
) -> None:
    assert _warnings(monkeypatch, DESKTOP, command) == []


def test_an_inhibitor_holds_while_the_run_lasts_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    inhibit = room._inhibit

    def remembered() -> "subprocess.Popen[bytes] | None":
        inhibitor = inhibit()
        started.extend([inhibitor] if inhibitor else [])
        return inhibitor

    monkeypatch.setattr(room, "read_power", lambda: MAINS)
    monkeypatch.setattr(room, "_command", lambda: ["cat"])
    monkeypatch.setattr(room, "_inhibit", remembered)
    with awake(lambda _: None):
        assert started[0].poll() is None
    assert started[0].poll() is not None
