"""What families have in common whose tower sees square tiles of one size: their pixels are tiles behind one another, and only those that exist.

B rows, T tokens, I image tokens of a whole batch.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from finefit.data.eyes.eye import Grid, Lens, Pixels, Shown, Size
from finefit.errors import DataError, ModelError, SpecError
from finefit.spec.rows import ImageLimits

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


def settings_of(config: Mapping[str, Any]) -> Any:
    """The family's configuration, with what config.json leaves out."""
    try:
        return CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the config.json of a {config['model_type']} cannot be read: {error}", "take the config.json of the published model"
        ) from None


def tile_of(vision: Any) -> Tile:
    return Tile(vision.image_size, vision.patch_size, getattr(vision, "num_channels", 3))


def require_tower(vision: Any, *known: str) -> None:
    """Where a family may be built around several."""
    if vision.model_type not in known:
        raise ModelError(
            f"the vision tower is of type {vision.model_type}, and in this family only {' and '.join(known)} are known",
            "take a model of the family with one of these towers",
        )


# batches


def seen(lens: Lens, input_ids_BT: NDArray[np.int64], lengths: Sequence[int], rows: Sequence[Sequence[Shown]]) -> dict[str, Tensor]:
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
        raise DataError(f"an image has pixels of the shape {found}, and its grid {image.grid} is of {expected}", "prepare the data again")
    return image.pixels["pixel_values"]


# processors


def image_processor(folder: Path, pil: type[BaseImageProcessor] | None = None) -> Any:
    """The model's own, with PIL whether torchvision is installed or not: pixels are the same everywhere. `pil` is its class where transformers does
    not find that by itself."""
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil") if pil is None else pil.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{folder} has no image processor that can be loaded: {reason}", "put the model's preprocessor_config.json there") from None


def tiles_of(processor: Any, image: PIL.Image.Image | list[PIL.Image.Image], **how: Any) -> NDArray[np.float32]:
    """With what the processor puts around them, as it stacks them."""
    tiles: NDArray[np.float32] = processor(images=[image], return_tensors="pt", **how)["pixel_values"].numpy().astype(np.float32, copy=False)
    return tiles


def identity_of(processor: Any, *others: object) -> str:
    told = json.dumps([type(processor).__name__, processor.to_dict(), others], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()


def token_of(folder: Path, name: str, usual: str) -> str:
    """As the tokenizer's settings spell it, or as the family does."""
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    extra = told.get("extra_special_tokens")
    found = told.get(name) or (extra.get(name) if isinstance(extra, dict) else None) or usual
    return str(found["content"] if isinstance(found, dict) else found)


def no_limits(limits: ImageLimits, side: int) -> None:
    if given := [f"data.images.{name}" for name, value in limits.model_dump().items() if value is not None]:
        raise SpecError(
            f"{' and '.join(given)} would have no effect: this model sees every image as {side} x {side} pixels",
            "take it out of the spec",
        )


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
    lens: Lens, tile: Tile, processor: Any, *, mark: str, written: str, write: Callable[[str, str, str], str] = as_it_stands, **how: Any
) -> OneTile:
    eye = OneTile(lens=lens, mark=mark, identity=identity_of(processor, how, written), processor=processor, how=how, written=written, write=write)
    require_side(tile, eye.pixels(PIL.Image.new("RGB", (tile.side, tile.side)))["pixel_values"].shape[-1])
    return eye


def require_side(tile: Tile, side: int) -> None:
    if side != tile.side:
        raise ModelError(
            f"the image processor makes tiles of {side} x {side} pixels, and the vision tower takes {tile.side} x {tile.side}",
            "config.json and preprocessor_config.json must be of the same model",
        )
