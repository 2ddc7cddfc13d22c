"""The ranks of one training: how they find each other, prove that they are alike, and agree on decisions."""

import hashlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from finefit import __version__
from finefit.artifacts.processes import RankEnv
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, RunError, WorkerDied
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_version

_TIMEOUT = timedelta(minutes=30)
"""For a working rank: the first one may be writing a large checkpoint."""
_LOST = ("/gloo/", "monitoredBarrier")
"""gloo has no error type of its own; its messages name their source file, or the barrier."""
_SAME_COMMAND = "give the same command again: it resumes from the last checkpoint"


class Ranks(Protocol):
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """The one that writes: metrics, checkpoints, the result."""
        ...

    def any(self, claim: bool) -> bool:
        """Whether any rank claims it; every rank gets the same answer, so every rank has to ask."""
        ...

    def gather(self, value: Any) -> Sequence[Any]:
        """Plain data of every rank, by rank."""
        ...

    def barrier(self) -> None: ...


class OneRank:
    rank, size = 0, 1
    is_first = True

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: Any) -> Sequence[Any]:
        return [value]

    def barrier(self) -> None:
        return


ONE_RANK = OneRank()


class ManyRanks:
    """Over its own group on the host (gloo), even where tensors travel between cards: agreeing never waits for a
    card."""

    def __init__(self, group: dist.ProcessGroup, *, patience: timedelta = _TIMEOUT) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._patience = group, patience

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any(self, claim: bool) -> bool:
        flag = torch.tensor([int(claim)])
        with peers_named(self.rank, "asking the others"):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def gather(self, value: Any) -> Sequence[Any]:
        values: list[Any] = [None] * self.size
        with peers_named(self.rank, "gathering what the others have"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        with peers_named(self.rank, "waiting for the others"):
            # its error names the ranks that are missing
            dist.monitored_barrier(self._group, timeout=self._patience, wait_all_ranks=True)


@contextmanager
def joined(place: RankEnv, store: Store, *, device: str, patience: timedelta = _TIMEOUT) -> Iterator[ManyRanks]:
    """torch's process group, for as long as the block lasts: NCCL between cards, gloo between processes on a CPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    card = torch.device("cuda", place.local_rank) if device == "cuda" else None
    with peers_named(place.rank, "joining the process group"):
        inner, rank, size = PrefixStore("group", store), place.rank, place.size
        dist.init_process_group(backend, store=inner, rank=rank, world_size=size, timeout=patience, device_id=card)
        group = dist.new_group(backend="gloo", timeout=patience)
    assert group is not None  # every rank is in it
    yield ManyRanks(group, patience=patience)
    dist.destroy_process_group()  # not after a failure: it would wait for ranks that are gone


def open_store(place: RankEnv, *, patience: timedelta) -> Store:
    """Where ranks exchange messages. The first one holds it, unless torchrun does."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.size,
            is_master=place.rank == 0 and not held_by_torchrun,
            timeout=patience,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return store
    except dist.DistNetworkError as error:
        if place.rank == 0 and not held_by_torchrun:
            raise WorkerDied(f"rank 0 cannot listen on port {place.port}: {first_line(error)}", _SAME_COMMAND) from None
        where, seconds = f"{place.address}:{place.port}", f"{patience.total_seconds():.0f} s"
        raise WorkerDied(
            f"rank {place.rank} did not find rank 0 at {where} within {seconds}: {first_line(error)}",
            "check why rank 0 did not start, and that its node is reachable; then give the same command again",
        ) from None


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def lost_peers(error: RuntimeError) -> bool:
    """Whether this rank fails because of another one."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _LOST)


def peers_lost(rank: int, doing: str, error: RuntimeError) -> FinefitError:
    return WorkerDied(f"rank {rank} lost the others while {doing}: {first_line(error)}", _SAME_COMMAND)


@contextmanager
def peers_named(rank: int, doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not lost_peers(error):
            raise
        raise peers_lost(rank, doing, error) from error


# The rendezvous, before anything is loaded: each rank publishes what it is and what it sees. When all have done so,
# every rank reads them and comes to the same verdict, which names missing ranks and those that differ.

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""Between the first and the last rank; loading Python and torch from a slow shared disk takes a minute."""
_POLL_SECONDS = 0.1
_PACKAGES = ("torch", "transformers", "peft", "deepspeed")
_MUCH_LESS = 0.8
"""Of the most free memory on any card: below it another program uses the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank, as it describes itself."""

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


def describe_rank(where: StageDir, stage: Stage, place: RankEnv) -> RankInfo:
    card, versions = place.local_rank, {name: read_version(name) for name in _PACKAGES}
    if stage.device == "cuda":
        device, free = f"cuda:{card} {torch.cuda.get_device_name(card)}", torch.cuda.mem_get_info(card)[0]
    else:
        device, free = "cpu", psutil.virtual_memory().available
    own, prepared = {"finefit": __version__, "python": platform.python_version()}, {}
    for name in stage.prepared:
        path = where.prepared(name)
        prepared[name] = sha256_of(path) if path.exists() else "missing"
    return RankInfo(
        rank=place.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        threads=torch.get_num_threads(),
        free_bytes=free,
        versions=own | {name: version for name, version in versions.items() if version is not None},
        stage_sha256=hashlib.sha256(where.stage.read_bytes()).hexdigest(),
        prepared=prepared,
    )


def rendezvous(info: RankInfo, store: Store, *, size: int, patience: timedelta = RENDEZVOUS_TIMEOUT) -> list[RankInfo]:
    """All ranks in order. Those that are missing when the time is up are named."""
    keys = [f"rendezvous/{rank}" for rank in range(size)]
    try:
        store.set(keys[info.rank], json.dumps(asdict(info)))
        missing = _wait_for(store, keys, patience)
        if not missing:
            return [RankInfo(**json.loads(store.get(key))) for key in keys]
    except dist.DistError as error:
        problem = f"rank {info.rank} lost rank 0, which holds the rendezvous: {first_line(error)}"
        raise WorkerDied(problem, "check why it ended; then give the same command again") from None
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    logs = " and ".join(f"logs/rank-{rank}.log" if rank else "logs/run.log" for rank in missing)
    problem = f"{who} of {size} did not reach the rendezvous within {patience.total_seconds():.0f} s"
    raise WorkerDied(
        f"{problem}: not started, hung, or unable to reach the first rank",
        f"{logs} may say why; then give the same command again",
    )


def _wait_for(store: Store, keys: Sequence[str], patience: timedelta) -> list[int]:
    """Returns the ranks that are missing."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def require_alike_ranks(ranks: Sequence[RankInfo], stage: Stage) -> list[str]:
    """Refuses ranks that differ from the others; returns warnings. Whether a stage fits at all was planned before."""
    found: list[str] = []
    for name in sorted({name for rank in ranks for name in rank.versions}):
        found += _differing(ranks, name, [rank.versions.get(name, "none") for rank in ranks])
    found += _differing(ranks, "stage.json", [rank.stage_sha256[:12] for rank in ranks])
    for rank in ranks:
        for name, sha256 in stage.prepared.items():
            if (seen := rank.prepared.get(name, "missing")) != sha256:
                found.append(f"{rank} sees data/{name} as {seen[:12]}, the run was prepared with {sha256[:12]}")
    most = max(rank.free_bytes for rank in ranks)
    short = {
        f"{rank} has {rank.free_bytes:,} bytes free on {rank.device}, another {most:,}": rank.free_bytes
        for rank in ranks
        if rank.free_bytes < _MUCH_LESS * most
    }
    needed = stage.predicted_bytes
    found += [f"{words}; {needed:,} are needed" for words, free_bytes in short.items() if free_bytes < needed]
    if found:
        raise RunError(
            "the ranks are not alike:\n" + "\n".join(f"  {line}" for line in found),
            "all ranks need the same versions, the same run directory and a card that nothing else uses",
        )
    return list(short)


def _differing(ranks: Sequence[RankInfo], what: str, values: Sequence[str]) -> Iterator[str]:
    (usual, _), *_ = Counter(values).most_common(1)  # of an even split the first rank's: it comes first
    for rank, value in zip(ranks, values, strict=True):
        if value != usual:
            yield f"{rank} has {what} {value}, the others {usual}"
