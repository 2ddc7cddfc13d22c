"""An evaluation: a request, a process that answers it, a result. What is scored already is not scored again; a killed one goes on at its next
item."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from finefit.artifacts.checkpoint import MANIFEST, list_checkpoints, step_named
from finefit.artifacts.evaluations import EvalFailure, EvalItem, EvalRequest, EvalResult, EvalStage, Score, Subject
from finefit.artifacts.forecasts import Plan, Room
from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.records import read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir
from finefit.artifacts.trainings import Stage
from finefit.errors import FinefitError, Interrupted, RunError
from finefit.evaluate.versions import made_with
from finefit.facts.files import read_file
from finefit.pipeline.create import stage_of
from finefit.pipeline.forecasting import Grids, rooms_here
from finefit.pipeline.launch import last_words, launch, raised_again
from finefit.pipeline.taskfiles import moved_task, take_task_file, task_sha256, without_paths
from finefit.plan.resolve import precision_on
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import LmEval
from finefit.train.tracking import Tracking

Tick = Callable[[], None]
Say = Callable[[str], None]
Size = Callable[[EvalRequest], Room]
Fill = Callable[[EvalRequest, EvalPaths], None]
Device = Literal["cpu", "cuda"]
ALIASES = ("final", "best")
NO_ITEMS = sha256(b"").hexdigest()
"""Of the items of a run that has none; tasks of lm-eval bring their own."""
_SAMPLES = 3
_APART = re.compile(r"-with-[0-9a-f]{8}$")
_LONGEST_LABEL = 64
_UNTOLD = re.compile(r"[^\w.-]+", re.ASCII)
"""What some trackers take in no name."""
_LONGEST_PROMPT = 4096
"""Of a run that was planned without a forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """What is to be answered: a file among the prepared ones."""

    file: str
    sha256: str
    suffix: str
    """Of the labels of its evaluations: scores of other rows are other scores."""
    prompt_tokens: int
    prompt_grids: Grids = ()


def evaluate(
    run: RunDir,
    request: EvalRequest,
    *,
    base: Path,
    lock: int,
    tick: Tick,
    size: Size | None = None,
    fill: Fill | None = None,
) -> EvalResult:
    """Answers a request in a process of its own. `base`: where the path of a task file of the user's own starts. `size` finds the room for it, `fill`
    writes down what is answered already."""
    where, evaluation = stage_of(run), request.evaluation
    request = replace(request, task_sha256=task_sha256(evaluation, base), made_with=made_with())
    paths = where.evaluation(evaluation.label, request.checkpoint, evaluation.limit)
    if not _is_scored(paths, request):
        paths.folder.mkdir(parents=True, exist_ok=True)
        request = replace(request, evaluation=take_task_file(evaluation, base, paths.folder))
        if size is not None:
            request = replace(request, room=size(request))
        _set_others_aside(where, paths, request)
        if fill is not None:
            fill(request, paths)
        write_record(paths.request, request)  # also when it is the old one: its time says which evaluation is in hand
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


def note_scores(where: StageDir, result: EvalResult) -> None:
    """For the trackers, which are fed from lines."""
    with Journal(where.evals) as journal:
        journal.write(**_noted(result))


def _is_noted(where: StageDir, result: EvalResult) -> bool:
    """A command that was killed may have left a record alone."""
    wanted = json.dumps(_noted(result))  # as text, for what is not finite is not equal to itself
    return any(json.dumps(line) == wanted for line in read_lines(where.evals))


def _noted(result: EvalResult) -> dict[str, Any]:
    """Scores with their intervals, and a few answers."""
    scores = _told(result.task, result.metrics) | {
        name: value
        for dataset, part in result.by_dataset.items()
        for name, value in _told(f"{result.task}/{_UNTOLD.sub('-', dataset)}", part.metrics).items()
    }
    samples = [
        {"prompt": item.prompt, "answer": item.answer, "reference": item.reference, "scores": item.scores}
        for item in spaced(result.items)
    ]
    about = {
        "event": "scored",
        "step": step_named(result.checkpoint) or 0,
        "checkpoint": result.checkpoint,
        "task": result.task,
    }
    return {**about, **scores, f"{result.task}/coverage": result.coverage, "samples": samples}


def _told(prefix: str, metrics: Mapping[str, Score]) -> dict[str, float]:
    return {f"{prefix}/{name}{end}": value for name, score in metrics.items() for end, value in _ends(score)}


def _ends(score: Score) -> tuple[tuple[str, float], ...]:
    return (("", score.value), ("_low", score.low), ("_high", score.high))


def spaced(items: Sequence[EvalItem], most: int = _SAMPLES) -> list[EvalItem]:
    """Evenly spaced, not chosen."""
    return list(items[:: max(1, len(items) // most)][:most])


@contextmanager
def scores_told(where: StageDir, say: Say) -> Iterator[None]:
    """What is scored in the `with` block reaches the trackers of the run after it, however it ends, each in a process of its own; the scores are
    safe here."""
    before = where.evals.stat().st_size if where.evals.exists() else 0
    try:
        yield
    finally:
        _tell_from(where, before, say)


def _tell_from(where: StageDir, before: int, say: Say) -> None:
    trackers = read_record(where.stage, Stage).trackers if where.stage.exists() else ()
    if trackers and where.evals.exists() and where.evals.stat().st_size > before:
        with Tracking(where, trackers, partial(_not_told, say), lines=where.evals, offset=before):
            pass


def _not_told(say: Say, *, tracker: str, found: str, **_: object) -> None:
    say(f"{tracker} did not get all scores: {found}; they are whole in the run directory")


def _is_scored(paths: EvalPaths, request: EvalRequest) -> bool:
    earlier = _readable(paths.request) if paths.request.exists() and paths.result.exists() else None
    if earlier is None or not _is_readable(paths.result):
        return False
    return (_asks(earlier), earlier.evaluation.judge) == (_asks(request), request.evaluation.judge)


def _set_others_aside(where: StageDir, paths: EvalPaths, request: EvalRequest) -> None:
    """What was asked in another way, or recorded by another version, is asked anew; where only the judge is another, its answers are taken."""
    for earlier in where.evaluations():
        if (earlier.folder, earlier.checkpoint) != (paths.folder, request.checkpoint):
            continue
        asked = _readable(earlier.request)
        if asked is None or _asks(asked) != _asks(request) or not _is_readable(earlier.result):
            earlier.set_aside()
        elif earlier.limit == paths.limit and earlier.result.exists():
            earlier.set_result_aside()


def _is_readable(result: Path) -> bool:
    """One that is not there yet will be."""
    try:
        return not result.exists() or read_record(result, EvalResult) is not None
    except RunError:
        return False


def _asks(request: EvalRequest) -> tuple[Evaluation, Subject, str | None, dict[str, str]]:
    """What decides an answer. A task file counts by its content."""
    return _deciding(request.evaluation), request.subject, request.task_sha256, request.made_with


def _deciding(evaluation: Evaluation) -> Evaluation:
    """A sample of the items asks them the same way as all of them, and so do fewer at a time; a judge reads what is answered."""
    same = {"limit": None, "base": True, "batch": "auto", "checkpoints": "final", "name": None, "judge": None}
    return without_paths(evaluation).model_copy(update=same)


def _no_result(failure: Path, code: int, log: Path) -> FinefitError:
    if failure.exists():
        return raised_again(read_record(failure, EvalFailure).failure)
    if code == Interrupted.exit_code:
        return Interrupted(
            f"the evaluation was stopped; its answers so far are kept. {last_words(log)}", "give the same command again"
        )
    return FinefitError(
        f"the evaluation ended with code {code}, which is a fault of finefit. {last_words(log)}",
        "please report it with these lines",
    )


# of a run


def request_of(
    run: RunDir, checkpoint: str, evaluation: Evaluation, *, device: Device | None = None, items: Items | None = None
) -> EvalRequest:
    """`device`: another one than that of the training. `items`: others than the run's own test rows."""
    where = stage_of(run)
    name = resolve_checkpoint(where, checkpoint)
    subject = _subject_on(subject_of(where, name), device)
    if items is not None:
        subject = replace(subject, items=items.file, items_sha256=items.sha256)
    return EvalRequest(checkpoint=name, evaluation=evaluation, subject=subject, room=Room(rows=1, tokens=1))


def subject_of(where: StageDir, checkpoint: str) -> Subject:
    if where.eval_stage.exists():
        return read_record(where.eval_stage, EvalStage).subject
    stage, is_base = read_record(where.stage, Stage), checkpoint == "base"
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
        images=stage.images,
        max_prompt_tokens=stage.max_prompt_tokens,
        form=stage.form,
        items_sha256=stage.prepared.get("test.jsonl", NO_ITEMS),
    )


def _subject_on(subject: Subject, device: Device | None) -> Subject:
    if device is None or device == subject.device:
        return subject
    return replace(subject, device=device, precision=precision_on(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """As many answers at a time as there is room for: on a processor as the run was planned, on a card by what is free now."""

    run: RunDir
    prompt_tokens: int
    prompt_grids: Grids = ()
    """Of the prompt that shows most."""
    as_planned: bool = False
    """On a card too: when the training that it was planned with has just ended."""
    known: dict[str, Room] = field(default_factory=dict)

    def find(self, request: EvalRequest) -> Room:
        subject, evaluation = request.subject, request.evaluation
        planned = self._planned(evaluation) if self.as_planned or subject.device == "cpu" else None
        if planned is not None:
            return planned
        key = f"{evaluation.model_copy(update={'limit': None})} {subject.device} {subject.tuning}"
        if key not in self.known:
            found = rooms_here(subject, self.run.path, (evaluation,), self.prompt_tokens, self.prompt_grids)
            self.known[key] = found[evaluation.label]
        return self.known[key]

    def _planned(self, evaluation: Evaluation) -> Room | None:
        """As long as it is asked for as it was then."""
        where = stage_of(self.run)
        stage = read_record(where.stage, Stage) if where.stage.exists() else None
        if stage is None or _needs(evaluation) not in [_needs(declared) for declared in stage.evaluate]:
            return None
        return stage.rooms.get(evaluation.label)


def _needs(evaluation: Evaluation) -> tuple[object, ...]:
    return evaluation.label, evaluation.batch, evaluation.max_new_tokens, evaluation.task


def prompt_tokens_of(run: RunDir) -> int:
    """Of the longest prompt among the test rows, as the plan knows it; where it does not, as long as a row may be."""
    where = stage_of(run)
    if where.eval_stage.exists():
        return read_record(where.eval_stage, EvalStage).prompt_tokens
    lengths = [forecast.lengths for forecast in read_record(run.plan, Plan).forecasts.values()]
    return max((found.prompt or found.longest for found in lengths), default=_LONGEST_PROMPT)


def prompt_grids_of(run: RunDir) -> Grids:
    """Of the images of the test row that shows most, in the same way."""
    where = stage_of(run)
    if where.eval_stage.exists():
        return read_record(where.eval_stage, EvalStage).prompt_grids
    lengths = [forecast.lengths for forecast in read_record(run.plan, Plan).forecasts.values()]
    return next((found.grids if found.prompt is None else found.prompt_grids for found in lengths), ())


def evaluations_of(run: RunDir, chosen: Iterable[Evaluation] = (), *, has_items: bool = False) -> list[Evaluation]:
    """Those that are named, or those of the spec. `has_items`: others than the run's own are given."""
    named = list(chosen)
    found = named or declared_by(run)
    if not found:
        raise RunError(f"the spec of {run.path.name} names no task", "name one with --task")
    needing = [e.label for e in found if not isinstance(e.task, LmEval)]
    if needing and not has_items and subject_of(stage_of(run), "base").items_sha256 == NO_ITEMS:
        remedy = "name them with --data FILE, or in the spec with data.test and run again with --new"
        raise RunError(f"{run.path.name} has no test rows to answer for {', '.join(needing)}", remedy)
    return found


def declared_by(run: RunDir) -> list[Evaluation]:
    """By the spec of a run; of one that only evaluates, what it was asked before."""
    where = stage_of(run)
    if not where.eval_stage.exists():
        return list(read_record(where.stage, Stage).evaluate)
    found = {}
    for paths in where.evaluations():
        if (request := _readable(paths.request)) is not None:
            copied = moved_task(request.evaluation, lambda path, folder=paths.folder: str((folder / path).resolve()))  # type: ignore[misc]
            found[copied.label] = copied.model_copy(update={"limit": None})
    return list(found.values())


def _readable(path: Path) -> EvalRequest | None:
    try:
        return read_record(path, EvalRequest)
    except RunError:
        return None


def checkpoints_of(run: RunDir, asked: str) -> list[str]:
    """`all` is the base and every checkpoint that is kept."""
    where = stage_of(run)
    if where.eval_stage.exists():
        return [read_record(where.eval_stage, EvalStage).name]
    if asked == "all":
        return ["base", *(p.name for p in list_checkpoints(where.checkpoints))]
    return [resolve_checkpoint(where, asked)]


def resolve_checkpoint(where: StageDir, checkpoint: str) -> str:
    """`final` and `best` become the checkpoint that they name."""
    if checkpoint == "base" or where.eval_stage.exists():
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


def at_the_end(run: RunDir, *, lock: int, tick: Tick, say: Say) -> None:
    """The evaluations that a run's spec asks for, when it is trained."""
    with scores_told(stage_of(run), say):
        _score_all(run, lock, tick)


def _score_all(run: RunDir, lock: int, tick: Tick) -> None:
    stage = read_record(stage_of(run).stage, Stage)
    rooms = Rooms(run=run, prompt_tokens=prompt_tokens_of(run), prompt_grids=prompt_grids_of(run), as_planned=True)
    for evaluation in stage.evaluate:
        names = (
            checkpoints_of(run, "all") if evaluation.checkpoints == "all" else ["base", *checkpoints_of(run, "final")]
        )
        for name in (name for name in names if evaluation.base or name != "base"):
            evaluate(run, request_of(run, name, evaluation), base=run.path, lock=lock, tick=tick, size=rooms.find)


def relabelled(evaluation: Evaluation, *suffixes: str) -> Evaluation:
    """The same evaluation of other rows, or on another device, is filed apart: nothing of the run's own scores is overwritten."""
    return _ending(evaluation, evaluation.label, "".join(f"-on-{suffix}" for suffix in suffixes))


def filed_apart(run: RunDir, evaluation: Evaluation) -> Evaluation:
    """Settings that decide answers, and are others than those of the spec, or of what is scored already, under the same label: a trial overwrites
    nothing."""
    known, settings = _settings_of(run, evaluation.label), _deciding(evaluation)
    if not known or settings in known:
        return evaluation
    digest = sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    return _ending(evaluation, _APART.sub("", evaluation.label), f"-with-{digest}")


def _ending(evaluation: Evaluation, label: str, end: str) -> Evaluation:
    return evaluation.model_copy(update={"name": f"{label[: _LONGEST_LABEL - len(end)]}{end}"})


def _settings_of(run: RunDir, label: str) -> list[Evaluation]:
    where = stage_of(run)
    declared = read_record(where.stage, Stage).evaluate if where.stage.exists() else ()
    if named := [_deciding(evaluation) for evaluation in declared if evaluation.label == label]:
        return named
    requests = [_readable(paths.request) for paths in where.evaluations() if paths.folder.name == label]
    return [_deciding(request.evaluation) for request in requests if request is not None]
