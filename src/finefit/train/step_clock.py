"""Where the time of a step goes: forward with the loss, backward, and the update.

On a card the host runs ahead of the kernels, so events are recorded between them, and read once the host has waited for
the loss."""

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch

Moment = float | torch.cuda.Event


class StepClock:
    def __init__(self, device: str) -> None:
        self._now: Callable[[], Moment] = _card_moment if device == "cuda" else time.perf_counter
        self._marks: list[tuple[str, Moment]] = []

    def begin(self) -> None:
        """Forgets an attempt that did not end."""
        self._marks.clear()

    def mark(self, phase: str) -> None:
        """What follows is this phase, until the next mark."""
        self._marks.append((phase, self._now()))

    def taken(self) -> dict[str, float]:
        """Seconds by their names in a metrics line; the last mark is the end. On a card the host must have waited for
        the step."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for (phase, began), (_, ended) in pairwise(self._marks):
            seconds[f"{phase}_seconds"] += _seconds_between(began, ended)
        self._marks.clear()
        return {name: round(value, 4) for name, value in seconds.items()}


def _card_moment() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(began: Moment, ended: Moment) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return float(began.elapsed_time(ended)) / 1000
