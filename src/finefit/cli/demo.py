"""`finefit demo`: a real model learns a task in minutes on a CPU, and the change is shown."""

import json
from pathlib import Path

import typer

from finefit.cli.console import AsJson, New, Runs, open_console


def demo(new: New = False, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """Fine-tune SmolLM2-135M on two CPU cores in minutes and compare it with the base model on held-out items."""
    from finefit.cli.run import open_place
    from finefit.recipes import find_recipe
    from finefit.report.run import ConsoleProgress, run_document, show_change
    from finefit.run.command import RunArgs, carry_out, read_command

    console = open_console(as_json=as_json)
    command = read_command(RunArgs(target=find_recipe("demo").spec, new=new, runs=runs))
    place = open_place(command, console)
    carry_out(command, place, ConsoleProgress(place, console))
    if as_json:
        typer.echo(json.dumps(run_document(place), indent=2))
    else:
        show_change(place, console)
