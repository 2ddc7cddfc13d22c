"""The one evaluation path: a request is written, a process answers it, its result is read. What is scored already is
not scored again, and a process that was killed goes on at its next item."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import Failure, Run, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import EvalFailure, EvalItem, EvalRequest, EvalResult, Score, Stage, Subject
from finefit.errors import FinefitError, Interrupted, Resumable, RunError
from finefit.evaluate.score import made_with
from finefit.plan.client import eval_limits_here
from finefit.plan.resolve import precision_on
from finefit.run.eval_rows import EvalRows, own_rows, rows_of
from finefit.run.eval_subjects import Device, checkpoints_of, resolve_checkpoint, run_subject
from finefit.run.external_answers import write_answers
from finefit.run.launch import launch, log_tail, reraise
from finefit.spec.models import ShapeModel
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import LmEval
from finefit.tasks import make_task
from finefit.tasks.task_files import take_task_file, task_sha256, without_paths
from finefit.train.trackers import Tracking

Tick = Callable[[], None]
Say = Callable[[str], None]
NOT_PLANNED = EvalBatchLimit(rows=1, tokens=1)
"""Before the limit is known, and where nothing is generated."""
_NUM_SAMPLES = 3
_MAX_LABEL = 64
_OTHER_SETTINGS = re.compile(r"-with-[0-9a-f]{8}$")
_NO_TRACKER_NAME = re.compile(r"[^\w.-]+", re.ASCII)
"""Characters that some trackers reject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequests:
    """The evaluations of one command, all in one run directory and on the same rows."""

    run: RunDir
    requests: tuple[EvalRequest, ...]
    rows: EvalRows
    answers: tuple[str, ...] | None = None
    """The answers to all items, where they were made elsewhere."""


def request_of(
    run: RunDir, checkpoint: str, evaluation: Evaluation, *, device: Device | None = None, rows: EvalRows | None = None
) -> EvalRequest:
    """`device`: another one than the training's. `rows`: others than the run's own test rows."""
    where = stage_of(run)
    name = resolve_checkpoint(where, checkpoint)
    subject = run_subject(where, name)
    if device is not None and device != subject.device:
        subject = replace(subject, device=device, precision=precision_on(device))
    if rows is not None:
        subject = replace(subject, items=rows.file, items_sha256=rows.sha256)
    return EvalRequest(checkpoint=name, evaluation=evaluation, subject=subject, batch_limit=NOT_PLANNED)


def evaluate_all(work: EvalRequests, *, tick: Tick, say: Say) -> list[EvalResult]:
    """For `finefit eval`."""
    run, limits = work.run, BatchLimits(run=work.run, rows=work.rows)
    with run_lock(run.lock) as lock, recording_status(run), track_scores(stage_of(run), say):
        return [
            evaluate(run, request, lock=lock, tick=tick, limits=limits, answers=work.answers)
            for request in work.requests
        ]


def evaluate_after_training(run: RunDir, *, lock: int, tick: Tick, say: Say) -> None:
    """The evaluations that a run's spec asks for."""
    limits = BatchLimits(run=run, rows=own_rows(run), as_planned=True)
    with track_scores(stage_of(run), say):
        for evaluation in read_record(stage_of(run).stage, Stage).evaluate:
            is_all = evaluation.checkpoints == "all"
            names = checkpoints_of(run, "all") if is_all else ["base", *checkpoints_of(run, "final")]
            for name in names if evaluation.base else names[1:]:
                evaluate(run, request_of(run, name, evaluation), lock=lock, tick=tick, limits=limits)


def evaluate(
    run: RunDir,
    request: EvalRequest,
    *,
    lock: int,
    tick: Tick,
    limits: "BatchLimits | None" = None,
    answers: Sequence[str] | None = None,
) -> EvalResult:
    """Carries out a request in a process of its own. `limits` finds its batch limit; `answers`, where they were made
    elsewhere, leave that process only the scoring. The path of a user's own task file starts in the run directory."""
    where, evaluation = stage_of(run), request.evaluation
    request = replace(request, task_sha256=task_sha256(evaluation, run.path), made_with=made_with())
    paths = where.evaluation(evaluation.label, request.checkpoint, evaluation.limit)
    if not _is_scored(paths, request):
        paths.folder.mkdir(parents=True, exist_ok=True)
        request = replace(request, evaluation=take_task_file(evaluation, run.path, paths.folder))
        if answers is None and where.eval_stage.exists() and isinstance(request.subject.model, ShapeModel):
            problem = f"{run.path.name} holds answers made elsewhere, and no model for {evaluation.label} to ask"
            raise RunError(problem, "give --answers FILE again")
        if answers is None and limits is not None:
            request = replace(request, batch_limit=limits.find(request))
        _set_others_aside(where, paths, request)
        if answers is not None:
            task = make_task(request.evaluation, form=request.subject.form, base=paths.folder, run=run.path)
            write_answers(task, request, paths, answers, rows_of(run, request.subject))
        write_record(paths.request, request)  # even if it is unchanged: its time says which evaluation is the current
        module = "finefit.evaluate.harness" if isinstance(evaluation.task, LmEval) else "finefit.evaluate.worker"
        code = launch(module, paths.request, log=run.log, lock=lock, tick=tick)
        if not paths.result.exists():
            raise _no_result(paths.failure, code, run.log)
    result = read_record(paths.result, EvalResult)
    if evaluation.limit is None and paths.earlier.exists():
        shutil.rmtree(paths.earlier)
    if not _is_noted(where, result):
        note_scores(where, result)
    return result


def _no_result(failure: Path, code: int, log: Path) -> FinefitError:
    if failure.exists():
        return reraise(read_record(failure, EvalFailure).failure)
    if code == Interrupted.exit_code:
        problem = f"the evaluation was stopped; its answers so far are kept. {log_tail(log)}"
        return Interrupted(problem, "give the same command again")
    problem = f"the evaluation ended with code {code}, which is a fault of finefit. {log_tail(log)}"
    return FinefitError(problem, "please report it with these lines")


# Which earlier answers count


def _is_scored(paths: EvalPaths, request: EvalRequest) -> bool:
    earlier = read_request(paths.request) if paths.request.exists() and paths.result.exists() else None
    if earlier is None or not _is_readable(paths.result):
        return False
    return (_deciding(earlier), earlier.evaluation.judge) == (_deciding(request), request.evaluation.judge)


def _set_others_aside(where: StageDir, paths: EvalPaths, request: EvalRequest) -> None:
    """Answers to another request, or of another version, are made again. Where only the judge differs, the answers
    stay."""
    for earlier in where.evaluations():
        if (earlier.folder, earlier.checkpoint) != (paths.folder, request.checkpoint):
            continue
        asked = read_request(earlier.request)
        if asked is None or _deciding(asked) != _deciding(request) or not _is_readable(earlier.result):
            earlier.set_aside()
        elif earlier.limit == paths.limit and earlier.result.exists():
            earlier.set_result_aside()


def _is_readable(result: Path) -> bool:
    """True also for a result that does not exist yet."""
    try:
        return not result.exists() or read_record(result, EvalResult) is not None
    except RunError:
        return False


def read_request(path: Path) -> EvalRequest | None:
    """None where it is missing, damaged or of another version."""
    try:
        return read_record(path, EvalRequest)
    except RunError:
        return None


def _deciding(request: EvalRequest) -> tuple[Evaluation, Subject, str | None, dict[str, str]]:
    """Everything that decides an answer. A task file counts by its content."""
    return _deciding_settings(request.evaluation), request.subject, request.task_sha256, request.made_with


def _deciding_settings(evaluation: Evaluation) -> Evaluation:
    """A sample and a smaller batch give the same answers, and a judge only reads them."""
    same = {"limit": None, "base": True, "batch": "auto", "checkpoints": "final", "name": None, "judge": None}
    return without_paths(evaluation).model_copy(update=same)


# Labels: other rows, another device or other settings never overwrite a run's own scores


def label_apart(run: RunDir, requests: Sequence[EvalRequest], rows: EvalRows) -> tuple[EvalRequest, ...]:
    """Each request under a label of its own where it differs from what the run's label stands for."""
    own_device = run_subject(stage_of(run), "base").device
    found: dict[tuple[str, str], EvalRequest] = {}
    for request in requests:
        one = request.evaluation
        suffixes = [rows.suffix, "" if request.subject.device == own_device else request.subject.device]
        one = _relabelled(one, one.label, "".join(f"-on-{suffix}" for suffix in suffixes if suffix))
        known, settings = _settings_of(run, one.label), _deciding_settings(one)
        if known and settings not in known:
            digest = sha256(settings.model_dump_json().encode()).hexdigest()[:8]
            one = _relabelled(one, _OTHER_SETTINGS.sub("", one.label), f"-with-{digest}")
        found[one.label, request.checkpoint] = replace(request, evaluation=one)
    return tuple(found.values())


def _relabelled(evaluation: Evaluation, label: str, end: str) -> Evaluation:
    return evaluation.model_copy(update={"name": f"{label[: _MAX_LABEL - len(end)]}{end}"}) if end else evaluation


def _settings_of(run: RunDir, label: str) -> list[Evaluation]:
    """What a label stands for: in the spec, or in what is scored already."""
    where = stage_of(run)
    declared = read_record(where.stage, Stage).evaluate if where.stage.exists() else ()
    if named := [_deciding_settings(evaluation) for evaluation in declared if evaluation.label == label]:
        return named
    requests = [read_request(paths.request) for paths in where.evaluations() if paths.folder.name == label]
    return [_deciding_settings(request.evaluation) for request in requests if request is not None]


# Batch limits


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How many answers fit at a time: on a CPU as the run was planned, on a GPU by what is free now."""

    run: RunDir
    rows: EvalRows
    as_planned: bool = False
    """On a GPU too: the training that it was planned with has just ended."""
    known: dict[str, EvalBatchLimit] = field(default_factory=dict)

    def find(self, request: EvalRequest) -> EvalBatchLimit:
        subject, evaluation = request.subject, request.evaluation
        planned = self._planned(evaluation) if self.as_planned or subject.device == "cpu" else None
        if planned is not None:
            return planned
        key = f"{evaluation.model_copy(update={'limit': None})} {subject.device} {subject.tuning}"
        if key not in self.known:
            tokens, grids = self.rows.prompt_tokens, self.rows.prompt_grids
            found = eval_limits_here(subject, self.run.path, (evaluation,), tokens, grids)
            self.known[key] = found[evaluation.label]
        return self.known[key]

    def _planned(self, evaluation: Evaluation) -> EvalBatchLimit | None:
        """None unless the spec asks for the same."""

        def needs(one: Evaluation) -> tuple[object, ...]:
            return one.label, one.batch, one.max_new_tokens, one.task

        where = stage_of(self.run)
        stage = read_record(where.stage, Stage) if where.stage.exists() else None
        if stage is None or needs(evaluation) not in [needs(declared) for declared in stage.evaluate]:
            return None
        return stage.eval_limits.get(evaluation.label)


# Scores for trackers


def note_scores(where: StageDir, result: EvalResult) -> None:
    """Trackers are fed from these lines."""
    with Journal(where.evals) as journal:
        journal.write(**_score_event(result))


def _is_noted(where: StageDir, result: EvalResult) -> bool:
    """False after a kill between the result and its line."""
    wanted = json.dumps(_score_event(result))  # as text, since NaN is not equal to itself
    return any(json.dumps(line) == wanted for line in read_lines(where.evals))


def _score_event(result: EvalResult) -> dict[str, Any]:
    """Scores with their intervals, and a few answers."""
    scores = _score_values(result.task, result.metrics)
    for dataset, part in result.by_dataset.items():
        scores |= _score_values(f"{result.task}/{_NO_TRACKER_NAME.sub('-', dataset)}", part.metrics)
    samples = [
        {"prompt": item.prompt, "answer": item.answer, "reference": item.reference, "scores": item.scores}
        for item in _evenly_spaced(result.items)
    ]
    step = step_named(result.checkpoint) or 0
    about = {"event": "scored", "step": step, "checkpoint": result.checkpoint, "task": result.task}
    return {**about, **scores, f"{result.task}/coverage": result.coverage, "samples": samples}


def _score_values(prefix: str, metrics: Mapping[str, Score]) -> dict[str, float]:
    ends = {"": "value", "_low": "low", "_high": "high"}
    return {f"{prefix}/{name}{end}": getattr(metrics[name], key) for name in metrics for end, key in ends.items()}


def _evenly_spaced(items: Sequence[EvalItem]) -> list[EvalItem]:
    return list(items[:: max(1, len(items) // _NUM_SAMPLES)][:_NUM_SAMPLES])


@contextmanager
def track_scores(where: StageDir, say: Say) -> Iterator[None]:
    """After the `with` block, however it ends, its scores go to the trackers of the run, each in a process of its
    own."""
    before = where.evals.stat().st_size if where.evals.exists() else 0

    def failed(*, tracker: str, found: str, **_: object) -> None:
        say(f"{tracker} did not get all scores: {found}; they are complete in the run directory")

    try:
        yield
    finally:
        trackers = read_record(where.stage, Stage).trackers if where.stage.exists() else ()
        if trackers and where.evals.exists() and where.evals.stat().st_size > before:
            with Tracking(where, trackers, failed, lines=where.evals, offset=before):
                pass


@contextmanager
def recording_status(run: RunDir) -> Iterator[None]:
    """A run that only evaluates has the status of its last command; that of a training run does not change."""
    record = read_record(run.run, Run)
    if record.kind == "train":
        yield
        return
    write_record(run.run, replace(record, status="running", failure=None))
    try:
        yield
    except BaseException as error:
        failure = _failure_of(error)
        is_resumable = failure.exit_code == Resumable.exit_code
        write_record(run.run, replace(record, status="stopped" if is_resumable else "failed", failure=failure))
        raise
    write_record(run.run, replace(record, status="finished", failure=None))


def _failure_of(error: BaseException) -> Failure:
    match error:
        case FinefitError():
            return Failure.of(error)
        case KeyboardInterrupt():
            return Failure.of(Interrupted("interrupted", "give the same command again"))
    return Failure.of(FinefitError(f"a fault of finefit: {type(error).__name__}: {error}", "please report it"))
