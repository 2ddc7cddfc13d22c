"""What the card's driver says is averaged over a step; where there is none, the fields are absent."""

import ctypes
import time
from typing import Any

import pytest

from finefit.facts.usage import Sample, Usage, open_card


class Driver:
    """Speaks NVML's language: zero is success, answers come through pointers."""

    def __init__(
        self, *, known: str = "GPU-1", utilisation: int = 37, milliwatts: int = 451_250, power: int = 0
    ) -> None:
        self.known, self.utilisation, self.milliwatts, self.power = known, utilisation, milliwatts, power

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        if uuid.decode() != self.known:
            return 6
        handle._obj.value = 4711
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:  # noqa: N802
        assert handle.value == 4711
        rates._obj.gpu, rates._obj.memory = self.utilisation, 99
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, milliwatts: Any) -> int:  # noqa: N802
        assert handle.value == 4711
        milliwatts._obj.value = self.milliwatts
        return self.power


def test_the_driver_is_asked_for_the_card_by_its_uuid() -> None:
    read = open_card("GPU-1", Driver())  # type: ignore[arg-type]
    assert read is not None
    assert read() == Sample(utilisation=0.37, watts=451.25)


@pytest.mark.parametrize(
    "driver", [Driver(known="GPU-2"), Driver(power=3)], ids=["another card", "a card that does not say its power"]
)
def test_a_card_that_the_driver_does_not_speak_of_has_no_reader(driver: Driver) -> None:
    assert open_card("GPU-1", driver) is None  # type: ignore[arg-type]


def test_without_a_driver_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.facts.usage.LIBRARY", "libabsent-ml.so.1")
    assert open_card("GPU-1") is None


def wait_for(samples: list[Sample], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(samples) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_samples_are_averaged_and_counted_once() -> None:
    given = [Sample(utilisation=1.0, watts=100.0), Sample(utilisation=0.5, watts=200.0)]
    taken: list[Sample] = []

    def read() -> Sample:
        if len(taken) == len(given):
            raise OSError("the driver is gone")
        taken.append(given[len(taken)])
        return taken[-1]

    with Usage(read, every=0.01) as usage:
        wait_for(taken, 2)
        time.sleep(0.05)
        assert usage.taken() == {"card_utilisation": 0.75, "card_watts": 150.0}
        assert usage.taken() == {}


def test_without_a_card_nothing_is_said() -> None:
    with Usage(None) as usage:
        assert usage.taken() == {}
