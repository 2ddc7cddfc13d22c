"""Gemma 3: an image is one tile of 256 tokens, between words that say where it begins and ends. Its tokens see one another both ways, so a batch
says for each token which image it belongs to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finefit.data.eyes.eye import Eye, Shown
from finefit.data.eyes.opening import token_of
from finefit.data.eyes.tiles import OneTileLens, one_tile, seen, tower_of
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits


class Gemma3Lens(OneTileLens):
    __slots__ = ()

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        """`blocks_BT`: the number of the image that a token belongs to, -1 of none."""
        tensors = seen(self, input_ids_BT, lengths, rows)
        if tensors:
            tensors["blocks_BT"] = torch.from_numpy(self._blocks(input_ids_BT.shape, tensors["places_I"].numpy()))
        return Extra(tensors=tensors)

    def _blocks(self, shape: tuple[int, ...], places_I: NDArray[np.int64]) -> NDArray[np.int32]:
        blocks = np.full(shape, -1, dtype=np.int32)
        blocks.reshape(-1)[places_I] = np.arange(len(places_I)) // self.features
        return blocks


def gemma3_lens(config: Mapping[str, Any]) -> Gemma3Lens:
    settings, tile = tower_of(config, "siglip_vision_model")
    return Gemma3Lens(settings.image_token_id, tile, settings.mm_tokens_per_image)


def gemma3_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> Eye:
    lens = gemma3_lens(config)
    start, image, end = (token_of(folder, *names) for names in _WORDS)
    written = f"\n\n{start}{image * lens.features}{end}\n\n"
    return one_tile(lens, lens.tile, folder, limits, mark=start, written=written, do_pan_and_scan=False)


_WORDS = (("boi_token", "<start_of_image>"), ("image_token", "<image_soft_token>"), ("eoi_token", "<end_of_image>"))
