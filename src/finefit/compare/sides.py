"""What is compared: checkpoints of runs, with the records that they left. Nothing is judged here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.evaluations import EvalRequest, EvalResult, EvalStage
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Facts, Run, read_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, open_run
from finefit.artifacts.stages import short_names
from finefit.artifacts.trainings import Stage, StageResult
from finefit.errors import RunError
from finefit.spec.models import ShapeModel

FINAL, BEST, BASE = "final", "best", "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    request: EvalRequest
    result: EvalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A side with all that its run directory says of it. A run that only evaluates has neither spec nor plan of its own."""

    name: str
    run: RunDir
    where: StageDir
    checkpoint: str
    role: str
    record: Run
    facts: Facts | None
    plan: Plan | None
    stage: Stage | None
    ended: StageResult | None
    evaluated: dict[str, Evaluated]
    unread: dict[str, str]
    """Tasks whose result cannot be read, and why."""

    @property
    def is_given(self) -> bool:
        """Answers that were made elsewhere: of whatever gave them nothing is known, even where a run has scored them."""
        return any(isinstance(found.request.subject.model, ShapeModel) for found in self.evaluated.values())

    @property
    def seed(self) -> int | None:
        return None if self.stage is None or self.is_given else self.stage.seed


def open_sides(targets: Sequence[str], *, checkpoint: str | None = None) -> tuple[Opened, ...]:
    """`RUN` or `RUN:CHECKPOINT`; `checkpoint` holds for those that name none, by default the final one. One run alone is its base and its end."""
    named = [_parsed(target, checkpoint) for target in targets]
    if len(named) == 1:
        run, asked = named[0]
        named = [(run, BASE), (run, asked)]
    places = [(run, *_resolved(run, asked)) for run, asked in named]
    names = _names([(run.path.resolve(), role, _is_all(where, name)) for run, where, name, role in places])
    models = [(run.path.resolve(), name) for run, _, name, _ in places]
    if again := [shown for at, shown in enumerate(names) if models[at] in models[:at]]:
        if len(targets) == 1:
            raise RunError(f"there is nothing to compare {targets[0]} with", "name another run or checkpoint beside it")
        raise RunError(
            f"{again[0]} is named twice: a model compared with itself differs by nothing",
            "name two runs, or RUN:base and RUN:final",
        )
    return tuple(
        _open(run, where, name, role, shown) for (run, where, name, role), shown in zip(places, names, strict=True)
    )


def _parsed(target: str, checkpoint: str | None) -> tuple[RunDir, str | None]:
    """A folder whose own name has a colon is itself."""
    if Path(target).is_dir() or ":" not in target:
        return open_run(Path(target)), checkpoint
    path, _, named = target.rpartition(":")
    return open_run(Path(path)), named


def _resolved(run: RunDir, asked: str | None) -> tuple[StageDir, str, str]:
    """The stage, the checkpoint's own name, and what was asked for."""
    where = run.stages()[-1]
    if where.eval_stage.exists():
        return where, *(2 * (_evaluated_one(run, where, asked),))
    wanted = asked or FINAL
    name = f"checkpoint-{wanted}" if wanted.isdecimal() else wanted
    if name == BASE:
        return where, BASE, BASE
    if (where.checkpoints / name).is_dir():
        return where, (where.checkpoints / name).resolve().name, name
    scored = _scored(where)
    if name in scored:
        return where, name, name
    there = (
        sorted(path.name for path in where.checkpoints.iterdir() if not path.name.startswith("."))
        if where.checkpoints.is_dir()
        else []
    )
    names = ", ".join(dict.fromkeys([BASE, *there, *scored]))
    raise RunError(f"{run.path} has no checkpoint {wanted}", f"there are {names}: name one as {run.path}:{BASE}")


def _scored(where: StageDir) -> list[str]:
    """Names that there are results of: of checkpoints that are gone, and of answers that were made elsewhere, too."""
    return sorted({paths.checkpoint for paths in where.evaluations() if paths.result.exists()})


def _evaluated_one(run: RunDir, where: StageDir, asked: str | None) -> str:
    """Its model, or answers that were scored beside it."""
    name = read_record(where.eval_stage, EvalStage).name
    if asked is not None and asked in _scored(where):
        return asked
    if asked not in (None, FINAL, BASE, name):
        raise RunError(
            f"{run.path} was only evaluated and has no checkpoint {asked}", f"name it without one: {run.path}"
        )
    return name


def _is_all(where: StageDir, name: str) -> bool:
    """The one model of a run that only evaluates, and no answers that were scored beside it."""
    return where.eval_stage.exists() and read_record(where.eval_stage, EvalStage).name == name


def _names(places: Sequence[tuple[Path, str, bool]]) -> list[str]:
    """As short as they can be and still differ. `is_all`: it is all that its run is about, and called as that."""
    shown = short_names([path for path, _, _ in places])
    is_one_role = len({role for _, role, _ in places}) == 1 and len(shown) == len(places)
    return [shown[path] + ("" if is_one_role or is_all else f":{role}") for path, role, is_all in places]


def _open(run: RunDir, where: StageDir, checkpoint: str, role: str, name: str) -> Opened:
    evaluated, unread = _evaluated(where, checkpoint)
    return Opened(
        name=name,
        run=run,
        where=where,
        checkpoint=checkpoint,
        role=role,
        record=read_record(run.run, Run),
        facts=read_record(run.facts, Facts) if run.facts.exists() else None,
        plan=read_record(run.plan, Plan) if run.plan.exists() else None,
        stage=read_record(where.stage, Stage) if where.stage.exists() else None,
        ended=read_record(where.result, StageResult) if where.result.exists() else None,
        evaluated=evaluated,
        unread=unread,
    )


def _evaluated(where: StageDir, checkpoint: str) -> tuple[dict[str, Evaluated], dict[str, str]]:
    """By task; all items before a sample, a larger sample before a smaller."""
    asked = [paths for paths in where.evaluations() if paths.checkpoint == checkpoint and paths.result.exists()]
    found: dict[str, Evaluated] = {}
    unread: dict[str, str] = {}
    for paths in sorted(asked, key=_size, reverse=True):
        if paths.folder.name in found:
            continue
        try:
            found[paths.folder.name] = Evaluated(
                request=read_record(paths.request, EvalRequest), result=read_record(paths.result, EvalResult)
            )
        except (
            RunError
        ) as error:  # of another version, or damaged: the side is there, and has no result that can be compared
            unread[paths.folder.name] = error.problem
    return found, {task: why for task, why in unread.items() if task not in found}


def _size(paths: EvalPaths) -> float:
    return float("inf") if paths.limit is None else paths.limit
