"""How Qwen2-VL, Qwen2.5-VL and Qwen3-VL read a batch. All that their towers would ask the device for comes with the batch, made by `data.eyes.qwen`.

B rows, T tokens, I image tokens of a whole batch, H hidden, P patches.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from finefit.model.sight.attention import attend_by_piece
from finefit.model.sight.patches import take_product
from finefit.objective.batch import Extra
from finefit.spec.models import Tower

_TOWER = "tower."
"""Begins the names of what is the tower's alone, which knows it by the rest of the name."""


@dataclass(frozen=True, slots=True)
class QwenSight:
    towers: Mapping[Tower, tuple[str, ...]]

    def read(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embeds_BTH: Tensor = model.get_input_embeddings()(input_ids_BT)
        told = settings | _positions(extra)
        if extra is not None and "pixel_values" in extra.tensors:
            places_I = extra.tensors["places_I"]
            features_IH, deeper = _look(model.visual, extra)
            embeds_BTH = _put(embeds_BTH, places_I, features_IH)
            told |= {"visual_pos_masks": places_I, "deepstack_visual_embeds": deeper} if deeper else {}
        with _adding_by_place(model.language_model):
            output: ModelOutput = model.language_model(inputs_embeds=embeds_BTH, **told)
        return output


def _towers(*projector: str) -> Mapping[Tower, tuple[str, ...]]:
    return {"language": ("model.language_model", "lm_head"), "vision": ("model.visual",), "projector": projector}


QWEN2 = QwenSight(_towers("model.visual.merger"))
QWEN3 = QwenSight(_towers("model.visual.merger", "model.visual.deepstack_merger_list"))


def _positions(extra: Extra | None) -> dict[str, Tensor]:
    """Three for each token: in time, down, across. Behind a prompt they are one, as for any model, and come with the settings."""
    return {} if extra is None else {"position_ids": extra.tensors["positions_3BT"]}


def _look(visual: Any, extra: Extra) -> tuple[Tensor, list[Tensor]]:
    """Features for the places of all images; of Qwen3 further ones, which its first layers are given."""
    attend_by_piece(visual)
    take_product(visual.patch_embed.proj)
    told = {
        name.removeprefix(_TOWER): value
        for name, value in (*extra.tensors.items(), *extra.host.items())
        if name.startswith(_TOWER)
    }
    seen = visual(extra.tensors["pixel_values"], grid_thw=None, **told)
    return seen.pooler_output, list(getattr(seen, "deepstack_features", None) or ())


def _put(embeds_BTH: Tensor, places_I: Tensor, features_IH: Tensor) -> Tensor:
    features_IH = features_IH.to(embeds_BTH.device, embeds_BTH.dtype)
    return embeds_BTH.flatten(0, 1).index_copy(0, places_I, features_IH).view_as(embeds_BTH)


def _add(hidden_BTH: Tensor, places_I: Tensor, features_IH: Tensor) -> Tensor:
    features_IH = features_IH.to(hidden_BTH.device, hidden_BTH.dtype)
    return hidden_BTH.flatten(0, 1).index_add(0, places_I.to(hidden_BTH.device), features_IH).view_as(hidden_BTH)


@contextmanager
def _adding_by_place(language: nn.Module) -> Iterator[None]:
    """Qwen3's own code adds by a mask, whose ones would be counted on the device. It does so between layers, never inside one: nothing of this is
    computed again in backward."""
    language._deepstack_process = _add  # type: ignore[assignment]
    try:
        yield
    finally:
        del language._deepstack_process
