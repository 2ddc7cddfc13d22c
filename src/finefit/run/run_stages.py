"""Runs the stages of a run directory one after another, each in processes of its own.

A stage that trains is a run directory: a folder of its pipeline's, or for a flat spec the run directory itself. Every
other stage is made under a hidden name and shown when it is whole; the record that a stage is finished is written last.
So a run that was killed goes on with the stage that it was at."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals, signal
from types import FrameType
from typing import Any, Literal, Protocol, Self

from finefit import __version__
from finefit.artifacts.atomic import (
    disk_full,
    read_lines,
    release_on_disk_full,
    remove_folder,
    replace_folder,
    report_disk_full,
    sweep,
    sync_tree,
)
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.processes import on_stop_signals, run_lock
from finefit.artifacts.records import (
    CacheInputs,
    Failure,
    FinishedStage,
    PipelineState,
    Run,
    StageMemory,
    StageOutcome,
    read_record,
    write_record,
)
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, stage_of
from finefit.artifacts.stage_records import Stage, StageResult
from finefit.artifacts.wiring import wired_spec
from finefit.errors import DiskFull, FinefitError, Interrupted, Resumable, RunError
from finefit.facts.files import free_bytes
from finefit.plan.stage_forecasts import stage_in_errors
from finefit.run.cache_inputs import key_of, output_digest, sizes_of
from finefit.run.create import between, create_stage_run, read_request
from finefit.run.evaluate_stage import score
from finefit.run.evaluation import Tick, evaluate_after_training
from finefit.run.launch import inhibit_sleep, launch, launch_ranks, log_tail, reraise
from finefit.run.resume import follow
from finefit.run.stage_jobs import MemoryMeter, device_here, stage_job
from finefit.run.staleness import (
    StageDecision,
    Stages,
    below,
    can_go_on,
    command_id,
    decide,
    forecast_pending,
    is_half_done,
    is_whole,
    is_worth_keeping,
    open_stages,
    require_below,
)
from finefit.spec.load import dumped
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import AutoEngine, Ddp, DeepSpeed, Fsdp2, Single
from finefit.spec.stages import AnyStage, EvaluateStage, TrainStage, moved

TRAIN_WORKER = "finefit.train.worker"
STAGE_WORKER = "finefit.stages.worker"
EARLIER = ".earlier-"
"""How the names of folders begin that were set aside and are kept."""

Train = Callable[[StageDir, Stage, int, Tick], int]
"""Trains a stage, whose run is locked by a descriptor, and returns the exit code; the result is in its folder."""


class View(Protocol):
    """Shows a training as it goes on."""

    def tick(self) -> None: ...

    def say(self, line: str) -> None: ...


class StageProgress(Protocol):
    """Shows the stages of a run as they come."""

    def begin(self, decision: StageDecision, number: int, count: int) -> None: ...

    def training(self, run: RunDir) -> AbstractContextManager[View]: ...

    def say(self, line: str) -> None: ...

    def end(self, decision: StageDecision, done: FinishedStage) -> None:
        """Also for a stage that need not run."""


def run_stages(
    run: RunDir,
    progress: StageProgress,
    *,
    lock: int,
    forced: Collection[str] = (),
    only: str | None = None,
    train: Train | None = None,
) -> Run:
    """To the end, or to the first failure, which is recorded before it is raised. `lock` holds the run's lock. `only`:
    one stage, whose inputs exist. `train`: by default in processes that are started here."""
    forced = set(forced) if only is None else {only} & set(forced)
    with _stoppable(), inhibit_sleep(progress.say):
        if is_pipeline(run.path):
            _sweep(run)
            _reset_states(run, forced)
        train, stages = train or _train_in_processes, open_stages(run)
        with _recorded(run):
            _StageRunner(run=run, stages=stages, progress=progress, lock=lock, train=train).run_all(forced, only)
        return read_record(run.run, Run)


class _Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def begin(self, decision: StageDecision, number: int, count: int) -> None:
        pass

    def training(self, _: RunDir) -> Self:
        return self

    def end(self, decision: StageDecision, done: FinishedStage) -> None:
        pass


def train_run(run: RunDir, *, train: Train | None = None) -> Run:
    """A whole run, without a terminal."""
    with run_lock(run.lock) as lock:
        return run_stages(run, _Silent(), lock=lock, train=train)


@contextmanager
def _recorded(run: RunDir) -> Iterator[None]:
    """The run is running, and then finished, stopped or failed; a pipeline with stages left to run is stopped."""
    record = replace(read_record(run.run, Run), status="running", failure=None)
    write_record(run.run, record)
    try:
        yield
    except FinefitError as error:
        with suppress(DiskFull):  # a record that finds no room does not hide the reason
            write_record(run.run, replace(record, status=_status(error), failure=Failure.of(error)))
        raise
    is_over = True
    if is_pipeline(run.path):
        state = read_record(run.state, PipelineState)
        write_record(run.state, replace(state, forced=(), command=""))
        is_over = all(one.status == "done" for one in state.stages)
    write_record(run.run, replace(record, status="finished" if is_over else "stopped"))


@dataclass(slots=True, kw_only=True)
class _StageRunner:
    run: RunDir
    stages: Stages
    progress: StageProgress
    lock: int
    train: Train

    def run_all(self, forced: Collection[str], only: str | None) -> None:
        """Where one stage alone is asked for, those that it depends on are reported and noted with their places too."""
        pipeline = self.stages.pipeline
        if pipeline.is_flat:
            with self.progress.training(self.run) as view:
                return self._train_and_evaluate(self.run, self.lock, view, view.tick)
        self._plan(forced, only)
        if only is not None:
            require_below(self.stages, only)
        for name in pipeline.order() if only is None else [*below(pipeline, only), only]:
            self._one(name, forced)
        return None

    def _plan(self, forced: Collection[str], only: str | None) -> None:
        """Forecasts of other stages stay as they were planned."""
        forecasts, findings = forecast_pending(open_stages(self.run), only=only, forced=forced)
        old = read_record(self.run.plan, Plan)
        known = {**old.forecasts, **forecasts}
        plan = replace(old, forecasts={name: known[name] for name in self.stages.pipeline.order() if name in known})
        if plan != old:
            write_record(self.run.plan, plan)
        for name, found in findings:
            if found.level == "warning":
                stage = "" if name is None else f"stage {name}: "
                remedy = f"\n  {found.remedy}" if found.remedy else ""
                self.progress.say(f"warning: {stage}{found.problem}{remedy}")

    def _one(self, name: str, forced: Collection[str]) -> None:
        decision = decide(self.stages, name, forced=forced)
        if decision.place is not None:
            remove_folder(
                self.run.unfinished(self.stages.number(name), name).path
            )  # of a command that was not given again
            done = self.stages.settle(name, decision.place)
            self._note(name, "done", decision.reason, place=decision.place)
            self.progress.end(decision, done)
            return
        own = self.stages.own(name)
        assert own is not None
        self._note(name, "running", decision.reason, place=own.path)
        self.progress.begin(decision, self.stages.number(name), len(self.stages.pipeline.stages))
        try:
            with stage_in_errors(self.stages.pipeline, name), report_disk_full(own.path):
                self._work(decision, own)
        except FinefitError as error:
            with suppress(DiskFull):
                self._note(name, _status(error), error.problem.splitlines()[0], place=own.path)
            raise
        done = self.stages.settle(name, own.path)
        self._note(name, "done", decision.reason, place=own.path)
        self.progress.end(decision, done)

    def _note(
        self, name: str, status: Literal["running", "done", "failed", "stopped"], reason: str, *, place: Path
    ) -> None:
        shown = Path(os.path.relpath(place.resolve(), self.run.path.resolve())).as_posix()
        old = read_record(self.run.state, PipelineState)
        stages = tuple(
            replace(one, status=status, reason=reason, place=shown) if one.name == name else one for one in old.stages
        )
        write_record(self.run.state, replace(old, stages=stages))

    def _work(self, decision: StageDecision, own: StageDir) -> None:
        name, stage, now = decision.name, self.stages.pipeline.stages[decision.name], decision.inputs
        assert now is not None  # all that it depends on is settled
        if isinstance(stage, TrainStage | EvaluateStage) and not can_go_on(own, stage, now):
            self._clear(own, stage)
        match stage:
            case TrainStage():
                self._train_stage(name, own, now)
            case EvaluateStage():
                self._evaluate(name, own, now)
            case _:
                self._make(name, own, now)

    def _clear(self, own: StageDir, stage: AnyStage) -> None:
        """Reviews by people and finished trainings are never deleted."""
        if not is_worth_keeping(own, stage):
            return remove_folder(own.path)
        aside = own.path.with_name(f"{EARLIER}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{own.path.name}")
        own.path.rename(aside)
        return self.progress.say(f"what was there is kept as {aside}; delete it when it is needed no more")

    # a training

    def _train_stage(self, name: str, own: StageDir, now: CacheInputs) -> None:
        began, base, run = time.perf_counter(), self.stages.base, RunDir(own.path)
        device = device_here(self.stages.pipeline)
        spec = wired_spec(self.stages.pipeline, name, self.stages.at, base)
        goes_on = own.path.exists()
        if not goes_on:
            text = dumped(spec.model_dump(mode="json", by_alias=True, exclude_unset=True))
            create_stage_run(own.path, read_request(Pipeline.of(spec), base, spec_text=text))
            write_record(own.begun, now)
        meter = MemoryMeter.begin(device, self.progress.say)
        with run_lock(run.lock) as lock:
            if goes_on:
                follow(run, moved(spec, between(base, own.path.resolve())))
            with self.progress.training(run) as view, _recorded(run):

                def tick() -> None:
                    view.tick()
                    meter.tick()

                self._train_and_evaluate(run, lock, view, tick)
        where = stage_of(run)
        result = read_record(where.result, StageResult)
        memory = meter.settled(loaded=_loaded(where, device), peak=result.peak_bytes)
        summary = {"checkpoint": result.checkpoint, "steps": result.step, "tokens": result.tokens}
        summary |= {"parameters": result.parameters, "trainable_parameters": result.trainable_parameters}
        self._finish(name, own, now, time.perf_counter() - began, memory, summary)

    def _train_and_evaluate(self, run: RunDir, lock: int, view: View, tick: Tick) -> None:
        where = stage_of(run)
        stage = read_record(where.stage, Stage)
        if not _is_trained(where, stage):
            where.result.unlink(missing_ok=True)
            _raise_failure(where.result, self.train(where, stage, lock, tick), run.log)
        evaluate_after_training(run, lock=lock, tick=tick, say=view.say)

    # models that are scored

    def _evaluate(self, name: str, own: StageDir, now: CacheInputs) -> None:
        own.path.mkdir(exist_ok=True)
        own.done.unlink(missing_ok=True)
        write_record(own.begun, now)
        job = stage_job(self.stages, name)
        write_record(own.job, job)
        began, meter = time.perf_counter(), MemoryMeter.begin(job.device, self.progress.say)
        summary = score(job, own.path, lock=self.lock, tick=meter.tick, say=self.progress.say)
        memory = meter.settled(loaded=summary["loaded_bytes"], peak=summary["peak_bytes"])
        self._finish(name, own, now, time.perf_counter() - began, memory, summary)

    # all others

    def _make(self, name: str, own: StageDir, now: CacheInputs) -> None:
        staging = self.run.unfinished(self.stages.number(name), name)
        if not is_whole(staging, now):
            if not is_half_done(staging, now):
                remove_folder(staging.path)
            with release_on_disk_full(staging.output):
                self._make_hidden(name, staging, now)
        replace_folder(staging.path, own.path)

    def _make_hidden(self, name: str, staging: StageDir, now: CacheInputs) -> None:
        staging.log.parent.mkdir(parents=True, exist_ok=True)
        write_record(staging.begun, now)
        job = stage_job(self.stages, name)
        write_record(staging.job, job)
        began, meter = time.perf_counter(), MemoryMeter.begin(job.device, self.progress.say)
        log = self.run.log.with_name(f"{name}.log")
        is_exact = self.stages.pipeline.deterministic
        code = launch(STAGE_WORKER, staging.job, log=log, lock=self.lock, tick=meter.tick, deterministic=is_exact)
        outcome = _outcome(staging, code, log)
        memory = meter.settled(loaded=outcome.summary.get("loaded_bytes"), peak=outcome.peak_bytes)
        shutil.copyfile(log, staging.log)
        sync_tree(staging.path)
        self._finish(name, staging, now, time.perf_counter() - began, memory, outcome.summary)

    def _finish(
        self, name: str, where: StageDir, now: CacheInputs, seconds: float, memory: StageMemory, summary: dict[str, Any]
    ) -> None:
        stage, key = self.stages.pipeline.stages[name], key_of(now)
        done = FinishedStage(
            name=name,
            kind=stage.kind,
            key=key,
            inputs=now.inputs,
            output_digest=output_digest(where.path, stage, key),
            finefit=__version__,
            seconds=seconds,
            memory=memory,
            summary=summary,
            files=sizes_of(where.path, stage),
        )
        write_record(where.done, done)


def _status(error: FinefitError) -> Literal["stopped", "failed"]:
    return "stopped" if error.exit_code == Resumable.exit_code else "failed"


# the process of a training


def _train_in_processes(where: StageDir, stage: Stage, lock: int, tick: Tick) -> int:
    match stage.engine:
        case Single() | AutoEngine():
            devices = 1
        case Ddp() | Fsdp2() | DeepSpeed():
            devices = stage.engine.devices
    if stage.num_ranks not in (None, devices):
        raise RunError(
            f"{where.run.name} was planned for {stage.num_ranks} ranks on several nodes, and this command starts "
            f"{devices}",
            "start them as they were started before, or start another run with --new",
        )
    if devices > 1:
        return launch_ranks(TRAIN_WORKER, where, devices=devices, lock=lock, tick=tick)
    log = RunDir(where.run).log
    return launch(TRAIN_WORKER, where.path, log=log, lock=lock, tick=tick, deterministic=stage.deterministic)


def _is_trained(where: StageDir, stage: Stage) -> bool:
    if not where.result.exists():
        return False
    result = read_record(where.result, StageResult)
    return result.failure is None and result.step == stage.total_steps


def _raise_failure(result: Path, code: int, log: Path) -> None:
    if result.exists():
        if failure := read_record(result, StageResult).failure:
            raise reraise(failure)
    elif code == Interrupted.exit_code:
        raise Interrupted(f"stopped at once, without a new checkpoint. {log_tail(log)}", "give the same command again")
    else:
        raise FinefitError(
            f"the worker ended with code {code}, which is a fault of finefit. {log_tail(log)}",
            "please report it with these lines",
        )


def _loaded(where: StageDir, device: str) -> int | None:
    """As the worker noted it, after its model was loaded and before the first step."""
    notes = [line for line in read_lines(where.memory) if line.get("instant") == "loaded"]
    return int(notes[-1]["reserved_bytes" if device == "cuda" else "resident_bytes"]) if notes else None


# the process of any other stage


def _outcome(staging: StageDir, code: int, log: Path) -> StageOutcome:
    if not staging.outcome.exists() and code == DiskFull.exit_code:  # no room for the record
        raise disk_full(staging.path, None, free_bytes(staging.path))
    if not staging.outcome.exists():
        raise FinefitError(
            f"its process ended with code {code}, which is a fault of finefit. {log_tail(log)}",
            "please report it with these lines",
        )
    found = read_record(staging.outcome, StageOutcome)
    if found.failure is not None:
        failure = reraise(found.failure)
        remedy = failure.remedy if isinstance(failure, Interrupted) else f"{failure.remedy}\nits log is {log}"
        raise type(failure)(failure.problem, remedy)
    return found


def _sweep(run: RunDir) -> None:
    """Deletes what a killed run has left half made, before anything is written: it may be what fills the disk. Answers
    of models are kept, since they are whole as far as they go."""
    sweep(run.path / "stages")
    for number, stage in enumerate(read_record(run.state, PipelineState).stages, 1):
        staging = run.unfinished(number, stage.name)
        if not staging.done.exists():
            if staging.output.exists():
                shutil.rmtree(staging.output)
            staging.outcome.unlink(missing_ok=True)


def _reset_states(run: RunDir, forced: Collection[str]) -> None:
    """The stage that a killed run was at, and those that are forced, are waiting."""
    old = read_record(run.state, PipelineState)
    stages = tuple(
        one if one.status == "done" and one.name not in forced else replace(one, status="waiting", reason="")
        for one in old.stages
    )
    new = replace(old, stages=stages, forced=tuple(sorted(forced)), command=command_id(old, forced))
    write_record(run.state, new)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Between processes a stop signal ends this one; while one works, it is passed on."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(f"stopped by {Signals(number).name}", "give the same command again")

    before = on_stop_signals(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal(number, handler)
