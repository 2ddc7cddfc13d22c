"""Tiny mixtures of experts with random weights, of the shapes that dense models of a family are made into."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finefit.model.experts import choose_experts
from finefit.moe.build import moe_config
from tests.conftest import SPECIAL, make_project, make_tokenizer

DENSE: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
FAMILIES = {"llama": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""The dense type, and that of its mixture."""


def mixture_config(family: str, *, num_experts: int = 4, top_k: int = 2, **more: Any) -> dict[str, Any]:
    return moe_config({"model_type": family, **DENSE, **more}, num_experts=num_experts, top_k=top_k)


def make_mixture(family: str, *, num_experts: int = 3, top_k: int = 2, **more: Any) -> PreTrainedModel:
    """Weights large enough that routers are decided, and tokens of one text go to every expert. What stands in for a
    shared expert is zero, as it is built."""
    torch.manual_seed(0)
    config = mixture_config(family, num_experts=num_experts, top_k=top_k, **more)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), experts_implementation=choose_experts()
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(
                parameter, std=1.0 if name.endswith("mlp.gate.weight") else 0.0 if ".shared_expert" in name else 0.1
            )
    return model


def make_mixture_folder(folder: Path, family: str, **more: Any) -> Path:
    make_mixture(family, **more).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_mixture_project(folder: Path, *, spec: str, family: str = "qwen2") -> Path:
    """As `make_project`, with a mixture in the place of the dense model."""
    path = make_project(folder, spec=spec)
    (folder / "model").rename(folder / "replaced")
    make_mixture_folder(folder / "model", family)
    return path
