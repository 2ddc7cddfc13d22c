"""Every shipped recipe can be planned, without a card, weights or a network; the twins on the machine that runs the
tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.plan.client import forecast
from finefit.plan.stage_forecasts import forecast_trainings, on_cards, row_lengths
from finefit.recipes import Recipe, all_recipes, find_recipe
from finefit.spec.load import load_any, load_spec
from finefit.spec.models import EmbeddedModel, ShapeModel
from finefit.spec.pipeline import Pipeline
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
    pytest.param(recipe, marks=() if recipe.name == "demo" else pytest.mark.slow, id=recipe.name)
    for recipe in RECIPES.values()
    if isinstance(spec := load_any(recipe.spec), Spec) and isinstance(spec.model, EmbeddedModel)
]
"""Of one training; what has stages is planned by its stages. The demo is the quick one."""


@pytest.mark.real_model
@pytest.mark.parametrize("recipe", EMBEDDED)
def test_a_recipe_with_the_embedded_model_fits_here(recipe: Recipe) -> None:
    spec = load_spec(recipe.spec)
    (found,) = forecast(spec, recipe.spec.parent, ("cpu",), row_lengths(spec, recipe.spec.parent))
    assert found.fits
    assert found.gradients.unreached == ()
    assert found.lengths.source == "counted"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["four cards", "one card"])
def test_whole_court_files_fit_on_four_cards_by_zero_2_and_on_one_with_offload(engine: str) -> None:
    recipe = RECIPES["legal-200k"]
    spec = load_spec(recipe.spec)
    assert spec.model.kind == "hub"
    changes: dict[str, object] = {"model": ShapeModel(kind="shape", config=HUB[spec.model.id])}
    if engine == "one card":
        changes |= {"engine": Single(kind="single"), "card": "H100-80GB"}
    spec = spec.model_copy(update=changes)
    (found,) = forecast(spec, recipe.spec.parent, (spec.card,), row_lengths(spec, recipe.spec.parent))
    assert found.lengths.longest == 262_144
    assert found.fits
    assert found.engine == spec.engine
    assert found.levers.offload
    assert found.devices == (4 if engine == "four cards" else 1)


@pytest.mark.slow
def test_a_7b_model_learns_rows_of_2048_tokens_on_a_card_of_24_gb() -> None:
    """The five ways differ in what their rows hold, and where rows are not there the longest is planned for: one plan
    is that of all."""
    recipe = RECIPES["amr/mtup4"]
    spec = load_spec(recipe.spec)
    assert spec.model.kind == "hub"
    spec = spec.model_copy(update={"model": ShapeModel(kind="shape", config=HUB[spec.model.id])})
    (found,) = forecast(spec, recipe.spec.parent, (spec.card,), row_lengths(spec, recipe.spec.parent))
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


GENERATORS = {
    "amr-twin": "make_amr_rows.py",
    "demo": "make_demo_rows.py",
    "legal-200k-twin": "make_legal_rows.py",
    "medical-sft-dpo-twin": "make_medical_rows.py",
    "rmoe-twin": "make_rmoe_rows.py",
}


@pytest.mark.parametrize(("recipe", "generator"), GENERATORS.items())
def test_a_generator_writes_the_committed_rows_byte_for_byte(recipe: str, generator: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, str(root / "tools" / generator), str(tmp_path)], check=True)
    committed = (root / "src" / "finefit" / "recipes" / recipe).iterdir()
    rows = {path.name: path.read_bytes() for path in committed if path.suffix in (".jsonl", ".txt")}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == rows


def test_recipes_lie_where_the_wheel_takes_them() -> None:
    assert all(
        recipe.spec.is_relative_to(Path(__file__).parents[2] / "src" / "finefit" / "recipes")
        for recipe in RECIPES.values()
    )


# Both trainings of medical-sft-dpo fit on the card of 12 GB that they are planned for, before any stage has run.

MISTRAL_7B = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sft_and_dpo_of_a_7b_model_fit_on_a_card_of_12_gb() -> None:
    recipe = find_recipe("medical-sft-dpo")
    model = json.dumps({"kind": "shape", "config": MISTRAL_7B})
    pipeline = load_any(recipe.spec, (f"stages.sft.model={model}", f"stages.scores.models.base={model}"))
    assert isinstance(pipeline, Pipeline)
    found = forecast_trainings(pipeline, recipe.spec.parent, on_cards((pipeline.card,)))
    assert list(found) == ["sft", "dpo"]
    for (one,) in found.values():
        assert (one.card, one.devices, one.fits) == ("RTX 5070", 1, True)
        assert one.lengths.longest == 1024
        assert one.gradients.unreached == ()
        assert one.trainable_parameters == 41_943_040  # rank 16 on all seven linear layers of 32
