"""What a stage holds, seen from outside while it lives, and that it is given back before the next one begins.

On a card it is all that is in use there; on a CPU what is resident in the processes that the stage has started."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import psutil

from finefit.artifacts.pipelines import StageMemory
from finefit.facts.card_memory import used_bytes
from finefit.facts.cards import read_card_processes
from finefit.pipeline.forecasting import visible_cards

Device = Literal["cpu", "cuda"]
Say = Callable[[str], None]
_SLACK_BYTES = 64 << 20
"""What a display or a driver takes and gives by itself."""
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.2


@dataclass(slots=True)
class Meter:
    """`tick()` while the stage works; then `settled` once."""

    device: Device
    say: Say
    before: int = 0
    peak: int = 0
    others: frozenset[int] = field(default_factory=frozenset)
    """Children of ours from before, which are none of the stage's."""

    @classmethod
    def begin(cls, device: Device, say: Say) -> "Meter":
        meter = cls(device, say, others=frozenset(child.pid for child in psutil.Process().children(recursive=True)))
        meter.before = meter.peak = meter.now()
        return meter

    def now(self) -> int:
        if self.device == "cuda":
            return used_bytes(visible_cards()) or 0
        return sum(
            _resident(child) for child in psutil.Process().children(recursive=True) if child.pid not in self.others
        )

    def tick(self) -> None:
        self.peak = max(self.peak, self.now())

    def settled(self, *, loaded: int | None = None, peak: int | None = None) -> StageMemory:
        """Waits until the memory is back where it was. `loaded` and `peak`: what the stage's own process has noted, without what others hold."""
        after = self._given_back()
        shared = self.before if self.device == "cuda" else 0
        return StageMemory(
            device=self.device,
            before_bytes=self.before,
            loaded_bytes=None if loaded is None else shared + loaded,
            peak_bytes=max(self.peak, shared + (peak or 0)) or None,
            after_bytes=after,
        )

    def _given_back(self) -> int:
        began = time.monotonic()
        while (after := self.now()) > self.before + _SLACK_BYTES:
            if time.monotonic() - began > _PATIENCE_SECONDS:
                self.say(
                    f"warning: {after - self.before:,} bytes more than before are in use {_PATIENCE_SECONDS:.0f} s after the stage has ended; "
                    f"held by {self._holders() or 'nobody that can be seen'}"
                )
                break
            time.sleep(_RETRY_SECONDS)
        return after

    def _holders(self) -> str:
        if self.device == "cuda":
            return ", ".join(f"{one.name} (pid {one.pid})" for one in read_card_processes())
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in self.others]
        return ", ".join(f"pid {child.pid}" for child in children)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended since it was listed
        return 0
