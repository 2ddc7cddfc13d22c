"""Adapters of other tools on their base: answered with as peft itself would, or refused with words. Models that are
spread over cards: where their layers go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from finefit.errors import ModelError
from finefit.model.load import device_map, load_for_answers
from tests.conftest import make_model, make_model_folder

torch.set_num_threads(1)

INPUT_IDS = torch.arange(5, 45).reshape(2, 20)
TARGETS = ["q_proj", "down_proj"]
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=3, use_dora=True, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "rslora with patterns": lambda: peft.LoraConfig(
        r=3, use_rslora=True, rank_pattern={"down_proj": 2}, target_modules=TARGETS, task_type="CAUSAL_LM"
    ),
    "lora with biases and a head": lambda: peft.LoraConfig(
        r=3, modules_to_save=["lm_head"], target_modules=TARGETS, task_type="CAUSAL_LM"
    ),
    "without a task": lambda: peft.LoraConfig(r=3, target_modules=TARGETS),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM"),
}


def _untied(folder: Path) -> Path:
    """A head of its own can be saved with an adapter without touching the embedding."""
    make_model_folder(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _adapter(base: Path, folder: Path, config: peft.PeftConfig) -> Path:
    """Made by peft alone, its values far from those that leave a model as it is."""
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    adapted.save_pretrained(folder)
    return folder


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=INPUT_IDS).logits
    return logits


def _answering(base: Path, adapter: Path | None) -> nn.Module:
    return load_for_answers(base, adapter, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_any_adapter_that_peft_reads_answers_as_peft_would(kind: str, tmp_path: Path) -> None:
    base = _untied(tmp_path / "base")
    adapter = _adapter(base, tmp_path / "adapter", KINDS[kind]())
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    found = _answering(base, adapter)
    assert torch.equal(_logits(found), _logits(plain))
    assert not torch.allclose(_logits(found), _logits(_answering(base, None)), atol=1e-2)
    assert not found.training


def test_an_adapter_in_torchs_own_format_is_read_too(tmp_path: Path) -> None:
    base = make_model_folder(tmp_path / "base")
    adapter = _adapter(base, tmp_path / "adapter", KINDS["lora"]())
    wanted = _logits(_answering(base, adapter))
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    assert torch.equal(_logits(_answering(base, adapter)), wanted)


def test_a_whole_model_of_another_tool_is_answered_with_as_it_is(tmp_path: Path) -> None:
    base, other = make_model_folder(tmp_path / "base"), make_model_folder(tmp_path / "other", seed=5)
    assert torch.equal(_logits(_answering(base, other)), _logits(AutoModelForCausalLM.from_pretrained(other)))


Weights = dict[str, torch.Tensor]


def _lacking(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "layers.1.self_attn.q_proj.lora_B" not in name}


def _of_more_layers(weights: Weights) -> Weights:
    more = {name.replace("layers.1.", "layers.7."): tensor.clone() for name, tensor in weights.items()}
    return weights | more


def _wider(weights: Weights) -> Weights:
    return {name: torch.cat([t, t], dim=-1) if "lora_A" in name else t for name, t in weights.items()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_lacking, r"lacks tensors that this model needs: .*layers\.1\.self_attn\.q_proj\.lora_B"),
        (_of_more_layers, r"adapts layers that this model does not have: base_model.model.model.layers.7"),
        (_wider, r"does not fit this model: .*size mismatch"),
    ],
)
def test_an_adapter_for_another_model_is_refused(
    change: Callable[[Weights], Weights], problem: str, tmp_path: Path
) -> None:
    base = make_model_folder(tmp_path / "base")
    adapter = _adapter(base, tmp_path / "adapter", KINDS["lora"]())
    save_file(change(load_file(adapter / "adapter_model.safetensors")), adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=problem) as caught:
        _answering(base, adapter)
    assert "base_model_name_or_path" in caught.value.remedy


def test_prompts_that_were_learned_are_no_adapter_of_weights(tmp_path: Path) -> None:
    base = make_model_folder(tmp_path / "base")
    adapter = tmp_path / "adapter"
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    peft.get_peft_model(make_model(), prompts).save_pretrained(adapter)
    with pytest.raises(ModelError, match="holds PROMPT_TUNING prompts"):
        _answering(base, adapter)


def test_a_config_that_peft_does_not_know_is_told(tmp_path: Path) -> None:
    base, adapter = make_model_folder(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "UNHEARD_OF"}')
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read: .*UNHEARD_OF"):
        _answering(base, adapter)


# spread over cards

MIB = 2**20


def _wide(folder: Path) -> Path:
    """Eight equal layers of about 0.8 MiB in fp32."""
    make_model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8}
    config |= {"layer_types": None, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _layers(places: dict[str, int]) -> list[int]:
    return [places[f"model.layers.{at}"] for at in range(8)]


def test_layers_go_whole_and_in_order_in_equal_shares(tmp_path: Path) -> None:
    places = device_map(_wide(tmp_path / "model"), dtype=torch.float32, bits=None, free={0: 40 * MIB, 1: 40 * MIB})
    assert _layers(places) == sorted(_layers(places))
    assert 3 <= _layers(places).count(0) <= 5
    assert set(places.values()) == {0, 1}
    assert not any(name.startswith("model.layers.0.") for name in places)  # none is torn


def test_a_smaller_card_gets_fewer_layers(tmp_path: Path) -> None:
    places = device_map(_wide(tmp_path / "model"), dtype=torch.float32, bits=None, free={0: 3 * MIB, 1: 40 * MIB})
    assert 1 <= _layers(places).count(0) <= 3


def test_in_four_bits_a_model_takes_less_room(tmp_path: Path) -> None:
    folder, free = _wide(tmp_path / "model"), {0: 2 * MIB, 1: 2 * MIB}
    told = r"model does not fit on 2 cards with 0.0 GiB, 0.0 GiB free: .* would be left over"
    with pytest.raises(ModelError, match=told) as caught:
        device_map(folder, dtype=torch.float32, bits=None, free=free)
    assert "4 bits" in caught.value.remedy
    assert set(device_map(folder, dtype=torch.float32, bits=4, free=free).values()) == {0, 1}


@pytest.mark.parametrize(
    "content", [b"", b"nothing", (4).to_bytes(8, "little") + b"{]}{"], ids=["empty", "short", "header"]
)
def test_an_adapter_whose_weights_are_damaged_is_refused_by_folder(content: bytes, tmp_path: Path) -> None:
    base = make_model_folder(tmp_path / "model")
    adapter = _adapter(base, tmp_path / "adapter", KINDS["lora"]())
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="adapter") as refused:
        load_for_answers(base, adapter, device="cpu", dtype=torch.float32)
    assert refused.value.remedy


def test_a_config_that_cannot_be_read_is_named_before_cards_are_shared_out(tmp_path: Path) -> None:
    folder = _wide(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(ModelError, match="model"):
        device_map(folder, dtype=torch.float32, bits=None, free={0: 40 * MIB})
