"""`finefit eval`: score checkpoints of a run on its held-out rows."""

import json
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    checkpoint: Annotated[str, typer.Option(help="final, best, base, a step number, or all.")] = "final",
    task: Annotated[str | None, typer.Option(help="A task; by default those that the spec names.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A seeded sample of the items instead of all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score checkpoints, each in a process of its own. All items count; a failed answer scores zero.

    Examples:

      finefit eval runs/orders-1

      finefit eval runs/orders-1 --checkpoint all --limit 20
    """
    from finefit.artifacts.lock import run_lock
    from finefit.artifacts.rundir import open_run
    from finefit.pipeline import execute
    from finefit.report.live import RunView
    from finefit.report.run import evals_document, evals_tables

    console = open_console(as_json=as_json)
    run = open_run(target)
    evaluations = execute.evaluations(run, task=task, limit=limit)
    checkpoints = execute.checkpoints(run, checkpoint)
    with run_lock(run.lock) as lock, RunView(run, console, log=run.log, evaluates=True) as view:
        results = [execute.evaluate(run, name, e, lock=lock, tick=view.tick) for e in evaluations for name in checkpoints]
    if as_json:
        typer.echo(json.dumps(evals_document(results), indent=2))
    else:
        console.print(evals_tables(results))
