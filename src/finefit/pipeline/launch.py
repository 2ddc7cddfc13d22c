"""A worker is a child process in a session of its own. Signals are passed on; its standard input is a pipe whose end tells it that the launcher is
gone; it inherits the run's lock, so the run stays locked while any of the two lives.

The ranks of a training are such workers side by side: they live and end together. When one fails, the others soon have nobody to compute with; those
that do not see it by themselves, as one that waits inside a card's collective, are ended, and the one that failed first is mourned."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from finefit import errors
from finefit.artifacts.atomic import full_disk_named
from finefit.artifacts.launcher import Place, chosen_variables, on_stop_signals, without_place
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import Stage, StageResult
from finefit.errors import FinefitError, Interrupted, SpecError, WorkerDied

_TICK_SECONDS = 0.2
_TAIL_LINES = 15
_GRACE_SECONDS = 10.0
"""That the other ranks have, after one has failed, to see it and say so."""
_SAME_COMMAND = "give the same command again: it goes on where it was"


def launch(
    module: str, argument: Path, *, log: Path, lock: int, tick: Callable[[], None], deterministic: bool = False
) -> int:
    """Runs `python -m module argument` to its end; its output goes to the log."""
    worker = _start(module, argument, log=log, lock=lock, environment=_environment(deterministic))
    with worker, _signals_passed_on([worker]) as received:
        while worker.poll() is None:
            tick()
            time.sleep(_TICK_SECONDS)
    tick()
    if worker.returncode < 0:
        raise _died("the worker", signal.Signals(-worker.returncode), log)
    if received and worker.returncode == 0:  # it came too late to stop this work, but not to stop what would follow
        raise _too_late(received[0])
    return worker.returncode


def launch_ranks(module: str, where: StageDir, *, devices: int, lock: int, tick: Callable[[], None]) -> int:
    """Runs `python -m module STAGE_DIR` as so many ranks to their common end. The exit code of the first; its failure is in its result, that of
    another rank is raised."""
    stage, run = read_record(where.stage, Stage), RunDir(where.run)
    require_cards(stage.device, devices)
    port = free_port()
    places = [
        Place(rank=at, size=devices, local_rank=at, local_size=devices, address="127.0.0.1", port=port)
        for at in range(devices)
    ]
    for place in places:
        where.result_of(place.rank).unlink(missing_ok=True)
    ranks = Company(where=where, logs=[run.log_of(place.rank) for place in places])
    with ranks:
        for place, log in zip(places, ranks.logs, strict=True):
            environment = _environment(stage.deterministic) | rank_environment(place, stage)
            ranks.workers.append(_start(module, where.path, log=log, lock=lock, environment=environment))
        with _signals_passed_on(ranks.workers) as received:
            while ranks.are_alive():
                tick()
                time.sleep(_TICK_SECONDS)
    tick()
    if (failure := ranks.verdict()) is not None:
        raise failure
    code = ranks.workers[0].returncode
    if received and code == 0:
        raise _too_late(received[0])
    return code


@dataclass(slots=True, kw_only=True)
class Company:
    """Ranks that live and end together; none outlives the `with` block."""

    where: StageDir
    logs: Sequence[Path]
    workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    failed_at: float | None = None
    ended_by_us: set[int] = field(default_factory=set)

    def __enter__(self) -> "Company":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Those that live are told that the launcher is gone, and waited for: they save."""
        for worker in self.workers:
            if worker.stdin is not None:
                worker.stdin.close()
        while self.are_alive():
            time.sleep(_TICK_SECONDS)

    def are_alive(self) -> bool:
        """Whether any is. Those whose companion failed are ended when their time is up."""
        if self.failed_at is None and any(self._has_failed(rank) for rank in range(len(self.workers))):
            self.failed_at = time.monotonic()
        live = [rank for rank, worker in enumerate(self.workers) if worker.poll() is None]
        if live and self.failed_at is not None and time.monotonic() - self.failed_at > _GRACE_SECONDS:
            for rank in live:
                self.ended_by_us.add(rank)
                self.workers[rank].kill()
        return bool(live)

    def _has_failed(self, rank: int) -> bool:
        """A rank that was asked to stop has not: the first may still be writing the checkpoint that they agreed on."""
        code = self.workers[rank].poll()
        if code is None or code == 0:
            return False
        failure = _failure(self.where, rank)
        return failure is None or failure.kind != Interrupted.__name__

    def verdict(self) -> FinefitError | None:
        """Why they ended: one was killed, one knows why it failed, one fell silent, in this order. None: the first rank's result says."""
        return self._killed() or told_by(self.where, len(self.workers)) or self._silent()

    def _killed(self) -> FinefitError | None:
        for rank, worker in enumerate(self.workers):
            if worker.returncode < 0 and rank not in self.ended_by_us:
                return _died(f"rank {rank} of {len(self.workers)}", signal.Signals(-worker.returncode), self.logs[rank])
        return None

    def _silent(self) -> FinefitError | None:
        for rank, worker in enumerate(self.workers):
            if worker.returncode == 0 or rank in self.ended_by_us or _failure(self.where, rank) is not None:
                continue
            if worker.returncode == Interrupted.exit_code:
                continue  # stopped at once, by a second SIGINT
            return FinefitError(
                f"rank {rank} of {len(self.workers)} ended with code {worker.returncode}, which is a fault of finefit. {last_words(self.logs[rank])}",
                "please report it with these lines",
            )
        for rank in sorted(self.ended_by_us):
            problem = (
                f"rank {rank} of {len(self.workers)} did not end within {_GRACE_SECONDS:.0f} s after another had failed"
            )
            return WorkerDied(f"{problem}. {last_words(self.logs[rank])}", _SAME_COMMAND)
        return None


def told_by(where: StageDir, size: int) -> FinefitError | None:
    """The failure of another rank than the first, whose own is in its result. One that only lost the others has nothing to tell."""
    told = {
        rank: failure
        for rank in range(size)
        if (failure := _failure(where, rank)) is not None and failure.kind != WorkerDied.__name__
    }
    if 0 in told or not told:
        return None
    rank, failure = next(iter(told.items()))
    return raised_again(failure, who=f"rank {rank} of {size}: ")


def _failure(where: StageDir, rank: int) -> Failure | None:
    path = where.result_of(rank)
    return read_record(path, StageResult).failure if path.exists() else None


def require_cards(device: str, devices: int) -> None:
    """Fewer cards than ranks is told before anything starts."""
    if device != "cuda":
        return
    import torch  # only here, since the launcher of one process needs none of it

    if (there := torch.cuda.device_count()) < devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise SpecError(
            f"engine.devices is {devices}, and torch sees {there} {'card' if there == 1 else 'cards'} here"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
            f"set engine.devices to {there} or fewer" if there else "`finefit doctor` says why it sees none",
        )


def free_port() -> int:
    """Of this machine, now; between this and the first rank's taking it there is a second at most, and the system gives ports in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(place: Place, stage: Stage) -> dict[str, str]:
    return place.variables() | {"OMP_NUM_THREADS": str(place.share(stage.threads))}


def _start(
    module: str, argument: Path, *, log: Path, lock: int, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    with full_disk_named(log), log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(argument)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            env=environment,
        )


def _environment(deterministic: bool) -> dict[str, str]:
    """What must stand before torch starts. A user's own setting is kept."""
    return chosen_variables(os.environ, deterministic=deterministic) | without_place(os.environ)


@contextmanager
def _signals_passed_on(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[signal.Signals]]:
    """Yields the list of those that came."""
    received: list[signal.Signals] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for worker in workers:
            worker.send_signal(number)

    before = on_stop_signals(pass_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _too_late(number: signal.Signals) -> Interrupted:
    return Interrupted(f"stopped by {number.name}; what was in hand is done", "give the same command again")


def _died(who: str, number: signal.Signals, log: Path) -> WorkerDied:
    likely = "; out of host memory is the usual reason when nobody sent it" if number == signal.SIGKILL else ""
    return WorkerDied(f"{who} was ended by {number.name}{likely}. {last_words(log)}", _SAME_COMMAND)


def raised_again(failure: Failure, *, who: str = "") -> FinefitError:
    """What a worker reported, as the type that it was there."""
    kind: type[FinefitError] = getattr(errors, failure.kind, FinefitError)
    return kind(f"{who}{failure.problem}", failure.remedy)


def last_words(log: Path) -> str:
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    return f"The end of {log.name}:\n{tail}"
