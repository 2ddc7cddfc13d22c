"""Whether the machine may go dark: a laptop on battery throttles, then sleeps."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    on_battery: bool | None
    """None where there is a battery and the system does not say what feeds the machine."""
    has_battery: bool
    percent: float | None


def read_power() -> Power:
    try:
        battery = psutil.sensors_battery()
    except FileNotFoundError:  # psutil lists /sys/class/power_supply, which many containers lack
        battery = None
    if battery is None:
        return Power(on_battery=False, has_battery=False, percent=None)
    plugged: bool | None = battery.power_plugged
    return Power(on_battery=None if plugged is None else not plugged, has_battery=True, percent=float(battery.percent))
