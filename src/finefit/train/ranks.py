"""The ranks of one training: how they find each other, prove that they have the same setup, and agree on decisions."""

import json
import logging
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
from finefit.errors import FinefitError, RunError, WorkerDied, first_line
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_version

log = logging.getLogger("finefit")
_TIMEOUT = timedelta(minutes=30)  # the first rank may be writing a large checkpoint
_LOST = ("/gloo/", "monitoredBarrier")
"""gloo has no error type of its own; its messages name their source file, or the barrier."""
_SAME_COMMAND = "give the same command again: it resumes from the last checkpoint"


class Ranks(Protocol):
    rank: int
    size: int
    is_first: bool
    """Whether this rank writes metrics, checkpoints and the result."""

    def any(self, claim: bool) -> bool:
        """Whether the claim holds on any rank. Every rank gets the same answer, so every rank must call it."""

    def gather(self, value: Any) -> Sequence[Any]:
        """Plain data from every rank, in rank order."""

    def barrier(self) -> None: ...


class OneRank:
    rank, size, is_first = 0, 1, True

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: Any) -> Sequence[Any]:
        return [value]

    def barrier(self) -> None:
        return


ONE_RANK = OneRank()


class ManyRanks:
    """Ranks communicate over their own group on the host (gloo), so that agreement never waits for a card."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta = _TIMEOUT) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_first = self.rank == 0
        self._group, self._timeout = group, timeout

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
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)


@contextmanager
def joined(place: RankEnv, store: Store, *, device: str, timeout: timedelta = _TIMEOUT) -> Iterator[ManyRanks]:
    """Keeps torch's process group for the duration of the block: NCCL between cards, gloo between processes on a
    CPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    card = torch.device("cuda", place.local_rank) if device == "cuda" else None
    with peers_named(place.rank, "joining the process group"):
        inner, rank, size = PrefixStore("group", store), place.rank, place.size
        dist.init_process_group(backend, store=inner, rank=rank, world_size=size, timeout=timeout, device_id=card)
        group = dist.new_group(backend="gloo", timeout=timeout)
    assert group is not None  # every rank is in it
    yield ManyRanks(group, timeout=timeout)
    dist.destroy_process_group()  # not after a failure: it would wait for ranks that are gone


def open_store(place: RankEnv, *, timeout: timedelta) -> Store:
    """The store through which ranks exchange messages. The first rank hosts it, unless torchrun does."""
    is_holder = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            place.address, place.port, place.size, is_holder, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
        return store
    except dist.DistNetworkError as error:
        if is_holder:
            raise WorkerDied(f"rank 0 cannot listen on port {place.port}: {first_line(error)}", _SAME_COMMAND) from None
        where, seconds = f"{place.address}:{place.port}", f"{timeout.total_seconds():.0f} s"
        problem = f"rank {place.rank} did not find rank 0 at {where} within {seconds}: {first_line(error)}"
        remedy = "check why rank 0 did not start, and that its node is reachable; then give the same command again"
        raise WorkerDied(problem, remedy) from None


def lost_peers(error: RuntimeError) -> bool:
    """Whether this rank fails because it lost another one."""
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


RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""The time allowed between the first and the last rank; loading Python and torch from a slow shared disk takes a
minute."""
_POLL_SECONDS = 0.1
_PACKAGES = ("torch", "transformers", "peft", "deepspeed")
_MUCH_LESS = 0.8  # of the most free memory on any card: below it another program uses the card


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    rank: int
    host: str
    pid: int
    device: str
    threads: int
    free_bytes: int
    versions: dict[str, str]
    stage_sha256: str
    prepared: dict[str, str]
    """sha256 of each prepared file as this rank reads it; `missing` if it cannot see one."""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def describe_rank(where: StageDir, stage: Stage, place: RankEnv) -> RankInfo:
    card, installed = place.local_rank, {name: read_version(name) for name in _PACKAGES}
    versions = {name: version for name, version in installed.items() if version is not None}
    device, free = "cpu", psutil.virtual_memory().available
    if stage.device == "cuda":
        device, free = f"cuda:{card} {torch.cuda.get_device_name(card)}", torch.cuda.mem_get_info(card)[0]
    paths = {name: where.prepared(name) for name in stage.prepared}
    return RankInfo(
        rank=place.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        threads=torch.get_num_threads(),
        free_bytes=free,
        versions={"finefit": __version__, "python": platform.python_version(), **versions},
        stage_sha256=sha256_of(where.stage),
        prepared={name: sha256_of(path) if path.exists() else "missing" for name, path in paths.items()},
    )


def rendezvous(info: RankInfo, store: Store, *, size: int, timeout: timedelta = RENDEZVOUS_TIMEOUT) -> list[RankInfo]:
    """Yields all ranks in order, before anything is loaded. Ranks that are missing when the time is up are named."""
    keys, deadline = [f"rendezvous/{rank}" for rank in range(size)], time.monotonic() + timeout.total_seconds()
    try:
        store.set(keys[info.rank], json.dumps(asdict(info)))
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        else:
            return [RankInfo(**json.loads(store.get(key))) for key in keys]
    except dist.DistError as error:
        problem = f"rank {info.rank} lost rank 0, which holds the rendezvous: {first_line(error)}"
        raise WorkerDied(problem, "check why it ended; then give the same command again") from None
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    logs = " and ".join(f"logs/rank-{rank}.log" if rank else "logs/run.log" for rank in missing)
    late = f"did not reach the rendezvous within {timeout.total_seconds():.0f} s"
    problem = f"{who} of {size} {late}: not started, hung, or unable to reach the first rank"
    raise WorkerDied(problem, f"{logs} may say why; then give the same command again")


@contextmanager
def rank_group(
    where: StageDir, stage: Stage, place: RankEnv | None, store: Store | None
) -> Iterator[tuple[Ranks, Sequence[RankInfo]]]:
    """The group of all ranks, once the rendezvous has verified that their setups are the same."""
    if place is None or place.size == 1:
        yield ONE_RANK, ()
        return
    store = store or open_store(place, timeout=RENDEZVOUS_TIMEOUT)
    infos = rendezvous(describe_rank(where, stage, place), store, size=place.size)
    for line in require_same_setup(infos, stage):
        log.warning(line)
    with joined(place, store, device=stage.device) as ranks:
        yield ranks, infos


def require_same_setup(ranks: Sequence[RankInfo], stage: Stage) -> list[str]:
    """Refuses ranks that differ from the others; returns warnings. Whether a stage fits was planned before."""
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
        problem = "the ranks differ:\n" + "\n".join(f"  {line}" for line in found)
        remedy = "all ranks need the same versions, the same run directory and a card that nothing else uses"
        raise RunError(problem, remedy)
    return list(short)


def _differing(ranks: Sequence[RankInfo], what: str, values: Sequence[str]) -> Iterator[str]:
    (usual, _), *_ = Counter(values).most_common(1)  # of an even split the first rank's: it comes first
    for rank, value in zip(ranks, values, strict=True):
        if value != usual:
            yield f"{rank} has {what} {value}, the others {usual}"
