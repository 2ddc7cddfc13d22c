"""LLaVA: an image is one tile, scaled to its shorter side and cut in the middle; each patch of it is a token."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finefit.data.eyes.eye import Eye, Shown
from finefit.data.eyes.opening import token_of
from finefit.data.eyes.tiles import OneTileLens, Tile, one_tile, seen, tower_of
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits

TOWERS = ("clip_vision_model", "siglip_vision_model")


class LlavaLens(OneTileLens):
    __slots__ = ()

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        return Extra(tensors=seen(self, input_ids_BT, lengths, rows))


def llava_lens(config: Mapping[str, Any]) -> LlavaLens:
    settings, tile = tower_of(config, *TOWERS)
    return LlavaLens(settings.image_token_id, tile, num_features(settings, tile))


def num_features(settings: Any, tile: Tile) -> int:
    """Of a tile: CLIP puts a class token before the patches, and the usual way is to leave out what comes first."""
    has_class, leaves_first = (
        settings.vision_config.model_type == TOWERS[0],
        settings.vision_feature_select_strategy == "default",
    )
    return tile.patches**2 + int(has_class) - int(leaves_first)


def llava_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> Eye:
    lens, mark = llava_lens(config), token_of(folder)
    return one_tile(lens, lens.tile, folder, limits, mark=mark, written=mark * lens.features)
