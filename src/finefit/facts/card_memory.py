"""How much of the cards is in use, by whomever, as the driver's own library (NVML) tells it: quick enough to be asked several times a second."""

import ctypes
from collections.abc import Collection

from finefit.facts.usage import LIBRARY


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_bytes(numbers: Collection[int] | None = None, library: ctypes.CDLL | None = None) -> int | None:
    """Of the cards with these numbers, or of all; None where there is no driver, or it does not say."""
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    used = [_used(nvml, at) for at in (range(count.value) if numbers is None else numbers)]
    return None if not used or None in used else sum(one for one in used if one is not None)


def _used(nvml: ctypes.CDLL, number: int) -> int | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) or nvml.nvmlDeviceGetMemoryInfo(
        handle, ctypes.byref(memory)
    ):
        return None
    return int(memory.used)
