"""`finefit recipes`: what ships can be listed, loaded, and copied to start from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from finefit import recipes
from finefit.errors import UserError
from finefit.recipes import Recipe, all_recipes
from finefit.spec.data import HeldOut, Source
from finefit.spec.load import load_any, whole_text
from tests.cli.conftest import Finefit
from tests.conftest import make_model_folder

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
        case Source(path=path) | HeldOut(path=str(path)):
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


def test_the_chat_recipe_trains_with_the_user_s_model_and_nothing_else_changed(
    tmp_path: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert finefit("recipes", "chat", "--to", "mine").code == 0
    make_model_folder(tmp_path / "mine" / "model")
    own = ("--set", "model={kind: folder, path: model}", "--set", "device=cpu")
    checked = finefit("check", "mine/spec.yaml", *own, "--json").document
    assert (checked["ok"], checked["ledger"]["used"]) == (True, 24)
    document = finefit("run", "mine/spec.yaml", *own, "--json").document
    assert (document["status"], document["result"]["step"]) == ("finished", 9)
    assert (Path(document["checkpoints"]) / "final" / "adapter_config.json").is_file()


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


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("orders", "medical"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text(f"# Teaches {name}.\nname: {name}\n")
    (tmp_path / "not-a-recipe").mkdir()
    monkeypatch.setattr(recipes, "_FOLDER", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("shipped")
def test_a_recipe_is_a_folder_with_a_spec_whose_first_comment_says_its_purpose() -> None:
    assert [(r.name, r.purpose) for r in recipes.all_recipes()] == [
        ("medical", "Teaches medical."),
        ("orders", "Teaches orders."),
    ]


def test_specs_that_share_a_base_are_recipes_by_folder_and_file(shipped: Path) -> None:
    (shipped / "orders" / "base.yaml").write_text("# What all have in common.\nseed: 1\n")
    (shipped / "orders" / "large.yaml").write_text("# Teaches large orders.\nbase: base.yaml\nname: large\n")
    assert [recipe.name for recipe in recipes.all_recipes()] == ["medical", "orders/large", "orders"]
    recipes.copy_recipe(recipes.find_recipe("orders/large"), shipped / "mine")
    assert {path.name for path in (shipped / "mine").iterdir()} == {"base.yaml", "large.yaml", "spec.yaml"}


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(("name", "remedy"), [("order", "did you mean orders?"), ("xyz", "there are medical, orders")])
def test_an_unknown_recipe_is_answered_with_the_known_ones(name: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        recipes.find_recipe(name)
    assert caught.value.remedy == remedy


def test_a_copy_never_writes_into_what_is_there(shipped: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        recipes.copy_recipe(recipes.find_recipe("orders"), shipped / "medical")
