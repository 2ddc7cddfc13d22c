"""The specs that come with finefit."""

import difflib
import shutil
from dataclasses import dataclass
from pathlib import Path

from finefit.errors import UserError

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A folder with rows and a spec.yaml, whose first comment says what the recipe is for. A folder may contain several
    specs that share a base.yaml; each is a recipe named after folder and file, such as amr/mtup2."""

    name: str
    purpose: str
    spec: Path


def all_recipes() -> list[Recipe]:
    recipes = []
    for spec in sorted(_FOLDER.glob("*/*.yaml")):
        if spec.name != "base.yaml":
            name = spec.parent.name if spec.name == "spec.yaml" else f"{spec.parent.name}/{spec.stem}"
            purpose = spec.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
            recipes.append(Recipe(name=name, purpose=purpose, spec=spec))
    return recipes


def find_recipe(name: str) -> Recipe:
    known = {recipe.name: recipe for recipe in all_recipes()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise UserError(f"there is no recipe {name}", remedy)
    return known[name]


def copy_recipe(recipe: Recipe, to: Path) -> None:
    if to.exists():
        raise UserError(f"{to} exists already", "name a folder that does not")
    shutil.copytree(recipe.spec.parent, to)
