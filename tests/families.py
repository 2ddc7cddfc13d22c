"""Tiny models of families that differ from a plain transformer: mixtures of experts, latent attention, recurrences."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finefit.model.attention import choose_attention
from finefit.model.experts import choose_experts
from tests.conftest import SPECIAL, make_project, make_tokenizer

_PLAIN: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + 256,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_ATTENTION: dict[str, Any] = _PLAIN | {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_EXPERTS: dict[str, Any] = _ATTENTION | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = _ATTENTION | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = _ROUTED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_STATES: dict[str, Any] = _ATTENTION | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
_SHARED = {"shared_expert_intermediate_size": 16}

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": _EXPERTS | _SHARED,
    "qwen3_moe": _EXPERTS | {"head_dim": 8, "mlp_only_layers": [1]},
    "mixtral": _ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": _LATENT | {"q_lora_rank": 16},
    "glm4_moe": _ROUTED | {"head_dim": 8},
    "olmoe": _EXPERTS,
    "phimoe": _ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _ATTENTION
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2},
    "ernie4_5_moe": _ATTENTION | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": _EXPERTS
    | _SHARED
    | {
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "mamba": _PLAIN | {"state_size": 8, "time_step_rank": 4},
    "mamba2": _PLAIN | {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": _PLAIN | {"state_size": 8, "time_step_rank": 4},
    "jamba": _ATTENTION
    | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": _STATES | {"attn_layer_indices": [1]},
    "falcon_h1": _STATES | {"mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": _STATES
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    | {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "zamba2": _ATTENTION
    | {"num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8}
    | {"hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1},
    "recurrent_gemma": _ATTENTION
    | {"num_key_value_heads": 1, "head_dim": 8, "lru_width": 32, "attention_window_size": 16},
}
FAMILIES = MIXTURES | RECURRENT


def family_config(kind: str, **more: Any) -> dict[str, Any]:
    """As a config.json has it."""
    return {"model_type": kind, **FAMILIES[kind], **more}


def make_family(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**family_config(kind, **more))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config,
        attn_implementation=choose_attention("cpu", (0, 0), "fp32", config),
        experts_implementation=choose_experts(),
    )
    return model


def make_family_project(folder: Path, kind: str, *, spec: str) -> Path:
    """As `make_project`, with a model of this family in the place of the dense one."""
    path = make_project(folder, spec=spec)
    (folder / "model").rename(folder / "replaced")
    make_family(kind).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return path
