"""Determines which stages of a run have to run, and why.

A stage of a pipeline is done if its folder holds a record with the key of its current inputs, in this run or in another
one of the same name. A flat spec has one stage, which is the run directory itself and never stale: another spec, or
other inputs, are another run."""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal
from uuid import uuid4

from finefit.artifacts import records
from finefit.artifacts.forecasts import Forecast
from finefit.artifacts.records import (
    CacheInputs,
    FinishedStage,
    PipelineState,
    Run,
    read_if_there,
    read_or_none,
    read_pipeline,
    read_record,
    read_spec,
)
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, is_run, other_version, runs_named
from finefit.errors import RunError
from finefit.preflight import StageFinding, require_no_errors
from finefit.run.cache_inputs import differences, key_of, sizes_in, stage_inputs
from finefit.run.check_stages import below, check_pipeline
from finefit.spec.pipeline import Pipeline, needs
from finefit.spec.stages import AnyStage, EvaluateStage, TrainStage

_MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    name: str
    kind: str
    action: Literal["done", "reused", "run"]
    reason: str
    place: Path | None = None
    """The folder of an existing output."""
    inputs: CacheInputs | None = None
    """None if a stage that it depends on has yet to run, and for a flat spec."""
    is_forced: bool = False


@dataclass(slots=True, kw_only=True)
class Stages:
    """The stages of a run, and which of them are settled: finished, and up to date with their inputs."""

    pipeline: Pipeline
    base: Path
    """The folder that relative paths start from."""
    runs: Path
    run: RunDir | None
    """None if there is no run yet."""
    command: str = ""
    """The id of the command that forces stages to run again."""
    settled: dict[str, tuple[Path, FinishedStage]] = field(default_factory=dict)

    def own(self, name: str) -> StageDir | None:
        """Returns the stage's folder in this run, whether it exists or not."""
        if self.run is None:
            return None
        return StageDir(self.run.path) if self.pipeline.is_flat else self.run.stage(self.number(name), name)

    def number(self, name: str) -> int:
        return self.pipeline.order().index(name) + 1

    def at(self, name: str) -> Path:
        return records.output_of(self.settled[name][0].resolve(), self.pipeline.stages[name])

    def output(self, name: str) -> Path | None:
        """Returns None for an output that is not made yet."""
        return self.at(name) if name in self.settled else None

    def digest_of(self, name: str) -> str:
        return self.settled[name][1].output_digest

    def settle(self, name: str, place: Path) -> FinishedStage:
        done = read_record(StageDir(place).done, FinishedStage)
        self.settled[name] = place, done
        return done

    def others(self, name: str) -> Iterator[StageDir]:
        """Yields the folders of a stage of this name in other runs, newest first."""
        own, folder = None if self.run is None else self.run.path.resolve(), re.compile(rf"\d+-{re.escape(name)}")
        for run in reversed(runs_named(self.runs, self.pipeline.name)):
            if run.path.resolve() != own and is_pipeline(run.path) and other_version(run.path) is None:
                yield from (where for where in run.stages() if folder.fullmatch(where.path.name))


def open_stages(run: RunDir) -> Stages:
    here = run.path.resolve()
    if not is_pipeline(run.path):
        return Stages(pipeline=Pipeline.of(read_spec(run)), base=here, runs=here.parent, run=run)
    command = read_record(run.state, PipelineState).command
    return Stages(pipeline=read_pipeline(run), base=here, runs=here.parent, run=run, command=command)


def command_id(state: PipelineState, forced: Collection[str]) -> str:
    """Returns an empty id for a command that forces no stage. A repeated command that was killed keeps its id."""
    return "" if not forced else state.command if set(state.forced) == set(forced) else uuid4().hex


def is_finished(run: RunDir) -> bool:
    """Returns whether the run is recorded as finished and nothing would run: all outputs exist and are up to date."""
    is_recorded = read_record(run.run, Run).status == "finished"
    return is_recorded and all(decision.action != "run" for decision in decide_all(open_stages(run)))


def decide(stages: Stages, name: str, *, forced: Collection[str] = ()) -> StageDecision:
    stage, own = stages.pipeline.stages[name], stages.own(name)
    decision = partial(StageDecision, name=name, kind=stage.kind)
    if stages.pipeline.is_flat:
        if own is None:
            return decision(action="run", reason="not made yet")
        if read_record(RunDir(own.path).run, Run).status == "finished":
            return decision(action="done", reason="nothing has changed", place=own.path)
        return decision(action="run", reason="begun and not finished: it resumes")
    if pending := [needed for needed in needs(stage) if needed not in stages.settled]:
        return decision(action="run", reason=f"because {', '.join(pending)} {'runs' if len(pending) == 1 else 'run'}")
    now = stage_inputs(stages.pipeline, name, stages.base, stages.at, stages.digest_of)
    key = key_of(now)
    done = None if own is None else read_if_there(own.done, FinishedStage)
    if name in forced:
        again = replace(now, command=stages.command)
        if own is None or not stages.command or not (_is_made(own, stage, key, done) and is_whole(own, again)):
            return decision(action="run", reason="requested", inputs=again, is_forced=True)
    if own is not None and _is_made(own, stage, key, done):
        return decision(action="done", reason="nothing has changed", place=own.path, inputs=now)
    for other in stages.others(name):
        if _is_made(other, stage, key, read_or_none(other.done, FinishedStage)):
            reason = f"made by {other.run.name}"
            return decision(action="reused", reason=reason, place=other.path, inputs=now)
    return decision(action="run", reason=_why(stages, name, now), inputs=now)


def decide_all(stages: Stages, *, forced: Collection[str] = (), only: str | None = None) -> list[StageDecision]:
    """Decides for all stages, or for one and those that it depends on, as far as possible before any has run."""
    names = stages.pipeline.order() if only is None else [*below(stages.pipeline, only), only]
    found = []
    for name in names:
        decision = decide(stages, name, forced=forced)
        if decision.place is not None and not stages.pipeline.is_flat:
            stages.settle(name, decision.place)
        else:
            stages.settled.pop(name, None)
        found.append(decision)
    return found


def forecast_pending(
    stages: Stages, *, only: str | None, forced: Collection[str]
) -> tuple[dict[str, Forecast], tuple[StageFinding, ...]]:
    """Returns forecasts of the trainings that have not begun, and findings other than errors: what does not fit or
    cannot work is refused. A stage that resumes was checked when it began."""
    if only is not None:
        require_below(stages, only)
    names = set()
    for one in decide_all(stages, forced=forced, only=only):
        own = stages.own(one.name)
        can_resume = own is not None and one.inputs is not None and not one.is_forced and is_half_done(own, one.inputs)
        if one.action == "run" and not can_resume:
            names.add(one.name)
    if not names or stages.pipeline.is_flat:  # a flat spec is checked when its directory is filled
        return {}, ()
    checked = check_pipeline(stages.pipeline, stages.base, stages.runs, done=stages.output, names=names)
    require_no_errors(checked.findings, checked.refusal)
    found = {name: stage.forecast for name, stage in checked.stages.items() if stage.forecast is not None}
    return found, checked.findings


def above(pipeline: Pipeline, name: str) -> set[str]:
    """Returns a stage and all stages that depend on it."""
    found = {name}
    for other in pipeline.order():
        if found & set(needs(pipeline.stages[other])):
            found.add(other)
    return found


def require_below(stages: Stages, name: str) -> None:
    """Requires that one stage can run alone: the stages that it depends on are settled."""
    *under, _ = decide_all(stages, only=name)
    if waiting := [decision.name for decision in under if decision.action == "run"]:
        problem = f"stage {name} depends on {', '.join(waiting)}, whose output for the current spec does not exist"
        raise RunError(problem, f"run {', '.join(waiting)} first, or leave --only out")


def is_half_done(where: StageDir, now: CacheInputs) -> bool:
    """Returns whether the stage was begun, by this version of finefit or by another, and can be resumed. A damaged
    record is an error: without it, checkpoints and answers of unknown inputs would be made again from the start."""
    before = read_if_there(where.begun, CacheInputs)
    if before is None or where.done.exists() or not _is_for(before, now):
        return False
    return {**before.inputs, "finefit": ""} == {**now.inputs, "finefit": ""}


def is_whole(where: StageDir, now: CacheInputs) -> bool:
    """Returns whether the stage is finished, by this very command if it forces the stage; its files may have been
    deleted since."""
    before, done = read_if_there(where.begun, CacheInputs), read_if_there(where.done, FinishedStage)
    return before is not None and done is not None and done.key == key_of(now) and _is_for(before, now)


def _is_for(before: CacheInputs, now: CacheInputs) -> bool:
    return not now.command or before.command == now.command


def is_worth_keeping(where: StageDir, stage: AnyStage) -> bool:
    """Returns whether the folder holds reviews by people, or a finished training."""
    if any(path.is_file() for path in where.path.rglob("reviews/*.jsonl")):
        return True
    return isinstance(stage, TrainStage) and is_run(where.path) and records.output_of(where.path, stage).is_dir()


def _is_made(where: StageDir, stage: AnyStage, key: str, done: FinishedStage | None) -> bool:
    """Returns whether the stage is finished and its output complete; users may have deleted some of it."""
    if done is None or done.key != key:
        return False
    if isinstance(stage, EvaluateStage):
        return all(_is_scored(where.path / model, stage) for model in stage.models)
    if isinstance(stage, TrainStage) and not is_run(where.path):
        return False
    folder = records.output_of(where.path, stage)
    return folder.is_dir() and done.files.items() <= sizes_in(folder).items()


def _is_scored(run: Path, stage: EvaluateStage) -> bool:
    answers = RunDir(run).stages() if is_run(run) else []
    return any(
        all(where.evaluation(one.label, run.name, one.limit).result.exists() for one in stage.evaluate)
        for where in answers
    )


def _why(stages: Stages, name: str, now: CacheInputs) -> str:
    own = stages.own(name)
    if own is not None and is_half_done(own, now):
        return "begun and not finished: it resumes"
    staging = None if stages.run is None else stages.run.unfinished(stages.number(name), name)
    if staging is not None and staging.path.exists():
        can_resume = is_whole(staging, now) or (staging.answers.exists() and is_half_done(staging, now))
        return f"begun and not finished: it {'resumes' if can_resume else 'starts again'}"
    for where in (*([] if own is None else [own]), *stages.others(name)):
        if (before := read_or_none(where.begun, CacheInputs)) is not None:
            if found := differences(before, now):
                more = f" and {len(found) - _MOST_REASONS} more" if len(found) > _MOST_REASONS else ""
                return "; ".join(found[:_MOST_REASONS]) + more
            return f"some or all files of {os.path.relpath(where.path, stages.runs)} are gone"
    return "not made yet"
