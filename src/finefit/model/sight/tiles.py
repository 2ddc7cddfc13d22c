"""What sights have in common whose towers see tiles of one size: the tower read as far as it is used, features put in their places, and masks for
tokens that see what stands behind them.

The towers' own forward keeps the output of every layer where one of them is wanted, and some wait for the device. B rows, T tokens, I image tokens,
N tiles, P patches of a tile, C channels, S pixels of a side, H hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from finefit.model.sight.patches import take_product
from finefit.objective.batch import Extra

PIXELS = "pixel_values"


def embedded(backbone: Any, input_ids_BT: Tensor) -> Tensor:
    """Where the image token is beyond the vocabulary any other does: it is replaced."""
    embed, image_token = backbone.get_input_embeddings(), backbone.config.image_token_id
    if image_token >= backbone.config.get_text_config().vocab_size:
        input_ids_BT = input_ids_BT.masked_fill(input_ids_BT == image_token, 0)
    embedded_BTH: Tensor = embed(input_ids_BT)
    return embedded_BTH


def with_features(embedded_BTH: Tensor, extra: Extra, features_IH: Tensor) -> Tensor:
    """In the places of the image tokens, in order."""
    flat = embedded_BTH.flatten(0, 1).index_copy(0, extra.tensors["places_I"], features_IH.to(embedded_BTH.dtype))
    return flat.view_as(embedded_BTH)


def shows(extra: Extra | None) -> TypeGuard[Extra]:
    return extra is not None and PIXELS in extra.tensors


def states(tower: Any, pixels_NCSS: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """What CLIP and SigLIP give behind these layers, 0 before the first, -1 behind the last; those that follow are not computed."""
    take_product(tower.embeddings.patch_embedding)
    hidden_NPH = tower.embeddings(pixels_NCSS)
    if hasattr(tower, "pre_layrnorm"):
        hidden_NPH = tower.pre_layrnorm(hidden_NPH)
    wanted = [layer % (len(tower.encoder.layers) + 1) for layer in layers]
    found = {0: hidden_NPH}
    for number, layer in enumerate(tower.encoder.layers[: max(wanted)], start=1):
        hidden_NPH = layer(hidden_NPH, None)
        if number in wanted:
            found[number] = hidden_NPH
    return [found[number] for number in wanted]


def features_of_siglip(tower: Any, pixels_NCSS: Tensor) -> Tensor:
    """All of it but the head that pools an image into one vector, which nobody looks at."""
    features_NPH: Tensor = tower.post_layernorm(states(tower, pixels_NCSS, [-1])[0])
    return features_NPH


# masks


def causal_or_alike(blocks_BT: Tensor) -> Tensor:
    """B x 1 x T x T, true where a token is seen: all that stand before it, and all of its own block; -1 is no block."""
    return _before(blocks_BT) | _alike(blocks_BT)


def within(mask_B1TT: Tensor, window: int) -> Tensor:
    """Without what lies `window` tokens back or further."""
    return mask_B1TT & _near(mask_B1TT, window)


def near_or_alike(blocks_BT: Tensor, window: int) -> Tensor:
    """As `causal_or_alike`, but beyond the window only its own block is seen."""
    return within(_before(blocks_BT), window) | _alike(blocks_BT)


def as_taken(masks: Mapping[str, Tensor], config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Attention that is written out adds its mask to the scores."""
    if config._attn_implementation != "eager":
        return dict(masks)
    return {
        kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        for kind, mask in masks.items()
    }


def _before(blocks_BT: Tensor) -> Tensor:
    places_T = torch.arange(blocks_BT.shape[1], device=blocks_BT.device)
    return (places_T[None, :] <= places_T[:, None])[None, None]


def _near(mask_B1TT: Tensor, window: int) -> Tensor:
    places_T = torch.arange(mask_B1TT.shape[-1], device=mask_B1TT.device)
    return (places_T[None, :] > places_T[:, None] - window)[None, None]


def _alike(blocks_BT: Tensor) -> Tensor:
    same_BTT = (blocks_BT[:, :, None] == blocks_BT[:, None, :]) & (blocks_BT[:, :, None] >= 0)
    return same_BTT[:, None]


def spoken(language: Any, embedded_BTH: Tensor, **settings: Any) -> ModelOutput:
    answer: ModelOutput = language(inputs_embeds=embedded_BTH, **settings)
    return answer
