"""A loss that leaps out of its own recent past: told, never acted on."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_WINDOW, _ENOUGH = 50, 20
_DEVIATIONS, _RATIO = 8.0, 1.5
_NORMAL = 1.4826
"""Median distance from the median -> standard deviation, for a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    loss: float
    usual: float
    """Median of the steps before."""


class Spikes:
    def __init__(self, recent: Iterable[float] = ()) -> None:
        """`recent`: losses before this process began."""
        self._recent = deque(recent, maxlen=_WINDOW)

    def see(self, loss: float) -> Spike | None:
        """Far outside the scatter, and much higher than any step of the window: a smooth curve has next to no scatter, a skewed one high steps now
        and then. A leap that lasts is told once."""
        before = list(self._recent)
        self._recent.append(loss)
        if len(before) < _ENOUGH:
            return None
        usual, highest = median(before), max(before)
        scatter = _NORMAL * median(abs(value - usual) for value in before)
        is_spike = loss > usual + _DEVIATIONS * scatter and loss > highest + (_RATIO - 1) * abs(highest)
        return Spike(loss=loss, usual=usual) if is_spike else None
