"""The directory of a pipeline's run: made whole, planned before anything is loaded, and found again by what it stands on."""

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from finefit import __version__
from finefit.artifacts.atomic import full_disk_named, write_text
from finefit.artifacts.forecasts import Forecast, Plan
from finefit.artifacts.lock import run_lock
from finefit.artifacts.pipelines import PipelineState, StageState
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, newest_with_digest
from finefit.errors import RunError
from finefit.pipeline.create import put_in_place
from finefit.pipeline.examined import require_examined
from finefit.pipeline.foreseen import foresee_stages, require_fitting
from finefit.pipeline.inputs import between
from finefit.pipeline.stage_choice import Choice, Stages, foretell, is_half_done, require_below
from finefit.pipeline.stage_keys import outside_inputs, pinned, pipeline_digest
from finefit.pipeline.stage_paths import moved
from finefit.preflight.stages import Named
from finefit.spec.load import pipeline_from_json, spec_to_json
from finefit.spec.stages import Pipeline

_RECORDS_BYTES = 1 << 20
"""What the records of a run take before its stages begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A pipeline as a command gives it, with all that it names from outside."""

    pipeline: Pipeline
    base: Path
    """Where its relative paths start."""
    spec_text: str
    overrides: tuple[str, ...]
    inputs: dict[str, str]

    @property
    def digest(self) -> str:
        return pipeline_digest(self.pipeline, self.inputs)


def ask(pipeline: Pipeline, base: Path, *, spec_text: str, overrides: tuple[str, ...]) -> Asked:
    return Asked(
        pipeline=pipeline, base=base, spec_text=spec_text, overrides=overrides, inputs=outside_inputs(pipeline, base)
    )


def stages_of(asked: Asked, *, runs: Path, new: bool) -> Stages:
    """With the newest run of the same pipeline on the same inputs, where there is one."""
    run = None if new else newest_with_digest(runs, asked.pipeline.name, asked.digest)
    pipeline = asked.pipeline if run is None else _as_begun(asked.pipeline, run)
    return Stages(pipeline=pipeline, base=asked.base, runs=runs, run=run)


def _as_begun(pipeline: Pipeline, run: RunDir) -> Pipeline:
    """The same stages in the order that numbers the folders of a run, in whichever order the spec names them now."""
    order = [state.name for state in read_record(run.state, PipelineState).stages]
    return pipeline.model_copy(update={"stages": {name: pipeline.stages[name] for name in order}})


def open_or_create(
    asked: Asked, *, runs: Path, new: bool, only: str | None = None, forced: Collection[str] = ()
) -> RunDir:
    """A new run is planned and examined first: what does not fit, or cannot work, is refused before anything exists."""
    stages = stages_of(asked, runs=runs, new=new)
    if stages.run is not None:
        _follow(stages.run, asked)
        return stages.run
    forecasts = look_ahead(stages, only=only, forced=forced).forecasts
    with full_disk_named(runs / asked.pipeline.name, _RECORDS_BYTES):
        runs.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".staging-{asked.pipeline.name}-", dir=runs))
        try:
            _fill(RunDir(staging), asked, forecasts)
            staging.chmod(0o755)
            return RunDir(put_in_place(staging, runs, asked.pipeline.name))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Of the stages that have yet to begin."""

    forecasts: dict[str, Forecast]
    """Of those that train."""
    findings: tuple[Named, ...]
    """None of them an error."""


def look_ahead(stages: Stages, *, only: str | None, forced: Collection[str]) -> Ahead:
    """What does not fit, or cannot work, is refused. A stage that goes on where it was stopped has been planned and examined when it began."""
    if only is not None:
        require_below(stages, only)
    names = {
        choice.name
        for choice in foretell(stages, forced=forced, only=only)
        if choice.action == "run" and not _goes_on(stages, choice)
    }
    if not names:
        return Ahead(forecasts={}, findings=())
    found = foresee_stages(stages.pipeline, stages.base, done=stages.output, names=names)
    require_fitting(found)
    findings = require_examined(stages.pipeline, stages.base, found, runs=stages.runs, done=stages.output, names=names)
    return Ahead(forecasts={name: cards[0] for name, cards in found.items()}, findings=findings)


def _goes_on(stages: Stages, choice: Choice) -> bool:
    own = stages.own(choice.name)
    return own is not None and choice.grounds is not None and not choice.is_forced and is_half_done(own, choice.grounds)


def plan_rest(run: RunDir, *, only: str | None, forced: Collection[str]) -> tuple[Named, ...]:
    """Of a run that is at hand; what was planned for other stages stays."""
    stages = open_stages(run)
    ahead, old = look_ahead(stages, only=only, forced=forced), read_record(run.plan, Plan)
    known = {**old.forecasts, **ahead.forecasts}
    plan = replace(old, forecasts={name: known[name] for name in stages.pipeline.order() if name in known})
    if plan != old:
        write_record(run.plan, plan)
    return ahead.findings


def _fill(run: RunDir, asked: Asked, forecasts: dict[str, Forecast]) -> None:
    pipeline = asked.pipeline
    (run.path / "stages").mkdir()
    run.log.parent.mkdir()
    write_text(run.spec_yaml, asked.spec_text)
    write_text(run.spec_json, spec_to_json(_placed(asked, run)) + "\n")
    write_record(run.plan, Plan(stages={}, forecasts=forecasts))
    waiting = tuple(
        StageState(name=name, kind=pipeline.stages[name].kind, place=f"stages/{number}-{name}", status="waiting")
        for number, name in enumerate(pipeline.order(), 1)
    )
    write_record(run.state, PipelineState(stages=waiting, inputs=asked.inputs))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = Run(
        name=pipeline.name,
        digest=asked.digest,
        finefit=__version__,
        created=now,
        kind="pipeline",
        status="prepared",
        overrides=asked.overrides,
    )
    write_record(run.run, about)


def _placed(asked: Asked, run: RunDir) -> Pipeline:
    """With paths that start in the run directory, and the commits of today."""
    return pinned(moved(asked.pipeline, between(asked.base.resolve(), run.path.resolve())))


def _follow(run: RunDir, asked: Asked) -> None:
    """What has the same digest may lie elsewhere now, and may be told to others."""
    text = spec_to_json(_placed(replace(asked, pipeline=_as_begun(asked.pipeline, run)), run)) + "\n"
    if text != run.spec_json.read_text(encoding="utf-8"):
        with run_lock(run.lock):
            write_text(run.spec_json, text)


def open_stages(run: RunDir) -> Stages:
    pipeline = pipeline_from_json(run.spec_json.read_text(encoding="utf-8"))
    asked = read_record(run.state, PipelineState).asked
    return Stages(pipeline=pipeline, base=run.path.resolve(), runs=run.path.resolve().parent, run=run, asked=asked)


def command_of(state: PipelineState, forced: Collection[str]) -> str:
    """Which command asks for stages anew; empty where none does. One that was killed and is given again is the same one."""
    return "" if not forced else state.asked if set(state.forced) == set(forced) else uuid4().hex


def given_again(stages: Stages, forced: Collection[str]) -> Stages:
    """As the command that asks for these anew would find them."""
    return (
        stages
        if stages.run is None
        else replace(stages, asked=command_of(read_record(stages.run.state, PipelineState), forced))
    )


def require_unchanged(run: RunDir) -> None:
    """A run that is named by its directory goes on with what it began with."""
    stages, before = open_stages(run), read_record(run.state, PipelineState).inputs
    now = outside_inputs(stages.pipeline, stages.base)
    if changed := [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]:
        lines = (f"  {name}: {before.get(name, '(none)')[:12]} -> {now.get(name, '(none)')[:12]}" for name in changed)
        raise RunError(
            f"the inputs of {run.path.name} have changed since it began:\n" + "\n".join(lines),
            "put them back, or give the spec file: it starts another run, which takes over every stage that has not changed",
        )


def is_finished(run: RunDir) -> bool:
    """Said to be, and nothing would run: all that was made is still where it is said to be, and stands on what it stands on now."""
    states = read_record(run.state, PipelineState).stages
    is_told = read_record(run.run, Run).status == "finished" and all(
        (run.path / state.place / "done.json").exists() for state in states
    )
    return is_told and all(choice.action != "run" for choice in foretell(open_stages(run)))
