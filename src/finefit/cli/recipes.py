"""`finefit recipes`: the shipped specs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.options import AsJson


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
    from finefit.pipeline import recipes as shipped
    from finefit.spec.load import whole_text

    if name is None:
        found = shipped.all_recipes()
        if as_json:
            typer.echo(
                json.dumps([{"name": r.name, "purpose": r.purpose, "spec": str(r.spec)} for r in found], indent=2)
            )
        else:
            width = max(len(recipe.name) for recipe in found)
            for recipe in found:
                typer.echo(f"{recipe.name:{width}} {recipe.purpose}")
        return
    recipe = shipped.find_recipe(name)
    if to is not None:
        shipped.copy_recipe(recipe, to)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "name": recipe.name,
                    "purpose": recipe.purpose,
                    "spec": str(to / recipe.spec.name if to else recipe.spec),
                },
                indent=2,
            )
        )
    elif to is not None:
        typer.echo(f"next     finefit run {to / recipe.spec.name}")
    else:
        typer.echo(whole_text(recipe.spec), nl=False)
