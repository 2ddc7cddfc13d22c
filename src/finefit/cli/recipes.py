"""`finefit recipes` lists the shipped specs; `finefit demo` trains one of them and shows the change."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import AsJson, New, Runs, open_console, print_json


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's spec.")] = None,
    to: Annotated[Path | None, typer.Option(help="Copy the recipe, rows included, into this new folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes, print one, or copy one to start from.

    Examples:

      finefit recipes

      finefit recipes demo --to my-demo && finefit run my-demo/spec.yaml

      finefit recipes amr/mtup2 --to my-amr && finefit plan my-amr/mtup2.yaml
    """
    from finefit.recipes import all_recipes, copy_recipe, find_recipe
    from finefit.spec.load import whole_text

    if name is None:
        found = all_recipes()
        if as_json:
            return print_json([asdict(recipe) | {"spec": str(recipe.spec)} for recipe in found])
        width = max(len(recipe.name) for recipe in found)
        return typer.echo("\n".join(f"{recipe.name:{width}} {recipe.purpose}" for recipe in found))
    recipe = find_recipe(name)
    if to is not None:
        copy_recipe(recipe, to)
    spec = recipe.spec if to is None else to / recipe.spec.name
    if as_json:
        return print_json(asdict(recipe) | {"spec": str(spec)})
    return typer.echo(whole_text(spec) if to is None else f"next     finefit run {spec}\n", nl=False)


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
        print_json(run_document(place))
    else:
        show_change(place, console)
