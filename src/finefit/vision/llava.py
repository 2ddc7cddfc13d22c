"""LLaVA: an image is one tile, scaled to its shorter side and cut in the middle; each patch of it is a token.

LLaVA-NeXT: the whole image as one tile, then the image once more, scaled into the best of several rectangles of tiles.
The patches of those tiles that are only padding around the image are left out again, and a token for the end of a line
follows each row of patches.

I image tokens of a batch, F of them with features of patches, N tiles, P patches of a tile, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.image_processing_utils import select_best_resolution
from transformers.utils import ModelOutput

from finefit.errors import ModelError, SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision.family import (
    Config,
    Grid,
    ImageProcessor,
    ImageRows,
    Lengths,
    Pixels,
    Size,
    TokenIds,
    VisionFamily,
    load_processor,
    processor_identity,
    special_token,
)
from finefit.vision.tiles import (
    PIXELS,
    OneTileGeometry,
    Tile,
    config_and_tile,
    embed_tokens,
    has_images,
    hidden_states,
    image_tensors,
    insert_features,
    one_tile_processor,
    processed_tiles,
    with_checked_tiles,
)

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"


def llava_geometry(config: Config) -> OneTileGeometry:
    typed, tile = config_and_tile(config, _CLIP, _SIGLIP)
    return OneTileGeometry(typed.image_token_id, tile, _num_features(typed, tile))


def _num_features(typed: Any, tile: Tile) -> int:
    """Of a tile: CLIP puts a class token before the patches, and the default strategy drops the first feature."""
    has_class, drops_first = typed.vision_config.model_type == _CLIP, typed.vision_feature_select_strategy == "default"
    return tile.patches**2 + int(has_class) - int(drops_first)


def llava_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, image = llava_geometry(config), special_token(folder)
    return one_tile_processor(geometry, folder, limits, placeholder=image, written=image * geometry.features)


@dataclass(frozen=True, slots=True)
class LlavaNextGeometry:
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
        """`picks_F`: which patches of all tiles become tokens; `spots_F`: which of the image tokens; the others are
        ends of lines."""
        tensors = image_tensors(self, input_ids_BT, lengths, rows)
        if tensors:
            picks, spots = self._packed([image.grid for row in rows for image in row])
            tensors |= {"picks_F": torch.from_numpy(picks), "spots_F": torch.from_numpy(spots)}
        return Extra(tensors=tensors)

    def _packed(self, grids: Sequence[Grid]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        picks, start = [], 0
        for grid in grids:
            found = self._picked(grid)
            picks.append(np.where(found < 0, -1, found + start))
            start += (1 + grid[0] * grid[1]) * self.tile.patches**2
        joined = np.concatenate(picks)
        spots = np.flatnonzero(joined >= 0)
        return joined[spots], spots

    def _picked(self, grid: Grid) -> NDArray[np.int64]:
        """The patch of each image token, -1 at the end of a line."""
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
    """Rows and columns of patches without the padding; rounded as the model rounds."""
    width, height = size
    if width / height > across / down:
        return down - (down - int(round(height * (across / width), 7))) // 2 * 2, across
    return down, across - (across - int(round(width * (down / height), 7))) // 2 * 2


def llava_next_geometry(config: Config) -> LlavaNextGeometry:
    typed, tile = config_and_tile(config, _CLIP, _SIGLIP)
    features = _num_features(typed, tile)
    if features != tile.patches**2:
        raise ModelError(
            f"vision_feature_select_strategy: {typed.vision_feature_select_strategy} of a "
            f"{typed.vision_config.model_type} gives {features} features of {tile.patches**2} patches, which cannot be "
            "laid out as an image",
            "LLaVA-NeXT takes `default` with a CLIP tower and `full` with a SigLIP tower",
        )
    pinpoints = tuple((height, width) for height, width in typed.image_grid_pinpoints)
    return LlavaNextGeometry(typed.image_token_id, tile, pinpoints)


@dataclass(frozen=True, kw_only=True)
class LlavaNextProcessor:
    geometry: LlavaNextGeometry
    placeholder: str
    identity: str
    processor: Any
    pinpoints: list[list[int]]
    """Heights and widths that an image may be scaled into."""

    def grid(self, size: Size) -> Grid:
        return self.geometry.cut(size, self.pinpoints)

    def text(self, size: Size) -> str:
        return self.placeholder * self.geometry.num_tokens(self.grid(size))

    def plain_prompt(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {PIXELS: processed_tiles(self.processor, image, image_grid_pinpoints=self.pinpoints)[0]}


def llava_next_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, processor, image = llava_next_geometry(config), load_processor(folder), special_token(folder)
    low, high = limits.min_pixels or 0, limits.max_pixels or float("inf")
    pinpoints = [list(point) for point in processor.image_grid_pinpoints if low <= point[0] * point[1] <= high]
    if not pinpoints:
        areas = {height * width for height, width in processor.image_grid_pinpoints}
        raise SpecError(
            f"data.images allows no size that this model scales images into: they have "
            f"{', '.join(map(str, sorted(areas)))} pixels",
            "raise data.images.max_pixels or lower data.images.min_pixels, so that one of them is allowed",
        )
    opened = LlavaNextProcessor(
        geometry=geometry,
        placeholder=image,
        identity=processor_identity(processor, pinpoints, image),
        processor=processor,
        pinpoints=pinpoints,
    )
    return with_checked_tiles(opened, geometry.tile)


@dataclass(frozen=True)
class LlavaForward:
    """One layer of the tower, or several side by side, through a projector of two layers."""

    towers: Mapping[Tower, tuple[str, ...]]

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embed_tokens(model, input_ids_BT)
        if has_images(extra):
            features_NPH = _features(model, extra.tensors[PIXELS])
            embedded_BTH = insert_features(embedded_BTH, extra, _laid_out(model, extra, features_NPH.flatten(0, 1)))
        output: ModelOutput = model.language_model(inputs_embeds=embedded_BTH, **settings)
        return output


def _features(model: Any, pixels_NCSS: Tensor) -> Tensor:
    layers = model.config.vision_feature_layer
    found = hidden_states(model.vision_tower, pixels_NCSS, [layers] if isinstance(layers, int) else layers)
    joined_NPH = torch.cat(found, dim=-1)
    drops_first = model.config.vision_feature_select_strategy == "default"
    features_NPH: Tensor = model.multi_modal_projector(joined_NPH[:, 1:] if drops_first else joined_NPH)
    return features_NPH


def _laid_out(model: Any, extra: Extra, features_FH: Tensor) -> Tensor:
    """In LLaVA-NeXT with tokens for the ends of lines between the features."""
    if "picks_F" not in extra.tensors:
        return features_FH
    picked_FH = features_FH.index_select(0, extra.tensors["picks_F"])
    ends_IH: Tensor = model.image_newline.to(picked_FH.dtype).expand(extra.tensors["places_I"].shape[0], -1)
    return ends_IH.index_copy(0, extra.tensors["spots_F"], picked_FH)


_TOWERS: Mapping[Tower, tuple[str, ...]] = {
    "vision": ("model.vision_tower",),
    "projector": ("model.multi_modal_projector",),
    "language": ("model.language_model", "lm_head"),
}
LLAVA = VisionFamily(llava_geometry, llava_processor, LlavaForward(_TOWERS))
LLAVA_NEXT = VisionFamily(
    llava_next_geometry,
    llava_next_processor,
    LlavaForward({**_TOWERS, "projector": ("model.multi_modal_projector", "model.image_newline")}),
)
