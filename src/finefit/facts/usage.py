"""How busy a card is and what it draws, sampled beside the training by the driver's own library (NVML): nothing has to be installed, and nothing
waits for the card."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

LIBRARY = "libnvidia-ml.so.1"
_EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    utilisation: float
    """Share of the time in which a kernel ran, as the driver counts it."""
    watts: float


Read = Callable[[], Sample]


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def open_card(uuid: str, library: ctypes.CDLL | None = None) -> Read | None:
    """Of the card that the driver calls `GPU-...`; None where there is no driver or it does not know the card or its power."""
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None

    def read() -> Sample:
        rates, milliwatts = _Rates(), ctypes.c_uint()
        if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) or nvml.nvmlDeviceGetPowerUsage(
            handle, ctypes.byref(milliwatts)
        ):
            raise OSError("the driver does not say how busy the card is")
        return Sample(utilisation=rates.gpu / 100, watts=milliwatts.value / 1000)

    with suppress(OSError):
        read()
        return read
    return None


class Usage:
    """Its thread lives as long as the `with` block; without a card there is none."""

    def __init__(self, read: Read | None, *, every: float = _EVERY_SECONDS) -> None:
        self._read, self._every = read, every
        self._samples: list[Sample] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="usage", daemon=True)

    def taken(self) -> dict[str, float]:
        """Means since the last call, under the names that a metrics line has; empty where nothing was sampled."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {
            "card_utilisation": round(sum(s.utilisation for s in samples) / len(samples), 3),
            "card_watts": round(sum(s.watts for s in samples) / len(samples), 1),
        }

    def _sample(self) -> None:
        while self._read is not None and not self._over.wait(self._every):
            try:
                sample = self._read()
            except OSError:  # a driver that no longer answers ends the sampling, not the run
                return
            with self._lock:
                self._samples.append(sample)

    def __enter__(self) -> "Usage":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=5)
