"""Faults, placed exactly. Workers are forked from a server that has loaded torch once and never used it; they are
killed from outside, or kill themselves before a chosen file operation. A run that was struck is compared, tensor by
tensor, with one of the same job that was not."""

import faulthandler
import hashlib
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.checkpoint import list_checkpoints, problems, step_of
from finefit.artifacts.records import Failure, read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import StageResult
from finefit.run.create import create_run, read_request
from finefit.spec.load import load_pipeline
from finefit.train import loop, worker
from finefit.train.worker import work
from tests.conftest import SPEC, make_model_folder, make_project
from tests.forks import FORKS

KILLS = int(os.environ.get("FINEFIT_KILLS", "20"))
SAVE_EVERY = 3
TRAINING = re.sub(r"evaluate: .*\n", "", SPEC).replace("epochs: 2", "epochs: 3")
"""18 steps with dropout, a checkpoint every 3, of which 2 are kept."""
FULL = re.sub(r"tuning: .*\n", "tuning: {kind: full}\n", TRAINING)
PAGE = 4096
DEADLINE_SECONDS = 120
STACKS_AFTER_SECONDS = 100

_LOADED_BY = os.getpid()


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that must be equal, bit for bit."""

    tensors: dict[str, str]
    steps: list[tuple[int, float, float, str]]
    names: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One spec with its rows, prepared once and run many times."""

    pristine: Path
    number: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fresh(self) -> StageDir:
        """A run directory of its own that nothing has happened in."""
        return self.copy(self.pristine)

    def copy(self, run: Path) -> StageDir:
        """Beside the others, so that relative paths hold."""
        place = self.pristine.with_name(f"attempt-{next(self.number)}")
        shutil.copytree(run, place, symlinks=True)
        (stage,) = (place / "stages").iterdir()
        return StageDir(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A job and how it ends when nothing happens to it."""

    job: Job
    outcome: Outcome
    seconds: float
    operations: list["Operation"]


def make_job(
    folder: Path, *, spec: str = TRAINING, model_seed: int = 0, project: Callable[..., Path] = make_project
) -> Job:
    torch.set_num_threads(1)  # the plan takes it over for the workers; the runs of the command line have one too
    path = project(folder, spec=spec)
    if model_seed:
        make_model_folder(folder / "model", seed=model_seed, dropout=0.1)
    request = read_request(load_pipeline(path), folder, spec_text=spec)
    return Job(pristine=create_run(request, runs=folder / "runs").path)


def make_reference(job: Job) -> Reference:
    where = job.fresh()
    trace = where.run / "operations.txt"
    worker = start(where, lambda: record_operations(where.checkpoints, trace))
    began = time.perf_counter()  # not before: the first start waits for the server
    code = finish(worker)
    seconds = time.perf_counter() - began
    assert code == 0, words(where)
    operations = [Operation(*line.split("\t")) for line in trace.read_text().splitlines()]
    return Reference(job=job, outcome=outcome(where), seconds=seconds, operations=operations)


def outcome(where: StageDir) -> Outcome:
    names = {link.name: link.readlink().name for link in sorted(where.checkpoints.iterdir()) if link.is_symlink()}
    steps = [(line["step"], line["loss"], line["learning_rate"], line["batch"]) for line in read_steps(where.metrics)]
    return Outcome(tensors=digests(where.checkpoints / "final"), steps=steps, names=names)


def digests(checkpoint: Path) -> dict[str, str]:
    """Weights, optimizer and random numbers."""
    return {
        f"{file.name}:{name}": hashlib.sha256(f"{tensor.dtype}{tensor.shape}".encode() + _bytes(tensor)).hexdigest()
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    """numpy knows no bf16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    process: ForkServerProcess
    where: StageDir


def start(where: StageDir, prepare: Callable[[], None] = nothing) -> Worker:
    """`prepare` places a fault in the worker; it is sent there by value and shares nothing with this process."""
    process = FORKS.Process(target=_be_worker, args=(where, cloudpickle.dumps(prepare)), daemon=True)
    process.start()
    return Worker(process=process, where=where)


def _be_worker(where: StageDir, prepare: bytes) -> NoReturn:
    code = 70
    try:
        with Path(os.devnull).open() as null, (where.run / "logs" / "run.log").open("a", buffering=1) as log:
            sys.stdin, sys.stdout, sys.stderr = null, log, log
            faulthandler.dump_traceback_later(STACKS_AFTER_SECONDS, file=log)
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=log, force=True)
            warnings.simplefilter("error")
            try:
                assert os.getppid() == _LOADED_BY, (
                    f"the server could not import {__name__}: start pytest in the root of the repository"
                )
                cloudpickle.loads(prepare)()
                code = work(where)
            except BaseException:  # noqa: BLE001 the exit code is ours to choose
                traceback.print_exc()
    finally:
        os._exit(code)


def finish(started: Worker, *, kill_after: float | None = None) -> int:
    """The exit code, negative for the signal that ended it. A worker that hangs fails the test, with its stacks."""
    process = started.process
    try:
        process.join(DEADLINE_SECONDS if kill_after is None else kill_after)
        hangs = kill_after is None and process.exitcode is None
    finally:
        process.kill()  # nothing to one that has ended
        process.join()
    if hangs:
        pytest.fail(f"the worker did not end in {DEADLINE_SECONDS} seconds and said:\n{words(started.where)}")
    assert process.exitcode is not None
    return process.exitcode


def run_to_end(job: Job, prepare: Callable[[], None] = nothing) -> StageDir:
    """A fresh attempt at the job, which succeeds."""
    where = job.fresh()
    assert finish(start(where, prepare)) == 0, words(where)
    return where


def events(where: StageDir, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(where.metrics) if line.get("event") == kind]


def failure_of(where: StageDir) -> Failure:
    failure = read_record(where.result, StageResult).failure
    assert failure is not None
    return failure


def words(where: StageDir) -> str:
    """What the worker said."""
    return (where.run / "logs" / "run.log").read_text(encoding="utf-8")


def assert_only_whole_checkpoints(where: StageDir) -> None:
    """No visible checkpoint fails verification, and at most one save interval is lost."""
    visible = list_checkpoints(where.checkpoints)
    assert [found for checkpoint in visible for found in problems(checkpoint)] == []
    done = max((line["step"] for line in read_steps(where.metrics)), default=0)
    assert done - max(map(step_of, visible), default=0) <= SAVE_EVERY


def hidden(where: StageDir) -> list[str]:
    return [path.name for path in where.checkpoints.iterdir() if path.name.startswith(".")]


class Operation(NamedTuple):
    """Something that a process is about to do to a file."""

    what: str
    path: str
    """Relative to the watched folder; a bare name where only the system knows the folder."""


_WATCHED = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def watch_operations(folder: Path, see: Callable[[Operation], None]) -> None:
    """Calls `see` before each file operation in `folder`, for the rest of this process. What compiled code opens is not
    seen."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in _WATCHED:
            return
        path = args[1] if event == "os.symlink" else args[0]
        in_folder_of_its_own = (
            event in ("os.remove", "os.rmdir") and args[1] != -1
        )  # rmtree names files by descriptor and name
        if isinstance(path, (str, Path)) and (in_folder_of_its_own or str(path).startswith(str(folder))):
            writes = event == "open" and isinstance(args[1], str) and args[1][0] in "wax"
            see(Operation("write" if writes else event, _relative(str(path), folder)))

    def synced(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.startswith(str(folder)):
            see(Operation("fsync", _relative(path, folder)))
        really_sync(descriptor)

    really_sync = os.fsync
    os.fsync = synced  # type: ignore[assignment]
    sys.addaudithook(hook)


def _relative(path: str, folder: Path) -> str:
    return os.path.relpath(path, folder) if path.startswith("/") else path


def record_operations(folder: Path, trace: Path) -> None:
    file = trace.open("ab", buffering=0)

    def see(operation: Operation) -> None:
        file.write("\t".join(operation).encode() + b"\n")

    watch_operations(folder, see)


def die_at_operation(folder: Path, number: int) -> None:
    """Kill -9 just before the file operation of this number, counted from 0."""
    count = itertools.count()

    def see(_: Operation) -> None:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_operations(folder, see)


def at_operation(folder: Path, what: str, pattern: str, act: Callable[[], None]) -> None:
    """Acts once, just before the first operation of this kind on a path that matches."""
    acted = iter([False])

    def see(operation: Operation) -> None:
        if operation.what == what and re.fullmatch(pattern, operation.path) and next(acted, True) is False:
            act()

    watch_operations(folder, see)


def at_step(number: int, act: Callable[[], object]) -> None:
    """Acts when this process begins optimizer step `number`, counted from 1."""
    really: Callable[..., list[int]] = getattr(loop, "rows_of_step")  # noqa: B009 a name that the loop imports

    def rows_of_step(step: int, **rest: int) -> list[int]:
        if step + 1 == number:
            act()
        return really(step, **rest)

    setattr(loop, "rows_of_step", rows_of_step)  # noqa: B010


def change_model(change: Callable[[Any], None]) -> None:
    """What the worker trains is changed once it is loaded."""
    really: Callable[..., Any] = getattr(worker, "make_trainable")  # noqa: B009 a name that the worker imports

    def changed(*args: Any, **rest: Any) -> Any:
        model = really(*args, **rest)
        change(model)
        return model

    setattr(worker, "make_trainable", changed)  # noqa: B010


def send_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def small_disk(place: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of this size; the test is skipped where this user may not mount one."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs root, or `unshare -rm` around pytest: {mounted.stderr.splitlines()[0]}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill_disk(disk: Path, *, leave_pages: int) -> None:
    """A file that takes all room but so many pages."""
    free = os.statvfs(disk).f_bavail - leave_pages
    (disk / "filler").write_bytes(bytes(max(0, free) * os.statvfs(disk).f_frsize))
