"""Shared by families whose vision tower takes square tiles of one size: tiles as pixels of a batch, image processors
with one tile per image, the tower run as far as its features are used, and masks for tokens with bidirectional
attention.

The towers' own forward would keep the output of every layer although one is needed, and some wait for the device.
Tensors that a function of the forward keeps alive while another runs are part of the predicted memory. B rows, T
tokens, I image tokens of a whole batch, N tiles, P patches of a tile, C channels, S pixels of a side, H hidden."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from finefit.errors import DataError, ModelError, SpecError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision import family
from finefit.vision.attention import patches_by_matmul
from finefit.vision.family import Config, Grid, ImageGeometry, ImageProcessor, ImageRows, Lengths, Pixels, TokenIds

PIXELS = "pixel_values"
TOWERS: Mapping[Tower, tuple[str, ...]] = {
    "vision": ("model.vision_tower",),
    "projector": ("model.multi_modal_projector",),
    "language": ("model.language_model", "lm_head"),
}
"""The towers under the names that most families use."""
ONE_TILE: Grid = (1,)
"""The grid of every image in families that show an image as one tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    side: int
    patch: int
    channels: int

    @property
    def patches(self) -> int:
        """Patches along a side."""
        return self.side // self.patch

    def blank(self, count: int) -> Pixels:
        return {PIXELS: np.zeros((count, self.channels, self.side, self.side), dtype=np.float32)}


def config_and_tile(config: Config, *known: str) -> tuple[Any, Tile]:
    """Returns the family's config, and the tile that its tower takes. `known`: types of towers that the family may
    have."""
    typed = family.typed_config(config)
    vision = typed.vision_config
    if known and vision.model_type not in known:
        raise ModelError(
            f"the vision tower is of type {vision.model_type}; in this family only {' and '.join(known)} are supported",
            "use a model of the family with one of these towers",
        )
    return typed, Tile(vision.image_size, vision.patch_size, getattr(vision, "num_channels", 3))


def image_tensors(
    geometry: ImageGeometry, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows
) -> dict[str, Tensor]:
    """Returns `places_I` and the tiles of all images, `pixel_values`; nothing if no row has an image."""
    is_own_BT = np.arange(input_ids_BT.shape[1])[None] < np.asarray(lengths)[:, None]
    is_image_BT = is_own_BT & (input_ids_BT == geometry.image_token)
    for at, (row, tokens) in enumerate(zip(rows, is_image_BT.sum(1).tolist(), strict=True)):
        features = sum(geometry.num_tokens(image.grid) for image in row)
        if tokens != features:
            raise DataError(
                f"row {at + 1} of a batch has {tokens} image tokens, but its {len(row)} images give {features} "
                "features",
                "the row's text must contain exactly what the model's processor writes for its images",
            )
    images = [image for row in rows for image in row]
    if not images:
        return {}
    for image in images:
        expected, found = geometry.blank_pixels(image.grid)[PIXELS].shape, image.pixels[PIXELS].shape
        if found != expected:
            problem = f"an image has pixels of the shape {found}, but its grid {image.grid} requires {expected}"
            raise DataError(problem, "prepare the data again")
    pixels = np.concatenate([image.pixels[PIXELS] for image in images])
    return {"places_I": torch.from_numpy(np.flatnonzero(is_image_BT)), PIXELS: torch.from_numpy(pixels)}


@dataclass(frozen=True, slots=True)
class OneTileGeometry:
    """Every image is one tile, whatever its size."""

    image_token: int
    tile: Tile
    features: int
    bidirectional: Literal["none", "images", "prompts"] = "none"
    """Which tokens see one another in both directions: those of one image, or those of a prompt."""
    end_token: int | None = None
    """The token that ends an answer; known if prompts are bidirectional."""

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
            last = [row[length - 1] for row, length in zip(input_ids_BT, lengths, strict=True) if length]
            if prompts is None and self.end_token in last:  # its answer would be visible to the tokens that predict it
                problem = "a row of a batch ends with an answer, but the end of its prompt is unknown"
                raise DataError(problem, "give the geometry `prompts`")
            ends_B = np.asarray(lengths if prompts is None else prompts)
            blocks_BT[np.arange(input_ids_BT.shape[1])[None] < ends_B[:, None]] = 0
        else:
            return Extra(tensors=tensors)
        return Extra(tensors=tensors | {"blocks_BT": torch.from_numpy(blocks_BT)})


def processed_tiles(processor: Any, image: PIL.Image.Image | list[PIL.Image.Image], **how: Any) -> NDArray[np.float32]:
    """Returns the tiles as the processor stacks them, with what it adds around them."""
    found = processor(images=[image], return_tensors="pt", **how)[PIXELS]
    tiles: NDArray[np.float32] = found.numpy().astype(np.float32, copy=False)
    return tiles


def one_tile_processor(
    geometry: OneTileGeometry, folder: Path, limits: ImageLimits, *, written: str, how: Mapping[str, Any], **more: Any
) -> ImageProcessor:
    """`written`: the text that replaces a placeholder; `how`: options of the family for its image processor; `more`:
    options for ours."""
    if given := [f"data.images.{name}" for name, value in limits.model_dump().items() if value is not None]:
        side = geometry.tile.side
        problem = f"{' and '.join(given)} would have no effect: this model sees every image as {side} x {side} pixels"
        raise SpecError(problem, "remove it from the spec")
    processor = family.load_processor(folder)
    opened = ImageProcessor(
        geometry=geometry,
        identity=family.processor_identity(processor, how, written),
        grid=lambda _: ONE_TILE,
        text=lambda _: written,
        pixels=lambda image: {PIXELS: processed_tiles(processor, image, **how)},
        **more,
    )
    return with_checked_tiles(opened, geometry.tile)


def with_checked_tiles(processor: ImageProcessor, tile: Tile) -> ImageProcessor:
    """Returns the processor itself, after checking that it makes tiles of the size that the tower takes."""
    side = processor.pixels(PIL.Image.new("RGB", (tile.side, tile.side)))[PIXELS].shape[-1]
    if side != tile.side:
        raise ModelError(
            f"the image processor makes tiles of {side} x {side} pixels, but the vision tower expects "
            f"{tile.side} x {tile.side}",
            "use config.json and preprocessor_config.json of the same model",
        )
    return processor


def embed_tokens(backbone: Any, input_ids_BT: Tensor) -> Tensor:
    """An image token beyond the vocabulary is embedded like any other token: it is replaced later."""
    embed, image_token = backbone.get_input_embeddings(), backbone.config.image_token_id
    if image_token >= backbone.config.get_text_config().vocab_size:
        input_ids_BT = input_ids_BT.masked_fill(input_ids_BT == image_token, 0)
    embedded_BTH: Tensor = embed(input_ids_BT)
    return embedded_BTH


def insert_features(embedded_BTH: Tensor, extra: Extra, features_IH: Tensor) -> Tensor:
    """Inserts the features at the image tokens, in order."""
    flat = embedded_BTH.flatten(0, 1).index_copy(0, extra.tensors["places_I"], features_IH.to(embedded_BTH.dtype))
    return flat.view_as(embedded_BTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileForward:
    features: Callable[[Any, Tensor], Tensor]
    """(the whole model without its head, pixels_NCSS) -> features_NPH."""
    arrange: Callable[[Any, Extra, Tensor], Tensor] = lambda _model, _extra, features_FH: features_FH
    """The features of all tiles -> those of the image tokens."""
    adjust: Callable[[Any, Extra | None, Tensor, dict[str, Any]], dict[str, Any]] = lambda *given: given[-1]
    """(language model, extra, embedded_BTH, settings) -> settings."""
    language: str = "language_model"
    towers: Mapping[Tower, tuple[str, ...]] = field(default_factory=lambda: TOWERS)

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        model: Any = backbone
        embedded_BTH = embed_tokens(model, input_ids_BT)
        if extra is not None and PIXELS in extra.tensors:
            features_NPH = self.features(model, extra.tensors[PIXELS])
            embedded_BTH = insert_features(embedded_BTH, extra, self.arrange(model, extra, features_NPH.flatten(0, 1)))
        language = getattr(model, self.language)
        output: ModelOutput = language(
            inputs_embeds=embedded_BTH, **self.adjust(language, extra, embedded_BTH, settings)
        )
        return output


def hidden_states(tower: Any, pixels_NCSS: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Returns the states of CLIP and SigLIP after these layers, 0 before the first, -1 after the last; later ones are
    not computed."""
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
    """Runs all of the tower but the head that pools an image into one vector, which is never used."""
    features_NPH: Tensor = tower.post_layernorm(hidden_states(tower, pixels_NCSS, [-1])[0])
    return features_NPH


def as_attention_masks(masks: Mapping[str, Tensor], config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Eager attention adds its mask to the scores."""
    if config._attn_implementation != "eager":
        return dict(masks)
    return {
        kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        for kind, mask in masks.items()
    }
