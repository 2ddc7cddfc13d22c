"""How fast this host dispatches operations, beside the host on which `cost_model.HOST_SECONDS` was calibrated.

A training step at small batches waits for the host, whose one thread runs Python, autograd and torch's dispatcher. The
probe does the same without a card: products of a few numbers, forward and backward, whose arithmetic takes no time."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from finefit.artifacts.cache import cached_record
from finefit.artifacts.records import Record
from finefit.facts.machine import Machine

PROBE_SECONDS = 0.5
REFERENCE_OPERATION_SECONDS = 5.2e-6
"""What the probe takes on the reference host for each operation and its backward: 5.16 to 5.26 us on a Xeon of a like
server. On the host of the H200 itself it has yet to be measured, which bench/kernel_probe.py does."""
_OPERATIONS = 500
_LEAST, _MOST = 0.5, 3.0
"""Limits of the factor: a host beyond them was disturbed while it was measured."""


class HostSpeed(Record):
    operation_seconds: float
    """Of one operation and its backward."""

    @property
    def factor(self) -> float:
        """Host time as a multiple of the reference host's."""
        return min(_MOST, max(_LEAST, self.operation_seconds / REFERENCE_OPERATION_SECONDS))


def host_speed(machine: Machine, measure: Callable[[], HostSpeed] | None = None) -> HostSpeed:
    """Measured once for each host and version of torch, and kept in the user's cache."""
    about = [machine.host, machine.cpu_model, machine.num_cores, torch.__version__]
    return cached_record("host", about, HostSpeed, measure or measure_host, max_entries=10)


def measure_host(seconds: float = PROBE_SECONDS) -> HostSpeed:
    """The fastest of many rounds: other processes only ever slow one down."""
    rounds, ends = [_round()], time.perf_counter() + seconds
    while time.perf_counter() < ends:
        rounds.append(_round())
    return HostSpeed(operation_seconds=min(rounds) / _OPERATIONS)


def _round() -> float:
    start = torch.ones(8, requires_grad=True)
    began = time.perf_counter()
    _chain(start).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - began


def _chain(value: Tensor) -> Tensor:
    for _ in range(_OPERATIONS):
        value = value * 1.0001
    return value.sum()
