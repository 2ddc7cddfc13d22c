"""Every shipped recipe can be planned, without a card, weights or a network; the twins on the machine that runs the tests."""

from pathlib import Path

import pytest

from finefit.pipeline.forecasting import forecast, lengths_of
from finefit.pipeline.recipes import Recipe, all_recipes
from finefit.spec.load import load_any, load_spec
from finefit.spec.models import EmbeddedModel, ShapeModel
from finefit.spec.schema import Single, Spec

QWEN3_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000000},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}
QWEN2_5_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
HUB = {"Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B, "Qwen/Qwen2.5-7B-Instruct": QWEN2_5_7B}
"""config.json of the models that recipes take from the hub, in outline."""
RECIPES = {recipe.name: recipe for recipe in all_recipes()}
EMBEDDED = [
    recipe
    for recipe in RECIPES.values()
    if isinstance(spec := load_any(recipe.spec), Spec) and isinstance(spec.model, EmbeddedModel)
]
"""Of one training; what has stages is planned by its stages."""


@pytest.mark.real_model
@pytest.mark.parametrize("recipe", EMBEDDED, ids=lambda recipe: recipe.name)
def test_a_recipe_with_the_embedded_model_fits_here(recipe: Recipe) -> None:
    spec = load_spec(recipe.spec)
    (found,) = forecast(spec, recipe.spec.parent, ("cpu",), lengths_of(spec, recipe.spec.parent))
    assert found.fits
    assert found.gradients.unreached == ()
    assert found.lengths.source == "counted"


@pytest.mark.parametrize("engine", ["four cards", "one card"])
def test_whole_court_files_fit_on_four_cards_by_zero_2_and_on_one_with_offload(engine: str) -> None:
    recipe = RECIPES["legal-200k"]
    spec = load_spec(recipe.spec)
    assert spec.model.kind == "hub"
    changes: dict[str, object] = {"model": ShapeModel(kind="shape", config=HUB[spec.model.id])}
    if engine == "one card":
        changes |= {"engine": Single(kind="single"), "card": "H100-80GB"}
    spec = spec.model_copy(update=changes)
    (found,) = forecast(spec, recipe.spec.parent, (spec.card,), lengths_of(spec, recipe.spec.parent))
    assert found.lengths.longest == 262_144
    assert found.fits
    assert found.engine == spec.engine
    assert found.levers.offload
    assert found.devices == (4 if engine == "four cards" else 1)


def test_a_7b_model_learns_rows_of_2048_tokens_on_a_card_of_24_gb() -> None:
    """The five ways differ in what their rows hold, and where rows are not there the longest is planned for: one plan is that of all."""
    recipe = RECIPES["amr/mtup4"]
    spec = load_spec(recipe.spec)
    assert spec.model.kind == "hub"
    spec = spec.model_copy(update={"model": ShapeModel(kind="shape", config=HUB[spec.model.id])})
    (found,) = forecast(spec, recipe.spec.parent, (spec.card,), lengths_of(spec, recipe.spec.parent))
    assert (found.card, found.lengths.longest) == ("24GiB", 2048)
    assert found.fits
    assert found.gradients.unreached == ()
    assert found.trainable_parameters == 322_961_408  # rank 128 on all seven linear layers of 28


def test_no_document_and_no_summary_is_cut_without_a_word() -> None:
    for name in ("legal-200k", "legal-200k-twin"):
        assert load_spec(RECIPES[name].spec).data.too_long in ("drop", "error")


def test_the_twin_asks_the_same_of_its_rows_as_the_recipe() -> None:
    big, twin = (load_spec(RECIPES[name].spec) for name in ("legal-200k", "legal-200k-twin"))
    assert big.data.train[0].fields == twin.data.train[0].fields
    assert (big.engine.kind, twin.engine.kind) == ("deepspeed", "deepspeed")
    assert big.tuning.kind == twin.tuning.kind


def test_recipes_lie_where_the_wheel_takes_them() -> None:
    assert all(
        recipe.spec.is_relative_to(Path(__file__).parents[2] / "src" / "finefit" / "recipes")
        for recipe in RECIPES.values()
    )
