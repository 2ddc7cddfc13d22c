"""`finefit recipes`: the shipped specs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import AsJson


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
            typer.echo(json.dumps([asdict(recipe) for recipe in found], indent=2, default=str))
        else:
            width = max(len(recipe.name) for recipe in found)
            for recipe in found:
                typer.echo(f"{recipe.name:{width}} {recipe.purpose}")
        return
    recipe = find_recipe(name)
    if to is not None:
        copy_recipe(recipe, to)
    if as_json:
        spec = to / recipe.spec.name if to else recipe.spec
        typer.echo(json.dumps(asdict(recipe) | {"spec": str(spec)}, indent=2))
    elif to is not None:
        typer.echo(f"next     finefit run {to / recipe.spec.name}")
    else:
        typer.echo(whole_text(recipe.spec), nl=False)
