"""Layers that no text passes are known before anything is trained, and all others are adapted."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from finefit.model.load import make_trainable
from finefit.model.loadable import prove_loadable
from finefit.model.reach import idle_layers
from finefit.spec.models import Lora
from tests.tiny_types import tiny_config

LORA = Lora(kind="lora", rank=2)
IDLE = {
    "gemma3n_text": {"correction_coefs"},  # whose weight is read without a call
    "bart": {"k_proj", "v_proj", "q_proj", "out_proj"},  # of attention to an encoder
    "deepseek_v32": {"wq_b", "wk", "weights_proj"},  # of an indexer under no_grad
    "fuyu": {"vision_embed_tokens"},
    "llama": set(),
    "qwen3_moe": set(),
}


def _on_meta(kind: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind))
    return model


@pytest.mark.parametrize("kind", IDLE)
def test_all_linear_leaves_out_the_layers_that_no_text_passes(kind: str) -> None:
    with torch.device("meta"):  # as a rehearsal builds it
        idle = idle_layers(model := _on_meta(kind))
        adapted = make_trainable(model, LORA, name="tiny")
    assert {name.rpartition(".")[2] for name in idle} == IDLE[kind]
    carrying = {name.partition(".lora_")[0] for name, p in adapted.named_parameters() if p.requires_grad}
    assert carrying
    assert not {name.removeprefix("base_model.model.") for name in carrying} & idle


def test_a_layer_that_no_text_passes_can_still_be_named() -> None:
    """A rehearsal with the rows' own length then says whether it gets a gradient."""
    with torch.device("meta"):
        adapted = make_trainable(
            _on_meta("fuyu"), LORA.model_copy(update={"targets": ("vision_embed_tokens",)}), name="t"
        )
    assert any("vision_embed_tokens.lora_A" in name for name, _ in adapted.named_parameters())


def test_layers_beyond_the_first_are_known_by_their_like() -> None:
    config = tiny_config("bart")
    config.decoder_layers = config.num_hidden_layers = 12
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "model.decoder.layers.11.encoder_attn.q_proj" in idle_layers(model)
    assert "model.decoder.layers.11.self_attn.q_proj" not in idle_layers(model)


def test_a_model_that_needs_values_is_taken_as_it_is() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("jetmoe").to_dict()))
    assert idle_layers(model) == frozenset()


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_the_language_model_of_a_folder_that_also_holds_a_vision_tower_is_proved_loadable(
    kind: str, tmp_path: Path
) -> None:
    AutoModelForImageTextToText.from_config(tiny_config(kind)).save_pretrained(tmp_path)
    assert prove_loadable(tmp_path, LORA, "tiny", tmp_path).num_tensors > 0
