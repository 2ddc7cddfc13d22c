"""Runs the stages of a run directory one after another, each in separate processes.

A training stage is a run directory: a folder of its pipeline, or for a flat spec the run directory itself. Every other
stage is created under a hidden name and renamed when it is complete; the record that a stage is finished is written
last. So a run that was killed resumes with the stage that was in progress."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import Any, Literal, Protocol, Self

from finefit import __version__
from finefit.artifacts import atomic, records
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.processes import run_lock
from finefit.artifacts.reading import is_there, open_file
from finefit.artifacts.records import (
    CacheInputs,
    FinishedStage,
    Run,
    StageMemory,
    read_if_there,
    read_record,
    write_record,
)
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, stage_of
from finefit.artifacts.stage_records import Stage, StageResult
from finefit.errors import DiskFull, FinefitError, Interrupted, RunError
from finefit.facts.files import free_bytes
from finefit.facts.machine import read_machine
from finefit.plan.resolve import device_of, precision_on
from finefit.plan.stage_forecasts import stage_in_errors
from finefit.plan.target import devices_of
from finefit.run import staleness
from finefit.run.cache_inputs import key_of, output_digest, sizes_in
from finefit.run.check_stages import below
from finefit.run.create import between, create_training, read_request
from finefit.run.eval_subjects import EARLIER
from finefit.run.evaluate_stage import score
from finefit.run.evaluation import Tick, evaluate_after_training, status_after
from finefit.run.launch import MemoryMeter, inhibit_sleep, launch, launch_ranks, log_tail, reraise, stop_signals_to
from finefit.run.resume import follow
from finefit.run.staleness import StageDecision, Stages
from finefit.spec.load import dumped
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import AutoEngine
from finefit.spec.stages import CompareStage, EvaluateStage, MakePairs, Sampled, TrainStage, models_of, moved

TRAIN_WORKER = "finefit.train.worker"
Train = Callable[[StageDir, Stage, int, Tick], int]
"""Trains a stage whose run is locked by a descriptor, and returns the exit code; the result is in its folder."""


class View(Protocol):
    """Shows the progress of a training."""

    def tick(self) -> None: ...
    def say(self, line: str) -> None: ...


class StageProgress(Protocol):
    """Shows the progress through the stages of a run."""

    def begin(self, decision: StageDecision, number: int, count: int) -> None: ...
    def training(self, run: RunDir) -> AbstractContextManager[View]: ...
    def say(self, line: str) -> None: ...
    def end(self, decision: StageDecision, done: FinishedStage) -> None: ...  # also for stages that need not run


def run_stages(
    run: RunDir,
    progress: StageProgress,
    *,
    lock: int,
    forced: Collection[str] = (),
    only: str | None = None,
    train: Train | None = None,
) -> Run:
    """Runs to the end, or to the first failure, which is recorded before it is raised. `lock` holds the run's lock.
    `only`: run this stage, whose inputs must exist. `train`: by default trains in processes started here."""
    forced = set(forced) if only is None else {only} & set(forced)
    with stop_signals_to(_stop), inhibit_sleep(progress.say):
        if is_pipeline(run.path):
            _sweep(run, forced)
        train, stages = train or _train_in_processes, staleness.open_stages(run)
        with _recorded(run):
            _StageRunner(run=run, stages=stages, progress=progress, lock=lock, train=train).run_all(forced, only)
        return read_record(run.run, Run)


def _sweep(run: RunDir, forced: Collection[str]) -> None:
    """Deletes the incomplete files of a killed run, since they may be what fills the disk; models' answers are kept.
    The stage that was in progress and the forced stages are set to waiting."""
    atomic.sweep(run.path / "stages")
    old, states = read_record(run.state, records.PipelineState), []
    for number, stage in enumerate(old.stages, 1):
        staging = run.unfinished(number, stage.name)
        if not staging.done.exists():
            atomic.remove_folder(staging.output)
            if is_there(staging.outcome):  # of an earlier try, which says nothing about the next one
                with open_file(staging.outcome):
                    staging.outcome.unlink()
        is_done = stage.status == "done" and stage.name not in forced
        states.append(stage if is_done else replace(stage, status="waiting", reason=""))
    new = replace(old, stages=tuple(states), forced=tuple(sorted(forced)), command=staleness.command_id(old, forced))
    write_record(run.state, new)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def tick(self) -> None: ...
    def say(self, line: str) -> None: ...
    def begin(self, decision: StageDecision, number: int, count: int) -> None: ...
    def end(self, decision: StageDecision, done: FinishedStage) -> None: ...

    def training(self, _: RunDir) -> Self:
        return self


def train_run(run: RunDir, *, train: Train | None = None) -> Run:
    """Runs a whole run, without a terminal."""
    with run_lock(run.lock) as lock:
        return run_stages(run, _Silent(), lock=lock, train=train)


@contextmanager
def _recorded(run: RunDir) -> Iterator[None]:
    """Records the run as running, and then as finished, stopped or failed; a pipeline with pending stages is
    stopped."""
    record = replace(read_record(run.run, Run), status="running", failure=None)
    write_record(run.run, record)
    try:
        yield
    except FinefitError as error:
        with suppress(DiskFull):  # a full disk must not hide the original error
            write_record(run.run, replace(record, status=status_after(error), failure=records.Failure.of(error)))
        raise
    is_over = True
    if is_pipeline(run.path):
        state = read_record(run.state, records.PipelineState)
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
        """With `only`, the stages that it depends on are reported and recorded with their folders too."""
        pipeline = self.stages.pipeline
        if pipeline.is_flat:
            with self.progress.training(self.run) as view:
                return self._train_and_evaluate(self.run, self.lock, view, view.tick)
        forecasts, findings = staleness.forecast_pending(staleness.open_stages(self.run), only=only, forced=forced)
        old = read_record(self.run.plan, Plan)
        known = {**old.forecasts, **forecasts}  # forecasts of other stages stay as they were planned
        plan = replace(old, forecasts={name: known[name] for name in pipeline.order() if name in known})
        if plan != old:
            write_record(self.run.plan, plan)
        for stage, found in findings:
            if found.level == "warning":
                prefix = "" if stage is None else f"stage {stage}: "
                remedy = f"\n  {found.remedy}" if found.remedy else ""
                self.progress.say(f"warning: {prefix}{found.problem}{remedy}")
        if only is not None:
            staleness.require_below(self.stages, only)
        for name in pipeline.order() if only is None else [*below(pipeline, only), only]:
            self._one(name, forced)
        return None

    def _one(self, name: str, forced: Collection[str]) -> None:
        decision = staleness.decide(self.stages, name, forced=forced)
        own, number = self.stages.own(name), self.stages.number(name)
        assert own is not None
        place = decision.place or own.path
        if decision.place is not None:
            atomic.remove_folder(self.run.unfinished(number, name).path)  # left by a command that was not repeated
        else:
            self._note(name, "running", decision.reason, place=place)
            self.progress.begin(decision, number, len(self.stages.pipeline.stages))
            assert decision.inputs is not None  # all stages that it depends on are settled
            try:
                with stage_in_errors(self.stages.pipeline, name), atomic.report_disk_full(place):
                    self._work(name, own, decision.inputs)
            except FinefitError as error:
                with suppress(DiskFull):
                    self._note(name, status_after(error), error.problem.splitlines()[0], place=place)
                raise
        done = self.stages.settle(name, place)
        self._note(name, "done", decision.reason, place=place)
        self.progress.end(decision, done)

    def _note(
        self, name: str, status: Literal["running", "done", "failed", "stopped"], reason: str, *, place: Path
    ) -> None:
        shown = Path(os.path.relpath(place.resolve(), self.run.path.resolve())).as_posix()
        old = read_record(self.run.state, records.PipelineState)
        stages = tuple(
            replace(one, status=status, reason=reason, place=shown) if one.name == name else one for one in old.stages
        )
        write_record(self.run.state, replace(old, stages=stages))

    def _work(self, name: str, own: StageDir, now: CacheInputs) -> None:
        stage = self.stages.pipeline.stages[name]
        if not isinstance(stage, TrainStage | EvaluateStage):
            staging = self.run.unfinished(self.stages.number(name), name)
            if not staleness.is_whole(staging, now):
                if not staleness.is_half_done(staging, now):
                    atomic.remove_folder(staging.path)
                with atomic.release_on_disk_full(staging.output):
                    staging.log.parent.mkdir(parents=True, exist_ok=True)
                    self._make(name, staging, now)
            return atomic.replace_folder(staging.path, own.path)
        # an evaluation that lost some of its answers generates only those again
        lost_answers = isinstance(stage, EvaluateStage) and staleness.is_whole(own, now)
        if not staleness.is_half_done(own, now) and not lost_answers:
            if staleness.is_worth_keeping(own, stage):  # reviews by people and finished trainings are never deleted
                aside = own.path.with_name(f"{EARLIER}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{own.path.name}")
                own.path.rename(aside)
                self.progress.say(f"the earlier output is kept as {aside}; delete it when you no longer need it")
            else:
                atomic.remove_folder(own.path)
        if isinstance(stage, TrainStage):
            return self._train_stage(name, own, now)
        own.path.mkdir(exist_ok=True)
        own.done.unlink(missing_ok=True)
        return self._make(name, own, now)

    def _train_stage(self, name: str, own: StageDir, now: CacheInputs) -> None:
        began, base, run, is_resumed = time.perf_counter(), self.stages.base, RunDir(own.path), own.path.exists()
        device = _device_here(self.stages.pipeline)
        spec = records.wired_spec(self.stages.pipeline, name, self.stages.at, base)
        if not is_resumed:
            text = dumped(spec.model_dump(mode="json", by_alias=True, exclude_unset=True))
            create_training(read_request(Pipeline.of(spec), base, spec_text=text), own.path.parent, own.path)
            write_record(own.begun, now)
        meter = MemoryMeter(device, self.progress.say)
        with run_lock(run.lock) as lock:
            if is_resumed:
                follow(run, moved(spec, between(base, own.path.resolve())))
            with self.progress.training(run) as view, _recorded(run):

                def tick() -> None:
                    view.tick()
                    meter.tick()

                self._train_and_evaluate(run, lock, view, tick)
        where = stage_of(run)
        result = read_record(where.result, StageResult)
        # recorded by the worker before its first step
        key = "reserved_bytes" if device == "cuda" else "resident_bytes"
        notes = [line for line in atomic.read_lines(where.memory) if line.get("instant") == "loaded" and key in line]
        loaded = int(notes[-1][key]) if notes else None
        memory = meter.settled(loaded=loaded, peak=result.peak_bytes)
        summary = {"checkpoint": result.checkpoint, "steps": result.step, "tokens": result.tokens}
        summary |= {"parameters": result.parameters, "trainable_parameters": result.trainable_parameters}
        self._finish(name, own, now, time.perf_counter() - began, memory, summary)

    def _train_and_evaluate(self, run: RunDir, lock: int, view: View, tick: Tick) -> None:
        where = stage_of(run)
        stage = read_record(where.stage, Stage)
        before = read_if_there(where.result, StageResult)
        if before is None or before.failure is not None or before.step != stage.total_steps:
            where.result.unlink(missing_ok=True)
            code = self.train(where, stage, lock, tick)
            if where.result.exists():
                if failure := read_record(where.result, StageResult).failure:
                    raise reraise(failure)
            elif code == Interrupted.exit_code:
                problem = f"stopped at once, without a new checkpoint. {log_tail(run.log)}"
                raise Interrupted(problem, "give the same command again")
            else:
                problem = f"the worker ended with code {code}, which is a fault of finefit. {log_tail(run.log)}"
                raise FinefitError(problem, "please report it with these lines")
        evaluate_after_training(run, lock=lock, tick=tick, say=view.say)

    def _make(self, name: str, where: StageDir, now: CacheInputs) -> None:
        """Runs a stage that does not train: an evaluation in its own folder, any other stage in a hidden one."""
        write_record(where.begun, now)
        job = _stage_job(self.stages, name)
        write_record(where.job, job)
        stage, began, meter = job.stage, time.perf_counter(), MemoryMeter(job.device, self.progress.say)
        if isinstance(stage, EvaluateStage):
            summary = score(job, where.path, lock=self.lock, tick=meter.tick, say=self.progress.say)
            peak_bytes = summary["peak_bytes"]
        else:
            is_sampled = isinstance(stage, MakePairs) and isinstance(stage.method, Sampled)
            worker = f"finefit.stages.{'sampled_pairs' if is_sampled else stage.kind}"
            log, is_exact = self.run.log.with_name(f"{name}.log"), self.stages.pipeline.deterministic
            code = launch(worker, where.job, log=log, lock=self.lock, tick=meter.tick, deterministic=is_exact)
            outcome = _outcome(where, code, log)
            summary, peak_bytes = outcome.summary, outcome.peak_bytes
            shutil.copyfile(log, where.log)
        memory = meter.settled(loaded=summary.get("loaded_bytes"), peak=peak_bytes)
        if not isinstance(stage, EvaluateStage):
            atomic.sync_tree(where.path)
        self._finish(name, where, now, time.perf_counter() - began, memory, summary)

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
            files={} if isinstance(stage, EvaluateStage) else sizes_in(records.output_of(where.path, stage)),
        )
        write_record(where.done, done)


def _train_in_processes(where: StageDir, stage: Stage, lock: int, tick: Tick) -> int:
    devices = 1 if isinstance(stage.engine, AutoEngine) else devices_of(stage.engine) or 1
    if stage.num_ranks not in (None, devices):
        planned = f"{where.run.name} was planned for {stage.num_ranks} ranks on several nodes"
        remedy = "start them as they were started before, or start another run with --new"
        raise RunError(f"{planned}, but this command starts {devices}", remedy)
    if devices > 1:
        return launch_ranks(TRAIN_WORKER, where, devices=devices, lock=lock, tick=tick)
    log = RunDir(where.run).log
    return launch(TRAIN_WORKER, where.path, log=log, lock=lock, tick=tick, deterministic=stage.deterministic)


def _device_here(pipeline: Pipeline) -> Literal["cpu", "cuda"]:
    return "cuda" if device_of(pipeline, read_machine()) == "cuda" else "cpu"


def _stage_job(stages: Stages, name: str) -> records.StageJob:
    """Describes a stage for its process: outputs of other stages are filled in, and paths are absolute. Its inputs are
    settled."""
    pipeline, stage = stages.pipeline, stages.pipeline.stages[name]
    device = _device_here(pipeline)
    models = {}
    for key, asked in models_of(stage):
        if not key.startswith("evaluate."):  # models that judge a task are not inputs of the stage
            wired = records.wired_model(pipeline, asked, stages.at)
            models[key] = replace(wired, model=moved(wired.model, lambda path: str((stages.base / path).resolve())))
    scores: dict[str, tuple[str, ...]] = {}
    for part in stage.of if isinstance(stage, CompareStage) else ():
        # `scores` is all models of an evaluation, `scores:sft` one of them, `sft:base` a checkpoint of a training
        other, _, within = part.partition(":")
        place, made_by = stages.settled[other][0].resolve(), pipeline.stages[other]
        if isinstance(made_by, EvaluateStage):
            scores[part] = tuple(str(place / model) for model in made_by.models if within in ("", model))
        else:
            scores[part] = (f"{place}:{within}" if within else str(place),)
    return records.StageJob(
        name=name,
        pipeline=pipeline.name,
        seed=pipeline.seed,
        device=device,
        precision=precision_on(device) if pipeline.precision == "auto" else pipeline.precision,
        base=str(stages.base),
        stage=records.with_files(stage, lambda path: str(records.file_at(path, stages.at))),
        models=models,
        scores=scores,
    )


def _outcome(staging: StageDir, code: int, log: Path) -> records.StageOutcome:
    if not staging.outcome.exists():
        if code == DiskFull.exit_code:  # there was no room for the record
            raise atomic.disk_full(staging.path, None, free_bytes(staging.path))
        problem = f"its process ended with code {code}, which is a fault of finefit. {log_tail(log)}"
        raise FinefitError(problem, "please report it with these lines")
    found = read_record(staging.outcome, records.StageOutcome)
    if found.failure is not None:
        failure = reraise(found.failure)
        remedy = failure.remedy if isinstance(failure, Interrupted) else f"{failure.remedy}\nits log is {log}"
        raise type(failure)(failure.problem, remedy)
    return found


def _stop(number: int, _: FrameType | None) -> None:
    """Between processes a stop signal ends this one; while a worker runs, the signal is passed on."""
    raise Interrupted(f"stopped by {Signals(number).name}", "give the same command again")
