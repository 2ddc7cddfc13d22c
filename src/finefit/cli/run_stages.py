"""`finefit run` of a spec with stages, or of the directory of a pipeline's run."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from finefit.cli.code import tell_code
from finefit.cli.console import open_console
from finefit.errors import RunError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.artifacts.launcher import Place
    from finefit.artifacts.rundir import RunDir
    from finefit.pipeline.stage_choice import Stages
    from finefit.pipeline.stage_run import Asked
    from finefit.spec.stages import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the command says of stages."""

    first: str | None = None
    only: str | None = None
    force: tuple[str, ...] = ()
    dry_run: bool = False

    def __bool__(self) -> bool:
        return self != Wish()

    def arguments(self) -> list[str]:
        """As a command line has them."""
        found = [] if self.first is None else ["--from", self.first]
        found += [] if self.only is None else ["--only", self.only]
        return [*found, *(word for name in self.force for word in ("--force", name))]

    def forced(self, pipeline: "Pipeline") -> set[str]:
        from finefit.pipeline.stage_choice import above, require_stages
        from finefit.spec.stage_graph import EVERY

        named = [name for name in (self.first, self.only) if name is not None]
        require_stages(pipeline, [*named, *(name for name in self.force if name != EVERY)])
        self._require_sense()
        again = set(pipeline.stages) if EVERY in self.force else set(self.force)
        if self.only is not None:
            return again & {self.only}
        return again | (above(pipeline, self.first) if self.first is not None else set())

    def _require_sense(self) -> None:
        """One stage alone runs, so nothing else can be made again beside it."""
        from finefit.spec.stage_graph import EVERY

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


def refuse_for_one(wish: Wish) -> None:
    """Words of stages, given for a single training."""
    if wish:
        raise RunError(
            "--from, --only, --force and --dry-run choose among stages, and this is one training", "leave them out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    target: Path
    overrides: tuple[str, ...]
    new: bool
    runs: Path
    as_json: bool
    wish: Wish = field(default_factory=Wish)


def has_stages(call: Call) -> bool:
    from finefit.artifacts.rundir import is_pipeline

    if call.target.is_dir():
        return is_pipeline(call.target)
    from finefit.spec.load import load_any
    from finefit.spec.stages import Pipeline

    return isinstance(load_any(call.target, call.overrides), Pipeline)


def refuse_changes(call: Call) -> None:
    """A stage by itself goes on as its pipeline has made it: with other settings it would not be what its key says."""
    from finefit.artifacts.rundir import is_pipeline

    pipeline = call.target.resolve().parent.parent
    if call.overrides and call.target.is_dir() and is_pipeline(pipeline):
        raise RunError(
            f"{call.target} is a stage of {pipeline.name}, and --set would make it another one",
            "give --set stages.NAME.KEY=VALUE with the spec file of the pipeline",
        )


def refuse_ranks(call: Call, at: "Place | None") -> None:
    """A pipeline starts its processes itself, also those of several ranks."""
    if at is not None:
        raise RunError(
            f"{call.target} has stages, and this process is rank {at.rank} of {at.size}, started from outside",
            "give `finefit run` alone: each stage starts its own ranks (engine.devices)",
        )


def run_stages(call: Call) -> None:
    console = open_console(as_json=call.as_json)
    if call.wish.dry_run:
        _tell_choices(call, console)
    else:
        _carry_out(open_place(call, console), call, console)


def open_place(call: Call, console: "Console") -> "RunDir":
    """The run that this command means: the directory itself, the newest of the same pipeline and inputs, or a new one."""
    if call.target.is_dir():
        from finefit.artifacts.rundir import RunDir
        from finefit.pipeline.stage_run import require_unchanged
        from finefit.spec.load import pipeline_from_json

        _require_plain(call)
        with console.status("comparing models and data with what the run began with"):
            require_unchanged(RunDir(call.target))
        tell_code(pipeline_from_json(RunDir(call.target).spec_json.read_text(encoding="utf-8")), call.target, console)
        return RunDir(call.target)
    with console.status("reading models and data, and planning every stage"):
        from finefit.pipeline.stage_run import open_or_create

        asked = _asked(call)
        tell_code(asked.pipeline, asked.base, console)
        return open_or_create(
            asked, runs=call.runs, new=call.new, only=call.wish.only, forced=call.wish.forced(asked.pipeline)
        )


def _asked(call: Call) -> "Asked":
    """A stage that is not there is told before anything is read."""
    from finefit.pipeline.stage_run import ask
    from finefit.spec.load import load_any, whole_text
    from finefit.spec.stages import Pipeline

    pipeline = load_any(call.target, call.overrides)
    assert isinstance(pipeline, Pipeline)
    call.wish.forced(pipeline)
    return ask(pipeline, call.target.resolve().parent, spec_text=whole_text(call.target), overrides=call.overrides)


def _require_plain(call: Call) -> None:
    if call.new:
        raise RunError(
            "--new starts from a spec file, not from a run directory",
            f"give the spec file that {call.target} was started from",
        )
    if call.overrides:
        raise RunError(
            f"{call.target} is a pipeline, which goes on as it began: --set has no place here",
            "give --set with the spec file: it starts another run, which takes over every stage that has not changed",
        )


def _carry_out(place: "RunDir", call: Call, console: "Console") -> None:
    from finefit.artifacts.lock import run_lock
    from finefit.pipeline.stage_run import is_finished, open_stages
    from finefit.pipeline.staged import carry_out
    from finefit.report.stages import StagesTeller, show_stages_end, stages_document

    forced = call.wish.forced(open_stages(place).pipeline)
    if is_finished(place) and not call.wish:
        remedy = "--new starts another run, --from STAGE makes a stage and all that stand on it again"
        console.print(f"{place.path} is finished already; {remedy}", soft_wrap=True)
    else:
        with run_lock(place.lock):  # a run that another process works on is refused before anything is shown
            console.print(f"run      {place.path}", soft_wrap=True)
        carry_out(place, StagesTeller(place, console), forced=forced, only=call.wish.only)
    if call.as_json:
        typer.echo(json.dumps(stages_document(place), indent=2))
    else:
        show_stages_end(place, console)


def _tell_choices(call: Call, console: "Console") -> None:
    from finefit.pipeline.stage_choice import foretell
    from finefit.pipeline.stage_run import given_again
    from finefit.report.stages import choices_document, choices_table

    with console.status("reading models and data"):
        stages = _stages(call)
        forced = call.wish.forced(stages.pipeline)
        choices = foretell(given_again(stages, forced), forced=forced, only=call.wish.only)
    run = "a new run" if stages.run is None else str(stages.run.path)
    if call.as_json:
        document = {"run": None if stages.run is None else run, "stages": choices_document(stages.pipeline, choices)}
        typer.echo(json.dumps(document, indent=2))
        return
    console.print(choices_table(stages.pipeline, choices))
    console.print(f"in       {run}; nothing was started", soft_wrap=True)


def _stages(call: Call) -> "Stages":
    from finefit.artifacts.rundir import RunDir
    from finefit.pipeline.stage_run import open_stages, stages_of

    if call.target.is_dir():
        _require_plain(call)
        return open_stages(RunDir(call.target))
    return stages_of(_asked(call), runs=call.runs, new=call.new)
