"""`finefit eval`: whose answers, to which items, by which tasks; then one evaluation after another."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from finefit import __version__
from finefit.artifacts.evaluations import EvalRequest, EvalResult, EvalStage, Subject
from finefit.artifacts.forecasts import Room
from finefit.artifacts.lock import run_lock
from finefit.artifacts.records import Failure, Run, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, find_run, is_run, newest_with_digest, open_run
from finefit.artifacts.stages import models_of
from finefit.data.items import item_line, read_items
from finefit.data.looking import OwnEye, PictureKeeper
from finefit.data.pictures import KEPT
from finefit.data.rows import Row
from finefit.data.tasks import make_task
from finefit.errors import FinefitError, Interrupted, Resumable, RunError
from finefit.facts.files import read_file
from finefit.model.locate import locate
from finefit.pipeline.asking import named_evaluations, overlaid
from finefit.pipeline.bare import FORMS, find_bare, open_bare
from finefit.pipeline.create import put_in_place, stage_of
from finefit.pipeline.data import PreparedData
from finefit.pipeline.evaluating import (
    NO_ITEMS,
    Device,
    Items,
    Rooms,
    Say,
    Tick,
    checkpoints_of,
    declared_by,
    evaluate,
    evaluations_of,
    filed_apart,
    prompt_grids_of,
    prompt_tokens_of,
    relabelled,
    request_of,
    scores_told,
    subject_of,
)
from finefit.pipeline.forecasting import Grids
from finefit.pipeline.given import aligned, given_subject, name_of, read_given, write_answers
from finefit.pipeline.inputs import moved_model
from finefit.pipeline.questions import file_facts, prepare_questions, read_questions, require_answerable, without_rows
from finefit.spec.load import spec_from_json
from finefit.spec.models import CustomModel, Full, Model, ShapeModel
from finefit.spec.rows import ImageLimits, Source
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import LmEval

_NO_ROOM = Room(rows=1, tokens=1)
"""Where nothing is generated, or it is not known yet."""
_LONGEST_STEM = 24
ITEMS = "test.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a command says."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What came of it: a run directory, and what is to be asked there."""

    run: RunDir
    requests: tuple[EvalRequest, ...]
    prompt_tokens: int
    prompt_grids: Grids = ()
    given: tuple[str, ...] | None = None
    """The answers to all items, where they were made elsewhere."""


def open_work(wish: Wish) -> Work:
    if wish.target is not None and _names_a_run(Path(wish.target)):
        return _of_run(open_run(Path(wish.target)), wish)
    _require_words(wish)
    named_evaluations(wish.tasks)  # before anything heavy: a misspelt task is told at once
    if wish.target is None:
        return _of_run(_run_of_answers(wish), replace(wish, data=None))
    assert wish.data is not None
    run = open_bare(find_bare(wish.target, base=wish.base), wish.data, device=wish.device, runs=wish.runs)
    return _of_run(run, replace(wish, device=None, data=None, base=None))


def _names_a_run(target: Path) -> bool:
    """By its directory, or as a stage of a pipeline; a folder of several models is refused where it is opened."""
    found = find_run(target) if ":" not in str(target) or target.is_dir() else target
    return is_run(found) or bool(models_of(found))


def _require_words(wish: Wish) -> None:
    """A run knows its rows and its tasks; a model knows neither."""
    if wish.target is None and wish.answers is None:
        raise RunError(
            "nobody is named whose answers are to be scored",
            f"name {FORMS}; or answers that are there already with --answers FILE",
        )
    missing = [name for name, value in (("--data FILE", wish.data), ("--task NAME", wish.tasks)) if not value]
    if missing:
        who = (
            "answers made elsewhere know"
            if wish.target is None
            else f"{wish.target} is no run directory, and a model knows"
        )
        raise RunError(
            f"{who} neither rows nor tasks: give {' and '.join(missing)}",
            f"name {FORMS}; with --data test.jsonl --task rouge, say",
        )


# a run directory


def _of_run(run: RunDir, wish: Wish) -> Work:
    if wish.base is not None:
        raise RunError("--base is for adapters, and a run knows its model", "leave it out")
    others = None if wish.data is None else _other_items(run, wish.data)
    chosen = evaluations_of(run, named_evaluations(wish.tasks, declared_by(run)), has_items=others is not None)
    evaluations = [
        overlaid(one, limit=wish.limit, max_new_tokens=wish.max_new_tokens, batch=wish.batch)
        for one in _on_rows(chosen, wish)
    ]
    if others is not None:
        evaluations = [relabelled(one, others.suffix) for one in evaluations]
    tokens = prompt_tokens_of(run) if others is None else others.prompt_tokens
    if wish.answers is not None:
        return _with_answers(run, evaluations, wish.answers, others, tokens)
    names, own = checkpoints_of(run, wish.checkpoint), subject_of(stage_of(run), "base").device
    requests = [request_of(run, name, one, device=wish.device, items=others) for one in evaluations for name in names]
    require_readable(run, requests)
    grids = prompt_grids_of(run) if others is None else others.prompt_grids
    return Work(run=run, requests=_filed(run, requests, own), prompt_tokens=tokens, prompt_grids=grids)


def _on_rows(chosen: list[Evaluation], wish: Wish) -> list[Evaluation]:
    """Where rows or answers are given: what the spec asks of lm-eval is none of theirs; named by hand it is a mistake."""
    given = "--data" if wish.data is not None else "--answers"
    bringing = [one.label for one in chosen if isinstance(one.task, LmEval)]
    if not bringing or (wish.data is None and wish.answers is None):
        return chosen
    if wish.tasks or len(bringing) == len(chosen):
        raise RunError(
            f"lm_eval brings its own items, so {given} is nothing to {', '.join(bringing)}",
            f"leave {given} out, or name another task",
        )
    return [one for one in chosen if one.label not in bringing]


def _filed(run: RunDir, requests: Sequence[EvalRequest], own: str) -> tuple[EvalRequest, ...]:
    """Answers from another device, or by other settings, are others, and those of the run's own stay."""
    found: dict[tuple[str, str], EvalRequest] = {}
    for request in requests:
        device, one = request.subject.device, request.evaluation
        one = filed_apart(run, one if device == own else relabelled(one, device))
        found[one.label, request.checkpoint] = replace(request, evaluation=one)
    return tuple(found.values())


def require_readable(run: RunDir, requests: Sequence[EvalRequest]) -> None:
    """A reference that its task cannot read is told before anything is asked."""
    by_file = {
        request.subject.items: request.subject for request in requests if request.subject.items_sha256 != NO_ITEMS
    }
    for file, subject in by_file.items():
        rows = _rows(run, subject)
        require_answerable(
            rows,
            [request.evaluation for request in requests if request.subject.items == file],
            form=subject.form,
            base=run.path,
        )


def _rows(run: RunDir, subject: Subject) -> list[Row]:
    return read_items(stage_of(run).verified(subject.items, {subject.items: subject.items_sha256}))


def _other_items(run: RunDir, data: str) -> Items:
    """Prepared with the run's own template, form and lengths, into a file of its own."""
    where = stage_of(run)
    if where.eval_stage.exists():
        raise RunError(
            f"{run.path.name} belongs to its own rows",
            "score the model itself with --data, which makes another run directory",
        )
    spec = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    model = moved_model(spec.model, lambda path: str((run.path / path).resolve()))
    like = spec.model_copy(update={"model": model, "data": without_rows(spec.data, form_base=run.path)})
    prepared = prepare_questions(Source(path=data), like, _tokenizer(where, model), base=Path.cwd())
    shown = () if prepared.record.pictures_sha256 is None else (prepared.record.pictures_sha256,)
    digest = hashlib.sha256("".join((*(fact.sha256 for fact in file_facts(prepared)), *shown)).encode()).hexdigest()[:8]
    place = _taken_in(where, prepared, digest)
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(data).stem)[
        :_LONGEST_STEM
    ]
    sha256 = read_file(place, where.path).sha256
    return Items(
        file=str(place.relative_to(where.prepared(""))),
        sha256=sha256,
        suffix=f"{stem}-{digest}",
        prompt_tokens=prepared.record.prompt_tokens or 1,
        prompt_grids=prepared.record.prompt_grids,
    )


def _tokenizer(where: StageDir, model: Model) -> Path:
    """The run's own; of a model that sees the folder of the model, where its config and its processor lie."""
    if isinstance(model, CustomModel):
        return where.tokenizer
    folder = locate(model, where.run).folder
    return where.tokenizer if OwnEye(folder, folder / "config.json", ImageLimits())() is None else folder


def _taken_in(where: StageDir, prepared: PreparedData, digest: str) -> Path:
    """Images that came as bytes lie beside their items, which then have a folder of their own."""
    has_images = KEPT in prepared.record.files
    place = where.prepared(f"items-{digest}/{ITEMS}" if has_images else f"items-{digest}.jsonl")
    place.parent.mkdir(exist_ok=True)
    for name, target in ((KEPT, place.with_name(KEPT)), (ITEMS, place)) if has_images else ((ITEMS, place),):
        temporary = target.with_suffix(".tmp")
        shutil.copyfile(prepared.path(name), temporary)
        temporary.replace(target)
    return place


# answers made elsewhere


def _with_answers(
    run: RunDir, evaluations: Sequence[Evaluation], path: Path, others: Items | None, tokens: int
) -> Work:
    subject = subject_of(stage_of(run), "base")
    if others is not None:
        subject = replace(subject, items=others.file, items_sha256=others.sha256)
    answers = aligned(read_given(path, subject.form), _rows(run, subject))
    subject, name = given_subject(path, subject), name_of(path)
    requests = [EvalRequest(checkpoint=name, evaluation=one, subject=subject, room=_NO_ROOM) for one in evaluations]
    require_readable(run, requests)
    return Work(run=run, requests=_filed(run, requests, subject.device), prompt_tokens=tokens, given=tuple(answers))


def _run_of_answers(wish: Wish) -> RunDir:
    """Of rows alone: there is no model, and so neither tokenizer nor template."""
    assert wish.data is not None
    assert wish.answers is not None
    rows = read_questions(Source(path=wish.data), base=Path.cwd())
    name, lines = f"eval-{name_of(wish.answers)}", "".join(map(item_line, rows))
    digest = hashlib.sha256(json.dumps([lines, read_file(wish.answers, Path.cwd()).sha256]).encode()).hexdigest()
    return newest_with_digest(wish.runs, name, digest) or _created(wish, name, rows, digest)


def _created(wish: Wish, name: str, rows: Sequence[Row], digest: str) -> RunDir:
    assert wish.answers is not None
    lines = "".join(map(item_line, rows))
    wish.runs.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".staging-{name}-", dir=wish.runs))
    try:
        run = RunDir(staging)
        where = run.stage(1, "eval")
        for folder in (where.path / "data", run.log.parent):
            folder.mkdir(parents=True)
        run.log.touch()
        where.prepared(ITEMS).write_text(lines, encoding="utf-8")
        with PictureKeeper(where.path / "data") as keeper:
            for row in rows:
                keeper.keep(row.images, row.pictures)
        stage = EvalStage(
            name=name_of(wish.answers),
            subject=_nobody(wish.answers, lines),
            prompt_tokens=1,
            num_items=lines.count("\n"),
        )
        write_record(where.eval_stage, stage)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_record(
            run.run, Run(name=name, digest=digest, finefit=__version__, created=now, kind="eval", status="prepared")
        )
        staging.chmod(0o755)
        return RunDir(put_in_place(staging, wish.runs, name))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _nobody(answers: Path, lines: str) -> Subject:
    return Subject(
        model=ShapeModel(kind="shape", config={}),
        model_name=f"answers of {answers.name}",
        model_fingerprint=read_file(answers, answers.parent).sha256,
        tuning=Full(kind="full"),
        device="cpu",
        precision="fp32",
        threads=1,
        seed=0,
        template="plain",
        template_sha256=NO_ITEMS,
        items_sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )


# one after another


def carry_out(work: Work, *, tick: Tick, say: Say) -> list[EvalResult]:
    run, rooms = work.run, Rooms(run=work.run, prompt_tokens=work.prompt_tokens, prompt_grids=work.prompt_grids)
    fill = None if work.given is None else partial(_fill, run, work.given)
    with run_lock(run.lock) as lock, recorded(run), scores_told(stage_of(run), say):
        size = None if fill is not None else partial(_no_model, run) if _holds_answers(run) else rooms.find
        return [
            evaluate(run, request, base=run.path, lock=lock, tick=tick, size=size, fill=fill)
            for request in work.requests
        ]


def _holds_answers(run: RunDir) -> bool:
    where = stage_of(run)
    return where.eval_stage.exists() and isinstance(read_record(where.eval_stage, EvalStage).subject.model, ShapeModel)


def _no_model(run: RunDir, request: EvalRequest) -> Room:
    """What is scored already is shown, and nothing is asked for room then."""
    raise RunError(
        f"{run.path.name} holds answers made elsewhere, and no model for {request.evaluation.label} to ask",
        "give --answers FILE again",
    )


def _fill(run: RunDir, given: Sequence[str], request: EvalRequest, paths: EvalPaths) -> None:
    task = make_task(request.evaluation, form=request.subject.form, base=paths.folder, run=run.path)
    write_answers(task, request, paths, given, _rows(run, request.subject))


@contextmanager
def recorded(run: RunDir) -> Iterator[None]:
    """A run that only evaluates stands where its last command left it; that of a training does not change."""
    record = read_record(run.run, Run)
    if record.kind == "train":
        yield
        return
    write_record(run.run, replace(record, status="running", failure=None))
    try:
        yield
    except BaseException as error:
        failure = _failure_of(error)
        write_record(
            run.run,
            replace(
                record, status="stopped" if failure.exit_code == Resumable.exit_code else "failed", failure=failure
            ),
        )
        raise
    write_record(run.run, replace(record, status="finished", failure=None))


def _failure_of(error: BaseException) -> Failure:
    match error:
        case FinefitError():
            return Failure.of(error)
        case KeyboardInterrupt():
            return Failure.of(Interrupted("interrupted", "give the same command again"))
    return Failure.of(FinefitError(f"a fault of finefit: {type(error).__name__}: {error}", "please report it"))
