"""A run whose ranks were started by another program: torchrun, accelerate launch, a SLURM job. The first rank opens or makes the run directory and
leaves word in the store where the ranks find each other; the others wait for it, however long it takes; then all of them are workers in place."""

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

from finefit.artifacts.launcher import Place, chosen_variables
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run
from finefit.artifacts.trainings import Stage
from finefit.errors import FinefitError, RunError, SpecError, WorkerDied
from finefit.model.load import quiet
from finefit.pipeline.create import stage_of
from finefit.pipeline.launch import told_by
from finefit.spec.schema import AutoEngine, DeepSpeed, Engine, FullyShard, Parallel, Single
from finefit.train.meeting import PATIENCE
from finefit.train.ranks import first_line, lost_peers
from finefit.train.worker import work

_INVITATION, _PULSE, _LEFT = "invitation", "pulse", "left"
_LEAVING_SECONDS = 2.0
"""That a Python process takes to end."""
_PULSE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_TICK_SECONDS = 0.5
_SIGHT = timedelta(seconds=60)
"""For a shared file system to show on one node what another has written."""


def engine_overrides(engine: Engine, place: Place) -> tuple[str, ...]:
    """What the ranks that are there make of the spec's engine. A spec that names another number is refused, not bent."""
    match engine:
        case Single() if place.size > 1:
            return ("engine.kind=ddp", f"engine.devices={place.local_size}")
        case AutoEngine(devices=None) if place.size > 1:
            return ("engine.kind=auto", f"engine.devices={place.local_size}")
        case Single() | AutoEngine(devices=None):
            return ()
        case AutoEngine() | Parallel() | FullyShard() | DeepSpeed():
            require_size(engine, place)
            return ()


def require_size(engine: Engine, place: Place) -> None:
    devices = 1 if isinstance(engine, Single) else engine.devices
    if devices is None or devices == place.local_size:
        return
    started = "1 rank was started" if place.local_size == 1 else f"{place.local_size} ranks were started"
    nodes = f" on each of {place.num_nodes} nodes" if place.num_nodes > 1 else ""
    raise SpecError(
        f"engine.devices is {devices}, but {started}{nodes} (WORLD_SIZE={place.size})",
        f"start {devices} on each node, or set engine.devices to {place.local_size}",
    )


def require_ranks(stage: Stage, place: Place) -> None:
    """As many as the run was planned for, on all nodes together; runs of earlier versions do not say."""
    if stage.num_ranks is None or stage.num_ranks == place.size:
        return
    nodes = stage.num_ranks // place.local_size
    raise RunError(
        f"this run was planned for {stage.num_ranks} ranks, and {place.size} were started (WORLD_SIZE={place.size})",
        f"start {place.local_size} on each of {nodes} {'node' if nodes == 1 else 'nodes'}, or start another run with --new",
    )


@dataclass(slots=True, kw_only=True)
class Invitation:
    """Of the first rank to the others. While it prepares, its pulse tells them to go on waiting; a `with` block that ends without an invitation tells
    them why there is none."""

    store: Store
    _sent: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Invitation":
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        return self

    def send(self, run: RunDir) -> None:
        self._set({"run": str(run.path.resolve())})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sent:
            named = (
                error
                if isinstance(error, FinefitError) or error is None
                else FinefitError(f"{type(error).__name__}: {error}")
            )
            self._set({"failure": asdict(Failure.of(named))} if named else {})
        self._done.set()

    def _set(self, words: dict[str, Any]) -> None:
        self._sent = True
        self._done.set()
        self.store.set(_INVITATION, json.dumps(words))

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(_PULSE_SECONDS):
            count += 1
            try:
                self.store.set(_PULSE, str(count))
            except RuntimeError as error:  # the store is gone with torchrun; this process is about to be told so
                if not lost_peers(error):
                    raise
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the first rank said: where to work, or why not. Neither where there is nothing to do."""

    run: RunDir | None
    failure: Failure | None


def await_invitation(store: Store, place: Place, *, patience: timedelta = PATIENCE) -> Word:
    """`patience`: since the first rank was last heard of."""
    try:
        words = _heard(store, place, patience)
    except RuntimeError as error:
        if not lost_peers(error):
            raise
        raise WorkerDied(
            f"rank {place.rank} lost rank 0 while it prepared the run: {first_line(error)}", "see why it ended"
        ) from None
    run, failure = words.get("run"), words.get("failure")
    return Word(
        run=None if run is None else _seen(RunDir(Path(run)), place),
        failure=None if failure is None else Failure(**failure),
    )


def _heard(store: Store, place: Place, patience: timedelta) -> dict[str, Any]:
    pulse, heard_at = b"", time.monotonic()
    while not store.check([_INVITATION]):
        if store.check([_PULSE]) and (now := store.get(_PULSE)) != pulse:
            pulse, heard_at = now, time.monotonic()
        if time.monotonic() - heard_at > patience.total_seconds():
            silence = f"for {patience.total_seconds():.0f} s nothing was heard of rank 0, which prepares the run"
            raise WorkerDied(
                f"rank {place.rank} on {socket.gethostname()}: {silence}",
                "see why rank 0 did not start or hangs; then give the same command again",
            )
        time.sleep(_POLL_SECONDS)
    found: dict[str, Any] = json.loads(store.get(_INVITATION))
    return found


def _seen(run: RunDir, place: Place, *, patience: timedelta = _SIGHT) -> RunDir:
    deadline = time.monotonic() + patience.total_seconds()
    while not is_run(run.path):
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {place.rank} on {socket.gethostname()} does not see {run.path}, which rank 0 works in",
                "all nodes need the same file system at the same path: name a folder on it with --runs",
            )
        time.sleep(_POLL_SECONDS)
    return run


def leave(store: Store) -> None:
    """Of the first rank, when what it has to record is recorded."""
    store.set(_LEFT, "1")


def leave_after_first(store: Store, *, patience: timedelta = _SIGHT) -> None:
    """For a rank that failed or was stopped: what started the ranks ends all of them when one has failed, and the first has still to
    record why."""
    deadline = time.monotonic() + patience.total_seconds()
    try:
        while not store.check([_LEFT]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:  # the first rank held the store, and has left
        if not lost_peers(error):
            raise
    time.sleep(_LEAVING_SECONDS)


def work_here(run: RunDir, place: Place, store: Store) -> int:
    """This process becomes a worker; the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", filename=run.log_of(place.rank), force=True
    )
    quiet()
    where = stage_of(run)
    stage = read_record(where.stage, Stage)
    for name, value in chosen_variables(os.environ, deterministic=stage.deterministic).items():
        os.environ.setdefault(name, value)  # what is read when the first product is taken; the rest stands already
    return work(where, place, store, is_child_of_ours=False)


Tick = Callable[[], None]


def first_of_all(place: Place, store: Store, invitation: Invitation) -> Callable[[StageDir, Stage, int, Tick], int]:
    """Trains in this process, the first rank, once the others are invited."""

    def train(where: StageDir, stage: Stage, _: int, tick: Tick) -> int:
        require_size(stage.engine, place)
        require_ranks(stage, place)
        invitation.send(RunDir(where.run))
        with _ticking(tick):
            code = work_here(RunDir(where.run), place, store)
        _give_back(stage.device)
        if code and (cause := told_by(where, place.size)) is not None:
            raise cause
        return code

    return train


def _give_back(device: str) -> None:
    """What the model held: evaluations follow in processes of their own, on the same card."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _ticking(tick: Tick) -> Iterator[None]:
    """While this process trains, a thread shows how far it is."""
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
