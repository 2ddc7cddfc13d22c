"""A tiny config of any model type of transformers: its default one, with the sizes that its class has by default made
small, and of the layers one or two of each kind."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.families import MIXTURES, RECURRENT

CAUSAL = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VISION = tuple(sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(CAUSAL)))
VOCABULARY, WIDTH, HEADS, HEAD, LAYERS = 288, 32, 4, 8, 2


def _all(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, int] = {
    **_all(
        VOCABULARY,
        "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size "
        "audio_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    ),
    **_all(
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size "
        "output_embedding_size lru_width attention_hidden_size cross_attention_hidden_size backbone_hidden_size "
        "hidden_size_per_layer_input router_hidden_size pronunciation_embed_dim shape_embed_dim prompt_mid_dim "
        "ple_embed_dim",
    ),
    **_all(
        2 * WIDTH,
        "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner dff dim_ff "
        "feed_forward_size intermediate_size_mlp dense_intermediate_size moe_shared_expert_intermediate_size "
        "mamba_d_ssm",
    ),
    **_all(
        WIDTH // 2,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "q_lora_rank kv_lora_rank o_lora_rank hc_lowrank",
    ),
    **_all(
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads index_n_heads",
    ),
    **_all(2, "num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_kv_heads num_query_groups"),
    **_all(
        HEAD,
        "head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim index_head_dim kv_channels d_head dim_head attention_head_size mamba_d_head mamba_head_dim "
        "mamba_headdim laurel_rank gated_norm_rank adapter_rank mamba_d_state state_size ssm_state_size d_rel "
        "rotary_dim",
    ),
    **_all(2 * HEAD, "qk_head_dim attention_head_dim global_head_dim"),
    **_all(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_blocks num_layers_per_stack",
    ),
    **_all(
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num mamba_dt_rank time_step_rank",
    ),
    **_all(2, "num_experts_per_tok num_experts_per_token moe_k moe_topk index_topk_blocks"),
    **_all(1, "n_group topk_group first_k_dense_replace num_dense_layers n_groups mamba_n_groups num_kv_shared_layers"),
    **_all(8, "mamba_n_heads mamba_num_heads n_mamba_heads chunk_size mamba_chunk_size index_block_size"),
    **_all(
        32, "sliding_window sliding_window_size attention_chunk_size window_size attention_window_size local_attention"
    ),
    **_all(64, "index_topk keep_window_size"),
    **_all(512, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    **_all(512, "max_source_positions max_target_positions"),
    "num_attention_heads_per_layer": HEADS,
}
"""By the name of a setting, wherever a config has a number there."""
_DEEP = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
PLAIN: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": 3, "eos_token_id": 0, "pad_token_id": 1}
_KIMI = {"num_key_value_heads": HEADS, "linear_num_heads": HEADS}
_COMPASS = {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_DBRX: dict[str, Any] = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}}
_DBRX |= {"ffn_config": {"ffn_hidden_size": WIDTH, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH}}
_ZAMBA = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD, "num_key_value_heads": HEADS}
_LLAMA4: dict[str, Any] = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3]}
_LLAMA4 |= {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}
_QWEN4: dict[str, Any] = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 64}
_QWEN4 |= {"indexer_compress_ratio": 4, "output_gate_type": "swish"}
FITTED: Mapping[str, dict[str, Any]] = {
    **{kind: RECURRENT[kind] for kind in ("bamba", "granitemoehybrid", "jamba", "mamba2", "recurrent_gemma")},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text"}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "cohere_compass_text": {"rope_parameters": _COMPASS},
    "dbrx": _DBRX,
    "deepseek_v2": MIXTURES["deepseek_v2"],
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": _LLAMA4,
    "qwen4_exp_text": _QWEN4,
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "num_buckets": 8},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "chunk_size": 16, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": RECURRENT["zamba2"] | _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
    "hrm_text": {"num_layers_per_stack": None},
}
"""What single types need besides, because one size follows from others or a size has a name of its own."""


def tiny_config(kind: str) -> PretrainedConfig:
    made: PretrainedConfig = AutoConfig.for_model(kind, **tiny_values(kind))
    return made


def tiny_values(kind: str) -> dict[str, Any]:
    return _shrunk(AutoConfig.for_model(kind))


def _shrunk(usual: PretrainedConfig) -> dict[str, Any]:
    values = usual.to_dict()
    found = {name: _sized(name, value) for name, value in values.items() if name in SIZES and _is_number(value, name)}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # keys and values are made for every head
        found["num_key_value_heads"] = HEADS
    depth = next((values[name] for name in _DEEP if _is_number(values.get(name))), 0)
    if kept := _one_of_each(values, depth):
        lists = {name: value for name, value in values.items() if _is_per_layer(value, depth)}
        found |= {name: [_sized(name, value[at]) for at in kept] for name, value in lists.items()}
        found |= {name: len(kept) for name in _DEEP if name in found}
    found |= {name: value for name, value in PLAIN.items() if name in values}
    if usual.model_type in CAUSAL and values.get("is_decoder") is False:  # else an encoder
        found["is_decoder"] = True
    found |= {name: 0.0 for name, value in values.items() if "drop" in name and isinstance(value, float)}
    for name in usual.sub_configs:
        inner = getattr(usual, name, None)
        if isinstance(inner, PretrainedConfig):
            found[name] = _shrunk(inner) | (
                {"model_type": inner.model_type} if inner.model_type in CONFIG_MAPPING else {}
            )
    return found | FITTED.get(usual.model_type, {})


def _is_number(value: Any, name: str = "") -> bool:
    """Or a number of heads or their width that follows from others where it is not given."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or (value is None and name in ("head_dim", "num_key_value_heads"))


def _sized(name: str, value: Any) -> Any:
    if name not in SIZES or not _is_number(value, name):
        return value
    return SIZES[name] if value is None else min(SIZES[name], value)


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list) and depth > LAYERS and len(value) == depth


def _one_of_each(values: Mapping[str, Any], depth: int) -> list[int]:
    """The first layer of each kind, by all lists that have a value for each layer; at least two layers."""
    lists = [value for name, value in values.items() if _is_per_layer(value, depth) and not _is_number(value[0])]
    kinds: dict[str, int] = {}
    for at in range(depth if lists else 0):
        kinds.setdefault(repr([value[at] for value in lists]), at)
    first = sorted(kinds.values())
    return sorted({*first, *range(LAYERS)}) if len(first) == 1 else first
