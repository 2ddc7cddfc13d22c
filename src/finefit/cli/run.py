"""`finefit run`: fine-tune what a spec describes; the same command again goes on where it stopped."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson, New, Runs, Set

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.artifacts.rundir import RunDir

_TICK_SECONDS = 0.5


def run(
    target: Annotated[Path, typer.Argument(metavar="SPEC_OR_RUN", help="A spec file, or a run directory to go on in.")],
    overrides: Set = None,
    new: New = False,
    detach: Annotated[bool, typer.Option("--detach", help="Go on without this terminal; follow with `finefit watch`.")] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune. The same command again resumes, bit for bit.

    Examples:

      finefit run spec.yaml

      finefit run spec.yaml --set optimizer.lr=1e-4 --new

      finefit run runs/orders-1 --set schedule.epochs=2
    """
    from finefit.artifacts.records import Run, read_record
    from finefit.report.run import evals_of, run_document, show_end

    console = open_console(as_json=as_json)
    place = open_or_create(target, tuple(overrides or ()), new=new, runs=runs, console=console)
    if read_record(place.run, Run).status == "finished":
        remedy = "--set schedule.epochs=N trains it further" if target.is_dir() else "--new starts another run"
        console.print(f"{place.path} is finished already; {remedy}", soft_wrap=True)
    elif detach:
        return _detach(place, console, as_json)
    else:
        carry_out(place, console)
    if as_json:
        typer.echo(json.dumps(run_document(place), indent=2))
    else:
        show_end(place, console)
        if evals_of(place.stages()[0]):
            console.print(f"next     finefit eval {place.path} --checkpoint all", soft_wrap=True)
    return None


def open_or_create(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console") -> "RunDir":
    """The run that this command means: the directory itself, the newest with the same digest, or a new one."""
    if target.is_dir():
        return _from_run(target, overrides, new=new, console=console)
    return _from_spec(target, overrides, new=new, runs=runs, console=console)


def _from_run(target: Path, overrides: tuple[str, ...], *, new: bool, console: "Console") -> "RunDir":
    from finefit.artifacts.rundir import open_run
    from finefit.errors import RunError

    place = open_run(target)
    if new:
        raise RunError("--new starts from a spec file, not from a run directory", f"give the spec file that {target} was started from")
    with console.status("comparing model and data with what the run began with"):
        from finefit.pipeline.resume import amend

        lines = amend(place, overrides)
    for line in lines:
        console.print(line, soft_wrap=True)
    return place


def _from_spec(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console") -> "RunDir":
    from finefit.artifacts.rundir import newest_with_digest
    from finefit.spec.load import load_spec

    spec = load_spec(target, overrides)  # before the heavy rooms: a misspelt key is told at once
    base = target.resolve().parent
    with console.status("reading model and data"):
        from finefit.pipeline.create import create_run
        from finefit.pipeline.inputs import open_inputs

        opened = open_inputs(spec, base, (runs / spec.name).resolve())
        earlier = None if new else newest_with_digest(runs, spec.name, opened.digest)
        if earlier is not None:
            return earlier
        text = target.read_text(encoding="utf-8-sig")
        return create_run(opened, spec_text=text, overrides=overrides, base=base, runs=runs)


def carry_out(place: "RunDir", console: "Console") -> None:
    from finefit.artifacts.lock import run_lock
    from finefit.artifacts.records import Plan, read_record
    from finefit.pipeline.execute import execute
    from finefit.report.ledger import ledger_lines
    from finefit.report.live import RunView
    from finefit.report.run import plan_view

    with run_lock(place.lock):  # a run that another process works on is refused before anything is shown
        console.print(f"run      {place.path}", soft_wrap=True)
        console.print(plan_view(read_record(place.plan, Plan)))
        for line in ledger_lines(place.stages()[0]):
            console.print(line, soft_wrap=True)
    with RunView(place, console, log=place.log) as view:
        execute(place, tick=view.tick, warn=view.say)


def _detach(place: "RunDir", console: "Console", as_json: bool) -> None:
    from finefit.artifacts.lock import run_lock

    with run_lock(place.lock):  # one that is being worked on is refused here, not in a log that nobody reads
        pass
    with (place.log.parent / "detached.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "finefit", "run", str(place.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _wait_until_it_works(process, place)
    if as_json:
        typer.echo(json.dumps({"run": str(place.path), "pid": process.pid, "status": "running"}, indent=2))
    else:
        console.print(
            f"process {process.pid} goes on without this terminal\nnext     finefit watch {place.path}",
            highlight=False,
            soft_wrap=True,
        )


def _wait_until_it_works(process: "subprocess.Popen[bytes]", place: "RunDir") -> None:
    """Until then `finefit watch` would find nobody at work."""
    from finefit.artifacts.lock import holder_of
    from finefit.errors import WorkerDied

    while holder_of(place.lock) != process.pid:
        if process.poll():
            reason = f"its reason is in {place.log.parent / 'detached.log'}"
            raise WorkerDied(f"the detached process ended at once, with code {process.returncode}", reason)
        if process.returncode == 0:
            return
        time.sleep(_TICK_SECONDS)
