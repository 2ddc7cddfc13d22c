"""What families share whose vision tower takes square tiles of one size: tiles as pixels of a batch, image processors
with one tile per image, the tower read as far as its features are used, and masks for tokens with bidirectional
attention.

The towers' own forward would keep the output of every layer where one is wanted, and some wait for the device. B rows,
T tokens, I image tokens of a whole batch, N tiles, P patches of a tile, C channels, S pixels of a side, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from finefit.errors import DataError, ModelError, SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.vision.attention import patches_by_matmul
from finefit.vision.family import (
    Config,
    Grid,
    ImageGeometry,
    ImageInput,
    ImageProcessor,
    ImageRows,
    Lengths,
    Pixels,
    Size,
    TokenIds,
    load_processor,
    processor_identity,
    typed_config,
)

PIXELS = "pixel_values"
ONE_TILE: Grid = (1,)
"""The grid of every image in families that show an image as one tile."""
Processor = TypeVar("Processor", bound=ImageProcessor)


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
        return {PIXELS: np.zeros((count, self.channels, self.side, self.side), dtype=np.float32)}


def config_and_tile(config: Config, *known: str) -> tuple[Any, Tile]:
    """The family's config, and the tile that its tower takes. `known`: types of towers that the family may have."""
    typed = typed_config(config)
    vision = typed.vision_config
    if known and vision.model_type not in known:
        raise ModelError(
            f"the vision tower is of type {vision.model_type}; in this family only {' and '.join(known)} are supported",
            "take a model of the family with one of these towers",
        )
    return typed, Tile(vision.image_size, vision.patch_size, getattr(vision, "num_channels", 3))


# batches


def image_tensors(
    geometry: ImageGeometry, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows
) -> dict[str, Tensor]:
    """`places_I` and the tiles of all images, `pixel_values`; nothing where no row has an image."""
    is_own_BT = np.arange(input_ids_BT.shape[1])[None] < np.asarray(lengths)[:, None]
    is_image_BT = is_own_BT & (input_ids_BT == geometry.image_token)
    for at, (row, tokens) in enumerate(zip(rows, is_image_BT.sum(1).tolist(), strict=True)):
        features = sum(geometry.num_tokens(image.grid) for image in row)
        if tokens != features:
            raise DataError(
                f"row {at + 1} of a batch has {tokens} image tokens, and its {len(row)} images give {features} "
                "features",
                "the row's text must hold exactly what the model's processor writes for its images",
            )
    images = [image for row in rows for image in row]
    if not images:
        return {}
    pixels = np.concatenate([_checked_pixels(geometry, image) for image in images])
    return {"places_I": torch.from_numpy(np.flatnonzero(is_image_BT)), PIXELS: torch.from_numpy(pixels)}


def _checked_pixels(geometry: ImageGeometry, image: ImageInput) -> NDArray[np.float32]:
    expected, found = geometry.blank_pixels(image.grid)[PIXELS].shape, image.pixels[PIXELS].shape
    if found != expected:
        problem = f"an image has pixels of the shape {found}, and its grid {image.grid} requires {expected}"
        raise DataError(problem, "prepare the data again")
    return image.pixels[PIXELS]


@dataclass(frozen=True, slots=True)
class OneTileGeometry:
    """Every image is one tile, whatever its size."""

    image_token: int
    tile: Tile
    features: int
    bidirectional: Literal["none", "images", "prompts"] = "none"
    """Which tokens see one another in both directions: those of one image, or those of a prompt."""
    end_token: int | None = None
    """Ends an answer; known where prompts are bidirectional."""

    def num_tokens(self, grid: Grid) -> int:  # noqa: ARG002
        return self.features

    def square_grid(self, side: int) -> Grid:  # noqa: ARG002
        return ONE_TILE

    def blank_pixels(self, grid: Grid) -> Pixels:  # noqa: ARG002
        return self.tile.blank(1)

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:
        """`blocks_BT`: tokens with the same number of at least 0 see one another."""
        tensors = image_tensors(self, input_ids_BT, lengths, rows)
        blocks_BT = np.full(input_ids_BT.shape, -1, dtype=np.int32)
        if self.bidirectional == "images" and tensors:
            places_I = tensors["places_I"].numpy()
            blocks_BT.reshape(-1)[places_I] = np.arange(len(places_I)) // self.features
        elif self.bidirectional == "prompts":
            if prompts is None:
                self._require_prompts(input_ids_BT, lengths)
            ends_B = np.asarray(lengths if prompts is None else prompts)
            blocks_BT[np.arange(input_ids_BT.shape[1])[None] < ends_B[:, None]] = 0
        else:
            return Extra(tensors=tensors)
        return Extra(tensors=tensors | {"blocks_BT": torch.from_numpy(blocks_BT)})

    def _require_prompts(self, input_ids_BT: TokenIds, lengths: Lengths) -> None:
        """An answer taken for a prompt would be visible to the tokens that must predict it."""
        if self.end_token in [row[length - 1] for row, length in zip(input_ids_BT, lengths, strict=True) if length]:
            raise DataError(
                "a row of a batch ends with an answer, and nothing says where its prompt ends",
                "give the geometry `prompts`",
            )


# image processors


def processed_tiles(processor: Any, image: PIL.Image.Image | list[PIL.Image.Image], **how: Any) -> NDArray[np.float32]:
    """With what the processor puts around them, as it stacks them."""
    tiles: NDArray[np.float32] = (
        processor(images=[image], return_tensors="pt", **how)[PIXELS].numpy().astype(np.float32, copy=False)
    )
    return tiles


def start_then_prompt(_placeholder: str, prompt: str, start: str) -> str:
    return start + prompt


@dataclass(frozen=True, kw_only=True)
class OneTileProcessor:
    """Of families that show an image as one tile, whatever its size."""

    geometry: OneTileGeometry
    placeholder: str
    identity: str
    processor: Any
    how: Mapping[str, Any]
    """What the family's processor asks of its image processor."""
    written: str
    """In place of a placeholder."""
    write: Callable[[str, str, str], str]
    """(placeholder, prompt, start) -> the text of a prompt without a chat template."""

    def grid(self, size: Size) -> Grid:  # noqa: ARG002
        return ONE_TILE

    def text(self, size: Size) -> str:  # noqa: ARG002
        return self.written

    def plain_prompt(self, prompt: str, start: str) -> str:
        return self.write(self.placeholder, prompt, start)

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {PIXELS: processed_tiles(self.processor, image, **self.how)}


def one_tile_processor(
    geometry: OneTileGeometry,
    folder: Path,
    limits: ImageLimits,
    *,
    placeholder: str,
    written: str,
    write: Callable[[str, str, str], str] = start_then_prompt,
    **how: Any,
) -> OneTileProcessor:
    if given := [f"data.images.{name}" for name, value in limits.model_dump().items() if value is not None]:
        side = geometry.tile.side
        raise SpecError(
            f"{' and '.join(given)} would have no effect: this model sees every image as {side} x {side} pixels",
            "remove it from the spec",
        )
    processor = load_processor(folder)
    opened = OneTileProcessor(
        geometry=geometry,
        placeholder=placeholder,
        identity=processor_identity(processor, how, written),
        processor=processor,
        how=how,
        written=written,
        write=write,
    )
    return with_checked_tiles(opened, geometry.tile)


def with_checked_tiles(processor: Processor, tile: Tile) -> Processor:
    """The processor itself, once it has made a tile of the size that the tower takes."""
    side = processor.pixels(PIL.Image.new("RGB", (tile.side, tile.side)))[PIXELS].shape[-1]
    if side != tile.side:
        raise ModelError(
            f"the image processor makes tiles of {side} x {side} pixels, and the vision tower takes "
            f"{tile.side} x {tile.side}",
            "take config.json and preprocessor_config.json of the same model",
        )
    return processor


# forward; what a function holds on to while another runs is part of the memory that was predicted


def embed_tokens(backbone: Any, input_ids_BT: Tensor) -> Tensor:
    """An image token beyond the vocabulary is embedded as any other token: it is replaced later."""
    embed, image_token = backbone.get_input_embeddings(), backbone.config.image_token_id
    if image_token >= backbone.config.get_text_config().vocab_size:
        input_ids_BT = input_ids_BT.masked_fill(input_ids_BT == image_token, 0)
    embedded_BTH: Tensor = embed(input_ids_BT)
    return embedded_BTH


def insert_features(embedded_BTH: Tensor, extra: Extra, features_IH: Tensor) -> Tensor:
    """In the places of the image tokens, in order."""
    flat = embedded_BTH.flatten(0, 1).index_copy(0, extra.tensors["places_I"], features_IH.to(embedded_BTH.dtype))
    return flat.view_as(embedded_BTH)


def has_images(extra: Extra | None) -> TypeGuard[Extra]:
    return extra is not None and PIXELS in extra.tensors


def hidden_states(tower: Any, pixels_NCSS: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """What CLIP and SigLIP give after these layers, 0 before the first, -1 after the last; later layers are not
    computed."""
    patches_by_matmul(tower.embeddings.patch_embedding)
    hidden_NPH = tower.embeddings(pixels_NCSS)
    if hasattr(tower, "pre_layrnorm"):
        hidden_NPH = tower.pre_layrnorm(hidden_NPH)
    wanted = [layer % (len(tower.encoder.layers) + 1) for layer in layers]
    found = {0: hidden_NPH}
    for number, layer in enumerate(tower.encoder.layers[: max(wanted)], start=1):
        hidden_NPH = layer(hidden_NPH, None)
        if number in wanted:
            found[number] = hidden_NPH
    return [found[number] for number in wanted]


def siglip_features(tower: Any, pixels_NCSS: Tensor) -> Tensor:
    """All of the tower but the head that pools an image into one vector, which is never used."""
    features_NPH: Tensor = tower.post_layernorm(hidden_states(tower, pixels_NCSS, [-1])[0])
    return features_NPH


# masks: B x 1 x T x T, true where a token is visible


def causal_or_same_block(blocks_BT: Tensor) -> Tensor:
    """All earlier tokens, and all of the token's own block; -1 is no block."""
    return _before(blocks_BT) | _same_block(blocks_BT)


def within_window(mask_B1TT: Tensor, window: int) -> Tensor:
    """Without what lies `window` tokens back or further."""
    return mask_B1TT & _near(mask_B1TT, window)


def window_or_same_block(blocks_BT: Tensor, window: int) -> Tensor:
    """As `causal_or_same_block`, but beyond the window only the token's own block is visible."""
    return within_window(_before(blocks_BT), window) | _same_block(blocks_BT)


def as_attention_masks(masks: Mapping[str, Tensor], config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Eager attention adds its mask to the scores."""
    if config._attn_implementation != "eager":
        return dict(masks)
    return {
        kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        for kind, mask in masks.items()
    }


def _before(blocks_BT: Tensor) -> Tensor:
    places_T = torch.arange(blocks_BT.shape[1], device=blocks_BT.device)
    return (places_T[None, :] <= places_T[:, None])[None, None]


def _near(mask_B1TT: Tensor, window: int) -> Tensor:
    places_T = torch.arange(mask_B1TT.shape[-1], device=mask_B1TT.device)
    return (places_T[None, :] > places_T[:, None] - window)[None, None]


def _same_block(blocks_BT: Tensor) -> Tensor:
    same_BTT = (blocks_BT[:, :, None] == blocks_BT[:, None, :]) & (blocks_BT[:, :, None] >= 0)
    return same_BTT[:, None]
