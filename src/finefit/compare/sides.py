"""The sides of a comparison: the targets of a command, resolved to checkpoints of runs with their records, and the
figures of their trainings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from finefit.artifacts import rundir
from finefit.artifacts.atomic import read_steps, read_validations
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Facts, PipelineState, Run, read_if_there, read_record
from finefit.artifacts.stage_records import EvalRequest, EvalResult, EvalStage, Stage, StageResult
from finefit.compare.records import Comparison, LossCurve, Prediction, Quantity, QuantityUnit
from finefit.errors import RunError
from finefit.spec.models import ShapeModel

FINAL, BEST, BASE = "final", "best", "base"
COMPARISON_FILE = "comparison.json"
"""The file's name in the output folder of a compare stage."""
_MAX_POINTS = 500
_UNITS: dict[Quantity, QuantityUnit] = {
    "peak memory": "bytes",
    "time per step": "seconds",
    "tokens per second": "tokens/s",
    "training time": "seconds",
    "cost": "money",
    "evaluation memory": "bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEval:
    request: EvalRequest
    result: EvalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSide:
    """A side with the records of its run directory. A run that only evaluates has neither spec nor plan."""

    name: str
    run: rundir.RunDir
    where: rundir.StageDir
    checkpoint: str
    role: str
    record: Run
    facts: Facts | None
    plan: Plan | None
    stage: Stage | None
    ended: StageResult | None
    evaluated: dict[str, SideEval]
    unread: dict[str, str]
    """Maps a task to the reason why its result cannot be read."""

    @property
    def is_external(self) -> bool:
        """Whether the answers come from a file, so that nothing is known about the model, even if a run scored them."""
        return any(isinstance(found.request.subject.model, ShapeModel) for found in self.evaluated.values())

    @property
    def is_trained(self) -> bool:
        return self.role != BASE and self.stage is not None and not self.is_external

    @property
    def seed(self) -> int | None:
        return None if self.stage is None or self.is_external else self.stage.seed


def open_sides(targets: Sequence[str], *, checkpoint: str | None = None) -> tuple[LoadedSide, ...]:
    """`checkpoint` is the default for targets that name none, itself by default the final one. A single run is compared
    with its base."""
    if not targets:
        raise RunError("nothing is named to compare", "name runs, or one to compare with its base")
    named = [rundir.open_target(target, checkpoint) for target in targets]
    if len(named) == 1:
        run, asked = named[0]
        named = [(run, BASE), (run, asked)]
    places = [(run, *_resolved(run, asked)) for run, asked in named]
    models = [(run.path.resolve(), name) for run, _, name, _ in places]
    # names are as short as possible while they differ; a run that holds one model needs no checkpoint in its name
    shown = rundir.short_names([path for path, _ in models])
    is_one_role = len({role for *_, role in places}) == 1 and len(shown) == len(places)
    names = []
    for run, where, name, role in places:
        is_only = is_there(where.eval_stage) and read_record(where.eval_stage, EvalStage).name == name
        names.append(shown[run.path.resolve()] + ("" if is_one_role or is_only else f":{role}"))
    if again := [name for at, name in enumerate(names) if models[at] in models[:at]]:
        if len(targets) == 1:
            raise RunError(f"there is nothing to compare {targets[0]} with", "name another run or checkpoint as well")
        problem = f"{again[0]} is named twice; a model cannot be compared with itself"
        raise RunError(problem, "name two runs, or RUN:base and RUN:final")
    return tuple(_open(*place, shown) for place, shown in zip(places, names, strict=True))


def _resolved(run: rundir.RunDir, asked: str | None) -> tuple[rundir.StageDir, str, str]:
    """The stage, the checkpoint's own name, and the name that the user gave. Names with results include deleted
    checkpoints and external answers."""
    where = run.stages()[-1]
    scored = sorted({paths.checkpoint for paths in where.evaluations() if is_there(paths.result)})
    if is_there(where.eval_stage):
        only = read_record(where.eval_stage, EvalStage).name
        name = asked if asked is not None and asked in scored else only
        if asked not in (None, FINAL, BASE, name):
            problem = f"{run.path} was only evaluated and has no checkpoint {asked}"
            raise RunError(problem, f"name it without one: {run.path}")
        return where, name, name
    wanted = asked or FINAL
    name = f"checkpoint-{wanted}" if wanted.isdecimal() else wanted
    if name != BASE and (where.checkpoints / name).is_dir():
        return where, (where.checkpoints / name).resolve().name, name
    if name in (BASE, *scored):
        return where, name, name
    saved = where.checkpoints.iterdir() if where.checkpoints.is_dir() else ()
    there = sorted(path.name for path in saved if not path.name.startswith("."))
    names = ", ".join(dict.fromkeys([BASE, *there, *scored]))
    raise RunError(f"{run.path} has no checkpoint {wanted}", f"there are {names}: name one as {run.path}:{BASE}")


def _open(run: rundir.RunDir, where: rundir.StageDir, checkpoint: str, role: str, name: str) -> LoadedSide:
    """Among several results of a task, a larger sample is preferred, and all items most of all."""
    asked = [paths for paths in where.evaluations() if paths.checkpoint == checkpoint and is_there(paths.result)]
    found: dict[str, SideEval] = {}
    unread: dict[str, str] = {}
    for paths in sorted(asked, key=lambda paths: math.inf if paths.limit is None else paths.limit, reverse=True):
        if paths.folder.name in found:
            continue
        try:
            request, result = read_record(paths.request, EvalRequest), read_record(paths.result, EvalResult)
            found[paths.folder.name] = SideEval(request=request, result=result)
        except RunError as error:  # of another version, or damaged
            unread[paths.folder.name] = error.problem
    record = read_record(run.run, Run)
    is_trained, is_over = record.kind == "train", record.status == "finished"
    return LoadedSide(
        name=name,
        run=run,
        where=where,
        checkpoint=checkpoint,
        role=role,
        record=record,
        facts=(read_record if is_trained else read_if_there)(run.facts, Facts),
        plan=(read_record if is_trained else read_if_there)(run.plan, Plan),
        stage=(read_record if is_trained else read_if_there)(where.stage, Stage),
        ended=(read_record if is_trained and is_over else read_if_there)(where.result, StageResult),
        evaluated=found,
        unread={task: why for task, why in unread.items() if task not in found},
    )


def expand_targets(targets: Sequence[str]) -> list[str]:
    """Replaces every evaluation stage by its models. A pipeline with one evaluation stage means that stage."""
    expanded = []
    for target in targets:
        place = None if rundir.names_checkpoint(target) else rundir.find_run(Path(target))
        if place is not None and rundir.is_pipeline(place):
            scoring = _stage_folders(place, "evaluate")
            place = scoring[0] if len(scoring) == 1 else None
        models = [] if place is None else rundir.models_of(place)
        expanded += [str(model) for model in models] or [target]
    return expanded


def stored_comparisons(targets: Sequence[str]) -> tuple[Comparison, ...]:
    """The comparison of a compare stage, or all comparisons of a pipeline; empty if the targets are neither."""
    if len(targets) != 1 or rundir.names_checkpoint(targets[0]):
        return ()
    place = rundir.find_run(Path(targets[0]))
    folders = _stage_folders(place, "compare") if rundir.is_pipeline(place) else [place]
    files = [rundir.StageDir(folder).output / COMPARISON_FILE for folder in folders]
    return tuple(read_record(file, Comparison) for file in files if file.is_file())


def _stage_folders(pipeline: Path, kind: str) -> list[Path]:
    stages = read_record(rundir.RunDir(pipeline).state, PipelineState).stages
    return [(pipeline / stage.place).resolve() for stage in stages if stage.kind == kind]


def predictions_of(sides: Sequence[LoadedSide]) -> tuple[Prediction, ...]:
    """Predictions of the trained sides; a quantity that no side has is left out."""
    found = [_figures(side) for side in sides]
    rows = []
    for quantity, unit in _UNITS.items():
        predicted, measured = zip(*(figures.get(quantity, (None, None)) for figures in found), strict=True)
        if any(value is not None for value in (*predicted, *measured)):
            rows.append(Prediction(quantity=quantity, unit=unit, predicted=predicted, measured=measured))
    return tuple(rows)


def _figures(side: LoadedSide) -> dict[Quantity, tuple[float | None, float | None]]:
    """Predicted and measured figures of the training, and of the evaluation that took most memory. The time of a step
    is the median, because the first step and steps held up by other programs are not typical."""
    found: dict[Quantity, tuple[float | None, float | None]] = {}
    stage, plan = side.stage, side.plan
    forecast = plan.forecasts.get(stage.name) if plan is not None and stage is not None and side.is_trained else None
    if stage is not None and forecast is not None:
        steps = [step for step in read_steps(side.where.metrics) if "seconds" in step]
        seconds = [step["seconds"] for step in steps]
        counted = [step for step in steps if "tokens" in step]
        counted_seconds = sum(step["seconds"] for step in counted)
        speed = sum(step["tokens"] for step in counted) / counted_seconds if counted_seconds else None
        price = forecast.price_per_hour
        predicted = forecast.predicted_bytes(stage.device)
        found["peak memory"] = predicted, None if side.ended is None else side.ended.peak_bytes
        found["time per step"] = forecast.step_seconds, median(seconds) if seconds else None
        found["tokens per second"] = forecast.tokens_per_second, speed
        found["training time"] = forecast.total_seconds, sum(seconds) or None
        found["cost"] = forecast.cost, None if price is None else price * sum(seconds) / 3600
    if results := [one.result for one in side.evaluated.values() if one.result.peak_bytes is not None]:
        largest = max(results, key=lambda result: result.peak_bytes or 0)
        found["evaluation memory"] = largest.predicted_bytes, largest.peak_bytes
    return found


def loss_curves(sides: Sequence[LoadedSide]) -> tuple[LossCurve, ...]:
    """Thinned evenly if there are very many steps. A loss that is not finite leaves a gap."""
    curves = []
    for at, side in enumerate(sides):
        recorded = read_steps(side.where.metrics) if side.is_trained else []
        if not recorded:
            continue
        steps = [step for step in recorded if step["loss"] is not None and math.isfinite(step["loss"])]
        thin = steps[:: max(1, math.ceil(len(steps) / _MAX_POINTS))]
        if steps and thin[-1] is not steps[-1]:
            thin.append(steps[-1])
        last = steps[-1]["step"] if steps else 0
        lines = (line for line in read_validations(side.where.metrics) if "validation_loss" in line)
        validated = sorted({line["step"]: line["validation_loss"] for line in lines}.items())
        validation = tuple((step, loss) for step, loss in validated if step <= last and math.isfinite(loss))
        numbers, losses = tuple(step["step"] for step in thin), tuple(step["loss"] for step in thin)
        curves.append(LossCurve(side=at, steps=numbers, losses=losses, validation=validation))
    return tuple(curves)
