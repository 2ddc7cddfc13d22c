"""`finefit watch`: follows a run from another terminal."""

import time
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import AsJson, open_console, print_json

_TICK_SECONDS = 0.5


def watch(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or RUN/STAGE.")],
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends; Ctrl-C stops watching, not the run. With --json: its state now.

    Example:

      finefit watch runs/orders-1
    """
    from finefit.artifacts.processes import holder_of
    from finefit.artifacts.records import Run, read_record
    from finefit.artifacts.rundir import is_pipeline, open_any_run
    from finefit.report.run import RunWatch, run_document, show_end

    run = open_any_run(target)
    if as_json:
        document, pid = run_document(run), holder_of(run.lock)
        print_json(document | {"status": _status(document["status"], pid), "pid": pid})
        return
    console = open_console()
    try:
        with RunWatch(run, console) as view:
            while holder_of(run.lock) is not None:
                time.sleep(_TICK_SECONDS)
                view.tick()
    except KeyboardInterrupt:
        console.print(f"{run.path} continues", soft_wrap=True)
        return
    record = read_record(run.run, Run)
    if is_pipeline(run.path) or record.status == "finished":
        show_end(run, console)
    console.print(f"{run.path} is {_status(record.status, None)}", soft_wrap=True)
    if record.failure is not None:
        console.print(record.failure.problem, soft_wrap=True)
    if record.status != "finished":
        console.print(f"next     finefit run {run.path}", soft_wrap=True)


def _status(recorded: str, pid: int | None) -> str:
    """A run that was killed had no time to record its end."""
    return "stopped" if recorded == "running" and pid is None else recorded
