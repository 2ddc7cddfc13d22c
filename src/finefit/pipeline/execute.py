"""Runs what a run directory says: the training stage, then its evaluations, each in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.lock import run_lock
from finefit.artifacts.records import Failure, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import Stage, StageResult
from finefit.errors import FinefitError, Interrupted, Resumable, RunError
from finefit.pipeline.awake import awake
from finefit.pipeline.create import stage_of
from finefit.pipeline.evaluating import Tick, at_the_end
from finefit.pipeline.launch import last_words, launch, launch_ranks, raised_again
from finefit.spec.schema import AutoEngine, DeepSpeed, FullyShard, Parallel, Single

WORKER = "finefit.train.worker"


Train = Callable[[StageDir, Stage, int, Tick], int]
"""Trains a stage, whose run is locked by a descriptor, to an exit code; the result is left in the stage's directory."""


def execute(run: RunDir, *, tick: Tick, warn: Callable[[str], None], train: Train | None = None) -> Run:
    """To the end, or to the first failure, which is recorded before it is raised. `train`: by default in processes that are started here."""
    with run_lock(run.lock) as lock, awake(warn):
        record = replace(read_record(run.run, Run), status="running", failure=None)
        write_record(run.run, record)
        try:
            _train(run, lock, tick, train or _in_processes)
            at_the_end(run, lock=lock, tick=tick, say=warn)
        except FinefitError as error:
            failure = Failure.of(error)
            resumable = error.exit_code == Resumable.exit_code
            write_record(run.run, replace(record, status="stopped" if resumable else "failed", failure=failure))
            raise
        record = replace(record, status="finished")
        write_record(run.run, record)
        return record


def _train(run: RunDir, lock: int, tick: Tick, train: Train) -> None:
    where = stage_of(run)
    stage = read_record(where.stage, Stage)
    if _is_trained(where, stage):
        return
    where.result.unlink(missing_ok=True)
    _raise_failure(where.result, train(where, stage, lock, tick), run.log)


def _in_processes(where: StageDir, stage: Stage, lock: int, tick: Tick) -> int:
    match stage.engine:
        case Single() | AutoEngine():
            devices = 1
        case Parallel() | FullyShard() | DeepSpeed():
            devices = stage.engine.devices
    if stage.num_ranks not in (None, devices):
        raise RunError(
            f"{where.run.name} was planned for {stage.num_ranks} ranks on several nodes, and this command starts {devices}",
            "start them as they were started before, or start another run with --new",
        )
    if devices > 1:
        return launch_ranks(WORKER, where, devices=devices, lock=lock, tick=tick)
    return launch(
        WORKER, where.path, log=RunDir(where.run).log, lock=lock, tick=tick, deterministic=stage.deterministic
    )


def _is_trained(where: StageDir, stage: Stage) -> bool:
    if not where.result.exists():
        return False
    result = read_record(where.result, StageResult)
    return result.failure is None and result.step == stage.total_steps


def _raise_failure(result: Path, code: int, log: Path) -> None:
    if result.exists():
        if failure := read_record(result, StageResult).failure:
            raise raised_again(failure)
    elif code == Interrupted.exit_code:
        raise Interrupted(
            f"stopped at once, without a new checkpoint. {last_words(log)}", "give the same command again"
        )
    else:
        raise FinefitError(
            f"the worker ended with code {code}, which is a fault of finefit. {last_words(log)}",
            "please report it with these lines",
        )
