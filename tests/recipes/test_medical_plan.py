"""Both trainings of medical-sft-dpo fit on the card of 12 GB that they are planned for, before any stage has run."""

import json

import pytest

from finefit.pipeline.foreseen import foresee_stages
from finefit.pipeline.recipes import find_recipe
from finefit.spec.load import load_any
from finefit.spec.stages import Pipeline

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


@pytest.mark.timeout(900)
def test_sft_and_dpo_of_a_7b_model_fit_on_a_card_of_12_gb() -> None:
    recipe = find_recipe("medical-sft-dpo")
    model = json.dumps({"kind": "shape", "config": MISTRAL_7B})
    pipeline = load_any(recipe.spec, (f"stages.sft.model={model}", f"stages.scores.models.base={model}"))
    assert isinstance(pipeline, Pipeline)
    found = foresee_stages(pipeline, recipe.spec.parent, cards=(pipeline.card,))
    assert list(found) == ["sft", "dpo"]
    for (forecast,) in found.values():
        assert (forecast.card, forecast.devices, forecast.fits) == ("RTX 5070", 1, True)
        assert forecast.lengths.longest == 1024
        assert forecast.gradients.unreached == ()
        assert forecast.trainable_parameters == 41_943_040  # rank 16 on all seven linear layers of 32
