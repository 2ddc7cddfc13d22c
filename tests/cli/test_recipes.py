"""`finefit recipes`: what ships can be listed, loaded, and copied to start from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from finefit.pipeline.recipes import Recipe, all_recipes
from finefit.spec.load import load_any, whole_text
from finefit.spec.rows import Held, Source
from tests.cli.conftest import Finefit

RECIPES = all_recipes()


def test_demo_is_a_recipe() -> None:
    assert "demo" in [recipe.name for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_shipped_recipe_loads_and_its_rows_are_there_or_in_its_twin(recipe: Recipe) -> None:
    spec = load_any(recipe.spec)
    assert recipe.purpose
    if {f"{recipe.spec.parent.name}-twin", f"{recipe.name}/twin"} & {
        name for other in RECIPES for name in (other.name, other.spec.parent.name)
    }:
        return  # its rows are the user's own
    paths = [path for path in _paths(spec) if not path.startswith("stage://")]
    assert paths
    assert all((recipe.spec.parent / path).is_file() for path in paths)


def _paths(value: Any) -> Iterator[str]:
    """Of all rows, in whatever stage."""
    match value:
        case Source(path=path) | Held(path=str(path)):
            yield path
        case BaseModel():
            yield from (path for field in type(value).model_fields for path in _paths(getattr(value, field)))
        case dict():
            yield from (path for inner in value.values() for path in _paths(inner))
        case tuple():
            yield from (path for inner in value for path in _paths(inner))


def test_the_list_names_each_recipe_with_its_purpose(finefit: Finefit) -> None:
    shown = finefit("recipes").out.splitlines()
    assert [line.split()[0] for line in shown] == [recipe.name for recipe in RECIPES]
    assert all(recipe.purpose in line for recipe, line in zip(RECIPES, shown, strict=True))
    assert [entry["name"] for entry in finefit("recipes", "--json").document] == [recipe.name for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_named_recipe_is_printed_as_it_stands_or_with_its_base(recipe: Recipe, finefit: Finefit) -> None:
    assert finefit("recipes", recipe.name).out == whole_text(recipe.spec)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_copied_whole_into_a_new_folder_only(recipe: Recipe, tmp_path: Path, finefit: Finefit) -> None:
    to = tmp_path / "mine"
    answer = finefit("recipes", recipe.name, "--to", to)
    assert answer.code == 0
    assert f"finefit run {to / recipe.spec.name}" in answer.out
    originals = [p for p in recipe.spec.parent.rglob("*") if p.is_file()]
    assert all((to / p.relative_to(recipe.spec.parent)).read_bytes() == p.read_bytes() for p in originals)
    assert load_any(to / recipe.spec.name) == load_any(recipe.spec)
    again = finefit("recipes", recipe.name, "--to", to)
    assert again.code == 2
    assert "exists already" in again.err
