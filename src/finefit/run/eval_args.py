"""The arguments of `finefit eval` become requests: whose answers, on which rows, by which tasks."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, find_run, is_run, models_of, open_run, stage_of
from finefit.artifacts.stage_records import EvalRequest, Stage
from finefit.errors import RunError, SpecError
from finefit.evaluate.external_model import FORMS, find_external_model
from finefit.run.eval_rows import NO_ITEMS, EvalRows, other_rows, own_rows, require_readable, rows_of
from finefit.run.eval_subjects import Device, checkpoints_of, open_answers_run, open_model_run, run_subject
from finefit.run.evaluation import NOT_PLANNED, EvalRequests, label_apart, read_request, request_of
from finefit.run.external_answers import align_answers, answers_name, answers_subject, read_answers
from finefit.spec.reader import Reader, schema_problems
from finefit.spec.schema import Evaluation
from finefit.spec.stages import moved
from finefit.spec.tasks import LmEval, task_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArgs:
    target: str | None
    checkpoint: str = "final"
    tasks: tuple[str, ...] = ()
    data: str | None = None
    limit: int | None = None
    device: Device | None = None
    base: str | None = None
    max_new_tokens: int | None = None
    batch: int | None = None
    answers: Path | None = None
    runs: Path = Path("runs")


def open_evaluation(args: EvalArgs) -> EvalRequests:
    if args.target is not None and _names_a_run(Path(args.target)):
        return _requests(open_run(Path(args.target)), args)
    _require_rows_and_tasks(args)
    named_evaluations(args.tasks)  # before anything slow: a misspelt task is reported at once
    assert args.data is not None
    if args.target is None:
        assert args.answers is not None
        run = open_answers_run(args.answers, args.data, runs=args.runs)
        return _requests(run, replace(args, data=None))
    external = find_external_model(args.target, base=args.base)
    run = open_model_run(external, args.data, device=args.device, runs=args.runs)
    return _requests(run, replace(args, device=None, data=None, base=None))


def _names_a_run(target: Path) -> bool:
    """A run directory or a stage of a pipeline; a folder of several models is refused where it is opened."""
    found = find_run(target) if ":" not in str(target) or target.is_dir() else target
    return is_run(found) or bool(models_of(found))


def _require_rows_and_tasks(args: EvalArgs) -> None:
    """A run knows its rows and its tasks; a model knows neither."""
    if args.target is None and args.answers is None:
        raise RunError("there is nothing to score", f"name {FORMS}; or give answers that exist with --answers FILE")
    missing = [name for name, value in (("--data FILE", args.data), ("--task NAME", args.tasks)) if not value]
    if missing:
        known = f"{args.target} is not a run directory, and a model knows" if args.target else "a file of answers knows"
        problem = f"{known} neither rows nor tasks: give {' and '.join(missing)}"
        raise RunError(problem, f"name {FORMS}; for instance with --data test.jsonl --task rouge")


def _requests(run: RunDir, args: EvalArgs) -> EvalRequests:
    if args.base is not None:
        raise RunError("--base is for adapters, and a run knows its model", "leave it out")
    rows = own_rows(run) if args.data is None else other_rows(run, args.data)
    named = named_evaluations(args.tasks, declared_by(run))
    evaluations = _with_options(_without_own_items(evaluations_of(run, named, rows=rows), args), args)
    if args.answers is not None:
        subject = replace(run_subject(stage_of(run), "base"), items=rows.file, items_sha256=rows.sha256)
        answers = tuple(align_answers(read_answers(args.answers, subject.form), rows_of(run, subject)))
        subject, name = answers_subject(args.answers, subject), answers_name(args.answers)
        requests = [
            EvalRequest(checkpoint=name, evaluation=one, subject=subject, batch_limit=NOT_PLANNED)
            for one in evaluations
        ]
    else:
        names, answers = checkpoints_of(run, args.checkpoint), None
        requests = [request_of(run, name, one, device=args.device, rows=rows) for one in evaluations for name in names]
    require_readable(run, requests[0].subject, evaluations)
    return EvalRequests(run=run, requests=label_apart(run, requests, rows), rows=rows, answers=answers)


def evaluations_of(run: RunDir, named: Iterable[Evaluation] = (), *, rows: EvalRows | None = None) -> list[Evaluation]:
    """Those that are named, or else those of the spec. `rows`: others than the run's own."""
    found = list(named) or declared_by(run)
    if not found:
        raise RunError(f"the spec of {run.path.name} names no task", "name one with --task")
    needing = [one.label for one in found if not isinstance(one.task, LmEval)]
    if needing and (rows or own_rows(run)).sha256 == NO_ITEMS:
        remedy = "name them with --data FILE, or in the spec with data.test and run again with --new"
        raise RunError(f"{run.path.name} has no test rows to answer for {', '.join(needing)}", remedy)
    return found


def declared_by(run: RunDir) -> list[Evaluation]:
    """In the spec of a run; for a run that only evaluates, what it was asked before."""
    where = stage_of(run)
    if not where.eval_stage.exists():
        return list(read_record(where.stage, Stage).evaluate)
    found: dict[str, Evaluation] = {}
    for paths in where.evaluations():
        if (request := read_request(paths.request)) is not None:
            copied = _absolute(request.evaluation, paths.folder)
            found[copied.label] = copied.model_copy(update={"limit": None})
    return list(found.values())


def _without_own_items(chosen: list[Evaluation], args: EvalArgs) -> list[Evaluation]:
    """With --data or --answers the spec's lm-eval tasks, which bring their own items, are left out; naming one is an
    error."""
    option = "--data" if args.data is not None else "--answers"
    bringing = [one.label for one in chosen if isinstance(one.task, LmEval)]
    if not bringing or (args.data is None and args.answers is None):
        return chosen
    if args.tasks or len(bringing) == len(chosen):
        problem = f"lm_eval brings its own items, so {option} does not apply to {', '.join(bringing)}"
        raise RunError(problem, f"leave {option} out, or name another task")
    return [one for one in chosen if one.label not in bringing]


def _with_options(evaluations: list[Evaluation], args: EvalArgs) -> list[Evaluation]:
    options = {"limit": args.limit, "max_new_tokens": args.max_new_tokens, "batch": args.batch}
    given = {key: value for key, value in options.items() if value is not None}
    return [one.model_copy(update=given) for one in evaluations]


# Tasks in words


def named_evaluations(asked: Iterable[str], declared: Iterable[Evaluation] = ()) -> list[Evaluation]:
    """Each is a task's name, a label of the spec, a mapping in YAML, or a file: `.yaml` with one or several
    evaluations, `.py` with a user's own task. The paths returned are absolute, or start where those of `declared`
    do."""
    known = {evaluation.label: evaluation for evaluation in declared}
    found = [one for text in asked for one in ([known[text]] if text in known else _read(text))]
    labels = [evaluation.label for evaluation in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        remedy = "give them a name each: --task '{name: ..., task: ...}'"
        raise SpecError(f"two tasks are called {', '.join(twice)}", remedy)
    return found


def _read(text: str) -> list[Evaluation]:
    path = Path(text)
    if path.suffix == ".py":
        return [_validated({"task": {"kind": "python", "path": str(path.resolve())}}, text)]
    if path.suffix not in (".yaml", ".yml"):
        return [_absolute(one, Path()) for one in _parsed(text, text)]
    if not path.is_file():
        raise SpecError(f"--task {text}: there is no such file", f"name a file, or one of {', '.join(task_kinds())}")
    return [_absolute(one, path.parent) for one in _parsed(path.read_text(encoding="utf-8"), text)]


def _parsed(text: str, where: str) -> list[Evaluation]:
    reader = Reader(text, lambda line: (line, f"--task {where}:{line}" if "\n" in text else f"--task {where}"))
    value = reader.read()
    if reader.problems:
        remedy = "quote it as one argument: --task '{kind: rouge, stemmer: false}'"
        raise SpecError("\n".join(str(fault) for fault in reader.problems), remedy)
    values = value if isinstance(value, list) else [value]  # a task alone is an evaluation without other settings
    return [_validated(one if isinstance(one, dict) and "task" in one else {"task": one}, where) for one in values]


def _validated(value: Any, where: str) -> Evaluation:
    try:
        return Evaluation.model_validate_json(json.dumps(value))
    except ValidationError as error:
        if isinstance(value["task"], str) and value["task"] not in task_kinds():
            remedy = f"there are {', '.join(task_kinds())}; or a .yaml or .py file of your own"
            raise SpecError(f"there is no task {value['task']}", remedy) from None
        faults = schema_problems(error.errors(), {(): (1, f"--task {where}")}, Evaluation)
        raise SpecError("\n".join(map(str, faults)), "docs/spec.md has the tasks and their keys") from None


def _absolute(evaluation: Evaluation, base: Path) -> Evaluation:
    return moved(evaluation, lambda path: str((base / path).resolve()))
