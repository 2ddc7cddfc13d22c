"""What the driver reports, by a fake of pynvml; without a driver nothing is reported and nothing fails."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from finefit.facts import nvml
from finefit.facts.nvml import (
    Card,
    CardProcess,
    CardUsage,
    DriverError,
    UsageSample,
    open_card,
    read_card_processes,
    read_cards,
    used_bytes,
)

MIB = 2**20


class NVMLError(Exception):
    pass


class NoLibrary(NVMLError):
    pass


class FakeDriver:
    """pynvml with one card for each entry of `used_mib`; `unknown` functions raise, as for values that a card lacks."""

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NoLibrary

    def __init__(self, *used_mib: int, start: Exception | None = None, unknown: tuple[str, ...] = ()) -> None:
        self.used_mib, self.start, self.unknown = used_mib, start, unknown

    def _known(self, name: str) -> None:
        if name in self.unknown:
            raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        if self.start is not None:
            raise self.start

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.used_mib)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        if number >= len(self.used_mib):
            raise NVMLError("Invalid Argument")
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))

    def nvmlDeviceGetName(self, _: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetCudaComputeCapability(self, _: int) -> tuple[int, int]:  # noqa: N802
        self._known("capability")
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        self._known("memory")
        total, used = 143771 * MIB + 300_000, self.used_mib[handle] * MIB
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, _: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=37, memory=99)

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:  # noqa: N802
        self._known("power")
        return 451_250

    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetTemperature(self, _: int, sensor: int) -> int:  # noqa: N802
        self._known("temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        self._known("processes")
        return [SimpleNamespace(pid=42 + handle, usedGpuMemory=None if handle else 1024 * MIB)]

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        if pid == 43:
            raise NVMLError("Not Found")
        return "/usr/bin/python3, in a folder"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda driver: monkeypatch.setattr(nvml, "pynvml", driver)


def test_cards_are_read_in_whole_mebibytes(install: Any) -> None:
    install(FakeDriver(771))
    card = Card(
        name="NVIDIA H200",
        memory_bytes=143771 * MIB,
        free_bytes=143000 * MIB,
        driver="580.65.06",
        compute_capability="9.0",
    )
    assert read_cards() == ((card,), None)


def test_values_that_the_driver_does_not_know_are_none(install: Any) -> None:
    install(FakeDriver(0, unknown=("memory", "capability", "processes")))
    (card,), problem = read_cards()
    assert (card.memory_bytes, card.free_bytes, card.compute_capability, problem) == (None, None, None, None)
    assert used_bytes() is None
    assert read_card_processes() == ()


def test_without_a_driver_there_is_neither_card_nor_problem(install: Any) -> None:
    install(FakeDriver(start=NoLibrary("NVML Shared Library Not Found")))
    assert read_cards() == ((), None)
    assert (read_card_processes(), used_bytes(), open_card("GPU-0")) == ((), None, None)


def test_a_failing_driver_leaves_its_reason(install: Any) -> None:
    install(FakeDriver(start=NVMLError("Driver/library version mismatch")))
    assert read_cards() == ((), "the NVIDIA driver reports: Driver/library version mismatch")
    assert (read_card_processes(), used_bytes(), open_card("GPU-0")) == ((), None, None)


def test_a_driver_without_a_card_is_a_problem(install: Any) -> None:
    install(FakeDriver())
    assert read_cards() == ((), "the NVIDIA driver is installed and finds no card")
    assert used_bytes() is None


def test_a_hanging_driver_is_not_waited_for(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(1)
    monkeypatch.setattr(driver, "nvmlInit", lambda: time.sleep(5))
    monkeypatch.setattr(nvml, "ANSWER_SECONDS", 0.05)
    install(driver)
    assert read_cards() == ((), "the NVIDIA driver gave no answer within 0.05 s")
    assert read_card_processes() == ()


def test_processes_have_a_name_and_bytes_as_far_as_they_are_known(install: Any) -> None:
    install(FakeDriver(0, 0))
    assert read_card_processes() == (
        CardProcess(pid=42, name="/usr/bin/python3, in a folder", memory_bytes=1024 * MIB),
        CardProcess(pid=43, name="[Not Found]", memory_bytes=None),
    )


def test_the_use_of_all_cards_or_of_some_is_added_up(install: Any) -> None:
    install(FakeDriver(5, 7, 11))
    assert used_bytes() == 23 * MIB
    assert used_bytes((0, 2)) == 16 * MIB
    assert used_bytes((3,)) is None


def test_usage_is_read_from_the_card_with_the_uuid(install: Any) -> None:
    install(FakeDriver(5, 7))
    read = open_card("GPU-1")
    assert read is not None
    assert read() == UsageSample(utilisation=0.37, watts=451.25, celsius=61.0)
    assert open_card("GPU-2") is None
    install(FakeDriver(5, unknown=("temperature",)))
    read = open_card("GPU-0")
    assert read is not None
    assert read() == UsageSample(utilisation=0.37, watts=451.25)
    install(FakeDriver(5, unknown=("power",)))
    assert open_card("GPU-0") is None


def test_samples_are_averaged_and_counted_once() -> None:
    samples = UsageSample(utilisation=1.0, watts=100.0), UsageSample(utilisation=0.5, watts=200.0, celsius=61.0)
    given = iter(samples)
    over: list[bool] = []

    def read() -> UsageSample:
        try:
            return next(given)
        except StopIteration:
            over.append(True)
            raise DriverError("gone") from None

    with CardUsage(read, every=0.01) as usage:
        deadline = time.monotonic() + 20
        while not over:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert usage.taken() == {"card_utilisation": 0.75, "card_watts": 150.0, "card_celsius": 61.0}
        assert usage.taken() == {}


def test_without_a_card_no_usage_is_reported() -> None:
    with CardUsage(None) as usage:
        assert usage.taken() == {}
