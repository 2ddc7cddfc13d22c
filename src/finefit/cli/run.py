"""`finefit run`: fine-tune what a spec describes; the same command again goes on where it stopped."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.options import AsJson, New, Runs, Set

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.artifacts.rundir import RunDir


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
    from rich.console import Console

    from finefit.artifacts.records import Run, read_record
    from finefit.report.run import run_document, show_end

    console = Console(stderr=as_json)
    place = open_or_create(target, tuple(overrides or ()), new=new, runs=runs, console=console)
    if read_record(place.run, Run).status == "finished":
        console.print(f"{place.path} is finished already; --new starts another run", highlight=False)
    elif detach:
        return _detach(place, console, as_json)
    else:
        carry_out(place, console)
    if as_json:
        typer.echo(json.dumps(run_document(place), indent=2))
    else:
        show_end(place, console)
        console.print(f"next     finefit eval {place.path} --checkpoint all", highlight=False, soft_wrap=True)
    return None


def open_or_create(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console") -> "RunDir":
    """The run that this command means: the directory itself, the newest with the same digest, or a new one."""
    from finefit.artifacts.rundir import open_run
    from finefit.errors import RunError
    from finefit.pipeline.resume import amend

    if target.is_dir():
        if new:
            raise RunError("--new starts from a spec file, not from a run directory", f"finefit run {target / 'spec.yaml'} --new")
        place = open_run(target)
        for line in amend(place, overrides):
            console.print(line, highlight=False)
        return place
    return _from_spec(target, overrides, new=new, runs=runs, console=console)


def _from_spec(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console") -> "RunDir":
    from finefit.artifacts.rundir import newest_with_digest
    from finefit.pipeline.create import create_run
    from finefit.pipeline.inputs import open_inputs
    from finefit.spec.load import load_spec

    spec = load_spec(target, overrides)
    base = target.resolve().parent
    with console.status("reading model and data"):
        opened = open_inputs(spec, base, (runs / spec.name).resolve())
    earlier = None if new else newest_with_digest(runs, spec.name, opened.digest)
    if earlier is not None:
        return earlier
    text = target.read_text(encoding="utf-8-sig")
    return create_run(opened, spec_text=text, overrides=overrides, base=base, runs=runs)


def carry_out(place: "RunDir", console: "Console") -> None:
    from finefit.artifacts.records import Plan, read_record
    from finefit.pipeline.execute import execute
    from finefit.report.live import RunView
    from finefit.report.run import ledger_view, plan_view

    console.print(f"run      {place.path}", highlight=False, soft_wrap=True)
    console.print(plan_view(read_record(place.plan, Plan)))
    for line in ledger_view(place.stages()[0]):
        console.print(line, highlight=False)
    with RunView(place, console, log=place.log) as view:
        execute(place, tick=view.tick, warn=view.say)


def _detach(place: "RunDir", console: "Console", as_json: bool) -> None:
    import subprocess

    with (place.log.parent / "detached.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "finefit", "run", str(place.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if as_json:
        typer.echo(json.dumps({"run": str(place.path), "pid": process.pid, "status": "running"}, indent=2))
    else:
        console.print(
            f"process {process.pid} goes on without this terminal\nnext     finefit watch {place.path}",
            highlight=False,
            soft_wrap=True,
        )
