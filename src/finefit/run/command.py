"""Implements `finefit run` for a spec file or a run directory, for one training or a pipeline. The spec is parsed once,
when the command is read; the run's lock is taken once for all writes."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from finefit.artifacts.atomic import read_lines, write_text
from finefit.artifacts.processes import holder_of, run_lock
from finefit.artifacts.reading import open_to_append, read_text
from finefit.artifacts.records import PipelineState, Run, read_pipeline, read_record
from finefit.artifacts.rundir import RunDir, is_pipeline, open_any_run, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FindingError, FinefitError, RunError, UserError, WorkerDied
from finefit.run.cache_inputs import pinned
from finefit.run.create import between, create_run, find_stages, in_order_of, read_request
from finefit.run.resume import amend, follow, parse_again, require_unchanged
from finefit.run.run_stages import StageProgress, Train, run_stages, train_run
from finefit.run.staleness import StageDecision, Stages, above, command_id, decide_all, is_finished, open_stages
from finefit.spec.load import load_pipeline, load_spec, spec_to_json, whole_text
from finefit.spec.pipeline import EVERY, Pipeline
from finefit.spec.stages import moved

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSelection:
    """Which stages a command runs, and which of them it runs again."""

    first: str | None = None
    only: str | None = None
    force: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != StageSelection()

    def forced(self, pipeline: Pipeline) -> set[str]:
        """Returns the stages that run although they are finished."""
        named = [name for name in (self.first, self.only) if name is not None]
        named += [name for name in self.force if name != EVERY]
        if unknown := [name for name in named if name not in pipeline.stages]:
            remedy = f"its stages are {', '.join(pipeline.order())}"
            raise RunError(f"{pipeline.name} has no stage {', '.join(unknown)}", remedy)
        if self.only is not None and self.first is not None:
            problem = f"--from {self.first} selects several stages, but --only {self.only} selects one"
            raise RunError(problem, "leave out one of the two")
        others = [name for name in self.force if name not in (EVERY, self.only)]
        if self.only is not None and others:
            problem = f"--force {', '.join(others)} repeats another stage than the one that --only {self.only} runs"
            raise RunError(problem, "leave out one of the two")
        if pipeline.is_flat and (self.first is not None or self.force):
            problem = f"{pipeline.name} is one training, which --from and --force would overwrite"
            raise RunError(problem, "--new trains it again in another run")
        again = set(pipeline.stages) if EVERY in self.force else set(self.force)
        if self.only is not None:
            return again & {self.only}
        return again | (above(pipeline, self.first) if self.first is not None else set())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArgs:
    target: Path
    """A spec file, or a run directory."""
    overrides: tuple[str, ...] = ()
    new: bool = False
    runs: Path = Path("runs")
    selection: StageSelection = field(default_factory=StageSelection)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """The arguments with the spec that they refer to."""

    args: RunArgs
    pipeline: Pipeline
    base: Path
    """The folder that relative paths in the spec start from."""
    run: RunDir | None
    """The run directory that was given; None for a spec file."""

    @property
    def forced(self) -> set[str]:
        return self.args.selection.forced(self.pipeline)


def read_command(args: RunArgs, pipeline: Pipeline | None = None) -> RunCommand:
    """Errors in arguments or spec are reported first. `pipeline`: the parsed spec file, if it is parsed already."""
    if args.target.is_dir():
        run = open_any_run(args.target)
        command = RunCommand(args=args, pipeline=_spec_of(run, args), base=args.target, run=run)
    else:
        pipeline = pipeline or load_pipeline(args.target, args.overrides)
        command = RunCommand(args=args, pipeline=pipeline, base=args.target.resolve().parent, run=None)
    args.selection.forced(command.pipeline)
    return command


def _spec_of(run: RunDir, args: RunArgs) -> Pipeline:
    place, above_it = run.path, run.path.resolve().parent.parent
    if args.new:
        remedy = f"give the spec file that {place} was started from"
        raise RunError("--new starts from a spec file, not from a run directory", remedy)
    if is_pipeline(place):
        if args.overrides:
            raise RunError(
                f"{place} is a pipeline, which resumes with its own spec: it does not accept --set",
                "give --set with the spec file: this starts another run, which reuses every stage that has not changed",
            )
        return read_pipeline(run)
    if read_record(run.run, Run).kind == "eval":
        problem = f"{place.name} holds an evaluation and nothing to train"
        raise RunError(problem, f"resume it with `finefit eval {place}`")
    if is_pipeline(above_it) and args.overrides:  # with other settings it would not match its key
        problem = f"{place} is a stage of {above_it.name}, and --set would make it a different stage"
        raise RunError(problem, "give --set stages.NAME.KEY=VALUE with the spec file of the pipeline")
    return Pipeline.of(parse_again(run, args.overrides))


def find_or_create(command: RunCommand, *, nodes: int | None = None) -> RunDir:
    """Returns the given directory, the newest run with the same digest, or a new one. `nodes`: the number of nodes on
    which ranks were started."""
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
    """Applies permitted changes to an existing run, and returns lines that describe them. The caller holds its lock."""
    pipeline = command.pipeline
    if command.run is not None:
        return amend(run, command.args.overrides, asked=pipeline.flat_spec) if pipeline.is_flat else []
    here = moved(in_order_of(run, pipeline), between(command.base, run.path.resolve()))
    if pipeline.is_flat:
        return follow(run, here.flat_spec)
    text = spec_to_json(pinned(here)) + "\n"
    if text != read_text(run.spec_json):
        write_text(run.spec_json, text)
    return []


def amend_now(command: RunCommand, run: RunDir) -> list[str]:
    with run_lock(run.lock):  # this refuses a run that another process works on
        return take_over(command, run)


class RunProgress(StageProgress, Protocol):
    def start(self) -> None:
        """Called before the run resumes."""


def has_work(command: RunCommand, run: RunDir) -> bool:
    """Returns False for a finished run if the command requests nothing more; the run is left untouched."""
    if command.args.selection or not is_finished(run):
        return True
    if command.run is None or not command.pipeline.is_flat:
        return False
    return bool(amend(run, command.args.overrides, asked=command.pipeline.flat_spec, dry=True))


def carry_out(command: RunCommand, run: RunDir, progress: RunProgress, *, train: Train | None = None) -> bool:
    """Runs all pending stages; returns False if there are none. `train`: by default starts processes here."""
    if not has_work(command, run):
        return False
    with run_lock(run.lock) as lock:
        for line in take_over(command, run):
            progress.say(line)
        if not command.args.selection and is_finished(run):  # another process was faster, or only paths changed
            return False
        progress.start()
        only = command.args.selection.only
        run_stages(run, progress, lock=lock, forced=command.forced, only=only, train=train)
    return True


def detach(command: RunCommand, run: RunDir) -> int | None:
    """Continues without a terminal. Returns the process id once it holds the run's lock, or None if there is no
    work."""
    if not has_work(command, run):
        return None
    amend_now(command, run)  # errors are reported before detaching, not in a log
    selection, log = command.args.selection, run.log.parent / "detached.log"
    words = [sys.executable, "-P", "-m", "finefit", "run", str(run.path)]
    for option, value in (("--from", selection.first), ("--only", selection.only)):
        words += [] if value is None else [option, value]
    words += [word for name in selection.force for word in ("--force", name)]
    nothing, same = subprocess.DEVNULL, subprocess.STDOUT
    with open_to_append(log) as output:
        process = subprocess.Popen(words, stdin=nothing, stdout=output, stderr=same, start_new_session=True)
    while holder_of(run.lock) != process.pid and process.poll() is None:
        time.sleep(_POLL_SECONDS)
    if process.returncode:
        problem = f"the detached process ended at once, with code {process.returncode}"
        raise WorkerDied(problem, f"its reason is in {log}")
    return process.pid


def dry_run(command: RunCommand) -> tuple[Stages, list[StageDecision]]:
    args, forced = command.args, command.forced
    if command.run is not None:
        stages = open_stages(command.run)
    else:
        request = read_request(command.pipeline, command.base, spec_text="", overrides=args.overrides)
        stages = find_stages(request, runs=args.runs, new=args.new)
    if stages.run is not None and not stages.pipeline.is_flat:  # resolved as this command would resolve them
        stages = replace(stages, command=command_id(read_record(stages.run.state, PipelineState), forced))
    return stages, decide_all(stages, forced=forced, only=args.selection.only)


_NOTHING_ELSE = ("evaluate=[]", "data.validation=null", "save.every=1000000 steps")
_ONE_STEP = ("schedule.epochs=null", "schedule.steps=1", "schedule.warmup=0", *_NOTHING_ELSE)


def measure_step(target: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Takes one real step on this GPU, as a run in a temporary folder, and compares its longest rows with the
    forecast."""
    if not torch.cuda.is_available():
        problem = "--measure needs a CUDA device, but torch finds none here"
        raise UserError(problem, "`finefit doctor` explains why; without --measure no device is needed")
    overrides = (*overrides, *_ONE_STEP)
    pipeline = Pipeline.of(load_spec(target, overrides))
    with tempfile.TemporaryDirectory(prefix="finefit-measure-") as folder:
        text, base = whole_text(target), target.resolve().parent
        run = create_run(read_request(pipeline, base, spec_text=text, overrides=overrides), runs=Path(folder))
        require_measurable(read_record(stage_of(run).stage, Stage))
        train_run(run)
        found = measured(read_lines(stage_of(run).metrics))
    keys = ("predicted_bytes", "measured_bytes", "error")
    return {"card": torch.cuda.get_device_name(), **{key: found[key] for key in keys}}


def require_measurable(stage: Stage) -> None:
    """Refuses, before weights are loaded, a step that could not be compared."""
    if (num_ranks := stage.num_ranks or 1) > 1:
        remedy = "measure one rank: --set 'engine={kind: single}'; a run's memory.jsonl records the memory of each rank"
        raise UserError(f"--measure compares one card, but this spec is planned for {num_ranks} ranks", remedy)
    if stage.levers.update == "inside":
        problem = "--measure applies no update, but with levers.update: inside backward itself changes the weights"
        raise UserError(problem, "measure with --set levers.update=after; a run's memory.jsonl records its memory")


def measured(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line that training wrote about its longest rows."""
    events = {line["event"]: line for line in lines if "event" in line}
    if (found := events.get("measured")) is not None:
        return found
    if (short := events.get("worst_does_not_fit")) is not None:
        problem = f"a step of the longest rows ran out of memory; {short['predicted_bytes']:,} bytes were predicted"
        raise FindingError(problem, "close other programs on the card and measure again, or lower levers.micro_batch")
    problem = "the step was taken but not measured, which is a bug in finefit"
    raise FinefitError(problem, "please report it with the spec")
