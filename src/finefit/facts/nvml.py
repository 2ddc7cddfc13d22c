"""What the NVIDIA driver reports through NVML: cards, their memory, the processes on them, and how busy they are."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import TypeVar

import pynvml  # type: ignore[import-untyped]

T = TypeVar("T")

ANSWER_SECONDS = 10.0
_SAMPLE_SECONDS = 0.5
_MIB = 2**20


class DriverError(Exception):
    """The driver fails, or does not answer."""


class NoDriver(DriverError):
    """The NVIDIA driver is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    name: str
    memory_bytes: int | None
    """None if the driver does not report it, as on cards that share the host's memory."""
    free_bytes: int | None
    driver: str
    compute_capability: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process that computes on a card; one on several cards appears once for each."""

    pid: int
    name: str
    memory_bytes: int | None
    """None if the driver does not report it, as on Windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSample:
    utilisation: float
    """Share of the time in which a kernel ran."""
    watts: float
    celsius: float | None = None
    """None if the driver does not report it."""


Read = Callable[[], UsageSample]


@contextmanager
def _driver() -> Iterator[None]:
    """The boundary to NVML, whose errors become DriverErrors."""
    try:
        pynvml.nvmlInit()
        yield
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NoDriver("the NVIDIA driver is not installed") from error
    except pynvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver reports: {error}") from error


def _ask(question: Callable[[], T]) -> T:
    """Calls the driver in a thread of its own, so that a driver that hangs is not waited for."""
    answers: SimpleQueue[T | DriverError] = SimpleQueue()

    def answer() -> None:
        try:
            with _driver():
                answers.put(question())
        except DriverError as error:
            answers.put(error)

    threading.Thread(target=answer, name="nvml", daemon=True).start()
    try:
        found = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise DriverError(f"the NVIDIA driver gave no answer within {ANSWER_SECONDS:g} s") from None
    if isinstance(found, DriverError):
        raise found
    return found


def _unless_unknown(question: Callable[[], T]) -> T | None:
    """None for a single value that the driver does not report."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def read_cards() -> tuple[tuple[Card, ...], str | None]:
    """The cards, and why an installed driver does not list them."""
    try:
        cards = _ask(lambda: tuple(_card(number) for number in range(pynvml.nvmlDeviceGetCount())))
    except NoDriver:
        return (), None
    except DriverError as error:
        return (), str(error)
    return cards, None if cards else "the NVIDIA driver is installed and finds no card"


def numbered(cards: tuple[Card, ...], numbers: tuple[int, ...] | None) -> tuple[Card, ...]:
    """The cards with these numbers, in the order in which CUDA then counts them; all of them without numbers."""
    return cards if numbers is None else tuple(cards[at] for at in numbers if at < len(cards))


def _card(number: int) -> Card:
    """Memory in whole MiB, as nvidia-smi shows it."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    memory = _unless_unknown(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    capability = _unless_unknown(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Card(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=round(memory.total / _MIB) * _MIB if memory else None,
        free_bytes=round(memory.free / _MIB) * _MIB if memory else None,
        driver=pynvml.nvmlSystemGetDriverVersion(),
        compute_capability="{}.{}".format(*capability) if capability else None,
    )


def read_card_processes() -> tuple[CardProcess, ...]:
    """Empty without a working driver."""
    try:
        return _ask(lambda: tuple(one for at in range(pynvml.nvmlDeviceGetCount()) for one in _processes(at)))
    except DriverError:
        return ()


def _processes(number: int) -> Iterator[CardProcess]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    for process in _unless_unknown(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ():
        try:
            name = str(pynvml.nvmlSystemGetProcessName(process.pid))
        except (pynvml.NVMLError, UnicodeDecodeError):  # of another container
            name = "[Not Found]"
        yield CardProcess(pid=process.pid, name=name, memory_bytes=process.usedGpuMemory)


def used_bytes(numbers: Collection[int] | None = None) -> int | None:
    """Memory in use by any process on the cards with these numbers, or on all; None if the driver does not report it.
    It is quick enough to be called several times a second."""

    def used() -> list[int]:
        wanted = range(pynvml.nvmlDeviceGetCount()) if numbers is None else numbers
        return [int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(at)).used) for at in wanted]

    try:
        found = _ask(used)
    except DriverError:
        return None
    return sum(found) if found else None


def open_card(uuid: str) -> Read | None:
    """Reads the usage of the card that the driver calls `GPU-...`; None if the driver does not report it."""

    def read() -> UsageSample:
        with _driver():
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            return UsageSample(
                utilisation=busy / 100,
                watts=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                celsius=_unless_unknown(
                    lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
                ),
            )

    try:
        read()
    except DriverError:
        return None
    return read


class CardUsage:
    """Samples a card in a thread that lives as long as the `with` block; without a card it reports nothing."""

    def __init__(self, read: Read | None, *, every: float = _SAMPLE_SECONDS) -> None:
        self._read, self._every = read, every
        self._samples: list[UsageSample] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="usage", daemon=True)

    def taken(self) -> dict[str, float]:
        """Means since the last call, by their names in a metrics line; empty without a sample."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        degrees = [sample.celsius for sample in samples if sample.celsius is not None]
        return {
            "card_utilisation": round(fmean(sample.utilisation for sample in samples), 3),
            "card_watts": round(fmean(sample.watts for sample in samples), 1),
        } | ({"card_celsius": round(fmean(degrees), 1)} if degrees else {})

    def _sample(self) -> None:
        while self._read is not None and not self._over.wait(self._every):
            try:
                sample = self._read()
            except DriverError:  # a driver that no longer answers ends the sampling, not the run
                return
            with self._lock:
                self._samples.append(sample)

    def __enter__(self) -> "CardUsage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)
