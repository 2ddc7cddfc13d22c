"""The sides of a comparison: what a command names, resolved to checkpoints of runs with their records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Facts, PipelineState, Run, StageState, read_record
from finefit.artifacts.rundir import (
    RunDir,
    StageDir,
    find_run,
    is_pipeline,
    models_of,
    open_run,
    short_names,
)
from finefit.artifacts.stage_records import EvalRequest, EvalResult, EvalStage, Stage, StageResult
from finefit.compare.records import Comparison
from finefit.errors import RunError
from finefit.spec.models import ShapeModel

FINAL, BEST, BASE = "final", "best", "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEval:
    request: EvalRequest
    result: EvalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSide:
    """A side with the records of its run directory. A run that only evaluates has neither spec nor plan."""

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
    evaluated: dict[str, SideEval]
    unread: dict[str, str]
    """Task -> why its result cannot be read."""

    @property
    def is_external(self) -> bool:
        """Whether the answers come from a file: nothing is known about the model that gave them, even if a run scored
        them."""
        return any(isinstance(found.request.subject.model, ShapeModel) for found in self.evaluated.values())

    @property
    def seed(self) -> int | None:
        return None if self.stage is None or self.is_external else self.stage.seed


def open_sides(targets: Sequence[str], *, checkpoint: str | None = None) -> tuple[LoadedSide, ...]:
    """`RUN` or `RUN:CHECKPOINT`; `checkpoint` applies to targets that name none, by default the final one. A single run
    is compared with its base."""
    named = [_parsed(target, checkpoint) for target in targets]
    if len(named) == 1:
        run, asked = named[0]
        named = [(run, BASE), (run, asked)]
    places = [(run, *_resolved(run, asked)) for run, asked in named]
    names = _names([(run.path.resolve(), role, _is_all(where, name)) for run, where, name, role in places])
    models = [(run.path.resolve(), name) for run, _, name, _ in places]
    if again := [shown for at, shown in enumerate(names) if models[at] in models[:at]]:
        if len(targets) == 1:
            raise RunError(f"there is nothing to compare {targets[0]} with", "name another run or checkpoint as well")
        raise RunError(
            f"{again[0]} is named twice, and a model does not differ from itself",
            "name two runs, or RUN:base and RUN:final",
        )
    return tuple(
        _open(run, where, name, role, shown) for (run, where, name, role), shown in zip(places, names, strict=True)
    )


def _parsed(target: str, checkpoint: str | None) -> tuple[RunDir, str | None]:
    """The name of a folder may itself contain a colon."""
    if Path(target).is_dir() or ":" not in target:
        return open_run(Path(target)), checkpoint
    path, _, named = target.rpartition(":")
    return open_run(Path(path)), named


def _resolved(run: RunDir, asked: str | None) -> tuple[StageDir, str, str]:
    """The stage, the checkpoint's own name, and the name that the user gave."""
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
    """Names with results, including deleted checkpoints and external answers."""
    return sorted({paths.checkpoint for paths in where.evaluations() if paths.result.exists()})


def _evaluated_one(run: RunDir, where: StageDir, asked: str | None) -> str:
    """The model of a run that only evaluates, or external answers scored in it."""
    name = read_record(where.eval_stage, EvalStage).name
    if asked is not None and asked in _scored(where):
        return asked
    if asked not in (None, FINAL, BASE, name):
        raise RunError(
            f"{run.path} was only evaluated and has no checkpoint {asked}", f"name it without one: {run.path}"
        )
    return name


def _is_all(where: StageDir, name: str) -> bool:
    """Whether this is the one model of a run that only evaluates, not external answers scored in it."""
    return where.eval_stage.exists() and read_record(where.eval_stage, EvalStage).name == name


def _names(places: Sequence[tuple[Path, str, bool]]) -> list[str]:
    """As short as possible while they differ. A run that holds one model needs no checkpoint in its name."""
    shown = short_names([path for path, _, _ in places])
    is_one_role = len({role for _, role, _ in places}) == 1 and len(shown) == len(places)
    return [shown[path] + ("" if is_one_role or is_all else f":{role}") for path, role, is_all in places]


def _open(run: RunDir, where: StageDir, checkpoint: str, role: str, name: str) -> LoadedSide:
    evaluated, unread = _evaluated(where, checkpoint)
    return LoadedSide(
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


def _evaluated(where: StageDir, checkpoint: str) -> tuple[dict[str, SideEval], dict[str, str]]:
    """Results by task, and why others cannot be read. A larger sample is preferred, all items most of all."""
    asked = [paths for paths in where.evaluations() if paths.checkpoint == checkpoint and paths.result.exists()]
    found: dict[str, SideEval] = {}
    unread: dict[str, str] = {}
    for paths in sorted(asked, key=lambda paths: math.inf if paths.limit is None else paths.limit, reverse=True):
        if paths.folder.name in found:
            continue
        try:
            found[paths.folder.name] = SideEval(
                request=read_record(paths.request, EvalRequest), result=read_record(paths.result, EvalResult)
            )
        except RunError as error:  # of another version, or damaged
            unread[paths.folder.name] = error.problem
    return found, {task: why for task, why in unread.items() if task not in found}


COMPARISON_FILE = "comparison.json"
"""In the output folder of a compare stage."""


def expand_targets(targets: Sequence[str]) -> list[str]:
    """Replaces every evaluation stage by its models; a pipeline with one evaluation stage stands for it."""
    return [one for target in targets for one in _expanded(target)]


def _expanded(target: str) -> list[str]:
    place = _place(target)
    if place is not None and is_pipeline(place):
        scoring = [stage for stage in _stages(place) if stage.kind == "evaluate"]
        place = _folder(place, scoring[0]) if len(scoring) == 1 else None
    models = [] if place is None else models_of(place)
    return [str(model) for model in models] or [target]


def stored_comparisons(targets: Sequence[str]) -> tuple[Comparison, ...]:
    """The comparison of a compare stage, or all comparisons of a pipeline; empty if the targets are neither."""
    place = _place(targets[0]) if len(targets) == 1 else None
    if place is None:
        return ()
    if not is_pipeline(place):
        return (_read(place),) if _file(place).is_file() else ()
    folders = [_folder(place, stage) for stage in _stages(place) if stage.kind == "compare"]
    return tuple(_read(folder) for folder in folders if _file(folder).is_file())


def _place(target: str) -> Path | None:
    """None if the target names a checkpoint, which only runs have."""
    return find_run(Path(target)) if Path(target).is_dir() or ":" not in target else None


def _stages(pipeline: Path) -> tuple[StageState, ...]:
    return read_record(RunDir(pipeline).state, PipelineState).stages


def _folder(pipeline: Path, stage: StageState) -> Path:
    return (pipeline / stage.place).resolve()


def _file(place: Path) -> Path:
    return StageDir(place).output / COMPARISON_FILE


def _read(place: Path) -> Comparison:
    return read_record(_file(place), Comparison)
