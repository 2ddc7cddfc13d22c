"""The choice of a model's attention. Torch's fast kernels for shared key and value heads need bf16 or fp16 and an
Ampere GPU or newer. Elsewhere the heads are repeated first, since torch would fall back to a kernel whose memory grows
with the square of the row. What SDPA does not compute (capped scores, attention sinks) is left to the model's own
attention, which keeps the scores of every pair of tokens.

Packed rows attend only to themselves: by torch's variable-length flash kernel where the GPU has it, else by one call
per row. B rows, H heads, T tokens, W width of a head.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import ModelOutput

from finefit.errors import ModelError
from finefit.facts.files import reading_model
from finefit.objective.batch import Batch, Packed
from finefit.vision import auto_class, vision_forward_in
from finefit.vision.attention import Attention, flash_varlen, has_varlen, widest_head

REPEATED = "sdpa_repeated"
PACKED = "_by_row"
"""Suffix of an attention that also takes packed rows."""
GROUPED = "_grouped"
"""Suffix of an attention for generation."""
STRETCHED_ROPE = ("longrope", "dynamic")
_PACKABLE_TYPES = """
afmoe apertus arcee axk1 bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 diffllama ernie4_5
ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_neox
granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe
laguna llama mellum minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu
"""
PACKABLE = frozenset(_PACKABLE_TYPES.split())
"""Model types whose packed rows were verified to equal the same rows alone; tests/step/test_packing.py repeats it for
each."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
RECURRENT = ("linear_attention", "hybrid", "recurrent")
"""Kinds of layers that carry a state from token to token."""
_WHOLE = nn.Module()
"""A placeholder for an attention module whose heads share no keys."""
_UNUSUAL = ("position_bias", "s_aux", "softcap")
"""Further arguments of some models' attention."""


def attention_here(device: str, precision: str, folder: Path, *, packing: bool = False) -> str:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    with reading_model(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder)
    return choose_attention(device, capability, precision, config, packing=packing)


def choose_attention(
    device: str, capability: tuple[int, int], precision: str, config: PretrainedConfig, *, packing: bool = False
) -> str:
    """The attention's name in transformers. On rows that are not packed, one that supports packing gives the same
    result as one that does not."""
    if caps_scores(config) or not has_attention(config) or not takes_sdpa(config):
        return "eager"
    is_fast = device == "cpu" or (capability >= (8, 0) and precision in ("bf16", "fp16"))
    name, attend = ("sdpa", sdpa_attention_forward) if is_fast else (REPEATED, _repeated)
    if packing:
        widest = widest_head(capability) if device == "cuda" and is_fast else 0
        name, attend = name + PACKED, partial(_by_row, attend, widest)
    if name != "sdpa":
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


def caps_scores(config: PretrainedConfig) -> bool:
    """Whether the model caps its attention scores, as Gemma 2 does. SDPA silently omits the cap, so a different model
    would be trained."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def takes_sdpa(config: PretrainedConfig) -> bool:
    """False for a model whose attention has more than SDPA computes, such as the sinks of gpt-oss, and for a model with
    code of its own for it: both have only the attention that they were written with."""
    known = auto_class(config)._model_mapping
    return type(config) not in known or bool(known[type(config)]._supports_sdpa)


def has_attention(config: PretrainedConfig) -> bool:
    """False for a model of recurrent layers only; transformers refuses every attention for it."""
    return getattr(config.get_text_config(), "num_attention_heads", None) is not None


def layer_types_of(config: PretrainedConfig) -> list[str]:
    """The kind of each layer; empty if the config does not distinguish them."""
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def for_answers(name: str) -> str:
    """The same attention, without repeating keys when one token follows prompts of unequal length."""
    attends = {"sdpa": sdpa_attention_forward, REPEATED: _repeated}
    if name not in attends:
        return name
    AttentionInterface.register(name + GROUPED, partial(_grouped, attends[name]))
    AttentionMaskInterface.register(name + GROUPED, sdpa_mask)
    return name + GROUPED


def _grouped(
    attend: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Attention for one new token per row. The heads that share a key are laid out as tokens, since all have the same
    keys and mask."""
    groups = query.shape[1] // key.shape[1]
    is_plain = not any(kwargs.get(name) is not None for name in _UNUSUAL)
    if query.shape[2] != 1 or groups == 1 or attention_mask is None or not is_plain:
        return attend(module, query, key, value, attention_mask, **kwargs)
    side_by_side = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
    scale = kwargs.get("scaling")
    answer = scaled_dot_product_attention(side_by_side, key, value, attn_mask=attention_mask, scale=scale)
    return answer.reshape(query.shape[0], 1, query.shape[1], value.shape[3]), None


def _repeated(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = int(getattr(module, "num_key_value_groups", 1))
    kwargs.setdefault("is_causal", getattr(module, "is_causal", True))
    answer: tuple[Tensor, None] = sdpa_attention_forward(
        _WHOLE, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs
    )
    return answer


def can_pack(config: PretrainedConfig, longest: int) -> str | None:
    """Why rows of up to `longest` tokens cannot be packed for this model; None where they can."""
    text = config.get_text_config()
    if hasattr(config, "vision_config"):
        return "rows of a vision-language model are not packed"
    kinds = layer_types_of(config)
    if odd := sorted(set(kinds) - {_FULL, _SLIDING}):
        return f"the model has layers of kind {', '.join(odd)}, which would see the previous row"
    if config.model_type not in PACKABLE:
        return f"packed rows are not known to be exact in a model of type {config.model_type}"
    if caps_scores(config):
        return "the model caps its attention scores, which only its own attention does"
    window = getattr(text, "sliding_window", None)
    is_sliding = _SLIDING in kinds if kinds else getattr(text, "use_sliding_window", True)
    if window and is_sliding and longest > window:
        return f"the longest row has {longest} tokens, the model's window {window}"
    if (limit := _rope_limit(text)) is not None and longest > limit:
        return f"rows of more than {limit} tokens change the rotary embedding of every row in the batch"
    return None


def turns_by_longest(config: PretrainedConfig, longest: int) -> bool:
    """Whether rows of up to `longest` tokens change the rotary embedding of all other rows in the batch."""
    limit = _rope_limit(config.get_text_config())
    return limit is not None and longest > limit


def _rope_limit(text: PretrainedConfig) -> int | None:
    """The length up to which rotary embeddings do not depend on the longest row of the batch; None if they never do."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    limits = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        for part in parts
        if part.get("rope_type") in STRETCHED_ROPE
    ]
    return min(map(int, limits), default=None)


def backbone_name(causal: nn.Module) -> str | None:
    """The attribute of the module below the head: the one that the class names, or that holds the embeddings. None for
    a model without one."""
    if not isinstance(causal, PreTrainedModel):
        return None
    if causal.base_model is not causal:
        return str(causal.base_model_prefix)
    embeddings = causal.get_input_embeddings()
    children = causal.named_children()
    return next((child for child, module in children if any(one is embeddings for one in module.modules())), None)


def run_backbone(causal: nn.Module, batch: Batch) -> ModelOutput:
    """Runs the batch and its images through the whole model except the head."""
    vision_forward, backbone = vision_forward_in(causal), getattr(causal, str(backbone_name(causal)))
    if vision_forward is not None:
        return vision_forward(backbone, batch.input_ids_BT, batch.extra, use_cache=False)
    told: dict[str, Any] = {}
    if (packed := batch.packed) is not None:
        # A four-dimensional mask is passed on as it is: without one transformers would search the positions for packed
        # rows, wait for the device, and make a mask of T x T.
        told = {"position_ids": packed.position_ids_BT, "attention_mask": packed.boundaries_R1[None, None, None]}
        told["packed"] = packed
    output: ModelOutput = backbone(input_ids=batch.input_ids_BT, use_cache=False, **told)
    return output


def _by_row(
    attend: Attention,
    widest: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with one call per row. What `can_pack` refuses must also fail here; otherwise a different model would
    be trained silently."""
    if packed is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    window, remedy = kwargs.get("sliding_window"), "set data.packing: none"
    if odd := [name for name in _UNUSUAL if kwargs.get(name) is not None]:
        raise ModelError(f"this model's attention uses {odd[0]}, which packed rows cannot have", remedy)
    if window and max(packed.lengths) > window:
        raise ModelError(f"a packed row is longer than the model's window of {window} tokens", remedy)
    if has_varlen(query, key, value, widest):
        dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
        return flash_packed(query, key, value, packed, dropout=dropout, scaling=scaling), None
    return row_by_row(partial(attend, module, attention_mask=None, **kwargs), query, key, value, packed.lengths), None


def row_by_row(attend: Attention, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(query=q, key=k, value=v)[0] for q, k, v in parts], dim=1)


def flash_packed(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, *, dropout: float, scaling: float | None
) -> Tensor:
    how: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": True}
    return flash_varlen(query, key, value, packed.boundaries_R1, max(packed.lengths), **how)
