"""Launches workers: child processes in sessions of their own. Signals are passed on; the end of its standard input
tells a worker that the launcher is gone; it inherits the run's lock, so the run stays locked while either of the two
lives.

The ranks of a training are such workers side by side, which start and end together. When one fails, the ranks that do
not notice it themselves, such as one that waits inside a collective, are killed, and the first failure is reported."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil
import torch

from finefit import bounded, errors
from finefit.artifacts.atomic import report_disk_full
from finefit.artifacts.processes import RankEnv, chosen_variables, on_stop_signals, without_rank_env
from finefit.artifacts.reading import open_to_append
from finefit.artifacts.records import Failure, StageMemory, read_if_there, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import Stage, StageResult
from finefit.errors import FinefitError, Interrupted, SpecError, WorkerDied
from finefit.facts.machine import read_power
from finefit.facts.nvml import read_card_processes, used_bytes
from finefit.plan.client import visible_cards

_TICK_SECONDS = 0.2
_TAIL_LINES = 15
_TAIL_BYTES = 64 << 10
_GRACE_SECONDS = 10.0
"""Time for the other ranks to notice a failure and report it."""
_SAME_COMMAND = "give the same command again: it resumes where it stopped"


def launch(
    module: str, argument: Path, *, log: Path, lock: int, tick: Callable[[], None], deterministic: bool = False
) -> int:
    """Runs `python -m module argument` to its end and returns its exit code; its output goes to the log."""
    worker = _start(module, argument, log=log, lock=lock, environment=_environment(deterministic))
    with worker, _signals_passed_on([worker]) as received:
        while worker.poll() is None:
            tick()
            time.sleep(_TICK_SECONDS)
    tick()
    if worker.returncode < 0:
        raise _killed("the worker", signal.Signals(-worker.returncode), log)
    _raise_late(received, worker.returncode)
    return worker.returncode


def launch_ranks(module: str, where: StageDir, *, devices: int, lock: int, tick: Callable[[], None]) -> int:
    """Runs `python -m module STAGE_DIR` as `devices` ranks until all have ended. Returns the exit code of the first
    rank, whose failure is in its result; a failure of another rank is raised."""
    stage, run, port = read_record(where.stage, Stage), RunDir(where.run), free_port()
    require_cards(stage.device, devices)
    ranks = RankGroup(where=where, logs=[run.log_of(at) for at in range(devices)])
    try:
        for at, log in enumerate(ranks.logs):
            where.result_of(at).unlink(missing_ok=True)
            rank = RankEnv(rank=at, size=devices, local_rank=at, local_size=devices, address="127.0.0.1", port=port)
            threads = {"OMP_NUM_THREADS": str(rank.share(stage.threads))}
            environment = _environment(stage.deterministic) | rank.variables() | threads
            ranks.workers.append(_start(module, where.path, log=log, lock=lock, environment=environment))
        with _signals_passed_on(ranks.workers) as received:
            while ranks.are_alive():
                tick()
                time.sleep(_TICK_SECONDS)
    finally:  # no rank outlives this call
        ranks.end()
    tick()
    if (failure := ranks.failure()) is not None:
        raise failure
    code = ranks.workers[0].returncode
    _raise_late(received, code)
    return code


@dataclass(slots=True, kw_only=True)
class RankGroup:
    where: StageDir
    logs: Sequence[Path]
    workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    failed_at: float | None = None
    ended_by_us: set[int] = field(default_factory=set)

    def end(self) -> None:
        """Closes the pipes of the live workers, so that they save, and waits for them."""
        for worker in self.workers:
            if worker.stdin is not None:
                worker.stdin.close()
        while self.are_alive():
            time.sleep(_TICK_SECONDS)

    def are_alive(self) -> bool:
        """Returns whether any rank is alive. After one has failed, the others are killed when the grace period ends."""
        for rank, worker in enumerate(self.workers):
            if self.failed_at is None and worker.poll():
                failure = _failure(self.where, rank)
                # a rank that was asked to stop has not failed: the first rank may still be writing the checkpoint
                if failure is None or failure.kind != Interrupted.__name__:
                    self.failed_at = time.monotonic()
        live = [rank for rank, worker in enumerate(self.workers) if worker.poll() is None]
        if live and self.failed_at is not None and time.monotonic() - self.failed_at > _GRACE_SECONDS:
            for rank in live:
                self.ended_by_us.add(rank)
                self.workers[rank].kill()
        return bool(live)

    def failure(self) -> FinefitError | None:
        """Returns the failure of a rank that was killed, else of one that reported a reason, else of one that ended
        without a report. None: the first rank's result says how it ended."""
        size = len(self.workers)
        for rank, worker in enumerate(self.workers):
            if worker.returncode < 0 and rank not in self.ended_by_us:
                return _killed(f"rank {rank} of {size}", signal.Signals(-worker.returncode), self.logs[rank])
        if (reported := failure_of_other_rank(self.where, size)) is not None:
            return reported
        for rank, worker in enumerate(self.workers):
            # an immediate stop by a second SIGINT is not a failure
            has_ended_well = worker.returncode in (0, Interrupted.exit_code)
            if not has_ended_well and rank not in self.ended_by_us and _failure(self.where, rank) is None:
                problem = f"rank {rank} of {size} ended with code {worker.returncode}, which is a fault of finefit"
                return FinefitError(f"{problem}. {log_tail(self.logs[rank])}", "please report it with these lines")
        if not self.ended_by_us:
            return None
        rank = min(self.ended_by_us)
        problem = f"rank {rank} of {size} did not end within {_GRACE_SECONDS:.0f} s after another had failed"
        return WorkerDied(f"{problem}. {log_tail(self.logs[rank])}", _SAME_COMMAND)


def failure_of_other_rank(where: StageDir, size: int) -> FinefitError | None:
    """Returns the failure of a rank other than the first, whose own is in its result. A rank that only lost its peers
    does not know the reason."""
    found = {rank: failure for rank in range(size) if (failure := _failure(where, rank)) is not None}
    reasons = {rank: failure for rank, failure in found.items() if failure.kind != WorkerDied.__name__}
    if 0 in reasons or not reasons:
        return None
    rank, failure = next(iter(reasons.items()))
    return reraise(failure, who=f"rank {rank} of {size}: ")


def _failure(where: StageDir, rank: int) -> Failure | None:
    path = where.result_of(rank)
    found = read_if_there(path, StageResult)
    return None if found is None else found.failure


def require_cards(device: str, devices: int) -> None:
    """Reports fewer GPUs than ranks before anything starts."""
    if device == "cuda" and (there := torch.cuda.device_count()) < devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"{there} {'card' if there == 1 else 'cards'} here"
        limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        remedy = f"set engine.devices to {there} or fewer" if there else "`finefit doctor` explains why it sees none"
        raise SpecError(f"engine.devices is {devices}, but torch sees {seen}{limit}", remedy)


def free_port() -> int:
    """Returns a free port of this machine. The first rank binds it within a second, and the system does not reuse ports
    at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    module: str, argument: Path, *, log: Path, lock: int, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    with report_disk_full(log), open_to_append(log) as output:
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
    """Returns the variables that must be set before torch starts. A user's own setting is kept."""
    return chosen_variables(os.environ, deterministic=deterministic) | without_rank_env(os.environ)


@contextmanager
def stop_signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = on_stop_signals(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def _signals_passed_on(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[signal.Signals]]:
    received: list[signal.Signals] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for worker in workers:
            worker.send_signal(number)

    with stop_signals_to(pass_on):
        yield received


def _raise_late(received: Sequence[signal.Signals], code: int) -> None:
    """A signal that came too late to stop this worker still stops what would follow."""
    if received and code == 0:
        raise Interrupted(f"stopped by {received[0].name}; the current step is done", "give the same command again")


def _killed(who: str, number: signal.Signals, log: Path) -> WorkerDied:
    likely = "; usually for lack of host memory, unless someone sent the signal" if number == signal.SIGKILL else ""
    return WorkerDied(f"{who} was ended by {number.name}{likely}. {log_tail(log)}", _SAME_COMMAND)


def reraise(failure: Failure, *, who: str = "") -> FinefitError:
    """Returns the failure that a worker reported, as the error type that it had there."""
    kind: type[FinefitError] = getattr(errors, failure.kind, FinefitError)
    return kind(f"{who}{failure.problem}", failure.remedy)


def log_tail(log: Path) -> str:
    try:
        text = bounded.tail_of(log, _TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
    return f"The end of {log.name}:\n{tail}"


@contextmanager
def inhibit_sleep(warn: Callable[[str], None]) -> Iterator[None]:
    """Keeps a laptop awake during a run if the system allows it, and otherwise warns."""
    power, command = read_power(), _command()
    if power.on_battery:
        warn(f"running on battery ({power.percent:.0f} %): plug in, or the run ends with it (it can be resumed)")
    inhibitor, pipe, nowhere = None, subprocess.PIPE, subprocess.DEVNULL
    if command is not None:
        inhibitor = subprocess.Popen(command, stdin=pipe, stdout=nowhere, stderr=nowhere)
        with suppress(subprocess.TimeoutExpired):  # the command is refused at once, or holds until it is ended
            inhibitor.wait(timeout=0.3)
    if (inhibitor is None or inhibitor.returncode is not None) and power.has_battery:
        warn("this system offers no way to prevent sleep: keep the lid open and the machine awake")
    try:
        yield
    finally:
        if inhibitor is not None:
            inhibitor.terminate()
            inhibitor.communicate()  # also closes its pipe


def _command() -> list[str] | None:
    """Both commands end with their standard input or with this process, so that a killed launcher leaves nothing
    behind."""
    if sys.platform == "darwin" and (caffeinate := shutil.which("caffeinate")):
        return [caffeinate, "-i", "cat"]
    if inhibit := shutil.which("systemd-inhibit"):
        return [inhibit, "--what=sleep:idle", "--who=finefit", "--why=a training run", "--mode=block", "cat"]
    return None


_SLACK_BYTES = 64 << 20
"""Memory that a display or a driver allocates and frees by itself."""
_PATIENCE_SECONDS = 30.0


@dataclass(slots=True)
class MemoryMeter:
    """Measures a stage's memory from outside: on a GPU all memory in use there, on a CPU the resident memory of the
    stage's processes. Call `tick()` while the stage works, then `settled` once."""

    device: Literal["cpu", "cuda"]
    say: Callable[[str], None]
    before: int = field(init=False)
    peak: int = field(init=False)
    others: frozenset[int] = field(init=False)
    """Earlier child processes, which do not belong to the stage."""

    def __post_init__(self) -> None:
        self.others = frozenset(child.pid for child in psutil.Process().children(recursive=True))
        self.before = self.peak = self.now()

    def now(self) -> int:
        if self.device == "cuda":
            return used_bytes(visible_cards()) or 0
        total = 0
        for child in self._children():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # the process has ended since it was listed
                total += int(child.memory_info().rss)
        return total

    def _children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in self.others]

    def tick(self) -> None:
        self.peak = max(self.peak, self.now())

    def settled(self, *, loaded: int | None = None, peak: int | None = None) -> StageMemory:
        """Waits until the memory is released. `loaded` and `peak`: measurements of the stage's own process."""
        began = time.monotonic()
        while (after := self.now()) > self.before + _SLACK_BYTES:
            if time.monotonic() - began > _PATIENCE_SECONDS:
                if self.device == "cuda":
                    holders = [f"{one.name} (pid {one.pid})" for one in read_card_processes()]
                else:
                    holders = [f"pid {child.pid}" for child in self._children()]
                self.say(
                    f"warning: {after - self.before:,} bytes more than before are in use "
                    f"{_PATIENCE_SECONDS:.0f} s after the stage has ended; "
                    f"held by {', '.join(holders) or 'no visible process'}"
                )
                break
            time.sleep(_TICK_SECONDS)
        shared = self.before if self.device == "cuda" else 0
        return StageMemory(
            device=self.device,
            before_bytes=self.before,
            loaded_bytes=None if loaded is None else shared + loaded,
            peak_bytes=max(self.peak, shared + (peak or 0)) or None,
            after_bytes=after,
        )
