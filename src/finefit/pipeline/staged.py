"""The stages of a pipeline, carried out one after another, each in processes of its own.

A stage that trains is a whole run in a folder of its own. Every other one is made under a hidden name and shown when it is whole; what says that a
stage is done is written last. So a run that was killed goes on with the stage that it was at."""

import json
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
from typing import Any, Literal, Protocol

from finefit import __version__
from finefit.artifacts.atomic import disk_full, full_disk_named, given_back_when_full, sync_file, sync_folder
from finefit.artifacts.journal import read_lines
from finefit.artifacts.launcher import on_stop_signals
from finefit.artifacts.lock import run_lock
from finefit.artifacts.pipelines import Begun, Done, Made, PipelineState, StageMemory
from finefit.artifacts.records import Failure, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import StageResult
from finefit.errors import DiskFull, FinefitError, Interrupted, Resumable
from finefit.facts.files import free_bytes
from finefit.pipeline.awake import awake
from finefit.pipeline.create import create_run_at, stage_of
from finefit.pipeline.execute import execute
from finefit.pipeline.foreseen import naming
from finefit.pipeline.inputs import between, open_inputs, relocate
from finefit.pipeline.launch import last_words, launch, raised_again
from finefit.pipeline.resume import amend
from finefit.pipeline.stage_choice import (
    Choice,
    Stages,
    below,
    can_go_on,
    choose,
    is_half_done,
    is_whole,
    is_worth_keeping,
    require_below,
)
from finefit.pipeline.stage_keys import key_of, output_digest, sizes_of
from finefit.pipeline.stage_memory import Meter
from finefit.pipeline.stage_order import device_here, order_for
from finefit.pipeline.stage_run import command_of, open_stages, plan_rest
from finefit.pipeline.wiring import wired_spec
from finefit.spec.edit import dumped
from finefit.spec.load import spec_from_json
from finefit.spec.models import CustomModel, FolderModel, Lora
from finefit.spec.schema import Spec
from finefit.spec.stages import AnyStage, EvaluateStage, TrainStage

MAKER = "finefit.pipeline.making.worker"
EARLIER = ".earlier-"
"""How the names begin of what was set aside, to be kept."""
_LEFT_OVER = (".staging-", ".removing-")
Tick = Callable[[], None]


class View(Protocol):
    """Shows a run as it goes on."""

    def tick(self) -> None: ...

    def say(self, line: str) -> None: ...


class Teller(Protocol):
    """Who is told of the stages."""

    def begin(self, choice: Choice, number: int, count: int) -> None: ...

    def training(self, run: RunDir) -> AbstractContextManager[View]: ...

    def say(self, line: str) -> None: ...

    def end(self, choice: Choice, done: Done) -> None:
        """Also for a stage that need not run."""


def carry_out(run: RunDir, teller: Teller, *, forced: Collection[str] = (), only: str | None = None) -> Run:
    """To the end, or to the first failure, which is recorded before it is raised. `only`: one stage, whose inputs are there."""
    forced = set(forced) if only is None else {only} & set(forced)
    with run_lock(run.lock) as lock, _stoppable(), awake(teller.say):
        _sweep(run)
        _put_back(run, forced)
        work = _Work(run=run, stages=open_stages(run), teller=teller, lock=lock)
        record = replace(read_record(run.run, Run), status="running", failure=None)
        write_record(run.run, record)
        try:
            work.plan(forced, only)
            work.all(forced, only)
        except FinefitError as error:
            with suppress(DiskFull):  # a record that finds no room does not hide the reason
                write_record(run.run, replace(record, status=_status(error), failure=Failure.of(error)))
            raise
        state = read_record(run.state, PipelineState)
        write_record(run.state, replace(state, forced=(), asked=""))
        is_over = all(one.status == "done" for one in state.stages)
        record = replace(record, status="finished" if is_over else "stopped")
        write_record(run.run, record)
        return record


@dataclass(slots=True, kw_only=True)
class _Work:
    run: RunDir
    stages: Stages
    teller: Teller
    lock: int

    def plan(self, forced: Collection[str], only: str | None) -> None:
        for name, found in plan_rest(self.run, only=only, forced=forced):
            if found.level == "warning":
                stage = "" if name is None else f"stage {name}: "
                remedy = f"\n  {found.remedy}" if found.remedy else ""
                self.teller.say(f"warning: {stage}{found.problem}{remedy}")

    def all(self, forced: Collection[str], only: str | None) -> None:
        """Also where one alone is asked for, those that it stands on are told and noted with their places: they are settled."""
        if only is not None:
            require_below(self.stages, only)
        pipeline = self.stages.pipeline
        for name in pipeline.order() if only is None else [*below(pipeline, only), only]:
            self._one(name, forced)

    def _one(self, name: str, forced: Collection[str]) -> None:
        choice = choose(self.stages, name, forced=forced)
        if choice.place is not None:
            _remove(self.run.making(self.stages.number(name), name).path)  # of a command that was not given again
            done = self.stages.settle(name, choice.place)
            self._note(name, "done", choice.reason, place=choice.place)
            self.teller.end(choice, done)
            return
        own = self.stages.own(name)
        assert own is not None
        self._note(name, "running", choice.reason, place=own.path)
        self.teller.begin(choice, self.stages.number(name), len(self.stages.pipeline.stages))
        try:
            with naming(name), full_disk_named(own.path):
                self._work(choice, own)
        except FinefitError as error:
            with suppress(DiskFull):
                self._note(name, _status(error), error.problem.splitlines()[0], place=own.path)
            raise
        done = self.stages.settle(name, own.path)
        self._note(name, "done", choice.reason, place=own.path)
        self.teller.end(choice, done)

    def _note(
        self, name: str, status: Literal["running", "done", "failed", "stopped"], reason: str, *, place: Path
    ) -> None:
        shown = Path(os.path.relpath(place.resolve(), self.run.path.resolve())).as_posix()
        old = read_record(self.run.state, PipelineState)
        stages = tuple(
            replace(one, status=status, reason=reason, place=shown) if one.name == name else one for one in old.stages
        )
        write_record(self.run.state, replace(old, stages=stages))

    def _work(self, choice: Choice, own: StageDir) -> None:
        stage, now = self.stages.pipeline.stages[choice.name], choice.grounds
        assert now is not None  # all that it stands on is settled
        if isinstance(stage, TrainStage | EvaluateStage) and not can_go_on(own, stage, now):
            self._clear(own, stage)
        match stage:
            case TrainStage():
                self._train(choice.name, own, now)
            case EvaluateStage():
                self._evaluate(choice.name, own, now)
            case _:
                self._make(choice.name, own, now)

    def _clear(self, own: StageDir, stage: AnyStage) -> None:
        """What people have judged, and a training that came to its end, is never deleted."""
        if not is_worth_keeping(own, stage):
            return _remove(own.path)
        aside = own.path.with_name(f"{EARLIER}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{own.path.name}")
        own.path.rename(aside)
        return self.teller.say(f"what was there is kept as {aside}; delete it when it is needed no more")

    # a training

    def _train(self, name: str, own: StageDir, now: Begun) -> None:
        began = time.perf_counter()
        device = device_here(self.stages.pipeline)
        spec = wired_spec(self.stages.pipeline, name, self.stages.at, self.stages.base)
        if own.path.exists():
            _amend_places(RunDir(own.path), relocate(spec, between(self.stages.base, own.path.resolve())))
        else:
            opened = open_inputs(spec, self.stages.base, own.path)
            text = dumped(spec.model_dump(mode="json", by_alias=True, exclude_unset=True))
            create_run_at(own.path, opened, spec_text=text, base=self.stages.base)
            write_record(own.begun, now)
        run = RunDir(own.path)
        meter = Meter.begin(device, self.teller.say)
        with self.teller.training(run) as view:
            execute(run, tick=_both(view.tick, meter.tick), warn=view.say)
        where = stage_of(run)
        result = read_record(where.result, StageResult)
        memory = meter.settled(loaded=_loaded(where, device), peak=result.peak_bytes)
        summary = {
            "checkpoint": result.checkpoint,
            "steps": result.step,
            "tokens": result.tokens,
            "parameters": result.parameters,
        }
        summary |= {"trainable_parameters": result.trainable_parameters}
        self._done(name, own, now, time.perf_counter() - began, memory, summary)

    # models that are scored

    def _evaluate(self, name: str, own: StageDir, now: Begun) -> None:
        from finefit.pipeline.making.evaluate import score

        own.path.mkdir(exist_ok=True)
        own.done.unlink(missing_ok=True)
        write_record(own.begun, now)
        order = order_for(self.stages, name)
        write_record(own.order, order)
        began, meter = time.perf_counter(), Meter.begin(order.device, self.teller.say)
        summary = score(order, own.path, lock=self.lock, tick=meter.tick, say=self.teller.say)
        memory = meter.settled(loaded=summary["loaded_bytes"], peak=summary["peak_bytes"])
        self._done(name, own, now, time.perf_counter() - began, memory, summary)

    # all others

    def _make(self, name: str, own: StageDir, now: Begun) -> None:
        making = self.run.making(self.stages.number(name), name)
        if not is_whole(making, now):
            if not is_half_done(making, now):
                _remove(making.path)
            with given_back_when_full(making.output):
                self._make_out_of_sight(name, making, now)
        with _set_aside(own.path):
            making.path.rename(own.path)
            sync_folder(own.path.parent)

    def _make_out_of_sight(self, name: str, making: StageDir, now: Begun) -> None:
        making.making_log.parent.mkdir(parents=True, exist_ok=True)
        write_record(making.begun, now)
        order = order_for(self.stages, name)
        write_record(making.order, order)
        began, meter = time.perf_counter(), Meter.begin(order.device, self.teller.say)
        log = self.run.log.with_name(f"{name}.log")
        is_exact = self.stages.pipeline.deterministic
        code = launch(MAKER, making.order, log=log, lock=self.lock, tick=meter.tick, deterministic=is_exact)
        made = _made(making, code, log)
        memory = meter.settled(loaded=made.summary.get("loaded_bytes"), peak=made.peak_bytes)
        shutil.copyfile(log, making.making_log)
        _sync(making.path)
        self._done(name, making, now, time.perf_counter() - began, memory, made.summary)

    def _done(
        self, name: str, where: StageDir, now: Begun, seconds: float, memory: StageMemory, summary: dict[str, Any]
    ) -> None:
        stage, key = self.stages.pipeline.stages[name], key_of(now)
        done = Done(
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


def _both(*ticks: Tick) -> Tick:
    def tick() -> None:
        for one in ticks:
            one()

    return tick


def _loaded(where: StageDir, device: str) -> int | None:
    """As the worker noted it, when its model was there and no step was done yet."""
    notes = [line for line in read_lines(where.memory) if line.get("instant") == "loaded"]
    return int(notes[-1]["reserved_bytes" if device == "cuda" else "resident_bytes"]) if notes else None


def _amend_places(run: RunDir, spec: Spec) -> None:
    """What a half-done training stands on may lie in another run's folder now."""
    before, changes = spec_from_json(run.spec_json.read_text(encoding="utf-8")), []
    match before.model, spec.model:
        case FolderModel(path=old), FolderModel(path=new) if old != new:
            changes.append(f"model.path={json.dumps(str((run.path / new).resolve()))}")
        case CustomModel(weights=str() as old), CustomModel(weights=str() as new) if old != new:
            changes.append(f"model.weights={json.dumps(str((run.path / new).resolve()))}")
    match before.tuning, spec.tuning:
        case Lora(adapter=str() as old), Lora(adapter=str() as new) if old != new:
            changes.append(f"tuning.adapter={json.dumps(str((run.path / new).resolve()))}")
    if changes:
        amend(run, tuple(changes))


def _made(making: StageDir, code: int, log: Path) -> Made:
    if not making.made.exists() and code == DiskFull.exit_code:  # no room for the record
        raise disk_full(making.path, None, free_bytes(making.path))
    if not making.made.exists():
        raise FinefitError(
            f"its process ended with code {code}, which is a fault of finefit. {last_words(log)}",
            "please report it with these lines",
        )
    made = read_record(making.made, Made)
    if made.failure is not None:
        failure = raised_again(made.failure)
        remedy = f"{failure.remedy}\nits log is {log}" if not isinstance(failure, Interrupted) else failure.remedy
        raise type(failure)(failure.problem, remedy)
    return made


def _forget_half_made(making: StageDir) -> None:
    """All but the answers of models, which are whole as far as they go."""
    if making.output.exists():
        shutil.rmtree(making.output)
    making.made.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() or path.is_dir():
            sync_file(path)


def _remove(place: Path) -> None:
    with _set_aside(place):
        pass


@contextmanager
def _set_aside(place: Path) -> Iterator[None]:
    """Out of sight in one instant, and gone at the end."""
    doomed = place.with_name(f".removing-{place.name.lstrip('.')}-{time.time_ns()}")
    if is_there := place.exists():
        place.rename(doomed)
    yield
    if is_there:
        shutil.rmtree(doomed)


def _sweep(run: RunDir) -> None:
    """What a killed run has left half made, before anything is written: it may be what fills the disk."""
    for path in (run.path / "stages").iterdir():
        if path.name.startswith(_LEFT_OVER):
            shutil.rmtree(path)
    for number, stage in enumerate(read_record(run.state, PipelineState).stages, 1):
        making = run.making(number, stage.name)
        if not making.done.exists():
            _forget_half_made(making)


def _put_back(run: RunDir, forced: Collection[str]) -> None:
    """What a killed run had in hand, and what shall be made again, is waiting."""
    old = read_record(run.state, PipelineState)
    stages = tuple(
        one if one.status == "done" and one.name not in forced else replace(one, status="waiting", reason="")
        for one in old.stages
    )
    write_record(run.state, replace(old, stages=stages, forced=tuple(sorted(forced)), asked=command_of(old, forced)))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Between processes a stop ends this one; while one works, it is passed on."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(f"stopped by {Signals(number).name}", "give the same command again")

    before = on_stop_signals(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal(number, handler)
