"""PaliGemma: an image is one tile, each patch a token. It has no chat template: images stand first, then the start token, the prompt and a newline.
All of that sees both ways, what the model writes behind it does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finefit.data.eyes.eye import Eye, Grid, Pixels, Shown
from finefit.data.eyes.opening import token_of
from finefit.data.eyes.tiles import ONE, Tile, one_tile, seen, tower_of
from finefit.errors import DataError
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits


@dataclass(frozen=True, slots=True)
class PaliGemmaLens:
    image_token: int
    tile: Tile
    end: int | None

    def num_tokens(self, grid: Grid) -> int:  # noqa: ARG002
        return self.tile.patches**2

    def square(self, side: int) -> Grid:  # noqa: ARG002
        return ONE

    def blank(self, grid: Grid) -> Pixels:  # noqa: ARG002
        return self.tile.blank(1)

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,
    ) -> Extra:
        """`blocks_BT`: 0 of a prompt's tokens, -1 of all others."""
        if prompts is None:
            self._require_prompts(input_ids_BT, lengths)
        is_prompt_BT = (
            np.arange(input_ids_BT.shape[1])[None] < np.asarray(lengths if prompts is None else prompts)[:, None]
        )
        blocks_BT = torch.from_numpy(np.where(is_prompt_BT, 0, -1).astype(np.int32))
        return Extra(tensors={**seen(self, input_ids_BT, lengths, rows), "blocks_BT": blocks_BT})

    def _require_prompts(self, input_ids_BT: NDArray[np.int64], lengths: Sequence[int]) -> None:
        """An answer that passed for a prompt would be seen by the tokens that have to foretell it."""
        ends = [row[length - 1] for row, length in zip(input_ids_BT, lengths, strict=True) if length]
        if self.end in ends:
            raise DataError(
                "a row of a batch ends with an answer, and nothing says where its prompt ends",
                "give the lens `prompts`",
            )


def paligemma_lens(config: Mapping[str, Any]) -> PaliGemmaLens:
    settings, tile = tower_of(config, "siglip_vision_model")
    return PaliGemmaLens(settings.image_token_id, tile, settings.text_config.eos_token_id)


def paligemma_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> Eye:
    lens, mark = paligemma_lens(config), token_of(folder)
    return one_tile(
        lens, lens.tile, folder, limits, mark=mark, written=mark * lens.tile.patches**2, write=_images_first
    )


def _images_first(mark: str, prompt: str, start: str) -> str:
    """As its processor does: the start behind the last image, a newline behind all."""
    images, text = prompt[: (behind := prompt.rfind(mark) + len(mark) if mark in prompt else 0)], prompt[behind:]
    return f"{images}{start}{text}\n"
