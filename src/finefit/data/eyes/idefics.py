"""Idefics3 and SmolVLM: an image is scaled to whole tiles and cut into them, row by row, and the whole image follows as one tile more. A block of
patches of a tile is a token; words of the vocabulary around the tiles tell which is which."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from transformers import BaseImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from finefit.data.eyes.eye import Eye, Grid, Pixels, Shown, Size
from finefit.data.eyes.opening import identity_of, image_processor, token_of
from finefit.data.eyes.tiles import Tile, seen, tiles_of, tower_of, tried
from finefit.errors import SpecError
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits

_PIL: Mapping[str, type[BaseImageProcessor]] = {
    "idefics3": Idefics3ImageProcessorPil,
    "smolvlm": SmolVLMImageProcessorPil,
}
_LARGEST = 4096
"""Pixels of the longer side, which the processors never go beyond."""


@dataclass(frozen=True, slots=True)
class IdeficsLens:
    """A grid is rows and columns of tiles; (0, 0) of an image that is shown whole and not cut."""

    image_token: int
    tile: Tile
    features: int
    """Of a tile."""

    def num_tokens(self, grid: Grid) -> int:
        return self.features * _num_tiles(grid)

    def square(self, side: int) -> Grid:
        tiles = min(side, _LARGEST) // self.tile.side
        return (tiles, tiles) if tiles > 1 else (0, 0)

    def blank(self, grid: Grid) -> Pixels:
        return self.tile.blank(_num_tiles(grid))

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        return Extra(tensors=seen(self, input_ids_BT, lengths, rows))


def _num_tiles(grid: Grid) -> int:
    return grid[0] * grid[1] + 1


@dataclass(frozen=True, kw_only=True)
class IdeficsEye:
    lens: IdeficsLens
    mark: str
    identity: str
    processor: Any
    max_pixels: int | None
    around: str
    whole: str

    def grid(self, size: Size) -> Grid:
        return self._cut(size, self._longest(size)) if self.processor.do_image_splitting else (0, 0)

    def text(self, size: Size) -> str:
        rows, columns = self.grid(size)
        tokens = self.mark * self.lens.features
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + self.around + self.whole + tokens + self.around

    def plain(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {"pixel_values": tiles_of(self.processor, [image], size={"longest_edge": self._longest(image.size)})[0]}

    def _longest(self, size: Size) -> int:
        """What the longer side is scaled to: as the processor has it, or as many whole tiles as the limit allows an image of this shape."""
        usual, side = int(self.processor.size["longest_edge"]), self.lens.tile.side
        if self.max_pixels is None or not self.processor.do_image_splitting:
            return usual
        choices = [usual, *(side * tiles for tiles in range(math.ceil(usual / side) - 1, 0, -1))]
        return next(
            (longest for longest in choices if _shown(self._cut(size, longest)) * side**2 <= self.max_pixels), side
        )

    def _cut(self, size: Size, longest: int) -> Grid:
        width, height = _scaled(size, longest)
        side = self.lens.tile.side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / (width / height)) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * (width / height)) / side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _shown(grid: Grid) -> int:
    """Tiles that the image is scaled to; the one that shows it whole comes on top."""
    return max(grid[0] * grid[1], 1)


def _scaled(size: Size, longest: int) -> Size:
    """With the longer side so long, the other one even; rounded as the processors round."""
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


def idefics_lens(config: Mapping[str, Any]) -> IdeficsLens:
    settings, tile = tower_of(config)
    return IdeficsLens(settings.image_token_id, tile, tile.patches**2 // settings.scale_factor**2)


def idefics_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> Eye:
    lens, processor = idefics_lens(config), image_processor(folder, _PIL[str(config["model_type"])])
    _require_reach(limits, lens.tile.side, processor)
    words = [token_of(folder, *names) for names in _WORDS]
    found = IdeficsEye(
        lens=lens,
        mark=words[0],
        identity=identity_of(processor, limits.max_pixels, words),
        processor=processor,
        max_pixels=limits.max_pixels,
        around=words[1],
        whole=words[2],
    )
    return tried(found, lens.tile)


_WORDS = (
    ("image_token", "<image>"),
    ("fake_image_token", "<fake_token_around_image>"),
    ("global_image_token", "<global-img>"),
)


def _require_reach(limits: ImageLimits, side: int, processor: Any) -> None:
    if limits.min_pixels is not None:
        longest = processor.size["longest_edge"]
        raise SpecError(
            f"data.images.min_pixels would have no effect: this model scales every image to {longest} pixels along its longer side",
            "take it out of the spec; data.images.max_pixels makes images smaller",
        )
    if limits.max_pixels is None:
        return
    if not processor.do_image_splitting:
        raise SpecError(
            f"data.images.max_pixels would have no effect: this model sees every image as {side} x {side} pixels",
            "take it out of the spec",
        )
    if limits.max_pixels < side**2:
        raise SpecError(
            f"data.images.max_pixels is {limits.max_pixels}, and the smallest image that this model sees has {side} x {side} = {side**2} pixels",
            f"set data.images.max_pixels to {side**2} or more",
        )
