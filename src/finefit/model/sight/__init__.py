"""Families of models that see, by the `model_type` of their config."""

from collections.abc import Mapping
from typing import Any

import peft
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.utils import ModelOutput

from finefit.model.attention import packed_inputs
from finefit.model.sight.gemma import GEMMA3, PALIGEMMA
from finefit.model.sight.idefics import IDEFICS
from finefit.model.sight.llava import LLAVA, LLAVA_NEXT
from finefit.model.sight.qwen import QWEN2, QWEN3
from finefit.model.sight.sight import Sight
from finefit.objective.batch import Batch
from finefit.spec.models import Tower

_WRAPPED = "base_model.model."
"""What names begin with that peft has put something around."""
SIGHTS: Mapping[str, Sight] = {
    "qwen2_vl": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "gemma3": GEMMA3,
    "paligemma": PALIGEMMA,
}


def sight_of(config: PretrainedConfig) -> Sight | None:
    """None for a model that sees nothing."""
    return SIGHTS.get(config.model_type)


def tower_of(sight: Sight, name: str) -> Tower | None:
    """Of the module or parameter with this dotted name; None where it belongs to none."""
    inside = [
        (len(prefix), tower)
        for tower, prefixes in sight.towers.items()
        for prefix in prefixes
        if f"{name}.".startswith(f"{prefix}.")
    ]
    return max(inside)[1] if inside else None


def sight_in(model: nn.Module) -> Sight | None:
    """Of a model in memory, with adapters or without."""
    config = getattr(bare(model), "config", None)
    return sight_of(config) if isinstance(config, PretrainedConfig) else None


def tower_in(model: nn.Module, name: str) -> Tower | None:
    """Of a parameter or module by its name in `model`, whatever peft has put before it; None also for a model that sees nothing."""
    sight = sight_in(model)
    return None if sight is None else tower_of(sight, name.removeprefix(_WRAPPED))


def bare(model: nn.Module) -> nn.Module:
    """Without what peft has put around it."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def auto_class(config: PretrainedConfig) -> Any:
    """What transformers builds and loads such a model by."""
    return AutoModelForCausalLM if sight_of(config) is None else AutoModelForImageTextToText


def read(causal: nn.Module, batch: Batch) -> ModelOutput:
    """The batch through all but the head, with whatever it shows."""
    sight, backbone = sight_in(causal), causal.base_model
    if sight is not None:
        return sight.read(backbone, batch.input_ids_BT, batch.extra, use_cache=False)  # type: ignore[arg-type]
    output: ModelOutput = backbone(input_ids=batch.input_ids_BT, use_cache=False, **packed_inputs(batch.packed))  # type: ignore[operator]
    return output
