"""`finefit report`: a run as one file to attach or to archive."""

from pathlib import Path
from typing import Annotated

import typer

from finefit import api
from finefit.cli.console import AsJson, open_console, print_json

_OUT = "report.html: one self-contained page with plots. report.md: Markdown. By default NAME.html, after the run."


def report(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or PIPELINE/STAGE.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help=_OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as one file: whether it learned, fitted and was as fast as planned, curves, scores with intervals, a
    sample of the answers, the data, every setting with its source, and the environment.

    Examples:

      finefit report runs/orders-1

      finefit report runs/orders-1 -o orders.md

      finefit report runs/medical-1/dpo -o dpo.html
    """
    run, console = api.open_run(target), open_console(as_json=as_json)
    with console.status("writing the report"):
        written = run.write_report(out or Path(f"{run.path.name}.html"))
    if as_json:
        print_json({"run": str(run.path), "report": str(written), "bytes": written.stat().st_size})
    else:
        console.print(f"report   {written}", soft_wrap=True)
