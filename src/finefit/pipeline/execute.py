"""Runs what a run directory says: the training stage, then its evaluations, each in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from finefit.artifacts.checkpoint import MANIFEST, list_checkpoints
from finefit.artifacts.lock import run_lock
from finefit.artifacts.records import EvalFailure, EvalRequest, EvalResult, Failure, Room, Run, Stage, StageResult, Subject, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.errors import FinefitError, Interrupted, Resumable, RunError
from finefit.facts.files import read_file
from finefit.pipeline.awake import awake
from finefit.pipeline.create import stage_of
from finefit.pipeline.launch import last_words, launch, launch_ranks, raised_again
from finefit.spec.schema import AutoEngine, DeepSpeed, Evaluation, FullyShard, Parallel, Single, task_kinds

Tick = Callable[[], None]
ALIASES = ("final", "best")
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
            for evaluation in read_record(stage_of(run).stage, Stage).evaluate:
                for checkpoint in (*(["base"] if evaluation.base else []), "final"):
                    evaluate(run, checkpoint, evaluation, lock=lock, tick=tick)
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
    return launch(WORKER, where.path, log=RunDir(where.run).log, lock=lock, tick=tick, deterministic=stage.deterministic)


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
        raise Interrupted(f"stopped at once, without a new checkpoint. {last_words(log)}", "give the same command again")
    else:
        raise FinefitError(f"the worker ended with code {code}, which is a fault of finefit. {last_words(log)}", "please report it with these lines")


def evaluate(run: RunDir, checkpoint: str, evaluation: Evaluation, *, lock: int, tick: Tick) -> EvalResult:
    """Scores one checkpoint in a process of its own. What is scored already is not scored again; a killed evaluation goes on at its next item."""
    where = stage_of(run)
    name = resolve_checkpoint(where, checkpoint)
    stage = read_record(where.stage, Stage)
    request = EvalRequest(checkpoint=name, evaluation=evaluation, subject=_subject(where, stage, name), room=_room(stage, evaluation))
    paths = where.evaluation(evaluation.label, name, evaluation.limit)
    for earlier in where.evaluations():
        is_same_model = (earlier.folder, earlier.checkpoint) == (paths.folder, name)
        if is_same_model and _asks(read_record(earlier.request, EvalRequest)) != _asks(request):
            earlier.forget()
    if not paths.result.exists():
        paths.folder.mkdir(parents=True, exist_ok=True)
        write_record(paths.request, request)  # also when it is the old one: its time says which evaluation is in hand
        code = launch("finefit.evaluate.worker", paths.request, log=run.log, lock=lock, tick=tick)
        if not paths.result.exists():
            raise _no_result(paths.failure, code, run.log)
    return read_record(paths.result, EvalResult)


def _subject(where: StageDir, stage: Stage, checkpoint: str) -> Subject:
    is_base = checkpoint == "base"
    return Subject(
        model=stage.model,
        model_name=stage.model_name,
        model_fingerprint=stage.model_fingerprint,
        weights=None if is_base else str((where.checkpoints / checkpoint).relative_to(where.run)),
        manifest_sha256=None if is_base else read_file(where.checkpoints / checkpoint / MANIFEST, where.path).sha256,
        tuning=stage.tuning,
        device=stage.device,
        precision=stage.precision,
        threads=stage.threads,
        seed=stage.seed,
        template=stage.template,
        template_options=stage.template_options,
        template_sha256=stage.template_sha256,
        max_prompt_tokens=stage.max_prompt_tokens,
        form=stage.form,
        items_sha256=stage.prepared["test.jsonl"],
    )


def _room(stage: Stage, evaluation: Evaluation) -> Room:
    if evaluation.label in stage.rooms:
        return stage.rooms[evaluation.label]
    rows = 8 if evaluation.batch == "auto" else evaluation.batch
    return Room(rows=rows, tokens=rows * 4096)


def _asks(request: EvalRequest) -> tuple[Evaluation, Subject, str | None]:
    """What decides an answer: a sample of the items asks them the same way as all of them, and so do fewer at a time."""
    same = {"limit": None, "base": True, "batch": "auto", "checkpoints": "final"}
    return request.evaluation.model_copy(update=same), request.subject, request.task_sha256


def evaluations(run: RunDir, *, task: str | None, limit: int | None) -> list[Evaluation]:
    """Those of the spec, or the named task; `limit` is laid over them."""
    stage = read_record(stage_of(run).stage, Stage)
    if "test.jsonl" not in stage.prepared:
        raise RunError(f"{run.path.name} has no test rows to answer", "name them in the spec with data.test and run again with --new")
    declared: dict[str, Evaluation] = {e.label: e for e in stage.evaluate}
    if task is None and not declared:
        raise RunError(f"the spec of {run.path.name} names no task", f"name one with --task: {', '.join(task_kinds())}")
    chosen = [declared.get(task) or named_evaluation(task)] if task else list(declared.values())
    return [e.model_copy(update={"limit": limit or e.limit}) for e in chosen]


def named_evaluation(task: str) -> Evaluation:
    try:
        return Evaluation.model_validate({"task": task})
    except ValidationError:
        raise RunError(f"there is no task {task}", f"there are {', '.join(task_kinds())}") from None


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
    aliases = [alias for alias in ALIASES if (where.checkpoints / alias).is_dir()]
    there = [*aliases, *(p.name for p in list_checkpoints(where.checkpoints))]
    if name not in there:
        raise RunError(
            f"{where.run.name} has no checkpoint {checkpoint}",
            f"there are base, {', '.join(there)}" if there else "there is only base so far",
        )
    return (where.checkpoints / name).resolve().name if name in ALIASES else name


def _no_result(failure: Path, code: int, log: Path) -> FinefitError:
    if failure.exists():
        return raised_again(read_record(failure, EvalFailure).failure)
    if code == Interrupted.exit_code:
        return Interrupted(f"the evaluation was stopped; its answers so far are kept. {last_words(log)}", "give the same command again")
    return FinefitError(f"the evaluation ended with code {code}, which is a fault of finefit. {last_words(log)}", "please report it with these lines")
