"""Families of vision-language models, by the `model_type` of their config, and the modules of a model that form its
vision tower, its projector and its language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision.family import Config, ImageGeometry, ImageProcessor, VisionFamily, VisionForward
from finefit.vision.gemma import GEMMA3, PALIGEMMA
from finefit.vision.idefics import IDEFICS
from finefit.vision.llava import LLAVA, LLAVA_NEXT
from finefit.vision.qwen import QWEN2, QWEN3

_PEFT_PREFIX = "base_model.model."
_LAYERS = "encoder.layers"

FAMILIES: Mapping[str, VisionFamily] = {
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


def geometry_of(config: Config) -> ImageGeometry | None:
    """Returns None for a model without images."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.geometry(config)


def open_image_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor | None:
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.processor(folder, config, limits)


def vision_forward_of(config: PretrainedConfig) -> VisionForward | None:
    family = FAMILIES.get(config.model_type)
    return None if family is None else family.forward


def without_adapter(model: nn.Module) -> nn.Module:
    """Returns the model that peft has wrapped, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)  # asking peft for its class would import it in data workers
    found: nn.Module = model if unwrap is None else unwrap()
    return found


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class with which transformers builds and loads such a model."""
    return AutoModelForCausalLM if vision_forward_of(config) is None else AutoModelForImageTextToText


def vision_forward_in(model: nn.Module) -> VisionForward | None:
    """Returns the forward of a model in memory, with or without adapters; None for a model without images."""
    config = getattr(without_adapter(model), "config", None)
    return vision_forward_of(config) if isinstance(config, PretrainedConfig) else None


def tower_of(vision_forward: VisionForward, name: str) -> Tower | None:
    """Returns the tower of the module or parameter with this dotted name; None if it belongs to no tower."""
    inside = [
        (len(prefix), tower)
        for tower, prefixes in vision_forward.towers.items()
        for prefix in prefixes
        if is_inside(name, (prefix,))
    ]
    return max(inside)[1] if inside else None


def tower_in(model: nn.Module, name: str) -> Tower | None:
    """Returns the tower of a parameter or module, with or without peft's prefix; None also for a model without
    images."""
    vision_forward = vision_forward_in(model)
    return None if vision_forward is None else tower_of(vision_forward, name.removeprefix(_PEFT_PREFIX))


def unused_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the dotted names of vision-tower modules that no image reaches, because features are taken before them.
    They get no gradient, so none of them is trained."""
    causal, vision_forward, found = without_adapter(model), vision_forward_in(model), list[str]()
    for tower in () if vision_forward is None else vision_forward.towers["vision"]:
        parts = dict(causal.get_submodule(tower).named_modules())
        # LLaVA takes the features after one or several layers and skips what follows
        features = getattr(causal.config, "vision_feature_layer", None)
        if features is not None and _LAYERS in parts:
            depth = len(list(parts[_LAYERS].children()))
            last = max(layer % (depth + 1) for layer in ([features] if isinstance(features, int) else features))
            found += [f"{tower}.{_LAYERS}.{number}" for number in range(last, depth)]
            found.append(f"{tower}.post_layernorm")
        if "head" in parts:  # SigLIP's pooled vector of a whole image
            found.append(f"{tower}.head")
    return tuple(found)


def is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
