"""Runs what a run directory says: the training stage, then its evaluations, each in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.checkpoint import list_checkpoints
from finefit.artifacts.lock import run_lock
from finefit.artifacts.records import EvalRequest, EvalResult, Failure, Run, Stage, StageResult, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.data.tasks import TASKS
from finefit.errors import FinefitError, Interrupted, Resumable, RunError, WorkerDied
from finefit.pipeline.awake import awake
from finefit.pipeline.create import stage_of
from finefit.pipeline.launch import launch
from finefit.spec.schema import Evaluation

Tick = Callable[[], None]
ALIASES = ("final", "best")


class Failed(FinefitError):
    """What a worker reported, with its own exit code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.problem, failure.remedy)
        self.exit_code = failure.exit_code  # type: ignore[misc]
        self.kind = failure.kind


def execute(run: RunDir, *, tick: Tick, warn: Callable[[str], None]) -> Run:
    """To the end, or to the first failure, which is recorded before it is raised."""
    with run_lock(run.lock) as lock, awake(warn):
        record = replace(read_record(run.run, Run), status="running", failure=None)
        write_record(run.run, record)
        try:
            _train(run, lock, tick)
            for evaluation in read_record(stage_of(run).stage, Stage).evaluate:
                for checkpoint in (*(["base"] if evaluation.base else []), "final"):
                    evaluate(run, checkpoint, evaluation, lock=lock, tick=tick)
        except FinefitError as error:
            failure = Failure(kind=_kind(error), problem=error.problem, remedy=error.remedy, exit_code=error.exit_code)
            resumable = error.exit_code == Resumable.exit_code
            write_record(run.run, replace(record, status="stopped" if resumable else "failed", failure=failure))
            raise
        record = replace(record, status="finished")
        write_record(run.run, record)
        return record


def _kind(error: FinefitError) -> str:
    return error.kind if isinstance(error, Failed) else type(error).__name__


def _train(run: RunDir, lock: int, tick: Tick) -> None:
    where = stage_of(run)
    stage = read_record(where.stage, Stage)
    if _is_trained(where, stage):
        return
    where.result.unlink(missing_ok=True)
    code = launch("finefit.train.worker", where.path, log=run.log, lock=lock, tick=tick, deterministic=stage.deterministic)
    _raise_failure(where.result, code, run.log)


def _is_trained(where: StageDir, stage: Stage) -> bool:
    if not where.result.exists():
        return False
    result = read_record(where.result, StageResult)
    return result.failure is None and result.step == stage.total_steps


def _raise_failure(result: Path, code: int, log: Path) -> None:
    if result.exists():
        if failure := read_record(result, StageResult).failure:
            raise Failed(failure)
    elif code == Interrupted.exit_code:
        raise Interrupted("stopped at once, without a new checkpoint")
    else:
        raise WorkerDied(f"the worker ended with code {code} and left no result; its last words are in {log}")


def evaluate(run: RunDir, checkpoint: str, evaluation: Evaluation, *, lock: int, tick: Tick) -> EvalResult:
    """Scores one checkpoint in a process of its own. What is scored already is not scored again; a killed evaluation goes on at its next item."""
    where = stage_of(run)
    name = resolve_checkpoint(where, checkpoint)
    request = EvalRequest(checkpoint=name, evaluation=evaluation)
    paths = (
        where.eval_request(evaluation.task, name),
        where.eval_result(evaluation.task, name),
        where.eval_items(evaluation.task, name),
    )
    request_path, result_path, items_path = paths
    if not request_path.exists() or read_record(request_path, EvalRequest) != request:
        items_path.parent.mkdir(parents=True, exist_ok=True)
        result_path.unlink(missing_ok=True)
        items_path.unlink(missing_ok=True)
        write_record(request_path, request)
    if not result_path.exists():
        code = launch("finefit.evaluate.worker", request_path, log=run.log, lock=lock, tick=tick)
        if not result_path.exists():
            raise _no_result(code, run.log)
    return read_record(result_path, EvalResult)


def evaluations(run: RunDir, *, task: str | None, limit: int | None) -> list[Evaluation]:
    """Those of the spec, or the named task; `limit` is laid over them."""
    stage = read_record(stage_of(run).stage, Stage)
    if "test.jsonl" not in stage.prepared:
        raise RunError(f"{run.path.name} has no test rows to answer", "name them in the spec with data.test and run again with --new")
    declared: dict[str, Evaluation] = {e.task: e for e in stage.evaluate}
    if task is not None and task not in TASKS:
        raise RunError(f"there is no task {task}", f"there are {', '.join(TASKS)}")
    if task is None and not declared:
        raise RunError(f"the spec of {run.path.name} names no task", f"name one with --task: {', '.join(TASKS)}")
    chosen = [declared.get(task) or Evaluation.model_validate({"task": task})] if task else list(declared.values())
    return [e.model_copy(update={"limit": limit or e.limit}) for e in chosen]


def checkpoints(run: RunDir, asked: str) -> list[str]:
    """`all` is the base and every checkpoint that is kept."""
    where = stage_of(run)
    if asked == "all":
        return ["base", *(p.name for p in list_checkpoints(where.checkpoints))]
    return [resolve_checkpoint(where, asked)]


def resolve_checkpoint(where: StageDir, checkpoint: str) -> str:
    """`final` and `best` become the checkpoint that they name."""
    if checkpoint == "base":
        return checkpoint
    name = f"checkpoint-{checkpoint}" if checkpoint.isdigit() else checkpoint
    path = where.checkpoints / name
    if not path.is_dir():
        there = sorted(p.name for p in where.checkpoints.iterdir() if p.is_dir() and not p.name.startswith(".")) if where.checkpoints.is_dir() else []
        raise RunError(
            f"{where.run.name} has no checkpoint {checkpoint}",
            f"there are base, {', '.join(there)}" if there else "there is only base so far",
        )
    return path.resolve().name if name in ALIASES else name


def _no_result(code: int, log: Path) -> FinefitError:
    if code == Interrupted.exit_code:
        return Interrupted("the evaluation was stopped; its answers so far are kept")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return WorkerDied(f"the evaluation ended with code {code}. The end of {log.name}:\n" + "\n".join(lines))
