"""`finefit watch`: follow a run from another terminal."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.options import AsJson

_TICK_SECONDS = 0.5


def watch(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends; Ctrl-C leaves it alone. With --json: where it stands now.

    Example:

      finefit watch runs/orders-1
    """
    from rich.console import Console

    from finefit.artifacts.lock import holder_of
    from finefit.artifacts.rundir import open_run
    from finefit.report.live import RunView
    from finefit.report.run import run_document

    run = open_run(target)
    if as_json:
        typer.echo(json.dumps(run_document(run) | {"pid": holder_of(run.lock)}, indent=2))
        return
    console = Console()
    with RunView(run, console) as view:
        view.tick()
        while holder_of(run.lock) is not None:
            time.sleep(_TICK_SECONDS)
            view.tick()
    record = view.follower.status()
    console.print(f"{run.path} is {'stopped' if record.status == 'running' else record.status}", highlight=False)
    if record.status != "finished":
        console.print(f"{record.failure.problem if record.failure else ''}\nnext     finefit run {run.path}", highlight=False, soft_wrap=True)
