"""Which attention a model is given. Torch's fast kernels for shared key and value heads need bf16 and an Ampere card or newer; elsewhere the heads
are repeated first, since torch would fall back to a kernel whose memory grows with the square of the row."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

REPEATED = "sdpa_repeated"


def attention_here(device: str, precision: str, folder: Path) -> str:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    return choose_attention(device, capability, precision, AutoConfig.from_pretrained(folder))


def choose_attention(device: str, capability: tuple[int, int], precision: str, config: PretrainedConfig) -> str:
    """The name that transformers knows it by."""
    if caps_scores(config):
        return "eager"
    if device == "cpu" or (capability >= (8, 0) and precision == "bf16"):
        return "sdpa"
    AttentionInterface.register(REPEATED, _repeated)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    return REPEATED


def caps_scores(config: PretrainedConfig) -> bool:
    """Gemma 2 caps its attention scores, which SDPA leaves out without a word: another model would be trained."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


class _Whole(nn.Module):
    """Stands for an attention module whose heads share nothing."""

    is_causal = True


_WHOLE = _Whole()


def _repeated(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
    groups = int(getattr(module, "num_key_value_groups", 1))
    kwargs.setdefault("is_causal", getattr(module, "is_causal", True))
    answer: tuple[Tensor, None] = sdpa_attention_forward(_WHOLE, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs)
    return answer
