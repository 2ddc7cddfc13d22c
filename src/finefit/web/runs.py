"""The runs that the page shows, by name: one, or those of a folder. All viewers of a run share what was read of it:
twenty cost no more reading than one."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from starlette.concurrency import run_in_threadpool

from finefit.artifacts.atomic import Journal, write_text
from finefit.artifacts.processes import holder_of, stop_holder
from finefit.artifacts.records import FinishedStage, PipelineState, Run, StageState, read_pipeline
from finefit.artifacts.rundir import RunDir, StageDir, find_run, is_pipeline, is_run, models_of, open_any_run
from finefit.errors import FinefitError, RunError
from finefit.facts.files import free_bytes
from finefit.report.layout import duration
from finefit.report.run import format_memory
from finefit.report.stage_summary import summary_lines
from finefit.spec.pipeline import needs
from finefit.web.training import Document, RecordReader, WatchedTraining, stamp_of

TICK_SECONDS = 1.0
_MAX_OPEN = 60


Action = Literal["stop", "save", "validate"]


class NoSuchRun(Exception):
    """Neither the run nor the stage is among those that the page shows."""


class WatchedRun:
    """One run directory, its stages, and the training or evaluation of each that was looked at."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.run = name, RunDir(path)
        self.records = RecordReader()
        self._trainings: dict[Path, WatchedTraining] = {}
        self._documents: dict[str, bytes] = {}
        self._read_at: dict[str, float] = {}
        self._needs_stamp: tuple[int, int] | None = None
        self._known_needs: Mapping[str, Sequence[str]] = {}
        self._lock = asyncio.Lock()

    async def document(self, stage: str) -> bytes:
        """As JSON, at most a tick old; a journal that was not read to its end is read on at once."""
        async with self._lock:
            if time.monotonic() - self._read_at.get(stage, -TICK_SECONDS) >= TICK_SECONDS:
                found, is_behind = await run_in_threadpool(self._look, stage)
                if len(self._documents) > _MAX_OPEN:
                    self._documents.clear()
                self._documents[stage] = json.dumps(found, allow_nan=False, default=str).encode()
                self._read_at[stage] = -TICK_SECONDS if is_behind else time.monotonic()
            return self._documents[stage]

    def is_behind(self, stage: str) -> bool:
        """Whether a journal was not read to its end."""
        return self._read_at.get(stage, 0.0) < 0

    async def thinned(self, stage: str, first: int, last: int, num_points: int) -> bytes:
        async with self._lock:
            training = self.training(stage)
            if training is None:
                return b"{}"
            return await run_in_threadpool(training.series.thinned, first, last, num_points)

    def training(self, stage: str) -> WatchedTraining | None:
        """None for a stage that neither trains nor evaluates."""
        place = self._place(stage)
        if place is None or not is_run(place):
            return None
        if place not in self._trainings:
            self._trainings[place] = WatchedTraining(RunDir(place), self.records)
        return self._trainings[place]

    def act(self, action: Action, stage: str) -> None:
        """Asks the run for something; the request is recorded first. Nothing else can be changed from a page."""
        training = self.training(stage)
        if holder_of(self.run.lock) is None or (action != "stop" and (training is None or not self._runs(stage))):
            raise RunError(f"{self.name} does not train now", "start it again with `finefit run`")
        record_action(self.run, action, stage=stage)
        if action != "stop":
            assert training is not None
            training.where.requests.mkdir(exist_ok=True)
            write_text(training.where.requests / action, "", durable=False)
        elif (reason := stop_holder(self.run.lock)) is not None:
            raise RunError(f"{self.name} cannot be stopped from here: {reason}", "stop it there")

    def _runs(self, stage: str) -> bool:
        """Whether a stage is the one in progress: a finished one may belong to another run."""
        states = self._states()
        name = (stage or _current(states)).partition("/")[0]
        return not is_pipeline(self.run.path) or any(one.name == name and one.status == "running" for one in states)

    def _place(self, stage: str) -> Path | None:
        if not is_pipeline(self.run.path):
            return self.run.path
        states = {state.name: state for state in self._states()}
        name, _, model = (stage or _current(list(states.values()))).partition("/")
        if name not in states:
            raise NoSuchRun
        place = find_run(self.run.path / name)
        models = {path.name: path for path in models_of(place)}
        return models.get(model) or next(iter(models.values()), place)

    def _states(self) -> Sequence[StageState]:
        state = self.records.read(self.run.state, PipelineState)
        return state.stages if state else ()

    def _look(self, stage: str) -> tuple[Document, bool]:
        record, pid = self.records.read(self.run.run, Run), holder_of(self.run.lock)
        found: Document = {"name": self.name, "path": str(self.run.path), "pid": pid}
        if record is not None:
            status = "interrupted" if record.status == "running" and pid is None else record.status
            failure = None if record.failure is None else f"{record.failure.problem}\n{record.failure.remedy}"
            found |= {"kind": record.kind, "status": status, "failure": failure, "created": record.created}
            found |= {"note": _note(status, self.run.path)}
        training, is_behind = None, False
        try:
            training = self.training(stage)
            if training is not None:
                is_behind = training.read()
                found["training"] = training.document(is_running=pid is not None)
        except FinefitError as error:
            self.records.problems[self.run.path] = error.problem
        found["stages"] = self._stage_documents()
        found["stage"] = stage or _current(self._states())
        found["problems"] = list(self.records.problems.values())
        found["is_behind"] = is_behind
        if pid is not None:
            memory = psutil.virtual_memory()
            sizes = {"memory": memory.total, "free_memory": memory.available, "free_disk": free_bytes(self.run.path)}
            found["host"] = {name: round(size / 2**30, 1) for name, size in sizes.items()}
        return found, is_behind

    def _needs(self) -> Mapping[str, Sequence[str]]:
        """The stages that each stage depends on; read again when the spec has changed."""
        stamp = stamp_of(self.run.spec_json) if is_pipeline(self.run.path) else None
        if stamp != self._needs_stamp:
            self._needs_stamp, self._known_needs = stamp, {}
            if stamp is not None:
                with suppress(RunError):  # without the spec the stages are shown in their order
                    stages = read_pipeline(self.run).stages
                    self._known_needs = {name: needs(stage) for name, stage in stages.items()}
        return self._known_needs

    def _stage_documents(self) -> list[Document]:
        """With their place in the graph of what they depend on; one after the other if that is not known."""
        states, wanted = self._states(), self._needs()
        if {state.name for state in states} != wanted.keys():
            names = [state.name for state in states]
            wanted = {name: names[max(0, at - 1) : at] for at, name in enumerate(names)}
        return [self._stage_document(state, wanted) for state in states]

    def _stage_document(self, state: StageState, wanted: Mapping[str, Sequence[str]]) -> Document:
        where = StageDir(self.run.path / state.place)
        found: Document = {"name": state.name, "kind": state.kind, "status": state.status, "reason": state.reason}
        found |= {"needs": list(wanted.get(state.name, ())), "depth": _depth(state.name, wanted)}
        if state.status == "running" and (begun := stamp_of(where.begun)) is not None:
            training = self._trainings.get(where.path)
            peak = training.peak_bytes() if training else None
            return found | {"time": duration(max(0.0, time.time() - begun[0] / 1e9)), "peak_bytes": peak}
        done = self.records.read(where.done, FinishedStage) if state.status == "done" else None
        if done is None:
            return found
        peak = done.memory.peak_bytes if done.memory else None
        lines = [format_memory(done.memory), *summary_lines(done.kind, done.summary)]
        return found | {"time": duration(done.seconds), "peak_bytes": peak, "lines": lines}


def record_action(run: RunDir, action: str, **details: object) -> None:
    """logs/actions.jsonl holds what was asked for from the page."""
    (run.path / "logs").mkdir(exist_ok=True)
    with Journal(run.path / "logs" / "actions.jsonl") as actions:
        actions.write(time=round(time.time(), 3), action=action, **details)


def _depth(name: str, wanted: Mapping[str, Sequence[str]]) -> int:
    """How many stages come before it, one after the other."""
    return 1 + max((_depth(other, wanted) for other in wanted.get(name, ())), default=-1)


def _note(status: str, path: Path) -> str:
    if status == "interrupted":
        return f"Its process is gone. It goes on where it saved with: finefit run {path}"
    return f"It goes on with: finefit run {path}" if status in ("stopped", "failed", "prepared") else ""


def _current(states: Sequence[StageState]) -> str:
    """The stage to show: the one that runs, else the last that began."""
    running = [state.name for state in states if state.status == "running"]
    begun = [state.name for state in states if state.status != "waiting" and state.kind in ("train", "evaluate")]
    return next(iter([*running, *begun[-1:], *(state.name for state in states)]), "")


class Runs:
    """`target` is a run directory, a stage of one, or a folder that holds run directories."""

    def __init__(self, target: Path) -> None:
        found = find_run(target)
        self.folder = found if not is_run(found) and found.is_dir() else None
        self._only = None if self.folder is not None else open_any_run(target).path
        if self.folder is not None and not self.names():
            raise RunError(f"{target} holds no run directory", "name a run directory, or the folder that holds them")
        self._open: dict[str, WatchedRun] = {}
        self._listed: dict[str, WatchedRun] = {}
        """Of the list alone, which reads no curves: a long one closes no run that somebody looks at."""

    @property
    def only(self) -> str | None:
        """The name of the run, if it is the only one to show."""
        return None if self._only is None else self._only.resolve().name

    def names(self) -> list[str]:
        """Looked up again every time: a run that starts appears."""
        if self.folder is None:
            return [str(self.only)]
        try:
            paths = [path for path in self.folder.iterdir() if not path.name.startswith(".") and is_run(path)]
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror}", "start the page again") from None
        stamps = {path.name: stamp_of(path / "run.json") for path in paths}  # none for a run that was just deleted
        found = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        return sorted(found, key=lambda name: found[name], reverse=True)

    def open(self, name: str) -> WatchedRun:
        """Those that were asked for last stay open."""
        is_known = name in self._open and is_run(self._open[name].run.path)
        if not is_known and name not in self.names():
            raise NoSuchRun
        found = self._open.pop(name, None) or self._new(name)
        self._open[name] = found
        if len(self._open) > _MAX_OPEN:
            self._open.pop(next(iter(self._open)))
        return found

    def _new(self, name: str) -> WatchedRun:
        return WatchedRun(name, self._only or Path(self.folder or "", name))

    def path_of(self, name: str) -> Path:
        """Of `run`, or of `run/stage`; absolute, so that it is never taken for an option of a command."""
        run, _, stage = name.partition("/")
        found = self.open(run)
        found.training(stage)  # refuses a stage that is not there
        return found.run.path.absolute() / stage

    def listed(self) -> list[Document]:
        """A line for each run, newest first."""
        before = self._listed
        self._listed = {name: before.get(name) or self._new(name) for name in self.names()}
        return [self._line(run) for run in self._listed.values()]

    def _line(self, run: WatchedRun) -> Document:
        name, record = run.name, run.records.read(run.run.run, Run)
        if record is None:
            return {"name": name, "status": "damaged", "note": next(iter(run.records.problems.values()), "")}
        found: Document = {"name": name, "kind": record.kind, "status": record.status, "created": record.created}
        try:
            is_running = holder_of(run.run.lock) is not None
            training = run.training("")
            summary = {} if training is None else training.summary()
        except FinefitError as error:  # one damaged run hides no other
            return found | {"note": error.problem}
        is_interrupted = record.status == "running" and not is_running
        return found | summary | {"note": ""} | ({"status": "interrupted"} if is_interrupted else {})
