"""Tiny shapes in the place of models that published configs name: of the same architecture, with the parts that decide
whether finefit trains it (towers, experts, states, packed weights)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.families import family_config
from tests.vision_models import vlm_config

Shape = dict[str, Any]

_DENSE: Shape = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1 << 19,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_VISION: Shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _dense(kind: str, **own: Any) -> Shape:
    return {"model_type": kind, **_DENSE, **own}


def _family(kind: str) -> Shape:
    return family_config(kind, num_hidden_layers=2, max_position_embeddings=1 << 19)


def _hybrid(kind: str, **own: Any) -> Shape:
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return _dense(f"{kind}_text", **linear, **own)


def _with_towers(kind: str, text: Shape, **own: Any) -> Shape:
    return {"model_type": kind, "text_config": text, "vision_config": _VISION, **own}


def _vlm(kind: str) -> Shape:
    return dict(json.loads(vlm_config(kind).to_json_string()))


_EXPERTS: Shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED: Shape = {"shared_expert_intermediate_size": 16}
_NF4 = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
_ROUTED: Shape = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}


def _packed(method: str) -> Shape:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


_QWEN3_5 = _with_towers("qwen3_5", _hybrid("qwen3_5"))
_QWEN3_5_MOE = _with_towers("qwen3_5_moe", _hybrid("qwen3_5_moe", **_EXPERTS, **_SHARED))
_MISTRAL3 = _with_towers("mistral3", _dense("ministral3"))
_LLAMA4 = _with_towers("llama4", _dense("llama4_text"))
_GEMMA4_MOE: Shape = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "expert_intermediate_size": 16,
}
_NEMOTRON_H: Shape = _dense(
    "nemotron_h", hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1
)

PLAIN = _dense("llama")

PUBLISHED: Mapping[str, Shape] = {
    r"lfm2-vl": _with_towers("lfm2_vl", _dense("lfm2", layer_types=["conv", "full_attention"])),
    r"lfm2-8b-a1b": _dense("lfm2_moe", **_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    r"lfm2-": _dense("lfm2", layer_types=["conv", "full_attention"]),
    r"afm-4.5b": _dense("arcee"),
    r"btlm": {"model_type": "btlm"},
    r"cerebras-gpt": {"model_type": "gpt2", "vocab_size": 261, "n_embd": 32, "n_layer": 2, "n_head": 4},
    r"dbrx": {"model_type": "dbrx", "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 261}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    r"falcon-7b": {"model_type": "falcon", "vocab_size": 261, "hidden_size": 32, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "multi_query": True, "parallel_attn": True},
    r"falcon-h1": _family("falcon_h1"),
    r"mpt-7b": {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 261},
    r"replit-code": {"model_type": "replit"},
    r"pythia": _dense("gpt_neox"),
    r"qwen/qwen-7b": {"model_type": "qwen"},
    r"qwen1.5-moe": _family("qwen2_moe"),
    r"stablelm-2": _dense("stablelm"),
    r"starcoder2": _dense("starcoder2"),
    r"command-r7b": _dense("cohere2"),
    r"deepseek-v2.5-bnb": _family("deepseek_v2") | _NF4,
    r"deepseek-v2": _family("deepseek_v2"),
    r"deepseek-v3": _family("deepseek_v3") | {"quantization_config": {"quant_method": "fp8"}},
    r"gemma-3-(1b|270m)": _dense("gemma3_text", layer_types=["sliding_attention", "full_attention"]),
    r"gemma-3n": _with_towers("gemma3n", _dense("gemma3n_text")),
    r"gemma-3-": _vlm("gemma3"),
    r"gemma-2-": _dense("gemma2"),
    r"gemma-7b": _dense("gemma"),
    r"gemma-4-26b-a4b-nvfp4": _with_towers("gemma4", _dense("gemma4_text")) | _packed("modelopt"),
    r"gemma-4-26b": _with_towers("gemma4", _dense("gemma4_text", **_GEMMA4_MOE)),
    r"gemma-4-12b": _with_towers("gemma4_unified", _dense("gemma4_unified_text")),
    r"gemma-4-": _with_towers("gemma4", _dense("gemma4_text")),
    r"glm-4.5-air": _family("glm4_moe"),
    r"glm-4.6v": _with_towers("glm4v", _dense("glm4v_text")),
    r"glm-4.7-flash": _dense("glm4_moe_lite", **_ROUTED),
    r"glm-5.2-nvfp4": _dense("glm_moe_dsa", **_ROUTED) | _packed("modelopt"),
    r"gpt-oss-120b-dequantized": _family("gpt_oss"),
    r"gpt-oss": _family("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4"}},
    r"granite-4.0": _family("granitemoehybrid") | {"layer_types": ["mamba", "attention"]},
    r"hunyuan": _dense("hunyuan_v1_dense"),
    r"internvl": _with_towers("internvl", _dense("qwen3")),
    r"jamba": _family("jamba"),
    r"kimi-linear": _dense("kimi_linear"),
    r"405b-bnb-nf4": _dense("llama") | _NF4,
    r"llama-4-.*bnb": _LLAMA4 | _NF4,
    r"llama.*-gptq": _dense("llama") | _packed("gptq"),
    r"llama.*-awq": _dense("llama") | _packed("awq"),
    r"llama.*-aqlm": _dense("llama") | _packed("aqlm"),
    r"llava-1.5": _vlm("llava"),
    r"magistral-small-2509|ministral-3-3b|mistral-small-3.1|mistral-medium-3.5": _MISTRAL3,
    r"mistral-small-4": _with_towers("mistral3", _dense("mistral4", **_ROUTED)),
    r"mamba-2.8b": {"d_model": 32, "n_layer": 2, "vocab_size": 261},
    r"mimo-7b": {"model_type": "mimo"},
    r"minimax-m2": _dense("minimax_m2", num_local_experts=4, num_experts_per_tok=2)
    | {"quantization_config": {"quant_method": "fp8"}},
    r"mixtral": _family("mixtral"),
    r"nvidia-nemotron-3": _NEMOTRON_H,
    r"nemotron-mini": _dense("nemotron"),
    r"olmo-3": _dense("olmo3"),
    r"paddleocr": _with_towers("paddleocr_vl", _dense("paddleocr_vl_text")),
    r"phi-3": _dense("phi3"),
    r"phi-": _dense("phi"),
    r"moss-vl": {"model_type": "moss_vl"},
    r"qwen2-vl": _vlm("qwen2_vl"),
    r"qwen2.5-vl": _vlm("qwen2_5_vl"),
    r"qwen3-vl-30b": _vlm("qwen3_vl") | {"model_type": "qwen3_vl_moe"},
    r"qwen3-vl": _vlm("qwen3_vl"),
    r"qwen3-next-.*nvfp4": _family("qwen3_next") | _packed("modelopt"),
    r"qwen3-next": _family("qwen3_next"),
    r"qwen3-30b-a3b-nvfp4": _family("qwen3_moe") | _packed("modelopt"),
    r"qwen3.5-.*-a\d+b": _QWEN3_5_MOE,
    r"qwen3.5-": _QWEN3_5,
    r"qwen3-.*-a\d+b": _family("qwen3_moe"),
    r"qwen3|plano": _dense("qwen3"),
    r"qwen2|cogito-v1-preview-qwen|deepcoder": _dense("qwen2"),
    r"seed-oss": _dense("seed_oss"),
    r"smolvlm2": _vlm("smolvlm"),
    r"trinity": _dense("afmoe", **_EXPERTS, num_dense_layers=1),
    r"voxtral": {"model_type": "voxtral", "text_config": _dense("llama")},
    r"mistral|devstral|magistral": _dense("mistral"),
    r"llama|orpheus|xgen|yi-34b|smollm2|cogito": _dense("llama"),
}
"""By a part of the model's name, the first that is found."""


def shape_of(name: str) -> Shape | None:
    return next((shape for pattern, shape in PUBLISHED.items() if re.search(pattern, name.lower())), None)
