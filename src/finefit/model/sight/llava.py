"""LLaVA and LLaVA-NeXT: a layer of the tower, or several side by side, through a projector of two layers. In LLaVA-NeXT tokens for the ends of lines
stand between what it gives.

B rows, T tokens, I image tokens, F of them with features of patches, N tiles, P patches of a tile, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.model.sight.tiles import PIXELS, embedded, shows, spoken, states, with_features
from finefit.objective.batch import Extra
from finefit.spec.models import Tower


@dataclass(frozen=True)
class LlavaSight:
    towers: Mapping[Tower, tuple[str, ...]]

    def read(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embedded(model, input_ids_BT)
        if shows(extra):
            features_NPH = _features(model, extra.tensors[PIXELS])
            embedded_BTH = with_features(embedded_BTH, extra, _laid_out(model, extra, features_NPH.flatten(0, 1)))
        return spoken(model.language_model, embedded_BTH, **settings)


def _features(model: Any, pixels_NCSS: Tensor) -> Tensor:
    layers = model.config.vision_feature_layer
    found = states(model.vision_tower, pixels_NCSS, [layers] if isinstance(layers, int) else layers)
    joined_NPH = torch.cat(found, dim=-1)
    leaves_first = model.config.vision_feature_select_strategy == "default"
    features_NPH: Tensor = model.multi_modal_projector(joined_NPH[:, 1:] if leaves_first else joined_NPH)
    return features_NPH


def _laid_out(model: Any, extra: Extra, features_FH: Tensor) -> Tensor:
    if "picks_F" not in extra.tensors:
        return features_FH
    picked_FH = features_FH.index_select(0, extra.tensors["picks_F"])
    ends_IH: Tensor = model.image_newline.to(picked_FH.dtype).expand(extra.tensors["places_I"].shape[0], -1)
    return ends_IH.index_copy(0, extra.tensors["spots_F"], picked_FH)


LLAVA = LlavaSight(
    {
        "vision": ("model.vision_tower",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model", "lm_head"),
    }
)
LLAVA_NEXT = LlavaSight({**LLAVA.towers, "projector": ("model.multi_modal_projector", "model.image_newline")})
