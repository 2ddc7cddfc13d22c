"""LLaVA: an image is one tile, scaled to its shorter side and cropped at the centre; each patch of it is a token.

LLaVA-NeXT: the whole image is one tile, followed by the image again, scaled into the best of several rectangles of
tiles. Patches of those tiles that are only padding around the image are dropped, and an end-of-line token follows each
row of patches.

I image tokens of a batch, F of them with features of patches, N tiles, P patches of a tile, H hidden."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from finefit.errors import ModelError, SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.vision import family, tiles
from finefit.vision.family import Config, Grid, ImageProcessor, ImageRows, Lengths, Pixels, Size, TokenIds

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"


def llava_geometry(config: Config) -> tiles.OneTileGeometry:
    typed, tile = tiles.config_and_tile(config, _CLIP, _SIGLIP)
    return tiles.OneTileGeometry(typed.image_token_id, tile, _num_features(typed, tile))


def _num_features(typed: Any, tile: tiles.Tile) -> int:
    """Returns the features of a tile: CLIP adds a class token before the patches, and the default strategy drops the
    first feature."""
    has_class, drops_first = typed.vision_config.model_type == _CLIP, typed.vision_feature_select_strategy == "default"
    return tile.patches**2 + int(has_class) - int(drops_first)


def llava_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, image = llava_geometry(config), family.special_token(folder)
    written = image * geometry.features
    return tiles.one_tile_processor(geometry, folder, limits, written=written, how={}, placeholder=image)


@dataclass(frozen=True, slots=True)
class LlavaNextGeometry:
    """A grid is rows and columns of tiles, then rows and columns of the patches that remain of them."""

    image_token: int
    tile: tiles.Tile
    pinpoints: tuple[tuple[int, int], ...]
    """Heights and widths into which the config allows an image to be scaled."""

    def cut(self, size: Size, pinpoints: Sequence[Sequence[int]]) -> Grid:
        """Returns the grid of an image that is scaled into the best of these."""
        width, height = size
        rows, columns = (pixels // self.tile.side for pixels in select_best_resolution((height, width), pinpoints))
        return rows, columns, *_unpadded(size, columns * self.tile.patches, rows * self.tile.patches)

    def square_grid(self, side: int) -> Grid:
        smallest = min(self.pinpoints, key=lambda point: point[0] * point[1])
        inside = [list(point) for point in self.pinpoints if point[0] * point[1] <= side**2]
        return self.cut((side, side), inside or [list(smallest)])

    def num_tokens(self, grid: Grid) -> int:
        _, _, height, width = grid
        return self.tile.patches**2 + height * (width + 1)

    def blank_pixels(self, grid: Grid) -> Pixels:
        return self.tile.blank(1 + grid[0] * grid[1])

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:  # noqa: ARG002
        """`picks_F`: which patches of all tiles become tokens; `spots_F`: which tokens those are; the others end
        lines."""
        tensors = tiles.image_tensors(self, input_ids_BT, lengths, rows)
        if tensors:
            picks, start = [], 0
            for grid in (image.grid for row in rows for image in row):
                found = self._picked(grid)
                picks.append(np.where(found < 0, -1, found + start))
                start += (1 + grid[0] * grid[1]) * self.tile.patches**2
            joined = np.concatenate(picks)
            spots = np.flatnonzero(joined >= 0)
            tensors |= {"picks_F": torch.from_numpy(joined[spots]), "spots_F": torch.from_numpy(spots)}
        return Extra(tensors=tensors)

    def _picked(self, grid: Grid) -> NDArray[np.int64]:
        """Returns the patch of each image token, -1 at the end of a line."""
        rows, columns, height, width = grid
        side = self.tile.patches
        whole = np.arange(side**2)
        tiled = (1 + np.arange(rows * columns)).reshape(rows, columns, 1, 1) * side**2 + whole.reshape(side, side)
        flat = tiled.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        top, left = (rows * side - height) // 2, (columns * side - width) // 2
        lines = np.full((height, width + 1), -1)
        lines[:, :width] = flat[top : top + height, left : left + width]
        return np.concatenate([whole, lines.reshape(-1)])


def _unpadded(size: Size, across: int, down: int) -> tuple[int, int]:
    """Returns rows and columns of patches without the padding; rounded like the model rounds."""
    width, height = size
    if width / height > across / down:
        return down - (down - int(round(height * (across / width), 7))) // 2 * 2, across
    return down, across - (across - int(round(width * (down / height), 7))) // 2 * 2


def llava_next_geometry(config: Config) -> LlavaNextGeometry:
    typed, tile = tiles.config_and_tile(config, _CLIP, _SIGLIP)
    features = _num_features(typed, tile)
    if features != tile.patches**2:
        raise ModelError(
            f"vision_feature_select_strategy: {typed.vision_feature_select_strategy} of a "
            f"{typed.vision_config.model_type} gives {features} features of {tile.patches**2} patches, which cannot be "
            "laid out as an image",
            "LLaVA-NeXT needs `default` with a CLIP tower and `full` with a SigLIP tower",
        )
    pinpoints = tuple((height, width) for height, width in typed.image_grid_pinpoints)
    return LlavaNextGeometry(typed.image_token_id, tile, pinpoints)


def llava_next_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, processor = llava_next_geometry(config), family.load_processor(folder)
    image = family.special_token(folder)
    low, high = limits.min_pixels or 0, limits.max_pixels or float("inf")
    pinpoints = [list(point) for point in processor.image_grid_pinpoints if low <= point[0] * point[1] <= high]
    if not pinpoints:
        areas = {height * width for height, width in processor.image_grid_pinpoints}
        raise SpecError(
            f"data.images allows no size that this model scales images into: they have "
            f"{', '.join(map(str, sorted(areas)))} pixels",
            "raise data.images.max_pixels or lower data.images.min_pixels, so that one of them is allowed",
        )
    grid = partial(geometry.cut, pinpoints=pinpoints)
    opened = ImageProcessor(
        geometry=geometry,
        placeholder=image,
        identity=family.processor_identity(processor, pinpoints, image),
        grid=grid,
        text=lambda size: image * geometry.num_tokens(grid(size)),
        pixels=lambda shown: {tiles.PIXELS: tiles.processed_tiles(processor, shown, image_grid_pinpoints=pinpoints)[0]},
    )
    return tiles.with_checked_tiles(opened, geometry.tile)


def _features(model: Any, pixels_NCSS: Tensor) -> Tensor:
    """Takes one layer of the tower, or several side by side, and passes them through a projector of two layers."""
    layers = model.config.vision_feature_layer
    found = tiles.hidden_states(model.vision_tower, pixels_NCSS, [layers] if isinstance(layers, int) else layers)
    joined_NPH = torch.cat(found, dim=-1)
    drops_first = model.config.vision_feature_select_strategy == "default"
    features_NPH: Tensor = model.multi_modal_projector(joined_NPH[:, 1:] if drops_first else joined_NPH)
    return features_NPH


def _with_line_ends(model: Any, extra: Extra, features_FH: Tensor) -> Tensor:
    picked_FH = features_FH.index_select(0, extra.tensors["picks_F"])
    ends_IH: Tensor = model.image_newline.to(picked_FH.dtype).expand(extra.tensors["places_I"].shape[0], -1)
    return ends_IH.index_copy(0, extra.tensors["spots_F"], picked_FH)


LLAVA = family.VisionFamily(llava_geometry, llava_processor, tiles.TileForward(features=_features))
LLAVA_NEXT = family.VisionFamily(
    llava_next_geometry,
    llava_next_processor,
    tiles.TileForward(
        features=_features,
        arrange=_with_line_ends,
        towers={**tiles.TOWERS, "projector": ("model.multi_modal_projector", "model.image_newline")},
    ),
)
