"""Idefics3 and SmolVLM: an image is scaled to whole tiles and cut into them, row by row, and the whole image follows as
one more tile. A block of patches of a tile is a token; words of the vocabulary around the tiles say which is which.

Tiles are always whole, so each patch has its own position and no patch is masked. The models' own code computes
positions from a mask on the device in the weights' precision: in bf16 some patches get their neighbour's position. Here
they are what they are in fp32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor, nn
from transformers import BaseImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils import ModelOutput

from finefit.errors import SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision.attention import patches_by_matmul
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
    Tile,
    config_and_tile,
    embed_tokens,
    has_images,
    image_tensors,
    insert_features,
    processed_tiles,
    with_checked_tiles,
)

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
    """A grid is rows and columns of tiles; (0, 0) of an image that is shown whole and not cut."""

    image_token: int
    tile: Tile
    features: int
    """Of a tile."""

    def num_tokens(self, grid: Grid) -> int:
        return self.features * (grid[0] * grid[1] + 1)

    def square_grid(self, side: int) -> Grid:
        tiles = min(side, _LARGEST) // self.tile.side
        return (tiles, tiles) if tiles > 1 else (0, 0)

    def blank_pixels(self, grid: Grid) -> Pixels:
        return self.tile.blank(grid[0] * grid[1] + 1)

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:  # noqa: ARG002
        return Extra(tensors=image_tensors(self, input_ids_BT, lengths, rows))


def idefics_geometry(config: Config) -> IdeficsGeometry:
    typed, tile = config_and_tile(config)
    return IdeficsGeometry(typed.image_token_id, tile, tile.patches**2 // typed.scale_factor**2)


@dataclass(frozen=True, kw_only=True)
class IdeficsProcessor:
    geometry: IdeficsGeometry
    placeholder: str
    identity: str
    processor: Any
    max_pixels: int | None
    around: str
    whole: str

    def grid(self, size: Size) -> Grid:
        return self._cut(size, self._longest(size)) if self.processor.do_image_splitting else (0, 0)

    def text(self, size: Size) -> str:
        rows, columns = self.grid(size)
        tokens = self.placeholder * self.geometry.features
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + self.around + self.whole + tokens + self.around

    def plain_prompt(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {PIXELS: processed_tiles(self.processor, [image], size={"longest_edge": self._longest(image.size)})[0]}

    def _longest(self, size: Size) -> int:
        """What the longer side is scaled to: the processor's own value, or as many whole tiles as the limit allows an
        image of this shape."""
        usual, side = int(self.processor.size["longest_edge"]), self.geometry.tile.side
        if self.max_pixels is None or not self.processor.do_image_splitting:
            return usual
        for longest in (usual, *(side * tiles for tiles in range(math.ceil(usual / side) - 1, 0, -1))):
            rows, columns = self._cut(size, longest)
            if max(rows * columns, 1) * side**2 <= self.max_pixels:
                return longest
        return side

    def _cut(self, size: Size, longest: int) -> Grid:
        width, height = _scaled(size, longest)
        side = self.geometry.tile.side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / (width / height)) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * (width / height)) / side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _scaled(size: Size, longest: int) -> Size:
    """With the longer side of this length and the other one even; rounded as the processors round."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest * ratio), longest
        width = max(width + width % 2, 1)
    if max(width, height) <= _LARGEST:
        return width, height
    ratio = width / height
    return (_LARGEST, max(int(_LARGEST / ratio), 1)) if width >= height else (max(int(_LARGEST * ratio), 1), _LARGEST)


def idefics_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, processor = idefics_geometry(config), load_processor(folder, _PIL[str(config["model_type"])])
    _require_effect(limits, geometry.tile.side, processor)
    words = [special_token(folder, *names) for names in _WORDS]
    opened = IdeficsProcessor(
        geometry=geometry,
        placeholder=words[0],
        identity=processor_identity(processor, limits.max_pixels, words),
        processor=processor,
        max_pixels=limits.max_pixels,
        around=words[1],
        whole=words[2],
    )
    return with_checked_tiles(opened, geometry.tile)


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
        raise SpecError(
            f"data.images.max_pixels would have no effect: this model sees every image as {side} x {side} pixels",
            "remove it from the spec",
        )
    if limits.max_pixels < side**2:
        raise SpecError(
            f"data.images.max_pixels is {limits.max_pixels}, and the smallest image that this model sees has "
            f"{side} x {side} = {side**2} pixels",
            f"set data.images.max_pixels to {side**2} or more",
        )


@dataclass(frozen=True)
class IdeficsForward:
    towers: Mapping[Tower, tuple[str, ...]]

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embed_tokens(model, input_ids_BT)
        if has_images(extra):
            features_NPH = model.connector(_hidden_states(model.vision_model, extra.tensors[PIXELS]))
            embedded_BTH = insert_features(embedded_BTH, extra, features_NPH.flatten(0, 1))
        output: ModelOutput = model.text_model(inputs_embeds=embedded_BTH, **settings)
        return output


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
IDEFICS = VisionFamily(idefics_geometry, idefics_processor, IdeficsForward(_TOWERS))
