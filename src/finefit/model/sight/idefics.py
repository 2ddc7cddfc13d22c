"""Idefics3 and SmolVLM: tiles are always whole, so each patch has its own position and no patch is masked; a connector joins blocks of patches.

The models' own code works the positions out of a mask on the device, in the weights' precision: in bf16 some patches get their neighbour's. Here they
are what they are in fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.model.sight.patches import take_product
from finefit.model.sight.tiles import PIXELS, embedded, shows, spoken, with_features
from finefit.objective.batch import Extra
from finefit.spec.models import Tower


@dataclass(frozen=True)
class IdeficsSight:
    towers: Mapping[Tower, tuple[str, ...]]

    def read(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embedded(model, input_ids_BT)
        if shows(extra):
            features_NPH = model.connector(_states(model.vision_model, extra.tensors[PIXELS]))
            embedded_BTH = with_features(embedded_BTH, extra, features_NPH.flatten(0, 1))
        return spoken(model.text_model, embedded_BTH, **settings)


def _states(tower: Any, pixels_NCSS: Tensor) -> Tensor:
    table = tower.embeddings
    take_product(table.patch_embedding)
    patches_NPH = table.patch_embedding(pixels_NCSS.to(table.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
    hidden_NPH = patches_NPH + table.position_embedding(torch.arange(patches_NPH.shape[1], device=patches_NPH.device))
    hidden_NPH = tower.encoder(inputs_embeds=hidden_NPH, attention_mask=None).last_hidden_state
    states_NPH: Tensor = tower.post_layernorm(hidden_NPH)
    return states_NPH


IDEFICS = IdeficsSight(
    {"vision": ("model.vision_model",), "projector": ("model.connector",), "language": ("model.text_model", "lm_head")}
)
