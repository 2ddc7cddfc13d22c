"""Gemma 3 and PaliGemma: an image is one tile, through SigLIP and a projector. Gemma 3 writes tokens around it, and the
tokens of one image see one another in both directions. PaliGemma has no chat template: images come first, then the
start token, the prompt and a newline, and the whole prompt is bidirectional.

Which tokens are bidirectional comes with the batch as B x T small numbers; the masks are made from them on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision.family import Config, ImageProcessor, VisionFamily, special_token
from finefit.vision.tiles import (
    PIXELS,
    OneTileGeometry,
    as_attention_masks,
    causal_or_same_block,
    config_and_tile,
    embed_tokens,
    has_images,
    insert_features,
    one_tile_processor,
    siglip_features,
    window_or_same_block,
    within_window,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WORDS = (("boi_token", "<start_of_image>"), ("image_token", "<image_soft_token>"), ("eoi_token", "<end_of_image>"))

Masks = dict[str, Tensor]
"""By the kind of layer that they are for."""


def gemma3_geometry(config: Config) -> OneTileGeometry:
    typed, tile = config_and_tile(config, "siglip_vision_model")
    return OneTileGeometry(typed.image_token_id, tile, typed.mm_tokens_per_image, bidirectional="images")


def gemma3_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry = gemma3_geometry(config)
    start, image, end = (special_token(folder, *names) for names in _WORDS)
    written = f"\n\n{start}{image * geometry.features}{end}\n\n"
    return one_tile_processor(geometry, folder, limits, placeholder=start, written=written, do_pan_and_scan=False)


def paligemma_geometry(config: Config) -> OneTileGeometry:
    typed, tile = config_and_tile(config, "siglip_vision_model")
    end = typed.text_config.eos_token_id
    return OneTileGeometry(typed.image_token_id, tile, tile.patches**2, bidirectional="prompts", end_token=end)


def paligemma_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, image = paligemma_geometry(config), special_token(folder)
    written = image * geometry.features
    return one_tile_processor(geometry, folder, limits, placeholder=image, written=written, write=_images_first)


def _images_first(placeholder: str, prompt: str, start: str) -> str:
    """As PaliGemma's processor does: the start after the last image, a newline at the end."""
    behind = prompt.rfind(placeholder) + len(placeholder) if placeholder in prompt else 0
    return f"{prompt[:behind]}{start}{prompt[behind:]}\n"


@dataclass(frozen=True)
class GemmaForward:
    towers: Mapping[Tower, tuple[str, ...]]
    masks: Callable[[Tensor, Any], Masks]
    """(blocks_BT, the language model's config) -> masks."""
    first_position: int

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embed_tokens(model, input_ids_BT)
        if has_images(extra):
            features_NPH = model.multi_modal_projector(siglip_features(model.vision_tower, extra.tensors[PIXELS]))
            embedded_BTH = insert_features(embedded_BTH, extra, features_NPH.flatten(0, 1))
        if extra is not None and "blocks_BT" in extra.tensors:
            settings.setdefault(
                "attention_mask", self._mask(model.language_model, extra.tensors["blocks_BT"], embedded_BTH.dtype)
            )
        output: ModelOutput = model.language_model(
            inputs_embeds=embedded_BTH, **self._with_positions(settings, input_ids_BT)
        )
        return output

    def _mask(self, language: Any, blocks_BT: Tensor, dtype: torch.dtype) -> Tensor | Masks:
        masks = as_attention_masks(self.masks(blocks_BT, language.config), language.config, dtype)
        return masks if _SLIDING in masks else masks[_FULL]

    def _with_positions(self, settings: dict[str, Any], input_ids_BT: Tensor) -> dict[str, Any]:
        """Callers count positions from 0, as for every model."""
        if not self.first_position:
            return settings
        positions = settings.get("position_ids")
        if positions is None:
            cache = settings.get("past_key_values")
            start = 0 if cache is None else cache.get_seq_length()
            positions = start + torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)[None]
        return settings | {"position_ids": positions + self.first_position}


def _gemma3_masks(blocks_BT: Tensor, text: Any) -> Masks:
    full = causal_or_same_block(blocks_BT)
    return {_FULL: full, _SLIDING: within_window(full, text.sliding_window)}


def _paligemma_masks(blocks_BT: Tensor, text: Any) -> Masks:
    """PaliGemma 2 has sliding layers; a prompt sees all of itself in them, too."""
    window = getattr(text, "sliding_window", None)
    sliding = {} if window is None else {_SLIDING: window_or_same_block(blocks_BT, window)}
    return {_FULL: causal_or_same_block(blocks_BT), **sliding}


_TOWERS: Mapping[Tower, tuple[str, ...]] = {
    "vision": ("model.vision_tower",),
    "projector": ("model.multi_modal_projector",),
    "language": ("model.language_model", "lm_head"),
}
GEMMA3 = VisionFamily(gemma3_geometry, gemma3_processor, GemmaForward(_TOWERS, _gemma3_masks, first_position=0))
PALIGEMMA = VisionFamily(
    paligemma_geometry, paligemma_processor, GemmaForward(_TOWERS, _paligemma_masks, first_position=1)
)
