"""A worker is a child process in a session of its own. Signals are passed on; the end of its standard input tells it
that the launcher is gone; it inherits the run's lock, so the run stays locked while either of the two lives.

The ranks of a training are such workers side by side, which live and end together. When one fails, those that do not
notice it themselves, such as one that waits inside a collective, are killed, and the first failure is reported."""

import os
import shutil
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

import torch

from finefit import errors
from finefit.artifacts.atomic import report_disk_full
from finefit.artifacts.processes import RankEnv, chosen_variables, on_stop_signals, without_rank_env
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import Stage, StageResult
from finefit.errors import FinefitError, Interrupted, SpecError, WorkerDied
from finefit.facts.machine import read_power

_TICK_SECONDS = 0.2
_TAIL_LINES = 15
_GRACE_SECONDS = 10.0
"""After one rank has failed, for the others to notice it and report."""
_SAME_COMMAND = "give the same command again: it goes on where it was"


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
    """Runs `python -m module STAGE_DIR` as so many ranks to their common end. Returns the exit code of the first, whose
    failure is in its result; a failure of another rank is raised."""
    stage, run = read_record(where.stage, Stage), RunDir(where.run)
    require_cards(stage.device, devices)
    port = free_port()
    ranks = RankGroup(where=where, logs=[run.log_of(at) for at in range(devices)])
    with ranks:
        for at, log in enumerate(ranks.logs):
            where.result_of(at).unlink(missing_ok=True)
            rank = RankEnv(rank=at, size=devices, local_rank=at, local_size=devices, address="127.0.0.1", port=port)
            environment = _environment(stage.deterministic) | rank_environment(rank, stage)
            ranks.workers.append(_start(module, where.path, log=log, lock=lock, environment=environment))
        with _signals_passed_on(ranks.workers) as received:
            while ranks.are_alive():
                tick()
                time.sleep(_TICK_SECONDS)
    tick()
    if (failure := ranks.failure()) is not None:
        raise failure
    code = ranks.workers[0].returncode
    _raise_late(received, code)
    return code


@dataclass(slots=True, kw_only=True)
class RankGroup:
    """Ranks that live and end together; none outlives the `with` block."""

    where: StageDir
    logs: Sequence[Path]
    workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    failed_at: float | None = None
    ended_by_us: set[int] = field(default_factory=set)

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Those that live are told that the launcher is gone, and waited for while they save."""
        for worker in self.workers:
            if worker.stdin is not None:
                worker.stdin.close()
        while self.are_alive():
            time.sleep(_TICK_SECONDS)

    def are_alive(self) -> bool:
        """Whether any is. When a rank has failed, the others are killed after the grace period."""
        if self.failed_at is None and any(self._has_failed(rank) for rank in range(len(self.workers))):
            self.failed_at = time.monotonic()
        live = [rank for rank, worker in enumerate(self.workers) if worker.poll() is None]
        if live and self.failed_at is not None and time.monotonic() - self.failed_at > _GRACE_SECONDS:
            for rank in live:
                self.ended_by_us.add(rank)
                self.workers[rank].kill()
        return bool(live)

    def _has_failed(self, rank: int) -> bool:
        """One that was asked to stop has not: the first may still be writing the checkpoint that they agreed on."""
        if not self.workers[rank].poll():
            return False
        failure = _failure(self.where, rank)
        return failure is None or failure.kind != Interrupted.__name__

    def failure(self) -> FinefitError | None:
        """Of a rank that was killed, of one that reported why it failed, of one that ended without a word, in this
        order. None: the first rank's result says how it ended."""
        size = len(self.workers)
        for rank, worker in enumerate(self.workers):
            if worker.returncode < 0 and rank not in self.ended_by_us:
                return _killed(f"rank {rank} of {size}", signal.Signals(-worker.returncode), self.logs[rank])
        return failure_of_other_rank(self.where, size) or self._silent(size)

    def _silent(self, size: int) -> FinefitError | None:
        for rank, worker in enumerate(self.workers):
            # stopped at once, by a second SIGINT, is no failure
            has_ended_well = worker.returncode in (0, Interrupted.exit_code)
            if not has_ended_well and rank not in self.ended_by_us and _failure(self.where, rank) is None:
                return FinefitError(
                    f"rank {rank} of {size} ended with code {worker.returncode}, which is a fault of finefit. "
                    f"{log_tail(self.logs[rank])}",
                    "please report it with these lines",
                )
        if not self.ended_by_us:
            return None
        rank = min(self.ended_by_us)
        problem = f"rank {rank} of {size} did not end within {_GRACE_SECONDS:.0f} s after another had failed"
        return WorkerDied(f"{problem}. {log_tail(self.logs[rank])}", _SAME_COMMAND)


def failure_of_other_rank(where: StageDir, size: int) -> FinefitError | None:
    """Of another rank than the first, whose own is in its result. One that only lost its peers knows no reason."""
    found = {rank: failure for rank in range(size) if (failure := _failure(where, rank)) is not None}
    reasons = {rank: failure for rank, failure in found.items() if failure.kind != WorkerDied.__name__}
    if 0 in reasons or not reasons:
        return None
    rank, failure = next(iter(reasons.items()))
    return reraise(failure, who=f"rank {rank} of {size}: ")


def _failure(where: StageDir, rank: int) -> Failure | None:
    path = where.result_of(rank)
    return read_record(path, StageResult).failure if path.exists() else None


def require_cards(device: str, devices: int) -> None:
    """Fewer cards than ranks are reported before anything starts."""
    if device != "cuda":
        return
    if (there := torch.cuda.device_count()) < devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise SpecError(
            f"engine.devices is {devices}, and torch sees {there} {'card' if there == 1 else 'cards'} here"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
            f"set engine.devices to {there} or fewer" if there else "`finefit doctor` says why it sees none",
        )


def free_port() -> int:
    """A free port of this machine. The first rank takes it within a second, and the system gives ports in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: RankEnv, stage: Stage) -> dict[str, str]:
    return rank.variables() | {"OMP_NUM_THREADS": str(rank.share(stage.threads))}


def _start(
    module: str, argument: Path, *, log: Path, lock: int, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    with report_disk_full(log), log.open("ab") as output:
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
    """With what must be set before torch starts. A user's own setting is kept."""
    return chosen_variables(os.environ, deterministic=deterministic) | without_rank_env(os.environ)


@contextmanager
def _signals_passed_on(workers: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[signal.Signals]]:
    """Yields the list of signals received."""
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


def _raise_late(received: Sequence[signal.Signals], code: int) -> None:
    """A signal that came too late to stop this worker still stops what would follow."""
    if received and code == 0:
        raise Interrupted(f"stopped by {received[0].name}; what was in progress is done", "give the same command again")


def _killed(who: str, number: signal.Signals, log: Path) -> WorkerDied:
    likely = "; out of host memory is the usual reason when nobody sent it" if number == signal.SIGKILL else ""
    return WorkerDied(f"{who} was ended by {number.name}{likely}. {log_tail(log)}", _SAME_COMMAND)


def reraise(failure: Failure, *, who: str = "") -> FinefitError:
    """The failure that a worker reported, as the type of error that it was there."""
    kind: type[FinefitError] = getattr(errors, failure.kind, FinefitError)
    return kind(f"{who}{failure.problem}", failure.remedy)


def log_tail(log: Path) -> str:
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    return f"The end of {log.name}:\n{tail}"


@contextmanager
def inhibit_sleep(warn: Callable[[str], None]) -> Iterator[None]:
    """Keeps a laptop awake during a run where the system allows it, and otherwise warns."""
    power = read_power()
    if power.on_battery:
        warn(f"running on battery ({power.percent:.0f} %): plug in, or the run ends with it (it can be resumed)")
    inhibitor = _inhibit()
    if inhibitor is None and power.has_battery:
        warn("this system offers no way to inhibit sleep: keep the lid open and the machine awake")
    try:
        yield
    finally:
        if inhibitor is not None:
            inhibitor.terminate()
            inhibitor.communicate()  # closes its pipe too


def _inhibit() -> "subprocess.Popen[bytes] | None":
    command = _command()
    if command is None:
        return None
    inhibitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        inhibitor.wait(timeout=0.3)  # it refuses at once, or holds until it is ended
    except subprocess.TimeoutExpired:
        return inhibitor
    inhibitor.communicate()
    return None


def _command() -> list[str] | None:
    """Both end with their standard input or with us, so that a killed launcher leaves nothing behind."""
    if sys.platform == "darwin" and (caffeinate := shutil.which("caffeinate")):
        return [caffeinate, "-i", "cat"]
    if inhibit := shutil.which("systemd-inhibit"):
        return [inhibit, "--what=sleep:idle", "--who=finefit", "--why=a training run", "--mode=block", "cat"]
    return None
