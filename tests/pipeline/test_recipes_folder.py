from pathlib import Path

import pytest

from finefit.errors import UserError
from finefit.pipeline import recipes


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
