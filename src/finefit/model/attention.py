"""Which attention a model is given. Torch's fast kernels for shared key and value heads need bf16 or fp16 and an Ampere card or newer; elsewhere the
heads are repeated first, since torch would fall back to a kernel whose memory grows with the square of the row.

Packed rows are attended to one by one: by torch's flash kernel for rows of any length where a card has it, else by a call for each row.
B rows, H heads, T tokens, W width of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from finefit.errors import ModelError
from finefit.objective.batch import Packed

Attention = Callable[..., tuple[Tensor, None]]
"""As transformers calls it: (module, query_BHTW, key, value, mask, **settings) -> (answer_BTHW, None)."""
REPEATED = "sdpa_repeated"
PACKED = "_by_row"
"""Follows the name of an attention that takes packed rows too."""
GROUPED = "_grouped"
"""Follows the name of an attention that answers are generated with."""
STRETCHED_ROPE = ("longrope", "dynamic")
PACKABLE = frozenset(
    (
        *(
            "afmoe",
            "apertus",
            "arcee",
            "axk1",
            "bitnet",
            "cohere",
            "cohere2",
            "cohere2_moe",
            "cwm",
            "deepseek_v2",
            "deepseek_v3",
        ),
        *(
            "diffllama",
            "ernie4_5",
            "ernie4_5_moe",
            "exaone4",
            "exaone_moe",
            "flex_olmo",
            "gemma",
            "gemma3_text",
            "glm",
            "glm4",
        ),
        *("glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granitemoe", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "laguna", "llama"),
        *(
            "mellum",
            "minicpm3",
            "minimax_m2",
            "ministral",
            "ministral3",
            "mistral",
            "mixtral",
            "nanochat",
            "olmo",
            "olmo2",
        ),
        *(
            "olmo3",
            "olmoe",
            "persimmon",
            "phi",
            "phi3",
            "phimoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "smollm3",
        ),
        *("solar_open", "starcoder2", "youtu"),
    )
)
"""Model types whose packed rows were compared with the same rows alone; tests/step/test_packing.py does it again for each."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_UNUSUAL = ("position_bias", "s_aux", "softcap")
"""What some models' attention is told besides."""


def attention_here(device: str, precision: str, folder: Path, *, packing: bool = False) -> str:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    return choose_attention(device, capability, precision, AutoConfig.from_pretrained(folder), packing=packing)


def choose_attention(
    device: str, capability: tuple[int, int], precision: str, config: PretrainedConfig, *, packing: bool = False
) -> str:
    """The name that transformers knows it by. One that packs is the same as without where rows are not packed."""
    if caps_scores(config):
        return "eager"
    is_fast = device == "cpu" or (capability >= (8, 0) and precision in ("bf16", "fp16"))
    name, attend = ("sdpa", sdpa_attention_forward) if is_fast else (REPEATED, _repeated)
    if packing:
        name, attend = (
            name + PACKED,
            partial(_by_row, attend, widest_head(capability) if device == "cuda" and is_fast else 0),
        )
    if name != "sdpa":
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


def caps_scores(config: PretrainedConfig) -> bool:
    """Gemma 2 caps its attention scores, which SDPA leaves out without a word: another model would be trained."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def for_answers(name: str) -> str:
    """The same attention, which repeats no keys when a token follows prompts of unequal length."""
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
    """Of one token a row the heads that share a key stand behind one another as tokens do: each sees the same keys under the same mask."""
    groups = query.shape[1] // key.shape[1]
    is_plain = not any(kwargs.get(name) is not None for name in _UNUSUAL)
    if query.shape[2] != 1 or groups == 1 or attention_mask is None or not is_plain:
        return attend(module, query, key, value, attention_mask, **kwargs)
    side_by_side = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
    answer = scaled_dot_product_attention(
        side_by_side, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return answer.reshape(query.shape[0], 1, query.shape[1], value.shape[3]), None


class _Whole(nn.Module):
    """Stands for an attention module whose heads share nothing."""

    is_causal = True


_WHOLE = _Whole()


def _repeated(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = int(getattr(module, "num_key_value_groups", 1))
    kwargs.setdefault("is_causal", getattr(module, "is_causal", True))
    answer: tuple[Tensor, None] = sdpa_attention_forward(
        _WHOLE, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs
    )
    return answer


# packed rows


def can_pack(config: PretrainedConfig, longest: int) -> str | None:
    """Why rows of up to `longest` tokens cannot be packed for this model; None where they can."""
    text = config.get_text_config()
    if hasattr(config, "vision_config"):
        return "rows of a model that sees images are not packed"
    if config.model_type not in PACKABLE:
        return f"packed rows are not known to be exact in a model of type {config.model_type}"
    if caps_scores(config):
        return "the model caps its attention scores, which only its own attention does"
    kinds = list(getattr(text, "layer_types", None) or ())
    if odd := sorted(set(kinds) - {_FULL, _SLIDING}):
        return f"the model has layers of kind {', '.join(odd)}, which would see the row before"
    window = getattr(text, "sliding_window", None)
    is_sliding = _SLIDING in kinds if kinds else getattr(text, "use_sliding_window", True)
    if window and is_sliding and longest > window:
        return f"the longest row has {longest} tokens, the model's window {window}"
    if (limit := _rope_limit(text)) is not None and longest > limit:
        return f"rows of more than {limit} tokens change how the model turns positions, for all rows beside them"
    return None


def turns_by_longest(config: PretrainedConfig, longest: int) -> bool:
    """Whether rows of up to `longest` tokens change how the model turns positions, for all rows beside them."""
    limit = _rope_limit(config.get_text_config())
    return limit is not None and longest > limit


def _rope_limit(text: PretrainedConfig) -> int | None:
    """Up to which length rotary embeddings do not depend on the longest row at hand; None where they never do."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    limits = [
        part.get("original_max_position_embeddings") or text.max_position_embeddings
        for part in parts
        if part.get("rope_type") in STRETCHED_ROPE
    ]
    return min(map(int, limits), default=None)


def packed_inputs(packed: Packed | None) -> dict[str, Any]:
    """What the backbone is called with so that its attention learns where rows begin. A mask of four dimensions is passed on as it is: without one
    transformers would look for packed rows in the positions, wait for the device, and make a mask of T x T."""
    if packed is None:
        return {}
    return {
        "position_ids": packed.position_ids_BT,
        "attention_mask": packed.boundaries_R1[None, None, None],
        "packed": packed,
    }


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
    if packed is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    _require_plain(packed, **kwargs)
    if has_varlen(query, key, value, widest):
        return varlen(
            query, key, value, packed, dropout=kwargs.get("dropout", 0.0), scaling=kwargs.get("scaling")
        ), None
    return row_by_row(partial(attend, module, attention_mask=None, **kwargs), query, key, value, packed.lengths), None


def _require_plain(packed: Packed, sliding_window: int | None = None, **kwargs: Any) -> None:
    """What `can_pack` has refused must not pass here either: it would train another model without a word."""
    if odd := [name for name in _UNUSUAL if kwargs.get(name) is not None]:
        raise ModelError(
            f"this model's attention uses {odd[0]}, which packed rows cannot have", "set data.packing: none"
        )
    if sliding_window and max(packed.lengths) > sliding_window:
        raise ModelError(
            f"a packed row is longer than the model's window of {sliding_window} tokens", "set data.packing: none"
        )


def row_by_row(attend: Attention, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(query=q, key=k, value=v)[0] for q, k, v in parts], dim=1)


def widest_head(capability: tuple[int, int]) -> int:
    """That the flash kernel has a backward for."""
    is_small = (8, 6) <= capability < (9, 0) or capability >= (12, 0)
    return 192 if is_small else 256


def has_varlen(query: Tensor, key: Tensor, value: Tensor, widest: int) -> bool:
    """Whether the flash kernel takes these: all in bf16 or all in fp16, of one width, which is a multiple of 8."""
    width, cast = query.shape[-1], _autocast_dtype(query)
    is_half = {cast or tensor.dtype for tensor in (query, key, value)} in ({torch.bfloat16}, {torch.float16})
    return is_half and width <= widest and width % 8 == 0 and key.shape[-1] == value.shape[-1] == width


def varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, *, dropout: float, scaling: float | None
) -> Tensor:
    """One kernel over all rows; it takes fewer key and value heads as they are."""
    return varlen_between(
        query, key, value, packed.boundaries_R1, max(packed.lengths), dropout=dropout, scaling=scaling, is_causal=True
    )


def varlen_between(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    """`boundaries` in int32 on the device; `longest` is what lies furthest apart of them."""
    q_THW, k_THW, v_THW = (tensor.squeeze(0).transpose(0, 1) for tensor in autocast(query, key, value))
    answer: Tensor = torch.ops.aten._flash_attention_forward(
        q_THW, k_THW, v_THW, boundaries, boundaries, longest, longest, dropout, is_causal, False, scale=scaling
    )[0]
    return answer.unsqueeze(0)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As SDPA takes its inputs; the kernels below it take them as they are."""
    cast = _autocast_dtype(tensors[0])
    return tensors if cast is None else tuple(tensor.to(cast) for tensor in tensors)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
