"""A run whose ranks were started by another program: torchrun, accelerate launch, a SLURM job. The first rank finds or
creates the run directory and announces it in the store that all ranks share; the others wait for it, however long it
takes; then each of them becomes a worker."""

import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from finefit.artifacts.processes import RankEnv, chosen_variables
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, RunError, SpecError, WorkerDied
from finefit.model.load import quiet
from finefit.run.launch import failure_of_other_rank
from finefit.spec.schema import AutoEngine, Ddp, DeepSpeed, Engine, Fsdp2, Single
from finefit.train.ranks import RENDEZVOUS_TIMEOUT, first_line, lost_peers
from finefit.train.worker import work

_RUN, _PULSE, _LEFT = "run", "pulse", "left"
_LEAVING_SECONDS = 2.0
"""For a Python process to end."""
_PULSE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_TICK_SECONDS = 0.5
_VISIBLE = timedelta(seconds=60)
"""For a shared file system to show on one node what another has written."""


def engine_overrides(engine: Engine, place: RankEnv) -> tuple[str, ...]:
    """For the number of ranks that were started. A spec that names another number is refused."""
    match engine:
        case Single() if place.size > 1:
            return ("engine.kind=ddp", f"engine.devices={place.local_size}")
        case AutoEngine(devices=None) if place.size > 1:
            return ("engine.kind=auto", f"engine.devices={place.local_size}")
        case Single() | AutoEngine(devices=None):
            return ()
        case AutoEngine() | Ddp() | Fsdp2() | DeepSpeed():
            require_size(engine, place)
            return ()


def require_size(engine: Engine, place: RankEnv) -> None:
    devices = 1 if isinstance(engine, Single) else engine.devices
    if devices is None or devices == place.local_size:
        return
    started = "1 rank was started" if place.local_size == 1 else f"{place.local_size} ranks were started"
    nodes = f" on each of {place.num_nodes} nodes" if place.num_nodes > 1 else ""
    raise SpecError(
        f"engine.devices is {devices}, but {started}{nodes} (WORLD_SIZE={place.size})",
        f"start {devices} on each node, or set engine.devices to {place.local_size}",
    )


def require_ranks(stage: Stage, place: RankEnv) -> None:
    """As many as the run was planned for, on all nodes together."""
    if stage.num_ranks is None or stage.num_ranks == place.size:
        return
    nodes = stage.num_ranks // place.local_size
    raise RunError(
        f"this run was planned for {stage.num_ranks} ranks, and {place.size} were started (WORLD_SIZE={place.size})",
        f"start {place.local_size} on each of {nodes} {'node' if nodes == 1 else 'nodes'}, or start another run with "
        "--new",
    )


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """The first rank's side of the rendezvous. While it prepares the run, its pulse tells the others to go on waiting;
    a `with` block that ends before the run is announced tells them why."""

    store: Store
    _sent: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Rendezvous":
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        return self

    def announce(self, run: RunDir) -> None:
        self._set({"run": str(run.path.resolve())})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sent:
            if error is not None and not isinstance(error, FinefitError):
                error = FinefitError(f"{type(error).__name__}: {error}")
            self._set({} if error is None else {"failure": asdict(Failure.of(error))})
        self._done.set()

    def _set(self, words: dict[str, Any]) -> None:
        self._sent = True
        self._done.set()
        self.store.set(_RUN, json.dumps(words))

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(_PULSE_SECONDS):
            count += 1
            try:
                self.store.set(_PULSE, str(count))
            except RuntimeError as error:  # the store is gone with torchrun, which is about to end this process too
                if not lost_peers(error):
                    raise
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRankMessage:
    """Where to work, or why not. Neither where there is nothing to do."""

    run: RunDir | None
    failure: Failure | None


def await_run(store: Store, place: RankEnv, *, timeout: timedelta = RENDEZVOUS_TIMEOUT) -> FirstRankMessage:
    """`timeout`: since the first rank's last pulse."""
    try:
        message = _receive(store, place, timeout.total_seconds())
    except RuntimeError as error:
        if not lost_peers(error):
            raise
        raise WorkerDied(
            f"rank {place.rank} lost rank 0 while it prepared the run: {first_line(error)}", "see why it ended"
        ) from None
    run, failure = message.get("run"), message.get("failure")
    if run is not None:
        _wait_until_visible(Path(run), place)
    return FirstRankMessage(
        run=None if run is None else RunDir(Path(run)), failure=None if failure is None else Failure(**failure)
    )


def _receive(store: Store, place: RankEnv, seconds: float) -> dict[str, Any]:
    pulse, heard_at = b"", time.monotonic()
    while not store.check([_RUN]):
        if store.check([_PULSE]) and (now := store.get(_PULSE)) != pulse:
            pulse, heard_at = now, time.monotonic()
        if time.monotonic() - heard_at > seconds:
            silence = f"for {seconds:.0f} s nothing was heard of rank 0, which prepares the run"
            raise WorkerDied(
                f"rank {place.rank} on {socket.gethostname()}: {silence}",
                "see why rank 0 did not start or hangs; then give the same command again",
            )
        time.sleep(_POLL_SECONDS)
    found: dict[str, Any] = json.loads(store.get(_RUN))
    return found


def _wait_until_visible(run: Path, place: RankEnv) -> None:
    deadline = time.monotonic() + _VISIBLE.total_seconds()
    while not is_run(run):
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {place.rank} on {socket.gethostname()} does not see {run}, which rank 0 works in",
                "all nodes need the same file system at the same path: name a folder on it with --runs",
            )
        time.sleep(_POLL_SECONDS)


def leave(store: Store) -> None:
    """The first rank has recorded what it had to."""
    store.set(_LEFT, "1")


def leave_after_first(store: Store) -> None:
    """For a rank that failed or was stopped: the program that started the ranks kills all of them when one ends so, and
    the first has still to record why."""
    deadline = time.monotonic() + _VISIBLE.total_seconds()
    try:
        while not store.check([_LEFT]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:  # the first rank held the store, and has left
        if not lost_peers(error):
            raise
    time.sleep(_LEAVING_SECONDS)


def work_here(run: RunDir, place: RankEnv, store: Store) -> int:
    """This process becomes a worker. Returns the exit code."""
    form, log = "%(asctime)s %(levelname)s %(message)s", run.log_of(place.rank)
    logging.basicConfig(level=logging.INFO, format=form, filename=log, force=True)
    quiet()
    where = stage_of(run)
    stage = read_record(where.stage, Stage)
    for name, value in chosen_variables(os.environ, deterministic=stage.deterministic).items():
        os.environ.setdefault(name, value)  # read at the first matrix product; the others are set
    return work(where, place, store, is_child_of_ours=False)


Tick = Callable[[], None]


def train_as_first_rank(
    place: RankEnv, store: Store, rendezvous: Rendezvous
) -> Callable[[StageDir, Stage, int, Tick], int]:
    """Trains in this process, the first rank, once the run is announced to the others."""

    def train(where: StageDir, stage: Stage, _: int, tick: Tick) -> int:
        require_size(stage.engine, place)
        require_ranks(stage, place)
        rendezvous.announce(RunDir(where.run))
        with _ticking(tick):
            code = work_here(RunDir(where.run), place, store)
        gc.collect()  # evaluations follow in processes of their own, on the same card
        if stage.device == "cuda":
            torch.cuda.empty_cache()
        if code and (cause := failure_of_other_rank(where, place.size)) is not None:
            raise cause
        return code

    return train


@contextmanager
def _ticking(tick: Tick) -> Iterator[None]:
    """While this process trains, a thread shows the progress."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_TICK_SECONDS):
            tick()

    thread = threading.Thread(target=beat, name="ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        tick()
