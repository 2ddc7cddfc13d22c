"""What is in use on the cards, as the driver says it."""

import ctypes
from typing import Any

import pytest

from finefit.facts.card_memory import used_bytes


class Driver:
    """Speaks NVML's language: zero is success, answers come through pointers."""

    def __init__(self, *used: int, refuses: int | None = None) -> None:
        self.used, self.refuses = used, refuses

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.used)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 100 + number
        return 0 if number < len(self.used) else 6

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802
        assert handle.value is not None
        at = handle.value - 100
        memory._obj.total, memory._obj.free, memory._obj.used = 80, 80 - self.used[at], self.used[at]
        return 3 if at == self.refuses else 0


def test_all_cards_are_added_up_or_those_that_are_named() -> None:
    driver: Any = Driver(5, 7, 11)
    assert used_bytes(library=driver) == 23
    assert used_bytes((0, 2), driver) == 16


@pytest.mark.parametrize("driver", [Driver(), Driver(5, 7, refuses=1)], ids=["no card", "a card that does not say"])
def test_what_the_driver_does_not_say_is_not_known(driver: Any) -> None:
    assert used_bytes(library=driver) is None


def test_a_card_that_is_not_there_is_not_known() -> None:
    driver: Any = Driver(5)
    assert used_bytes((1,), driver) is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.facts.card_memory.LIBRARY", "libabsent-ml.so.1")
    assert used_bytes() is None
