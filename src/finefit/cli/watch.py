"""`finefit watch`: follow a run from another terminal."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson

_TICK_SECONDS = 0.5


def watch(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or RUN/STAGE.")],
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends; Ctrl-C leaves it alone. With --json: where it stands now.

    Example:

      finefit watch runs/orders-1
    """
    from finefit.artifacts.lock import holder_of
    from finefit.artifacts.rundir import find_run, is_pipeline, open_run

    if is_pipeline(find_run(target)):
        return _watch_stages(find_run(target), as_json)
    from finefit.report.live import RunView
    from finefit.report.run import run_document

    run = open_run(target)
    if as_json:
        document, pid = run_document(run), holder_of(run.lock)
        typer.echo(json.dumps(document | {"status": _status(document["status"], pid), "pid": pid}, indent=2))
        return None
    console = open_console()
    try:
        with RunView(run, console) as view:
            view.tick()
            while holder_of(run.lock) is not None:
                time.sleep(_TICK_SECONDS)
                view.tick()
    except KeyboardInterrupt:
        console.print(f"{run.path} goes on", soft_wrap=True)
        return None
    record = view.follower.status()
    console.print(f"{run.path} is {_status(record.status, None)}", soft_wrap=True)
    if record.failure is not None:
        console.print(record.failure.problem, soft_wrap=True)
    if record.status != "finished":
        console.print(f"next     finefit run {run.path}", soft_wrap=True)
    return None


def _watch_stages(path: Path, as_json: bool) -> None:
    from finefit.artifacts.lock import holder_of
    from finefit.artifacts.records import Run, read_record
    from finefit.artifacts.rundir import RunDir
    from finefit.report.stages import StagesView, show_stages_end, stages_document

    run = RunDir(path)
    if as_json:
        document, pid = stages_document(run), holder_of(run.lock)
        typer.echo(json.dumps(document | {"status": _status(document["status"], pid), "pid": pid}, indent=2))
        return
    console = open_console()
    try:
        with StagesView(run, console) as view:
            while holder_of(run.lock) is not None:
                view.tick()
                time.sleep(_TICK_SECONDS)
    except KeyboardInterrupt:
        console.print(f"{run.path} goes on", soft_wrap=True)
        return
    record = read_record(run.run, Run)
    show_stages_end(run, console)
    console.print(f"{run.path} is {_status(record.status, None)}", soft_wrap=True)
    if record.failure is not None:
        console.print(record.failure.problem, soft_wrap=True)
    if record.status != "finished":
        console.print(f"next     finefit run {run.path}", soft_wrap=True)


def _status(recorded: str, pid: int | None) -> str:
    """A run that was killed had no time to record its end."""
    return "stopped" if recorded == "running" and pid is None else recorded
