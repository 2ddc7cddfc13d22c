"""The processes of one training, as one of them sees the others. Everything that one rank decides and all must follow goes through here."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from finefit.artifacts.launcher import Place
from finefit.errors import FinefitError, WorkerDied

_PATIENCE = timedelta(minutes=30)
"""For a rank that is at work: the first one may be writing a large checkpoint."""
_LOST = ("/gloo/", "monitoredBarrier")
"""gloo has no error type of its own; its messages name their source file, or the barrier."""
_SAME_COMMAND = "give the same command again: it goes on from the last checkpoint"


class Ranks(Protocol):
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """The one that writes: metrics, checkpoints, the result."""
        ...

    def any(self, claim: bool) -> bool:
        """Whether it is true of any rank; every rank gets the same answer, so every rank has to ask."""
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
    """Over a group of its own on the host (gloo), also where the tensors of a step travel between cards: what is agreed on never waits for a card."""

    def __init__(self, group: dist.ProcessGroup, *, patience: timedelta = _PATIENCE) -> None:
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
            dist.monitored_barrier(
                self._group, timeout=self._patience, wait_all_ranks=True
            )  # names those who do not come


@contextmanager
def joined(place: Place, store: Store, *, device: str, patience: timedelta = _PATIENCE) -> Iterator[ManyRanks]:
    """torch's process group, for as long as the block lasts: NCCL between cards, gloo between processes on a CPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    card = torch.device("cuda", place.local_rank) if device == "cuda" else None
    with peers_named(place.rank, "joining the process group"):
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=patience,
            device_id=card,
        )
        group = dist.new_group(backend="gloo", timeout=patience)
    assert group is not None  # every rank is in it
    yield ManyRanks(group, patience=patience)
    dist.destroy_process_group()  # not after a failure: it would wait for ranks that are gone


def open_store(place: Place, *, patience: timedelta) -> Store:
    """Where ranks leave word for each other. The first one holds it, unless torchrun does."""
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
        raise WorkerDied(
            f"rank {place.rank} did not find rank 0 at {place.address}:{place.port} within {patience.total_seconds():.0f} s: {first_line(error)}",
            "see why rank 0 did not start, and that its node can be reached from the others; then give the same command again",
        ) from None


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def lost_peers(error: RuntimeError) -> bool:
    """Whether another rank is why this one cannot go on."""
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
