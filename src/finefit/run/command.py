"""What `finefit run` does, whatever it is given: a spec file or a run directory, one training or a pipeline.

The spec is parsed once, when the command is read; the run's lock is taken once, for everything that is written."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finefit.artifacts.atomic import write_text
from finefit.artifacts.processes import holder_of, run_lock
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, is_pipeline, open_any_run
from finefit.errors import RunError, WorkerDied
from finefit.run.cache_inputs import pinned
from finefit.run.create import between, create_run, find_stages, in_order_of, read_request
from finefit.run.resume import amend, follow, parse_again, require_unchanged
from finefit.run.run_stages import StageProgress, Train, run_stages
from finefit.run.staleness import (
    StageDecision,
    Stages,
    above,
    decide_all,
    for_command,
    is_finished,
    open_stages,
    require_stages,
)
from finefit.spec.load import load_pipeline, pipeline_from_json, spec_to_json, whole_text
from finefit.spec.pipeline import EVERY, Pipeline
from finefit.spec.stages import moved

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSelection:
    """Which stages a command runs, and which of them again."""

    first: str | None = None
    only: str | None = None
    force: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != StageSelection()

    def arguments(self) -> list[str]:
        """As a command line has them."""
        found = [] if self.first is None else ["--from", self.first]
        found += [] if self.only is None else ["--only", self.only]
        return [*found, *(word for name in self.force for word in ("--force", name))]

    def forced(self, pipeline: Pipeline) -> set[str]:
        """Stages that run although they are finished."""
        named = [name for name in (self.first, self.only) if name is not None]
        require_stages(pipeline, [*named, *(name for name in self.force if name != EVERY)])
        self._require_sense(pipeline)
        again = set(pipeline.stages) if EVERY in self.force else set(self.force)
        if self.only is not None:
            return again & {self.only}
        return again | (above(pipeline, self.first) if self.first is not None else set())

    def _require_sense(self, pipeline: Pipeline) -> None:
        others = [name for name in self.force if name not in (EVERY, self.only)]
        if self.only is not None and self.first is not None:
            raise RunError(
                f"--from {self.first} means several stages, --only {self.only} one alone", "leave one of the two out"
            )
        if self.only is not None and others:
            raise RunError(
                f"--force {', '.join(others)} makes another stage again than --only {self.only} runs",
                "leave one of the two out",
            )
        if pipeline.is_flat and (self.first is not None or self.force):
            raise RunError(
                f"{pipeline.name} is one training, which --from and --force would train again in place of itself",
                "--new trains it again in another run",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArgs:
    """The arguments of `finefit run`."""

    target: Path
    """A spec file, or a run directory."""
    overrides: tuple[str, ...] = ()
    new: bool = False
    runs: Path = Path("runs")
    selection: StageSelection = field(default_factory=StageSelection)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """The arguments with the spec that they mean."""

    args: RunArgs
    pipeline: Pipeline
    base: Path
    """Where relative paths of the spec start."""
    run: RunDir | None
    """The run directory that is named; None for a spec file."""

    @property
    def forced(self) -> set[str]:
        return self.args.selection.forced(self.pipeline)


def read_command(args: RunArgs, pipeline: Pipeline | None = None) -> RunCommand:
    """What is wrong with arguments or spec is reported before anything else is read. `pipeline`: a spec file, where it
    is parsed already."""
    if args.target.is_dir():
        run = open_any_run(args.target)
        command = RunCommand(args=args, pipeline=_spec_of(run, args), base=args.target, run=run)
    else:
        pipeline = pipeline or load_pipeline(args.target, args.overrides)
        command = RunCommand(args=args, pipeline=pipeline, base=args.target.resolve().parent, run=None)
    args.selection.forced(command.pipeline)
    return command


def _spec_of(run: RunDir, args: RunArgs) -> Pipeline:
    place, pipeline = run.path, run.path.resolve().parent.parent
    if args.new:
        raise RunError(
            "--new starts from a spec file, not from a run directory",
            f"give the spec file that {place} was started from",
        )
    if is_pipeline(place) and args.overrides:
        raise RunError(
            f"{place} is a pipeline, which goes on as it began: --set has no place here",
            "give --set with the spec file: it starts another run, which takes over every stage that has not changed",
        )
    if is_pipeline(place):
        return pipeline_from_json(run.spec_json.read_text(encoding="utf-8"))
    if read_record(run.run, Run).kind == "eval":
        raise RunError(
            f"{place.name} holds an evaluation and nothing to train", f"`finefit eval {place}` goes on with it"
        )
    if is_pipeline(pipeline) and args.overrides:  # with other settings it would not be what its key says
        raise RunError(
            f"{place} is a stage of {pipeline.name}, and --set would make it another one",
            "give --set stages.NAME.KEY=VALUE with the spec file of the pipeline",
        )
    return Pipeline.of(parse_again(run, args.overrides))


def find_or_create(command: RunCommand, *, nodes: int | None = None) -> RunDir:
    """The run that a command means: the directory itself, the newest with the same digest, or a new one. `nodes`: that
    ranks were started on already."""
    args, pipeline = command.args, command.pipeline
    if command.run is not None:
        if not pipeline.is_flat:
            require_unchanged(command.run, pipeline)
        return command.run
    text = whole_text(args.target)
    request = read_request(pipeline, command.base, spec_text=text, overrides=args.overrides, nodes=nodes)
    found = find_stages(request, runs=args.runs, new=args.new).run
    return found or create_run(request, runs=args.runs, only=args.selection.only, forced=command.forced)


def take_over(command: RunCommand, run: RunDir) -> list[str]:
    """What a command may change in a run that exists: settings that leave the steps done as they were, and where files
    lie. The caller holds the run's lock. Returns lines that say what has changed."""
    pipeline = command.pipeline
    if command.run is not None:
        return amend(run, command.args.overrides, asked=pipeline.flat_spec) if pipeline.is_flat else []
    here = moved(in_order_of(run, pipeline), between(command.base, run.path.resolve()))
    if pipeline.is_flat:
        return follow(run, here.flat_spec)
    text = spec_to_json(pinned(here)) + "\n"
    if text != run.spec_json.read_text(encoding="utf-8"):
        write_text(run.spec_json, text)
    return []


def amend_now(command: RunCommand, run: RunDir) -> list[str]:
    with run_lock(run.lock):  # a run that another process works on is refused here
        return take_over(command, run)


class RunProgress(StageProgress, Protocol):
    def start(self) -> None:
        """The run is about to go on."""


def has_work(command: RunCommand, run: RunDir) -> bool:
    """False for a finished run that the command asks nothing more of; it is left untouched."""
    if command.args.selection or not is_finished(run):
        return True
    if command.run is None or not command.pipeline.is_flat:
        return False
    return bool(amend(run, command.args.overrides, asked=command.pipeline.flat_spec, dry=True))


def carry_out(command: RunCommand, run: RunDir, progress: RunProgress, *, train: Train | None = None) -> bool:
    """Runs what has yet to be done; False where that is nothing. `train`: by default in processes that are started
    here."""
    if not has_work(command, run):
        return False
    with run_lock(run.lock) as lock:
        for line in take_over(command, run):
            progress.say(line)
        if not command.args.selection and is_finished(run):  # another process was faster, or only files have moved
            return False
        progress.start()
        only = command.args.selection.only
        run_stages(run, progress, lock=lock, forced=command.forced, only=only, train=train)
    return True


def detach(command: RunCommand, run: RunDir) -> int | None:
    """Goes on in a process without a terminal, and returns its id once it holds the run's lock; None where nothing is
    left to do."""
    if not has_work(command, run):
        return None
    amend_now(command, run)  # what is refused is refused here, not in a log that nobody reads
    log = run.log.parent / "detached.log"
    words = [sys.executable, "-P", "-m", "finefit", "run", str(run.path), *command.args.selection.arguments()]
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    while holder_of(run.lock) != process.pid and process.poll() is None:
        time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise WorkerDied(
            f"the detached process ended at once, with code {process.returncode}", f"its reason is in {log}"
        )
    return process.pid


def dry_run(command: RunCommand) -> tuple[Stages, list[StageDecision]]:
    """Which stages would run, and why."""
    args = command.args
    if command.run is not None:
        stages = open_stages(command.run)
    else:
        request = read_request(command.pipeline, command.base, spec_text="", overrides=args.overrides)
        stages = find_stages(request, runs=args.runs, new=args.new)
    forced = command.forced
    return stages, decide_all(for_command(stages, forced), forced=forced, only=args.selection.only)
