"""Tiny models of many families with adapters that have learnt something, to be merged and exported."""

from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import SPECIAL

WORDS = len(SPECIAL) + 256
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"head_dim": 8},
    "phi3": {"original_max_position_embeddings": 128},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gpt_neox": {"num_key_value_heads": None, "tie_word_embeddings": False},
    "falcon": {"num_key_value_heads": None, "new_decoder_architecture": False, "multi_query": True},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_family(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    values = {key: value for key, value in (SHAPE | FAMILIES[kind] | more).items() if value is not None}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def save_adapter(folder: Path, base: Path, **config: Any) -> Path:
    """One that has learnt something in every part of it."""
    torch.manual_seed(3)
    targets = {} if "target_modules" in config or "target_parameters" in config else {"target_modules": "all-linear"}
    lora = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **targets, **config})
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    adapted.save_pretrained(folder)
    return folder
