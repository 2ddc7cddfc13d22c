"""A run whose ranks were started by another program: torchrun, accelerate launch, or a SLURM job. The first rank finds
or creates the run directory and announces it in the store that all ranks share; the others wait for it, however long it
takes; then every rank becomes a worker."""

import gc
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from finefit.artifacts.processes import RankEnv, chosen_variables
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_run, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, RunError, SpecError, WorkerDied, first_line
from finefit.model.load import quiet
from finefit.plan.target import devices_of
from finefit.run.evaluation import Tick
from finefit.run.launch import failure_of_other_rank
from finefit.run.run_stages import Train
from finefit.spec.schema import Engine, Single
from finefit.train.ranks import RENDEZVOUS_TIMEOUT, lost_peers
from finefit.train.worker import work

_RUN, _PULSE, _LEFT = "run", "pulse", "left"
_LEAVING_SECONDS = 2.0
"""Time for a Python process to end."""
_PULSE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_TICK_SECONDS = 0.5
_VISIBLE = timedelta(seconds=60)
"""Time for a shared file system to show on one node what another has written."""


def engine_overrides(engine: Engine, place: RankEnv) -> tuple[str, ...]:
    """Returns overrides for the number of ranks that were started. A spec with another number is refused."""
    if isinstance(engine, Single) or devices_of(engine) is None:
        kind = "ddp" if isinstance(engine, Single) else engine.kind
        return (f"engine.kind={kind}", f"engine.devices={place.local_size}") if place.size > 1 else ()
    require_size(engine, place)
    return ()


def require_size(engine: Engine, place: RankEnv) -> None:
    devices = devices_of(engine)
    if devices is None or devices == place.local_size:
        return
    started = "1 rank was started" if place.local_size == 1 else f"{place.local_size} ranks were started"
    nodes = f" on each of {place.num_nodes} nodes" if place.num_nodes > 1 else ""
    problem = f"engine.devices is {devices}, but {started}{nodes} (WORLD_SIZE={place.size})"
    raise SpecError(problem, f"start {devices} on each node, or set engine.devices to {place.local_size}")


def require_ranks(stage: Stage, place: RankEnv) -> None:
    """Requires as many ranks, over all nodes, as the run was planned for."""
    if stage.num_ranks is None or stage.num_ranks == place.size:
        return
    nodes, started = stage.num_ranks // place.local_size, f"{place.size} were started (WORLD_SIZE={place.size})"
    start = f"start {place.local_size} on each of {nodes} {'node' if nodes == 1 else 'nodes'}"
    problem = f"this run was planned for {stage.num_ranks} ranks, but {started}"
    raise RunError(problem, f"{start}, or start another run with --new")


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """The first rank's side of the rendezvous. While it prepares the run, its pulse keeps the others waiting; a `with`
    block that ends before the run is announced sends them the reason."""

    store: Store
    _sent: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Rendezvous":
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        return self

    def announce(self, run: RunDir) -> None:
        self._send({"run": str(run.path.resolve())})

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self._sent.is_set():
            if error is not None and not isinstance(error, FinefitError):
                error = FinefitError(f"{type(error).__name__}: {error}")
            self._send({} if error is None else {"failure": asdict(Failure.of(error))})

    def _send(self, words: dict[str, Any]) -> None:
        self._sent.set()
        self.store.set(_RUN, json.dumps(words))

    def _beat(self) -> None:
        count = 0
        while not self._sent.wait(_PULSE_SECONDS):
            count += 1
            try:
                self.store.set(_PULSE, str(count))
            except RuntimeError as error:  # the store is gone with torchrun, which is about to end this process too
                if not lost_peers(error):
                    raise
                return


def await_run(store: Store, place: RankEnv, *, timeout: timedelta = RENDEZVOUS_TIMEOUT) -> RunDir | Failure | None:
    """Returns the run, the reason why there is none, or None if there is nothing to do. `timeout`: counted from the
    first rank's last pulse."""
    here, pulse, heard_at = f"rank {place.rank} on {socket.gethostname()}", b"", time.monotonic()
    try:
        while not store.check([_RUN]):
            if store.check([_PULSE]) and (now := store.get(_PULSE)) != pulse:
                pulse, heard_at = now, time.monotonic()
            if time.monotonic() - heard_at > timeout.total_seconds():
                silence = f"rank 0, which prepares the run, was silent for {timeout.total_seconds():.0f} s"
                remedy = "find out why rank 0 did not start or hangs; then give the same command again"
                raise WorkerDied(f"{here}: {silence}", remedy)
            time.sleep(_POLL_SECONDS)
        message: dict[str, Any] = json.loads(store.get(_RUN))
    except RuntimeError as error:
        if not lost_peers(error):
            raise
        problem = f"rank {place.rank} lost rank 0 while it prepared the run: {first_line(error)}"
        raise WorkerDied(problem, "find out why it ended") from None
    if "run" not in message:
        return Failure(**message["failure"]) if "failure" in message else None
    run, deadline = RunDir(Path(message["run"])), time.monotonic() + _VISIBLE.total_seconds()
    while not is_run(run.path):
        if time.monotonic() > deadline:
            remedy = "all nodes need the same file system at the same path: name a folder on it with --runs"
            raise RunError(f"{here} does not see {run.path}, in which rank 0 works", remedy)
        time.sleep(_POLL_SECONDS)
    return run


def leave(store: Store) -> None:
    """Tells the other ranks that the first rank has finished recording."""
    store.set(_LEFT, "1")


def leave_after_first(store: Store) -> None:
    """Delays a rank that failed or was stopped: the program that started the ranks kills all of them when one ends this
    way, and the first rank must still record the reason."""
    deadline = time.monotonic() + _VISIBLE.total_seconds()
    try:
        while not store.check([_LEFT]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:  # the first rank hosted the store, and has left
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
        os.environ.setdefault(name, value)  # read at the first matrix product; the others are set already
    return work(where, place, store, is_child_of_ours=False)


def train_as_first_rank(place: RankEnv, store: Store, rendezvous: Rendezvous) -> Train:
    """Trains in this process, the first rank, after the run is announced to the others."""

    def train(where: StageDir, stage: Stage, _: int, tick: Tick) -> int:
        require_size(stage.engine, place)
        require_ranks(stage, place)
        rendezvous.announce(RunDir(where.run))
        done = threading.Event()

        def show_progress() -> None:
            while not done.wait(_TICK_SECONDS):
                tick()

        thread = threading.Thread(target=show_progress, name="ticks", daemon=True)
        thread.start()
        try:
            code = work_here(RunDir(where.run), place, store)
        finally:
            done.set()
            thread.join()
            tick()
        gc.collect()  # evaluations follow in separate processes on the same GPU
        if stage.device == "cuda":
            torch.cuda.empty_cache()
        if code and (cause := failure_of_other_rank(where, place.size)) is not None:
            raise cause
        return code

    return train
