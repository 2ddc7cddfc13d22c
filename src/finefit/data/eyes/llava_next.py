"""LLaVA-NeXT: the whole image as one tile, then the image once more, scaled into the best of several rectangles of tiles. Of the patches of those
tiles, what is only padding around the image is left out again, and behind each row of patches stands a token for the end of a line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from transformers.image_processing_utils import select_best_resolution

from finefit.data.eyes.eye import Eye, Grid, Pixels, Shown, Size
from finefit.data.eyes.llava import TOWERS, num_features
from finefit.data.eyes.opening import identity_of, image_processor, token_of
from finefit.data.eyes.tiles import Tile, seen, tiles_of, tower_of, tried
from finefit.errors import ModelError, SpecError
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits


@dataclass(frozen=True, slots=True)
class LlavaNextLens:
    """A grid is rows and columns of tiles, then rows and columns of patches that are left of them."""

    image_token: int
    tile: Tile
    pinpoints: tuple[tuple[int, int], ...]
    """Heights and widths that the config lets an image be scaled into."""

    def cut(self, size: Size, pinpoints: Sequence[Sequence[int]]) -> Grid:
        """Of an image that is scaled into the best of these."""
        width, height = size
        rows, columns = (pixels // self.tile.side for pixels in select_best_resolution((height, width), pinpoints))
        return rows, columns, *_unpadded(size, columns * self.tile.patches, rows * self.tile.patches)

    def square(self, side: int) -> Grid:
        smallest = min(self.pinpoints, key=lambda point: point[0] * point[1])
        return self.cut(
            (side, side),
            [list(point) for point in self.pinpoints if point[0] * point[1] <= side**2] or [list(smallest)],
        )

    def num_tokens(self, grid: Grid) -> int:
        _, _, height, width = grid
        return self.tile.patches**2 + height * (width + 1)

    def blank(self, grid: Grid) -> Pixels:
        return self.tile.blank(1 + grid[0] * grid[1])

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        """`picks_F`: which patches of all tiles become tokens; `spots_F`: which of the image tokens; the others are ends of lines."""
        tensors = seen(self, input_ids_BT, lengths, rows)
        if tensors:
            picks, spots = self._packed([image.grid for row in rows for image in row])
            tensors |= {"picks_F": torch.from_numpy(picks), "spots_F": torch.from_numpy(spots)}
        return Extra(tensors=tensors)

    def _packed(self, grids: Sequence[Grid]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A line's end is a pick of -1."""
        picks, start = [], 0
        for grid in grids:
            found = self._picked(grid)
            picks.append(np.where(found < 0, -1, found + start))
            start += (1 + grid[0] * grid[1]) * self.tile.patches**2
        joined = np.concatenate(picks)
        spots = np.flatnonzero(joined >= 0)
        return joined[spots], spots

    def _picked(self, grid: Grid) -> NDArray[np.int64]:
        rows, columns, height, width = grid
        side = self.tile.patches
        whole = np.arange(side**2)
        tiled = (1 + np.arange(rows * columns)).reshape(rows, columns, 1, 1) * side**2 + whole.reshape(side, side)
        flat = tiled.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        top, left = (rows * side - height) // 2, (columns * side - width) // 2
        lines = np.full((height, width + 1), -1)
        lines[:, :width] = flat[top : top + height, left : left + width]
        return np.concatenate([whole, lines.reshape(-1)])


@dataclass(frozen=True, kw_only=True)
class LlavaNextEye:
    lens: LlavaNextLens
    mark: str
    identity: str
    processor: Any
    pinpoints: list[list[int]]
    """Heights and widths that an image may be scaled into."""

    def grid(self, size: Size) -> Grid:
        return self.lens.cut(size, self.pinpoints)

    def text(self, size: Size) -> str:
        return self.mark * self.lens.num_tokens(self.grid(size))

    def plain(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {"pixel_values": tiles_of(self.processor, image, image_grid_pinpoints=self.pinpoints)[0]}


def _unpadded(size: Size, across: int, down: int) -> tuple[int, int]:
    """Rows and columns of patches without the padding; rounded as the model rounds."""
    width, height = size
    if width / height > across / down:
        return down - (down - int(round(height * (across / width), 7))) // 2 * 2, across
    return down, across - (across - int(round(width * (down / height), 7))) // 2 * 2


def llava_next_lens(config: Mapping[str, Any]) -> LlavaNextLens:
    settings, tile = tower_of(config, *TOWERS)
    if num_features(settings, tile) != tile.patches**2:
        raise ModelError(
            f"vision_feature_select_strategy: {settings.vision_feature_select_strategy} of a {settings.vision_config.model_type} gives "
            f"{num_features(settings, tile)} features of {tile.patches**2} patches, which cannot be laid out as an image",
            "LLaVA-NeXT takes `default` with a CLIP tower and `full` with a SigLIP tower",
        )
    return LlavaNextLens(
        settings.image_token_id, tile, tuple((height, width) for height, width in settings.image_grid_pinpoints)
    )


def llava_next_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> Eye:
    lens, processor, mark = llava_next_lens(config), image_processor(folder), token_of(folder)
    pinpoints = _allowed(processor.image_grid_pinpoints, limits)
    identity = identity_of(processor, pinpoints, mark)
    return tried(
        LlavaNextEye(lens=lens, mark=mark, identity=identity, processor=processor, pinpoints=pinpoints), lens.tile
    )


def _allowed(pinpoints: Sequence[Sequence[int]], limits: ImageLimits) -> list[list[int]]:
    low, high = limits.min_pixels or 0, limits.max_pixels or float("inf")
    allowed = [list(point) for point in pinpoints if low <= point[0] * point[1] <= high]
    if not allowed:
        sizes = ", ".join(str(pixels) for pixels in sorted({height * width for height, width in pinpoints}))
        raise SpecError(
            f"data.images allows no size that this model scales images into: they have {sizes} pixels",
            "raise data.images.max_pixels or lower data.images.min_pixels, so that one of them is allowed",
        )
    return allowed
