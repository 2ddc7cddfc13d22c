"""`finefit watch`: follows a run from another terminal."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import LOOPBACK, AsJson, Host, Port, UseToken, open_console, print_json

_TICK_SECONDS = 0.5


def watch(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or RUN/STAGE; with --web also RUNS.")],
    web: Annotated[bool, typer.Option("--web", help="Show it on a local page, also after its end.")] = False,
    host: Host = LOOPBACK,
    port: Port = 0,
    token: UseToken = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run until it ends; Ctrl-C stops watching, not the run. With --json: its state now.

    Examples:

      finefit watch runs/orders-1

      finefit watch runs/orders-1 --web

      finefit watch runs --web
    """
    if web:
        return show_page(target, host=host, port=port, asks_token=token, as_json=as_json)
    from finefit.artifacts.processes import holder_of
    from finefit.artifacts.records import Run, read_record
    from finefit.artifacts.rundir import is_pipeline, open_any_run
    from finefit.report.run import RunWatch, run_document, show_end

    run = open_any_run(target)
    if as_json:
        document, pid = run_document(run), holder_of(run.lock)
        return print_json(document | {"status": _status(document["status"], pid), "pid": pid})
    console = open_console()
    try:
        with RunWatch(run, console) as view:
            while holder_of(run.lock) is not None:
                time.sleep(_TICK_SECONDS)
                view.tick()
    except KeyboardInterrupt:
        return console.print(f"{run.path} continues", soft_wrap=True)
    record = read_record(run.run, Run)
    if is_pipeline(run.path) or record.status == "finished":
        show_end(run, console)
    console.print(f"{run.path} is {_status(record.status, None)}", soft_wrap=True)
    if record.failure is not None:
        console.print(record.failure.problem, soft_wrap=True)
    if record.status != "finished":
        console.print(f"next     finefit run {run.path}", soft_wrap=True)
    return None


def show_page(target: Path, *, host: str, port: int, asks_token: bool, as_json: bool) -> None:
    from finefit.web.linked_pages import LinkedPages
    from finefit.web.runs import Runs
    from finefit.web.server import serve_page
    from finefit.web.watch import watch_app

    runs, console = Runs(target), open_console(as_json=as_json)

    def ready(address: str, hint: str) -> None:
        console.print(f"watch at {address}{hint}\nCtrl-C ends the page, not a run", soft_wrap=True)
        if as_json:
            typer.echo(json.dumps({"url": address}))

    with LinkedPages(host) as pages:
        serve_page(
            lambda token: watch_app(runs, pages, token=token),
            host=host,
            port=port,
            asks_token=asks_token,
            ready=ready,
            path="/",
        )


def _status(recorded: str, pid: int | None) -> str:
    """A run that was killed had no time to record its end."""
    return "stopped" if recorded == "running" and pid is None else recorded
