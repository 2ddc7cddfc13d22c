"""Which stages of a run have to run, and why.

A stage of a pipeline is done where its folder says so with the key that its inputs give now: in this run, or in another
one of the same name. A flat spec has one stage, which lies in the run directory itself and is never stale: another
spec, or other inputs, are another run."""

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
    read_or_none,
    read_pipeline,
    read_record,
    read_spec,
)
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, is_run, other_version, runs_named
from finefit.errors import FindingError, RunError
from finefit.plan.stage_forecasts import forecast_trainings
from finefit.preflight import StageFinding, require_no_errors
from finefit.preflight.training import forecaster_here
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
    """The folder of what is there already."""
    inputs: CacheInputs | None = None
    """None where a stage that it depends on has yet to run, and for a flat spec."""
    is_forced: bool = False


@dataclass(slots=True, kw_only=True)
class Stages:
    """The stages of a run, with those that are settled: finished, and up to date with their inputs."""

    pipeline: Pipeline
    base: Path
    """Where relative paths start."""
    runs: Path
    run: RunDir | None
    """None where there is none yet."""
    command: str = ""
    """The id of the command that forces stages to run again."""
    settled: dict[str, tuple[Path, FinishedStage]] = field(default_factory=dict)

    def own(self, name: str) -> StageDir | None:
        """The stage's folder in this run, whether it exists or not."""
        if self.run is None:
            return None
        return StageDir(self.run.path) if self.pipeline.is_flat else self.run.stage(self.number(name), name)

    def number(self, name: str) -> int:
        return self.pipeline.order().index(name) + 1

    def at(self, name: str) -> Path:
        return records.output_of(self.settled[name][0].resolve(), self.pipeline.stages[name])

    def output(self, name: str) -> Path | None:
        """None for what has yet to be made."""
        return self.at(name) if name in self.settled else None

    def digest_of(self, name: str) -> str:
        return self.settled[name][1].output_digest

    def settle(self, name: str, place: Path) -> FinishedStage:
        done = read_record(StageDir(place).done, FinishedStage)
        self.settled[name] = place, done
        return done

    def others(self, name: str) -> Iterator[StageDir]:
        """Folders of a stage of this name in other runs, newest first."""
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
    """Empty for a command that forces no stage. One that was killed and is given again keeps its id."""
    return "" if not forced else state.command if set(state.forced) == set(forced) else uuid4().hex


def is_finished(run: RunDir) -> bool:
    """Recorded so, and nothing would run: every output is still there and up to date with its inputs."""
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
        return decision(action="run", reason="begun and not finished: it goes on")
    if pending := [needed for needed in needs(stage) if needed not in stages.settled]:
        return decision(action="run", reason=f"because {', '.join(pending)} {'runs' if len(pending) == 1 else 'run'}")
    now = stage_inputs(stages.pipeline, name, stages.base, stages.at, stages.digest_of)
    key = key_of(now)
    if name in forced:
        again = replace(now, command=stages.command)
        if own is None or not stages.command or not (_is_made(own, stage, key) and is_whole(own, again)):
            return decision(action="run", reason="asked for", inputs=again, is_forced=True)
    if own is not None and _is_made(own, stage, key):
        return decision(action="done", reason="nothing has changed", place=own.path, inputs=now)
    for other in stages.others(name):
        if _is_made(other, stage, key):
            reason = f"{other.run.name} has made it"
            return decision(action="reused", reason=reason, place=other.path, inputs=now)
    return decision(action="run", reason=_why(stages, name, now), inputs=now)


def decide_all(stages: Stages, *, forced: Collection[str] = (), only: str | None = None) -> list[StageDecision]:
    """For all stages, or for one and those that it depends on, as far as it can be known before any has run."""
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
    """Forecasts of the trainings that have yet to begin, and findings, none of which is an error: what does not fit, or
    cannot work, is refused. A stage that goes on where it was stopped was checked when it began."""
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
    pipeline, base, done = stages.pipeline, stages.base, stages.output
    found = forecast_trainings(pipeline, base, forecaster_here, done=done, names=names)
    checked = check_pipeline(pipeline, base, stages.runs, done=done, names=names, forecasts=found)
    require_no_errors(checked.findings, FindingError)
    return {name: cards[0] for name, cards in found.items()}, checked.findings


def above(pipeline: Pipeline, name: str) -> set[str]:
    """A stage and all that depend on it."""
    found = {name}
    for other in pipeline.order():
        if found & set(needs(pipeline.stages[other])):
            found.add(other)
    return found


def require_below(stages: Stages, name: str) -> None:
    """That one stage can run alone; what it depends on is settled then."""
    *under, _ = decide_all(stages, only=name)
    if waiting := [decision.name for decision in under if decision.action == "run"]:
        problem = f"stage {name} depends on {', '.join(waiting)}, and what the spec asks of it now is not there"
        raise RunError(problem, f"run {', '.join(waiting)} first, or leave --only out")


def is_half_done(where: StageDir, now: CacheInputs) -> bool:
    """By this version of finefit or by another one, which may go on with what one has begun."""
    before = read_or_none(where.begun, CacheInputs)
    if before is None or where.done.exists() or not _is_for(before, now):
        return False
    return {**before.inputs, "finefit": ""} == {**now.inputs, "finefit": ""}


def is_whole(where: StageDir, now: CacheInputs) -> bool:
    """Finished, by this very command where it forces the stage; its files may be gone since."""
    before, done = read_or_none(where.begun, CacheInputs), read_or_none(where.done, FinishedStage)
    return before is not None and done is not None and done.key == key_of(now) and _is_for(before, now)


def _is_for(before: CacheInputs, now: CacheInputs) -> bool:
    return not now.command or before.command == now.command


def is_worth_keeping(where: StageDir, stage: AnyStage) -> bool:
    """Whether the folder holds reviews by people, or a finished training."""
    if any(path.is_file() for path in where.path.rglob("reviews/*.jsonl")):
        return True
    return isinstance(stage, TrainStage) and is_run(where.path) and records.output_of(where.path, stage).is_dir()


def _is_made(where: StageDir, stage: AnyStage, key: str) -> bool:
    """Finished, and the output is complete; users may have deleted some of it."""
    done = read_or_none(where.done, FinishedStage)
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
        return "begun and not finished: it goes on"
    staging = None if stages.run is None else stages.run.unfinished(stages.number(name), name)
    if staging is not None and staging.path.exists():
        goes_on = is_whole(staging, now) or (staging.answers.exists() and is_half_done(staging, now))
        return f"begun and not finished: it {'goes on' if goes_on else 'is made again'}"
    for where in (*([] if own is None else [own]), *stages.others(name)):
        if (before := read_or_none(where.begun, CacheInputs)) is not None:
            if found := differences(before, now):
                more = f" and {len(found) - _MOST_REASONS} more" if len(found) > _MOST_REASONS else ""
                return "; ".join(found[:_MOST_REASONS]) + more
            return f"what {os.path.relpath(where.path, stages.runs)} held is gone, or some of it"
    return "not made yet"
