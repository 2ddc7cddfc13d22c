"""Ranks for tests: processes forked from the server that has loaded torch, each given its place among the others."""

import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from finefit.artifacts.processes import RankEnv
from finefit.errors import FinefitError
from finefit.run.launch import free_port
from tests.forks import FORKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended: with a value, with an error of ours, or with neither."""

    value: Any = None
    error: FinefitError | None = None
    code: int | None = 0
    trace: str = ""
    seconds: float = 0.0


class Beside:
    """One of two ranks; whatever is gathered, the other one has `other`."""

    size = 2

    def __init__(self, other: Any, *, rank: int = 0) -> None:
        self.rank, self.is_first, self._other = rank, rank == 0, other

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: Any) -> list[Any]:
        return [value, self._other] if self.is_first else [self._other, value]

    def barrier(self) -> None:
        return


def as_ranks(
    size: int, act: Callable[[RankEnv], Any], *, absent: tuple[int, ...] = (), deadline_seconds: float = 180
) -> list[Ended]:
    """What each rank came to, by rank; `absent` ones never start. `act` is sent by value and shares nothing with this
    process."""
    port, began = free_port(), time.monotonic()
    started = {}
    for rank in (rank for rank in range(size) if rank not in absent):
        ours, theirs = FORKS.Pipe(duplex=False)
        place = RankEnv(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
        process = FORKS.Process(target=_be_rank, args=(place, cloudpickle.dumps(act), theirs), daemon=True)
        process.start()
        theirs.close()
        started[rank] = (process, ours)
    ended = [Ended(code=None)] * size
    for rank, (process, ours) in started.items():
        told: Ended = Ended(code=None)
        if ours.poll(max(0.1, began + deadline_seconds - time.monotonic())):
            try:
                told = cloudpickle.loads(ours.recv_bytes())
            except EOFError:  # killed before it could say anything
                process.join(10)
                told = Ended(code=process.exitcode)
        process.kill()
        process.join()
        ended[rank] = told
    return ended


def _be_rank(place: RankEnv, act: bytes, theirs: "Connection[bytes, bytes]") -> None:
    os.environ.update(place.variables())
    warnings.simplefilter("error")
    began = time.monotonic()
    try:
        ended = Ended(value=cloudpickle.loads(act)(place))
    except FinefitError as error:
        ended = Ended(error=error)
    except BaseException:  # noqa: BLE001 shown by the test that did not expect it
        ended = Ended(code=1, trace=traceback.format_exc())
    theirs.send_bytes(cloudpickle.dumps(replace(ended, seconds=time.monotonic() - began)))
    theirs.close()
    os._exit(0)
