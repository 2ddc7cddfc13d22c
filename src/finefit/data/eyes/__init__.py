"""Families of models that see. The one of a model is found by the `model_type` of its config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.data.eyes.eye import Eye, Lens
from finefit.data.eyes.gemma3 import gemma3_eye, gemma3_lens
from finefit.data.eyes.idefics import idefics_eye, idefics_lens
from finefit.data.eyes.llava import llava_eye, llava_lens
from finefit.data.eyes.llava_next import llava_next_eye, llava_next_lens
from finefit.data.eyes.paligemma import paligemma_eye, paligemma_lens
from finefit.data.eyes.qwen import qwen_eye, qwen_lens
from finefit.spec.rows import ImageLimits

Config = Mapping[str, Any]
"""The contents of a config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    lens: Callable[[Config], Lens]
    eye: Callable[[Path, Config, ImageLimits], Eye]
    """From a folder with the model's processor, read without torchvision where that is not there."""


_QWEN = Family(qwen_lens, qwen_eye)
_IDEFICS = Family(idefics_lens, idefics_eye)
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "llava": Family(llava_lens, llava_eye),
    "llava_next": Family(llava_next_lens, llava_next_eye),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "gemma3": Family(gemma3_lens, gemma3_eye),
    "paligemma": Family(paligemma_lens, paligemma_eye),
}


def lens_of(config: Config) -> Lens | None:
    """None for a model that sees nothing."""
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.lens(config)


def open_eye(folder: Path, config: Config, limits: ImageLimits) -> Eye | None:
    family = FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.eye(folder, config, limits)
