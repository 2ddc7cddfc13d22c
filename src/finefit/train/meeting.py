"""The ranks meet before anything is loaded. Each leaves a card with what it is and what it sees; when all cards are there, every rank reads them and
comes to the same verdict: whoever is missing is named, and so is whoever is unlike the others."""

import hashlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from finefit import __version__
from finefit.artifacts.launcher import Place
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage
from finefit.errors import RunError, WorkerDied
from finefit.facts.files import read_file
from finefit.facts.machine import read_version
from finefit.train.ranks import first_line

PATIENCE = timedelta(seconds=120)
"""Between the first rank that comes and the last; loading Python and torch from a slow shared disk takes a minute."""
_POLL_SECONDS = 0.1
_PACKAGES = ("torch", "transformers", "peft", "deepspeed")
_MUCH_LESS = 0.8
"""Of the free memory of the freest: below it somebody else is at work on that card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """One rank, as it describes itself."""

    rank: int
    host: str
    pid: int
    device: str
    threads: int
    free_bytes: int
    versions: dict[str, str]
    stage_sha256: str
    prepared: dict[str, str]
    """sha256 of each prepared file as this rank reads it; `missing` where it does not see one."""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def introduce(where: StageDir, stage: Stage, place: Place) -> Visitor:
    versions = {name: version for name in _PACKAGES if (version := read_version(name)) is not None}
    return Visitor(
        rank=place.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=f"cuda:{place.local_rank} {torch.cuda.get_device_name(place.local_rank)}"
        if stage.device == "cuda"
        else "cpu",
        threads=torch.get_num_threads(),
        free_bytes=torch.cuda.mem_get_info(place.local_rank)[0]
        if stage.device == "cuda"
        else psutil.virtual_memory().available,
        versions={"finefit": __version__, "python": platform.python_version(), **versions},
        stage_sha256=hashlib.sha256(where.stage.read_bytes()).hexdigest(),
        prepared={name: _digest(where, name) for name in stage.prepared},
    )


def _digest(where: StageDir, name: str) -> str:
    path = where.prepared(name)
    return read_file(path, where.path).sha256 if path.exists() else "missing"


def meet(visitor: Visitor, store: Store, *, size: int, patience: timedelta = PATIENCE) -> list[Visitor]:
    """All of them, by rank. Whoever has not come when the time is up is named."""
    keys = [f"meeting/{rank}" for rank in range(size)]
    try:
        store.set(keys[visitor.rank], json.dumps(asdict(visitor)))
        missing = _wait_for(store, keys, patience)
        if not missing:
            return [_visitor(json.loads(store.get(key))) for key in keys]
    except dist.DistError as error:
        raise WorkerDied(
            f"rank {visitor.rank} lost rank 0, which holds the meeting: {first_line(error)}",
            "see why it ended; then give the same command again",
        ) from None
    raise _absent(missing, size, patience)


def _wait_for(store: Store, keys: Sequence[str], patience: timedelta) -> list[int]:
    """The ranks that did not come."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def _absent(missing: Sequence[int], size: int, patience: timedelta) -> WorkerDied:
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    logs = " and ".join(f"logs/rank-{rank}.log" if rank else "logs/run.log" for rank in missing)
    return WorkerDied(
        f"{who} of {size} did not come to the meeting within {patience.total_seconds():.0f} s: not started, hung, or unable to reach the first rank",
        f"{logs} may say why; then give the same command again",
    )


def _visitor(values: dict[str, Any]) -> Visitor:
    return Visitor(**values)


def require_alike(visitors: Sequence[Visitor], stage: Stage) -> list[str]:
    """Refuses ranks that are unlike the others. What is only remarkable is returned as words."""
    odd = [
        *_odd_versions(visitors),
        *_odd_views(visitors),
        *_odd_data(visitors, stage),
        *_too_little_memory(visitors, stage),
    ]
    if odd:
        raise RunError(
            "the ranks are not alike:\n" + "\n".join(f"  {line}" for line in odd),
            "all ranks need the same versions, the same run directory and a card that nobody else uses",
        )
    return list(_little_memory(visitors))


def _odd_versions(visitors: Sequence[Visitor]) -> Iterator[str]:
    for name in sorted({name for visitor in visitors for name in visitor.versions}):
        yield from _unlike(visitors, name, [visitor.versions.get(name, "none") for visitor in visitors])


def _odd_views(visitors: Sequence[Visitor]) -> Iterator[str]:
    yield from _unlike(visitors, "stage.json", [visitor.stage_sha256[:12] for visitor in visitors])


def _odd_data(visitors: Sequence[Visitor], stage: Stage) -> Iterator[str]:
    for visitor in visitors:
        for name, sha256 in stage.prepared.items():
            if (seen := visitor.prepared.get(name, "missing")) != sha256:
                yield f"{visitor} sees data/{name} as {seen[:12]}, the run was prepared with {sha256[:12]}"


def _unlike(visitors: Sequence[Visitor], what: str, values: Sequence[str]) -> Iterator[str]:
    (usual, _), *_ = Counter(values).most_common(1)  # of an even split the first rank's: it comes first
    for visitor, value in zip(visitors, values, strict=True):
        if value != usual:
            yield f"{visitor} has {what} {value}, the others {usual}"


def _too_little_memory(visitors: Sequence[Visitor], stage: Stage) -> Iterator[str]:
    """Only what is unlike the others is judged here; whether a stage fits at all was planned before."""
    needed = stage.foretold_bytes
    return (
        f"{_memory(visitor, visitors)}; {needed:,} are needed"
        for visitor in _short(visitors)
        if visitor.free_bytes < needed
    )


def _little_memory(visitors: Sequence[Visitor]) -> Iterator[str]:
    return (_memory(visitor, visitors) for visitor in _short(visitors))


def _short(visitors: Sequence[Visitor]) -> list[Visitor]:
    return [visitor for visitor in visitors if visitor.free_bytes < _MUCH_LESS * _most_free(visitors)]


def _memory(visitor: Visitor, visitors: Sequence[Visitor]) -> str:
    return f"{visitor} has {visitor.free_bytes:,} bytes free on {visitor.device}, another {_most_free(visitors):,}"


def _most_free(visitors: Sequence[Visitor]) -> int:
    return max(visitor.free_bytes for visitor in visitors)
