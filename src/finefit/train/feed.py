"""Micro-batches made ahead: while the device computes a step, one thread makes those of the next."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import psutil

from finefit.errors import WorkerDied
from finefit.objective.batch import Batch

Make = Callable[[int], list[Batch]]
"""The micro-batches of a step: a pure function of it, so that what was made for a step that does not come is worth nothing and harms nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    batches: list[Batch]
    """On the host."""
    wait_seconds: float
    """That the loop waited for them."""


def _named(make: Make, step: int) -> list[Batch]:
    """What goes wrong says where it went wrong; a lack of host memory says how much there is."""
    try:
        return make(step)
    except MemoryError:
        free = psutil.virtual_memory().available / 2**30
        remedy = "close other programs and give the same command again: it goes on from the last checkpoint"
        raise WorkerDied(
            f"host memory did not hold the micro-batches of step {step + 1}: {free:.1f} GiB are free", remedy
        ) from None
    except Exception as error:
        error.add_note(f"while the feeder made the micro-batches of step {step + 1}")
        raise


class Feeder:
    """Its thread lives as long as the `with` block. What goes wrong in it is raised where the step is taken."""

    def __init__(self, make: Make, *, total_steps: int) -> None:
        self._make, self._total_steps = make, total_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feeder")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def take(self, step: int) -> Fed:
        """Of any step; the one after it is the one that is made ahead."""
        began = time.perf_counter()
        batches = self._asked(step).result()
        waited = time.perf_counter() - began
        self._ahead = (
            (step + 1, self._thread.submit(_named, self._make, step + 1)) if step + 1 < self._total_steps else None
        )
        return Fed(batches=batches, wait_seconds=waited)

    def change(self, make: Make) -> None:
        """From the next step that is taken on; what the old one has made ahead is forgotten."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._make, self._ahead = make, None

    def _asked(self, step: int) -> Future[list[Batch]]:
        if self._ahead is not None:
            expected, future = self._ahead
            if expected == step:
                return future
            future.cancel()
        return self._thread.submit(_named, self._make, step)

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
