"""Idefics3 and SmolVLM: an image is scaled to whole tiles and cut into them, row by row, and the whole image follows as
one more tile. A block of patches of a tile is a token; words of the vocabulary around the tiles identify them.

Tiles are always whole, so each patch has its own position and no patch is masked. The models' own code computes
positions from a mask on the device in the weights' precision: in bf16 some patches get their neighbour's position. Here
they have their fp32 values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from finefit.errors import SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision import family, tiles
from finefit.vision.attention import patches_by_matmul
from finefit.vision.family import Config, Grid, ImageProcessor, ImageRows, Lengths, Pixels, Size, TokenIds

_PIL: Mapping[str, type[BaseImageProcessor]] = {
    "idefics3": Idefics3ImageProcessorPil,
    "smolvlm": SmolVLMImageProcessorPil,
}
_LARGEST = 4096
"""Pixels of the longer side, which the processors never exceed."""
_WORDS = (
    ("image_token", "<image>"),
    ("fake_image_token", "<fake_token_around_image>"),
    ("global_image_token", "<global-img>"),
)


@dataclass(frozen=True, slots=True)
class IdeficsGeometry:
    """A grid is rows and columns of tiles; (0, 0) for an image that is shown whole and not cut."""

    image_token: int
    tile: tiles.Tile
    features: int
    """Features of a tile."""

    def num_tokens(self, grid: Grid) -> int:
        return self.features * (grid[0] * grid[1] + 1)

    def square_grid(self, side: int) -> Grid:
        count = min(side, _LARGEST) // self.tile.side
        return (count, count) if count > 1 else (0, 0)

    def blank_pixels(self, grid: Grid) -> Pixels:
        return self.tile.blank(grid[0] * grid[1] + 1)

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:  # noqa: ARG002
        return Extra(tensors=tiles.image_tensors(self, input_ids_BT, lengths, rows))


def idefics_geometry(config: Config) -> IdeficsGeometry:
    typed, tile = tiles.config_and_tile(config)
    return IdeficsGeometry(typed.image_token_id, tile, tile.patches**2 // typed.scale_factor**2)


def idefics_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, processor = idefics_geometry(config), family.load_processor(folder, _PIL[str(config["model_type"])])
    side, is_split = geometry.tile.side, processor.do_image_splitting
    _require_effect(limits, side, processor)
    words = [family.special_token(folder, *names) for names in _WORDS]
    image, around, whole = words

    def longest(size: Size) -> int:
        """Returns the scaled length of the longer side: the processor's own value, or as many whole tiles as the limit
        allows."""
        usual = int(processor.size["longest_edge"])
        if limits.max_pixels is None or not is_split:
            return usual
        for pixels in (usual, *(side * count for count in range(math.ceil(usual / side) - 1, 0, -1))):
            rows, columns = _cut(size, pixels, side)
            if max(rows * columns, 1) * side**2 <= limits.max_pixels:
                return pixels
        return side

    def grid(size: Size) -> Grid:
        return _cut(size, longest(size), side) if is_split else (0, 0)

    def text(size: Size) -> str:
        rows, columns = grid(size)
        tokens = image * geometry.features
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + around + whole + tokens + around

    def pixels(shown: PIL.Image.Image) -> Pixels:
        return {tiles.PIXELS: tiles.processed_tiles(processor, [shown], size={"longest_edge": longest(shown.size)})[0]}

    opened = ImageProcessor(
        geometry=geometry,
        placeholder=image,
        identity=family.processor_identity(processor, limits.max_pixels, words),
        grid=grid,
        text=text,
        pixels=pixels,
    )
    return tiles.with_checked_tiles(opened, geometry.tile)


def _cut(size: Size, longest: int, side: int) -> Grid:
    """Cuts into tiles after the longer side has this length and the other one is even; rounds like the processors."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest * ratio), longest
        width = max(width + width % 2, 1)
    ratio = width / height
    if max(width, height) > _LARGEST:
        is_wide = width >= height
        width = _LARGEST if is_wide else max(int(_LARGEST * ratio), 1)
        height = max(int(_LARGEST / ratio), 1) if is_wide else _LARGEST
    if width >= height:
        columns = math.ceil(width / side)
        rows = math.ceil(int(columns * side / (width / height)) / side)
    else:
        rows = math.ceil(height / side)
        columns = math.ceil(int(rows * side * (width / height)) / side)
    return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _require_effect(limits: ImageLimits, side: int, processor: Any) -> None:
    if limits.min_pixels is not None:
        longest = processor.size["longest_edge"]
        raise SpecError(
            f"data.images.min_pixels would have no effect: this model scales every image to {longest} pixels along its "
            "longer side",
            "remove it from the spec; data.images.max_pixels makes images smaller",
        )
    if limits.max_pixels is None:
        return
    if not processor.do_image_splitting:
        problem = f"data.images.max_pixels would have no effect: this model sees every image as {side} x {side} pixels"
        raise SpecError(problem, "remove it from the spec")
    if limits.max_pixels < side**2:
        raise SpecError(
            f"data.images.max_pixels is {limits.max_pixels}, but the smallest image that this model sees has "
            f"{side} x {side} = {side**2} pixels",
            f"set data.images.max_pixels to {side**2} or more",
        )


def _features(model: Any, pixels_NCSS: Tensor) -> Tensor:
    features_NPH: Tensor = model.connector(_hidden_states(model.vision_model, pixels_NCSS))
    return features_NPH


def _hidden_states(tower: Any, pixels_NCSS: Tensor) -> Tensor:
    table = tower.embeddings
    patches_by_matmul(table.patch_embedding)
    patches_NPH = table.patch_embedding(pixels_NCSS.to(table.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
    hidden_NPH = patches_NPH + table.position_embedding(torch.arange(patches_NPH.shape[1], device=patches_NPH.device))
    hidden_NPH = tower.encoder(inputs_embeds=hidden_NPH, attention_mask=None).last_hidden_state
    states_NPH: Tensor = tower.post_layernorm(hidden_NPH)
    return states_NPH


_TOWERS: Mapping[Tower, tuple[str, ...]] = {
    "vision": ("model.vision_model",),
    "projector": ("model.connector",),
    "language": ("model.text_model", "lm_head"),
}
_FORWARD = tiles.TileForward(features=_features, language="text_model", towers=_TOWERS)
IDEFICS = family.VisionFamily(idefics_geometry, idefics_processor, _FORWARD)
