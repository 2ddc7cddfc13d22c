"""Gemma 3 and PaliGemma: an image is one tile, which passes SigLIP and a projector. Gemma 3 writes tokens around it,
and the tokens of one image attend to one another in both directions. PaliGemma has no chat template: images come first,
then the start token, the prompt and a newline, and the whole prompt is bidirectional.

The batch says which tokens are bidirectional, as B x T small numbers; the masks are made from them on the device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.vision import tiles
from finefit.vision.family import Config, ImageProcessor, VisionFamily, special_token

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WORDS = (("boi_token", "<start_of_image>"), ("image_token", "<image_soft_token>"), ("eoi_token", "<end_of_image>"))

Masks = dict[str, Tensor]
"""Masks by the kind of layer that uses them."""


def gemma3_geometry(config: Config) -> tiles.OneTileGeometry:
    typed, tile = tiles.config_and_tile(config, "siglip_vision_model")
    return tiles.OneTileGeometry(typed.image_token_id, tile, typed.mm_tokens_per_image, bidirectional="images")


def gemma3_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry = gemma3_geometry(config)
    start, image, end = (special_token(folder, *names) for names in _WORDS)
    written = f"\n\n{start}{image * geometry.features}{end}\n\n"
    how = {"do_pan_and_scan": False}
    return tiles.one_tile_processor(geometry, folder, limits, written=written, how=how, placeholder=start)


def paligemma_geometry(config: Config) -> tiles.OneTileGeometry:
    typed, tile = tiles.config_and_tile(config, "siglip_vision_model")
    end = typed.text_config.eos_token_id
    return tiles.OneTileGeometry(typed.image_token_id, tile, tile.patches**2, bidirectional="prompts", end_token=end)


def paligemma_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, image = paligemma_geometry(config), special_token(folder)
    words = {"placeholder": image, "plain_prompt": partial(_images_first, image)}
    return tiles.one_tile_processor(geometry, folder, limits, written=image * geometry.features, how={}, **words)


def _images_first(placeholder: str, prompt: str, start: str) -> str:
    """Orders the text like PaliGemma's processor: the start token after the last image, a newline at the end."""
    behind = prompt.rfind(placeholder) + len(placeholder) if placeholder in prompt else 0
    return f"{prompt[:behind]}{start}{prompt[behind:]}\n"


def _features(model: Any, pixels_NCSS: Tensor) -> Tensor:
    features_NPH: Tensor = model.multi_modal_projector(tiles.siglip_features(model.vision_tower, pixels_NCSS))
    return features_NPH


def _adjusted(
    masks_of: Callable[[Tensor, Any], Masks],
    first_position: int,
    language: Any,
    extra: Extra | None,
    embedded_BTH: Tensor,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Adds the masks of bidirectional tokens; `masks_of` makes them from blocks_BT and the language model's config.
    Callers count positions from 0, as for every model, but the model counts from `first_position`."""
    if extra is not None and "blocks_BT" in extra.tensors:
        masks = masks_of(extra.tensors["blocks_BT"], language.config)
        masks = tiles.as_attention_masks(masks, language.config, embedded_BTH.dtype)
        settings.setdefault("attention_mask", masks if _SLIDING in masks else masks[_FULL])
    if not first_position:
        return settings
    positions = settings.get("position_ids")
    if positions is None:
        cache = settings.get("past_key_values")
        start = 0 if cache is None else cache.get_seq_length()
        positions = start + torch.arange(embedded_BTH.shape[1], device=embedded_BTH.device)[None]
    return settings | {"position_ids": positions + first_position}


def _gemma3_masks(blocks_BT: Tensor, text: Any) -> Masks:
    full = _causal_or_same_block(blocks_BT)
    return {_FULL: full, _SLIDING: _within_window(full, text.sliding_window)}


def _paligemma_masks(blocks_BT: Tensor, text: Any) -> Masks:
    """PaliGemma 2 has sliding layers; in them, too, a prompt sees all of itself."""
    window = getattr(text, "sliding_window", None)
    sliding = {} if window is None else {_SLIDING: _within_window(_before(blocks_BT), window) | _same_block(blocks_BT)}
    return {_FULL: _causal_or_same_block(blocks_BT), **sliding}


def _causal_or_same_block(blocks_BT: Tensor) -> Tensor:
    """Shows all earlier tokens, and all of the token's own block; -1 is no block. B x 1 x T x T, true where visible."""
    return _before(blocks_BT) | _same_block(blocks_BT)


def _within_window(mask_B1TT: Tensor, window: int) -> Tensor:
    """Hides what is `window` tokens back or further."""
    return mask_B1TT & _near(mask_B1TT, window)


def _before(blocks_BT: Tensor) -> Tensor:
    places_T = torch.arange(blocks_BT.shape[1], device=blocks_BT.device)
    return (places_T[None, :] <= places_T[:, None])[None, None]


def _near(mask_B1TT: Tensor, window: int) -> Tensor:
    places_T = torch.arange(mask_B1TT.shape[-1], device=mask_B1TT.device)
    return (places_T[None, :] > places_T[:, None] - window)[None, None]


def _same_block(blocks_BT: Tensor) -> Tensor:
    same_BTT = (blocks_BT[:, :, None] == blocks_BT[:, None, :]) & (blocks_BT[:, :, None] >= 0)
    return same_BTT[:, None]


_GEMMA3_FORWARD = tiles.TileForward(features=_features, adjust=partial(_adjusted, _gemma3_masks, 0))
_PALIGEMMA_FORWARD = tiles.TileForward(features=_features, adjust=partial(_adjusted, _paligemma_masks, 1))
GEMMA3 = VisionFamily(gemma3_geometry, gemma3_processor, _GEMMA3_FORWARD)
PALIGEMMA = VisionFamily(paligemma_geometry, paligemma_processor, _PALIGEMMA_FORWARD)
