"""The only evaluation path: a request is written, a process answers it, and its result is read. Existing scores are not
computed again, and an evaluation that was killed resumes at its next item."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.processes import run_lock
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Failure, Run, read_if_there, read_or_none, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, find_run, is_run, models_of, open_run, stage_of
from finefit.artifacts.stage_records import EvalFailure, EvalRequest, EvalResult, EvalStage, Score, Stage, Subject
from finefit.data.rows import is_asked
from finefit.errors import FinefitError, Interrupted, Resumable, RunError, SpecError
from finefit.evaluate.external_model import FORMS, find_external_model
from finefit.evaluate.reuse import answers_of_other_tasks, needs_only_answers, write_taken
from finefit.evaluate.score import made_with
from finefit.evaluate.worker import sample
from finefit.facts.files import sha256_of
from finefit.plan.client import eval_limits_here
from finefit.plan.resolve import precision_on
from finefit.run import eval_rows, eval_subjects
from finefit.run.eval_args import EvalArgs, named_evaluations, server_of, with_absolute_paths
from finefit.run.eval_rows import EvalRows
from finefit.run.eval_subjects import Device, server_name, server_subject
from finefit.run.launch import launch, log_tail, reraise
from finefit.spec.models import Full, ShapeModel
from finefit.spec.schema import Evaluation
from finefit.spec.served import Server
from finefit.spec.tasks import WITH_LIKELIHOODS, LmEval
from finefit.tasks.custom import take_task_file, task_sha256, without_paths
from finefit.tasks.make import make_task
from finefit.train.trackers import Tracking

Tick = Callable[[], None]
Say = Callable[[str], None]
NOT_PLANNED = EvalBatchLimit(rows=1, tokens=1)
"""The limit before it is known, or if nothing is generated."""
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
    """The answers to all items, if they come from elsewhere."""
    warnings: tuple[str, ...] = ()
    """Warnings that a user should see before anything is answered."""


def request_of(
    run: RunDir, checkpoint: str, evaluation: Evaluation, *, device: Device | None = None, rows: EvalRows | None = None
) -> EvalRequest:
    """`device`: overrides the training's device. `rows`: replaces the run's own test rows."""
    where = stage_of(run)
    name = eval_subjects.resolve_checkpoint(where, checkpoint)
    subject = eval_subjects.run_subject(where, name)
    if device is not None and device != subject.device:
        subject = replace(subject, device=device, precision=precision_on(device))
    if rows is not None:
        subject = replace(subject, items=rows.file, items_sha256=rows.sha256)
    if evaluation.server is not None:
        name, subject = server_name(evaluation.server), server_subject(subject, evaluation.server)
    return EvalRequest(checkpoint=name, evaluation=evaluation, subject=subject, batch_limit=NOT_PLANNED)


def evaluate_all(requests: EvalRequests, *, tick: Tick, say: Say) -> list[EvalResult]:
    run, limits = requests.run, BatchLimits(run=requests.run, rows=requests.rows)
    for warning in requests.warnings:
        say(f"warning: {warning}")
    with run_lock(run.lock) as lock, recording_status(run), track_scores(stage_of(run), say):
        return [
            evaluate(run, request, lock=lock, tick=tick, limits=limits, answers=requests.answers, say=say)
            for request in requests.requests
        ]


def evaluate_after_training(run: RunDir, *, lock: int, tick: Tick, say: Say) -> None:
    """Runs the evaluations that a run's spec requests."""
    limits = BatchLimits(run=run, rows=eval_rows.own_rows(run), as_planned=True)
    evaluations = read_record(stage_of(run).stage, Stage).evaluate
    for warning in eval_rows.require_readable(run, eval_subjects.run_subject(stage_of(run), "base"), evaluations):
        say(f"warning: {warning}")
    with track_scores(stage_of(run), say):
        for evaluation in evaluations:
            names = eval_subjects.checkpoints_of(run, evaluation.checkpoints)
            trained = [name for name in names if name != "base"]
            # a server shares the rows and settings of the base
            with_base = evaluation.base or evaluation.server is not None
            for name in (["base"] if with_base else []) + (trained if evaluation.server is None else []):
                evaluate(run, request_of(run, name, evaluation), lock=lock, tick=tick, limits=limits, say=say)


def evaluate(
    run: RunDir,
    request: EvalRequest,
    *,
    lock: int,
    tick: Tick,
    limits: "BatchLimits | None" = None,
    answers: Sequence[str] | None = None,
    say: Say = lambda _: None,
) -> EvalResult:
    """Carries out a request in a process of its own. `limits` finds its batch limit; `answers`, where they were made
    elsewhere, leave that process only the scoring. The path of a user's own task file starts in the run directory.
    Damaged records of an earlier evaluation cost nothing but time: the model is asked again, and `say` hears it."""
    where, evaluation = stage_of(run), request.evaluation
    request = replace(request, task_sha256=task_sha256(evaluation, run.path), made_with=_versions(evaluation))
    paths = where.evaluation(evaluation.label, request.checkpoint, evaluation.limit)
    earlier, result = read_or_none(paths.request, EvalRequest, say), read_or_none(paths.result, EvalResult, say)
    is_same = earlier is not None and _deciding(earlier) == _deciding(request)
    if earlier is None or result is None or not is_same or earlier.evaluation.judge != evaluation.judge:
        paths.folder.mkdir(parents=True, exist_ok=True)
        request = replace(request, evaluation=take_task_file(evaluation, run.path, paths.folder))
        is_unknown = evaluation.server is None and isinstance(request.subject.model, ShapeModel)
        if answers is None and is_there(where.eval_stage) and is_unknown:
            problem = f"{run.path.name} holds answers from elsewhere, and no model that could answer {evaluation.label}"
            raise RunError(problem, "give --answers FILE again")
        request = _write_known_answers(where, paths, request, limits, answers)
        write_record(paths.request, request)  # even if it is unchanged: its time says which evaluation is the current
        module = "finefit.evaluate.harness" if isinstance(evaluation.task, LmEval) else "finefit.evaluate.worker"
        code = launch(module, paths.request, log=run.log, lock=lock, tick=tick)
        if not is_there(paths.result):
            if is_there(paths.failure):
                raise reraise(read_record(paths.failure, EvalFailure).failure)
            if code == Interrupted.exit_code:
                problem = f"the evaluation was stopped; its answers so far are kept. {log_tail(run.log)}"
                raise Interrupted(problem, "give the same command again")
            problem = f"the evaluation ended with code {code}, which is a fault of finefit. {log_tail(run.log)}"
            raise FinefitError(problem, "please report it with these lines")
        result = read_record(paths.result, EvalResult)
    if evaluation.limit is None and paths.earlier.exists():
        shutil.rmtree(paths.earlier)
    note_scores(where, result)
    return result


def _write_known_answers(
    where: StageDir, paths: EvalPaths, request: EvalRequest, limits: "BatchLimits | None", answers: Sequence[str] | None
) -> EvalRequest:
    """Writes answers that come from elsewhere, or from another task. Returns the request with its batch limit, which
    takes a rehearsal, if anything is left to generate."""
    is_own = answers is not None or isinstance(request.evaluation.task, LmEval)
    taken = {} if is_own else answers_of_other_tasks(where, request)
    if answers is None and not taken:
        request = request if limits is None else replace(request, batch_limit=limits.find(request))
        _set_others_aside(where, paths, request)
        return request
    rows = eval_rows.rows_of(RunDir(where.run), request.subject)
    task = make_task(request.evaluation, form=request.subject.form, base=paths.folder, run=where.run)
    asked = [at for at, row in enumerate(rows) if is_asked(row, request.evaluation.sources)]
    chosen = sample(rows, request.evaluation.limit, among=asked)
    taken = {at: taken[at] for at in chosen if at in taken} if needs_only_answers(task, rows) else {}
    if answers is None and limits is not None and len(taken) < len(chosen):
        request = replace(request, batch_limit=limits.find(request))
    _set_others_aside(where, paths, request)
    if answers is not None:
        eval_rows.write_answers(task, request, paths, answers, rows)
    elif taken:
        write_record(paths.request, request)  # first: items that a kill leaves behind are identified by their request
        write_taken(where, paths, task, rows, taken)
    return request


def _set_others_aside(where: StageDir, paths: EvalPaths, request: EvalRequest) -> None:
    """Answers to another request, or of another version, are generated again; with another judge, existing answers are
    kept."""
    for earlier in where.evaluations():
        if (earlier.folder, earlier.checkpoint) != (paths.folder, request.checkpoint):
            continue
        asked, is_scored = read_or_none(earlier.request, EvalRequest), earlier.result.exists()
        is_broken = is_scored and read_or_none(earlier.result, EvalResult) is None
        if asked is None or _deciding(asked) != _deciding(request) or is_broken:
            earlier.set_aside()
        elif earlier.limit == paths.limit and is_scored:
            earlier.set_aside(with_answers=False)


def _versions(evaluation: Evaluation) -> dict[str, str]:
    """Returns the versions that an answer depends on. A server's answers do not depend on the packages here."""
    found = made_with()
    return found if evaluation.server is None else {"finefit": found["finefit"]}


def _deciding(request: EvalRequest) -> tuple[Evaluation, Subject, str | None, dict[str, str]]:
    """Returns everything that decides an answer. A task file counts by its content."""
    return _deciding_settings(request.evaluation), request.subject, request.task_sha256, request.made_with


def _deciding_settings(evaluation: Evaluation) -> Evaluation:
    """A sample and a smaller batch give the same answers, a judge only reads them, and a server is part of the subject,
    so these settings are equalised."""
    same = {"limit": None, "base": True, "batch": "auto", "checkpoints": "final", "name": None, "judge": None}
    same |= {"server": None}
    return without_paths(evaluation).model_copy(update=same)


def label_apart(run: RunDir, requests: Sequence[EvalRequest], rows: EvalRows) -> tuple[EvalRequest, ...]:
    """Gives each request a label of its own if it differs from what the label stands for in the run's spec or in
    existing scores: other rows, another device or other settings never overwrite a run's own scores."""
    where = stage_of(run)
    own_device = eval_subjects.run_subject(where, "base").device
    declared = read_record(where.stage, Stage).evaluate if is_there(where.stage) else ()
    found: dict[tuple[str, str], EvalRequest] = {}
    for request in requests:
        one = request.evaluation
        suffixes = [rows.suffix, "" if request.subject.device == own_device else request.subject.device]
        one = _relabelled(one, one.label, "".join(f"-on-{suffix}" for suffix in suffixes if suffix))
        known = [other for other in declared if other.label == one.label]
        if not known:
            scored = [paths.request for paths in where.evaluations() if paths.folder.name == one.label]
            known = [earlier.evaluation for path in scored if (earlier := read_or_none(path, EvalRequest)) is not None]
        settings = _deciding_settings(one)
        if known and settings not in map(_deciding_settings, known):
            digest = sha256(settings.model_dump_json().encode()).hexdigest()[:8]
            one = _relabelled(one, _OTHER_SETTINGS.sub("", one.label), f"-with-{digest}")
        found[one.label, request.checkpoint] = replace(request, evaluation=one)
    return tuple(found.values())


def _relabelled(evaluation: Evaluation, label: str, end: str) -> Evaluation:
    return evaluation.model_copy(update={"name": f"{label[: _MAX_LABEL - len(end)]}{end}"}) if end else evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How many answers fit at a time: on a CPU as the run was planned, on a GPU by the memory that is free now."""

    run: RunDir
    rows: EvalRows
    as_planned: bool = False
    """Use the planned limits on a GPU too, because the training that they were planned with has just ended."""
    known: dict[str, EvalBatchLimit] = field(default_factory=dict)

    def find(self, request: EvalRequest) -> EvalBatchLimit:
        subject, evaluation, where = request.subject, request.evaluation, stage_of(self.run)
        if evaluation.server is not None:
            return NOT_PLANNED
        if is_there(where.stage) and (self.as_planned or subject.device == "cpu"):
            stage, needs = read_record(where.stage, Stage), attrgetter("label", "batch", "max_new_tokens", "task")
            if needs(evaluation) in map(needs, stage.evaluate) and evaluation.label in stage.eval_limits:
                return stage.eval_limits[evaluation.label]
        key = f"{evaluation.model_copy(update={'limit': None})} {subject.device} {subject.tuning}"
        if key not in self.known:
            tokens, grids = self.rows.prompt_tokens, self.rows.prompt_grids
            found = eval_limits_here(subject, self.run.path, (evaluation,), tokens, grids)
            self.known[key] = found[evaluation.label]
        return self.known[key]


def note_scores(where: StageDir, result: EvalResult) -> None:
    """Writes the lines that trackers receive: scores with their intervals, and a few answers. A line that is missing
    because the process was killed after the result is written later."""
    scores = _score_values(result.task, result.metrics)
    for dataset, part in result.by_dataset.items():
        scores |= _score_values(f"{result.task}/{_NO_TRACKER_NAME.sub('-', dataset)}", part.metrics)
    samples = [
        {"prompt": item.prompt, "answer": item.answer, "reference": item.reference, "scores": item.scores}
        for item in result.items[:: max(1, len(result.items) // _NUM_SAMPLES)][:_NUM_SAMPLES]
    ]
    step = step_named(result.checkpoint) or 0
    about = {"event": "scored", "step": step, "checkpoint": result.checkpoint, "task": result.task}
    event = {**about, **scores, f"{result.task}/coverage": result.coverage, "samples": samples}
    wanted = json.dumps(event)  # as text, since NaN is not equal to itself
    if not any(json.dumps(line) == wanted for line in read_lines(where.evals)):
        with Journal(where.evals) as journal:
            journal.write(**event)


def _score_values(prefix: str, metrics: Mapping[str, Score]) -> dict[str, float]:
    ends = {"": "value", "_low": "low", "_high": "high"}
    return {f"{prefix}/{name}{end}": getattr(metrics[name], key) for name in metrics for end, key in ends.items()}


@contextmanager
def track_scores(where: StageDir, say: Say) -> Iterator[None]:
    """Sends scores to the trackers after the `with` block, however it ends, each tracker in a separate process."""
    before = where.evals.stat().st_size if where.evals.exists() else 0

    def failed(*, tracker: str, found: str, **_: object) -> None:
        say(f"{tracker} did not receive all scores: {found}; the run directory has all of them")

    try:
        yield
    finally:
        trackers = read_record(where.stage, Stage).trackers if is_there(where.stage) else ()
        if trackers and where.evals.exists() and where.evals.stat().st_size > before:
            with Tracking(where, trackers, failed, lines=where.evals, offset=before):
                pass


def status_after(error: FinefitError) -> Literal["stopped", "failed"]:
    return "stopped" if error.exit_code == Resumable.exit_code else "failed"


@contextmanager
def recording_status(run: RunDir) -> Iterator[None]:
    """A run that only evaluates has the status of its last command; the status of a training run does not change."""
    record = read_record(run.run, Run)
    if record.kind == "train":
        yield
        return
    write_record(run.run, replace(record, status="running", failure=None))
    try:
        yield
    except BaseException as error:
        reason = FinefitError(f"a fault of finefit: {type(error).__name__}: {error}", "please report it")
        if isinstance(error, FinefitError):
            reason = error
        elif isinstance(error, KeyboardInterrupt):
            reason = Interrupted("interrupted", "give the same command again")
        write_record(run.run, replace(record, status=status_after(reason), failure=Failure.of(reason)))
        raise
    write_record(run.run, replace(record, status="finished", failure=None))


def open_evaluation(args: EvalArgs) -> EvalRequests:
    server = None if args.server is None else server_of(args)
    if args.target is not None:
        target = Path(args.target)
        found = find_run(target) if ":" not in args.target or target.is_dir() else target
        if is_run(found) or models_of(found):  # opening a folder of several models reports the error
            return _requests(open_run(target), args, server)
    elif args.answers is None and server is None:
        others = "or give existing answers with --answers FILE, or a server with --server URL"
        raise RunError("there is nothing to score", f"name {FORMS}; {others}")
    if args.target is not None:
        eval_subjects.refuse_what_has_not_run(args.target, args.runs)
    # a run has its own rows and tasks; a model has neither
    if missing := [name for name, value in (("--data FILE", args.data), ("--task NAME", args.tasks)) if not value]:
        nothing = "a file of answers knows" if server is None else "a server knows"
        known = f"{args.target} is not a run directory, and a model knows" if args.target else nothing
        problem = f"{known} neither rows nor tasks: give {' and '.join(missing)}"
        raise RunError(problem, f"name {FORMS}; for instance with --data test.jsonl --task rouge")
    named_evaluations(args.tasks)  # before anything slow: a misspelt task is reported at once
    assert args.data is not None
    if args.target is None and server is not None:
        run = eval_subjects.open_server_run(server, args.data, runs=args.runs)
        return _requests(run, replace(args, data=None), server)
    if args.target is None:
        assert args.answers is not None
        run = eval_subjects.open_answers_run(args.answers, args.data, runs=args.runs)
        return _requests(run, replace(args, data=None))
    external = find_external_model(args.target, base=args.base)
    run = eval_subjects.open_model_run(external, args.data, device=args.device, runs=args.runs)
    return _requests(run, replace(args, device=None, data=None, base=None), server)


def _requests(run: RunDir, args: EvalArgs, server: Server | None = None) -> EvalRequests:
    if args.base is not None:
        raise RunError("--base is for adapters, but a run knows its model", "leave it out")
    rows = eval_rows.own_rows(run) if args.data is None else eval_rows.other_rows(run, args.data)
    known = declared_by(run, is_all=not args.tasks)
    evaluations = evaluations_of(run, named_evaluations(args.tasks, known), rows=rows)
    option = "--data" if args.data is not None else "--answers"
    bringing = [one.label for one in evaluations if isinstance(one.task, LmEval)]
    if bringing and (args.data is not None or args.answers is not None):
        # the spec's lm-eval tasks, which bring their own items, are skipped; naming one is an error
        if args.tasks or len(bringing) == len(evaluations):
            problem = f"lm_eval brings its own items, so {option} does not apply to {', '.join(bringing)}"
            raise RunError(problem, f"leave {option} out, or name another task")
        evaluations = [one for one in evaluations if one.label not in bringing]
    options = {"limit": args.limit, "max_new_tokens": args.max_new_tokens, "batch": args.batch}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if server is not None:
        given["server"] = server
        _require_answers_alone(evaluations)
    evaluations = [one.model_copy(update=given) for one in evaluations]
    answers = None
    if args.answers is None:
        names = eval_subjects.checkpoints_of(run, args.checkpoint)
        asked = [(one, name) for one in evaluations for name in (names if one.server is None else names[:1])]
        requests = [request_of(run, name, one, device=args.device, rows=rows) for one, name in asked]
    else:
        subject = replace(eval_subjects.run_subject(stage_of(run), "base"), items=rows.file, items_sha256=rows.sha256)
        read = eval_rows.read_answers(args.answers, subject.form)
        answers = tuple(eval_rows.align_answers(read, eval_rows.rows_of(run, subject)))
        # the author of the answers is unknown, so their file identifies them
        name, digest = f"answers of {args.answers.name}", sha256_of(args.answers)
        subject = replace(eval_subjects.without_model(subject, name, digest), tuning=Full(kind="full"))
        request = partial(EvalRequest, checkpoint=eval_rows.answers_name(args.answers), batch_limit=NOT_PLANNED)
        requests = [request(evaluation=one, subject=subject) for one in evaluations]
    warned = eval_rows.require_readable(run, requests[0].subject, evaluations)
    labelled = label_apart(run, requests, rows)
    return EvalRequests(run=run, requests=labelled, rows=rows, answers=answers, warnings=warned)


def _require_answers_alone(evaluations: Sequence[Evaluation]) -> None:
    if others := [one.label for one in evaluations if isinstance(one.task, WITH_LIKELIHOODS)]:
        problem = f"{', '.join(others)} needs likelihoods of given answers, which a server does not give"
        raise SpecError(problem, "name tasks that read an answer with --task")


def evaluations_of(run: RunDir, named: Iterable[Evaluation] = (), *, rows: EvalRows | None = None) -> list[Evaluation]:
    """Returns the named evaluations, or else those of the spec. `rows`: replaces the run's own."""
    found = list(named) or declared_by(run)
    if not found:
        raise RunError(f"the spec of {run.path.name} names no task", "name one with --task")
    needing = [one.label for one in found if not isinstance(one.task, LmEval)]
    if needing and (rows or eval_rows.own_rows(run)).sha256 == eval_rows.NO_ITEMS:
        remedy = "name them with --data FILE, or in the spec with data.test and run again with --new"
        raise RunError(f"{run.path.name} has no test rows to answer for {', '.join(needing)}", remedy)
    return found


def declared_by(run: RunDir, *, is_all: bool = True) -> list[Evaluation]:
    """In the spec of a run; for a run that only evaluates, what it was asked before. `is_all`: a damaged request is an
    error, since its task would be left out."""
    where = stage_of(run)
    if not is_there(where.eval_stage):
        return list(read_record(where.stage, Stage).evaluate)
    found: dict[str, Evaluation] = {}
    same: dict[str, Any] = {"limit": None}
    if not isinstance(read_record(where.eval_stage, EvalStage).subject.model, ShapeModel):
        same["server"] = None  # it was asked beside the model that this run is of
    for paths in where.evaluations():
        if (request := (read_if_there if is_all else read_or_none)(paths.request, EvalRequest)) is not None:
            copied = with_absolute_paths(request.evaluation, paths.folder)
            found[copied.label] = copied.model_copy(update=same)
    return list(found.values())
