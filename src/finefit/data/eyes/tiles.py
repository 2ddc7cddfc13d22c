"""What families have in common whose tower sees square tiles of one size: their pixels are tiles behind one another, and only those that exist.

B rows, T tokens, I image tokens of a whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from finefit.data.eyes.eye import Eye, Grid, Lens, Pixels, Shown, Size
from finefit.data.eyes.opening import identity_of, image_processor, settings_of
from finefit.errors import DataError, ModelError, SpecError
from finefit.spec.rows import ImageLimits

Opened = TypeVar("Opened", bound=Eye)

ONE: Grid = (1,)
"""The grid of every image in families that show an image as one tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    side: int
    patch: int
    channels: int

    @property
    def patches(self) -> int:
        """Along a side."""
        return self.side // self.patch

    def blank(self, count: int) -> Pixels:
        return {"pixel_values": np.zeros((count, self.channels, self.side, self.side), dtype=np.float32)}


@dataclass(frozen=True, slots=True)
class OneTileLens:
    """A lens for which every image is one tile, whatever its size."""

    image_token: int
    tile: Tile
    features: int

    def num_tokens(self, grid: Grid) -> int:  # noqa: ARG002
        return self.features

    def square(self, side: int) -> Grid:  # noqa: ARG002
        return ONE

    def blank(self, grid: Grid) -> Pixels:  # noqa: ARG002
        return self.tile.blank(1)


def tower_of(config: Mapping[str, Any], *known: str) -> tuple[Any, Tile]:
    """The family's settings, and the tile that its tower takes. `known`: types of towers, where a family may be built around several."""
    settings = settings_of(config)
    vision = settings.vision_config
    if known and vision.model_type not in known:
        raise ModelError(
            f"the vision tower is of type {vision.model_type}, and in this family only {' and '.join(known)} are known",
            "take a model of the family with one of these towers",
        )
    return settings, Tile(vision.image_size, vision.patch_size, getattr(vision, "num_channels", 3))


# batches


def seen(
    lens: Lens, input_ids_BT: NDArray[np.int64], lengths: Sequence[int], rows: Sequence[Sequence[Shown]]
) -> dict[str, Tensor]:
    """`places_I` and the tiles of all images, `pixel_values`; nothing where no row has an image."""
    is_image_BT = _own(input_ids_BT.shape, lengths) & (input_ids_BT == lens.image_token)
    for at, (row, tokens) in enumerate(zip(rows, is_image_BT.sum(1).tolist(), strict=True)):
        features = sum(lens.num_tokens(image.grid) for image in row)
        if tokens != features:
            raise DataError(
                f"row {at + 1} of a batch has {tokens} image tokens, and its {len(row)} images give {features} features",
                "one of them would stand in another's place: the row's text must hold what the model's processor writes for its images",
            )
    images = [image for row in rows for image in row]
    if not images:
        return {}
    pixels = np.concatenate([_fitting(lens, image) for image in images])
    return {"places_I": torch.from_numpy(np.flatnonzero(is_image_BT)), "pixel_values": torch.from_numpy(pixels)}


def _own(shape: tuple[int, ...], lengths: Sequence[int]) -> NDArray[np.bool_]:
    return np.arange(shape[1])[None] < np.asarray(lengths)[:, None]


def _fitting(lens: Lens, image: Shown) -> NDArray[np.float32]:
    expected, found = lens.blank(image.grid)["pixel_values"].shape, image.pixels["pixel_values"].shape
    if found != expected:
        raise DataError(
            f"an image has pixels of the shape {found}, and its grid {image.grid} is of {expected}",
            "prepare the data again",
        )
    return image.pixels["pixel_values"]


# eyes


def tiles_of(processor: Any, image: PIL.Image.Image | list[PIL.Image.Image], **how: Any) -> NDArray[np.float32]:
    """With what the processor puts around them, as it stacks them."""
    tiles: NDArray[np.float32] = (
        processor(images=[image], return_tensors="pt", **how)["pixel_values"].numpy().astype(np.float32, copy=False)
    )
    return tiles


@dataclass(frozen=True, kw_only=True)
class OneTile:
    """The eye of families that show an image as one tile, whatever its size."""

    lens: Lens
    mark: str
    identity: str
    processor: Any
    how: Mapping[str, Any]
    """What the family's processor asks of its image processor."""
    written: str
    """In place of a mark."""
    write: Callable[[str, str, str], str]
    """(mark, prompt, start) -> the text of a prompt without a chat template."""

    def grid(self, size: Size) -> Grid:  # noqa: ARG002
        return ONE

    def text(self, size: Size) -> str:  # noqa: ARG002
        return self.written

    def plain(self, prompt: str, start: str) -> str:
        return self.write(self.mark, prompt, start)

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {"pixel_values": tiles_of(self.processor, image, **self.how)}


def as_it_stands(_mark: str, prompt: str, start: str) -> str:
    return start + prompt


def one_tile(
    lens: Lens,
    tile: Tile,
    folder: Path,
    limits: ImageLimits,
    *,
    mark: str,
    written: str,
    write: Callable[[str, str, str], str] = as_it_stands,
    **how: Any,
) -> OneTile:
    _require_none(limits, tile.side)
    processor = image_processor(folder)
    identity = identity_of(processor, how, written)
    return tried(
        OneTile(lens=lens, mark=mark, identity=identity, processor=processor, how=how, written=written, write=write),
        tile,
    )


def _require_none(limits: ImageLimits, side: int) -> None:
    if given := [f"data.images.{name}" for name, value in limits.model_dump().items() if value is not None]:
        raise SpecError(
            f"{' and '.join(given)} would have no effect: this model sees every image as {side} x {side} pixels",
            "take it out of the spec",
        )


def tried(eye: Opened, tile: Tile) -> Opened:
    """The eye, whose processor has been seen to make tiles as the tower takes them."""
    side = eye.pixels(PIL.Image.new("RGB", (tile.side, tile.side)))["pixel_values"].shape[-1]
    if side != tile.side:
        raise ModelError(
            f"the image processor makes tiles of {side} x {side} pixels, and the vision tower takes {tile.side} x {tile.side}",
            "config.json and preprocessor_config.json must be of the same model",
        )
    return eye
