"""`finefit demo`: a real model learns a task in minutes on a CPU, and the change is shown."""

import json
from pathlib import Path

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson, New, Runs


def demo(new: New = False, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """Fine-tune SmolLM2-135M on two CPU cores in minutes and compare it with the base model on held-out items."""
    from finefit.artifacts.records import Run, read_record
    from finefit.cli.run import carry_out, open_or_create
    from finefit.pipeline.recipes import find_recipe
    from finefit.report.demo import show_change
    from finefit.report.run import run_document

    console = open_console(as_json=as_json)
    place = open_or_create(find_recipe("demo").spec, (), new=new, runs=runs, console=console)
    if read_record(place.run, Run).status != "finished":
        carry_out(place, console)
    if as_json:
        typer.echo(json.dumps(run_document(place), indent=2))
    else:
        show_change(place, console)
