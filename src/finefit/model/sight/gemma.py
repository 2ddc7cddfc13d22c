"""Gemma 3 and PaliGemma: SigLIP through a projector, and tokens that see what stands behind them: in Gemma 3 those of one image, in PaliGemma those
of the prompt. Which these are comes with the batch, B x T small numbers; the masks are made of them on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.model.sight.tiles import (
    PIXELS,
    as_taken,
    causal_or_alike,
    embedded,
    features_of_siglip,
    near_or_alike,
    shows,
    spoken,
    with_features,
    within,
)
from finefit.objective.batch import Extra
from finefit.spec.models import Tower

_FULL, _SLIDING = "full_attention", "sliding_attention"

Masks = dict[str, Tensor]
"""By the kind of layer that they are for."""


@dataclass(frozen=True)
class GemmaSight:
    towers: Mapping[Tower, tuple[str, ...]]
    masks: Callable[[Tensor, Any], Masks]
    """(blocks_BT, the language model's config) -> masks."""
    first_position: int

    def read(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embedded(model, input_ids_BT)
        if shows(extra):
            features_NPH = model.multi_modal_projector(features_of_siglip(model.vision_tower, extra.tensors[PIXELS]))
            embedded_BTH = with_features(embedded_BTH, extra, features_NPH.flatten(0, 1))
        if extra is not None and "blocks_BT" in extra.tensors:
            settings.setdefault(
                "attention_mask", self._mask(model.language_model, extra.tensors["blocks_BT"], embedded_BTH.dtype)
            )
        return spoken(model.language_model, embedded_BTH, **self._placed(settings, input_ids_BT))

    def _mask(self, language: Any, blocks_BT: Tensor, dtype: torch.dtype) -> Tensor | Masks:
        masks = as_taken(self.masks(blocks_BT, language.config), language.config, dtype)
        return masks if _SLIDING in masks else masks[_FULL]

    def _placed(self, settings: dict[str, Any], input_ids_BT: Tensor) -> dict[str, Any]:
        """Positions are given as those of every model, from 0."""
        if not self.first_position:
            return settings
        positions = settings.get("position_ids")
        if positions is None:
            cache = settings.get("past_key_values")
            start = 0 if cache is None else cache.get_seq_length()
            positions = start + torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)[None]
        return settings | {"position_ids": positions + self.first_position}


def _gemma3_masks(blocks_BT: Tensor, text: Any) -> Masks:
    full = causal_or_alike(blocks_BT)
    return {_FULL: full, _SLIDING: within(full, text.sliding_window)}


def _paligemma_masks(blocks_BT: Tensor, text: Any) -> Masks:
    """PaliGemma 2 has sliding layers; a prompt sees all of itself in them, too."""
    window = getattr(text, "sliding_window", None)
    sliding = {} if window is None else {_SLIDING: near_or_alike(blocks_BT, window)}
    return {_FULL: causal_or_alike(blocks_BT), **sliding}


_TOWERS: Mapping[Tower, tuple[str, ...]] = {
    "vision": ("model.vision_tower",),
    "projector": ("model.multi_modal_projector",),
    "language": ("model.language_model", "lm_head"),
}
GEMMA3 = GemmaSight(_TOWERS, _gemma3_masks, first_position=0)
PALIGEMMA = GemmaSight(_TOWERS, _paligemma_masks, first_position=1)
