"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image is scaled to whole blocks of patches near its own size and shape; each
block becomes one token.

Whatever the towers would compute on the device (positions, boundaries, windows, interpolation weights) is computed on
the host by transformers' own functions and sent with the batch. B rows, T tokens, I image tokens of a whole batch, H
hidden."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.utils import ModelOutput
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from finefit.errors import DataError, ModelError
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower
from finefit.vision import family
from finefit.vision.attention import attend_by_piece, patches_by_matmul
from finefit.vision.family import Config, Grid, ImageInput, ImageProcessor, ImageRows, Lengths, Pixels, Size, TokenIds

PLACEHOLDER: Final = "<|image_pad|>"
_PIXELS: Final = "pixel_values"
_TOWER: Final = "tower."
"""Prefix of arguments for the tower alone, which knows them by the rest of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenGeometry:
    """A grid is (frames, rows, columns) of patches; an image has one frame."""

    image_token: int
    merge: int
    """Patches along each side of a block."""
    patch_size: int
    channels: int
    frames: int
    """Number of frames to which an image is repeated."""
    window_size: int | None
    """Side in pixels of the windows within which most layers of Qwen2.5 attend."""
    table_side: int | None
    """Side of the square of learned positions that Qwen3 stretches over an image."""

    def num_tokens(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return frames * rows * columns // self.merge**2

    def square_grid(self, side: int) -> Grid:
        patches = max(1, side // (self.patch_size * self.merge)) * self.merge
        return 1, patches, patches

    def blank_pixels(self, grid: Grid) -> Pixels:
        frames, rows, columns = grid
        width = self.channels * self.frames * self.patch_size**2
        return {_PIXELS: np.zeros((frames * rows * columns, width), dtype=np.float32)}

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:  # noqa: ARG002
        positions_3BT = np.zeros((3, *input_ids_BT.shape), dtype=np.int64)
        following, places = [], []
        for row, (length, images) in enumerate(zip(lengths, rows, strict=True)):
            own = np.flatnonzero(input_ids_BT[row, :length] == self.image_token)
            positions_3BT[:, row, :length], after = self._positions(length, own, [image.grid for image in images])
            following.append(after)
            places.append(own + row * input_ids_BT.shape[1])
        tensors = {
            "places_I": torch.from_numpy(np.concatenate(places)),
            "positions_3BT": torch.from_numpy(positions_3BT),
        }
        tower_tensors, tower_host = self._tower_inputs([image for images in rows for image in images])
        return Extra(tensors=tensors | tower_tensors, host={"next_positions": tuple(following)} | tower_host)

    def _positions(
        self, length: int, places: NDArray[np.int64], grids: Sequence[Grid]
    ) -> tuple[NDArray[np.int64], int]:
        """Returns the positions of a row in time, down and across, and the position that follows. Text advances by one
        in all three; an image has one time, its blocks count down and across from there, and the next token begins
        after its longer side. `places`: the positions of the row's image tokens; an error if features would take the
        places of other tokens."""
        counts = [self.num_tokens(grid) for grid in grids]
        ends = np.cumsum(counts, dtype=np.int64)
        firsts = ends - np.array(counts, dtype=np.int64)
        if len(places) != sum(counts) or any(
            places[end - 1] - places[first] != end - 1 - first for first, end in zip(firsts, ends, strict=True)
        ):
            raise DataError(
                f"a row has {len(places)} image tokens, but its {len(grids)} images make {sum(counts)}, each in one "
                "piece",
                "prepare the rows again with the same model and the same data.images",
            )
        parts, at, now = [], 0, 0
        for start, (frames, rows, columns) in zip(places[firsts].tolist(), grids, strict=True):
            parts.append(_text_positions(start - at) + now)
            now += start - at
            blocks = np.indices((frames, rows // self.merge, columns // self.merge)).reshape(3, -1)
            parts.append(blocks + now)
            now += max(rows, columns) // self.merge
            at = start + blocks.shape[1]
        parts.append(_text_positions(length - at) + now)
        return np.concatenate(parts, axis=1), now + length - at

    def _tower_inputs(self, images: Sequence[ImageInput]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what the tower's own code would compute from the grids, by the names of its arguments."""
        if not images:
            return {}, {}
        grid_thw = torch.tensor([image.grid for image in images])
        boundaries = get_vision_cu_seqlens(grid_thw)
        tensors = {"tower.position_ids": get_vision_position_ids(grid_thw, self.merge), "tower.cu_seqlens": boundaries}
        pieces = [_lengths(boundaries)]
        host: dict[str, Any] = {"tower.max_seqlen": max(pieces[0])}
        if self.window_size is not None:
            index, windows = get_vision_window_index(grid_thw, self.merge, self.window_size, self.patch_size)
            tensors |= {"tower.window_index": index, "tower.cu_window_seqlens": windows}
            pieces.append(_lengths(windows))
            host["tower.max_window_seqlen"] = max(pieces[1])
        if self.table_side is not None:
            taps = get_vision_interpolation_indices_and_weights(
                grid_thw, self.table_side, align_corners=True, spatial_merge_size=self.merge
            )
            tensors |= dict(zip(("tower.interp_indices", "tower.interp_weights"), taps, strict=True))
        pixels = np.concatenate([image.pixels[_PIXELS] for image in images])
        return {_PIXELS: torch.from_numpy(pixels)} | tensors, host | {"tower.pieces": tuple(pieces)}


def _lengths(boundaries: Tensor) -> tuple[int, ...]:
    return tuple(after - before for before, after in pairwise(boundaries.tolist()))


def _text_positions(length: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(length, dtype=np.int64), (3, length))


def qwen_geometry(config: Config) -> QwenGeometry:
    typed = family.typed_config(config)
    vision = typed.vision_config
    learned = getattr(vision, "num_position_embeddings", None)
    return QwenGeometry(
        image_token=typed.image_token_id,
        merge=vision.spatial_merge_size,
        patch_size=vision.patch_size,
        channels=vision.in_channels,
        frames=vision.temporal_patch_size,
        window_size=getattr(vision, "window_size", None),
        table_side=None if learned is None else int(learned**0.5),
    )


def qwen_processor(folder: Path, config: Config, limits: ImageLimits) -> ImageProcessor:
    geometry, processor = qwen_geometry(config), family.load_processor(folder, Qwen2VLImageProcessorPil)
    cut = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    if cut != (geometry.patch_size, geometry.merge, geometry.frames):
        raise ModelError(
            f"the image processor of {folder.name} cuts patches of {cut[0]} pixels, {cut[1]} to a block, {cut[2]} "
            f"frames; the tower expects {geometry.patch_size}, {geometry.merge} and {geometry.frames}",
            "use preprocessor_config.json and config.json of the same model",
        )
    # a limit from the spec adjusts the processor's other limit, never the spec's other limit
    smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
    max_pixels = limits.max_pixels or max(largest, limits.min_pixels or 0)
    min_pixels = limits.min_pixels or min(smallest, max_pixels)

    def grid(size: Size) -> Grid:
        width, height = size
        unit = geometry.patch_size * geometry.merge
        try:
            scaled = smart_resize(height, width, unit, min_pixels=min_pixels, max_pixels=max_pixels)
        except ValueError:
            raise ValueError(
                f"it has {width:,} x {height:,} pixels: one side is more than 200 times the other, which the model's "
                "processor refuses"
            ) from None
        return 1, scaled[0] // geometry.patch_size, scaled[1] // geometry.patch_size

    def pixels(image: PIL.Image.Image) -> Pixels:
        size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        return {_PIXELS: processor([image], size=size, return_tensors="np")[_PIXELS]}

    return ImageProcessor(
        geometry=geometry,
        placeholder=PLACEHOLDER,
        identity=family.processor_identity(processor, min_pixels, max_pixels),
        grid=grid,
        text=lambda size: PLACEHOLDER * geometry.num_tokens(grid(size)),
        pixels=pixels,
    )


@dataclass(frozen=True, slots=True)
class QwenForward:
    towers: Mapping[Tower, tuple[str, ...]]

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        """Tokens have three positions: in time, down and across. After a prompt the three are equal, as for any model,
        and come with the settings."""
        model: Any = backbone
        embeds_BTH: Tensor = model.get_input_embeddings()(input_ids_BT)
        given = settings | ({} if extra is None else {"position_ids": extra.tensors["positions_3BT"]})
        if extra is not None and _PIXELS in extra.tensors:
            places_I = extra.tensors["places_I"]
            features_IH, deeper = _run_tower(model.visual, extra)
            embeds_BTH = _insert(embeds_BTH, places_I, features_IH)
            given |= {"visual_pos_masks": places_I, "deepstack_visual_embeds": deeper} if deeper else {}
        with _adding_by_place(model.language_model):
            output: ModelOutput = model.language_model(inputs_embeds=embeds_BTH, **given)
        return output


def _run_tower(visual: Any, extra: Extra) -> tuple[Tensor, list[Tensor]]:
    """Returns features for the places of all images; for Qwen3 also those that its first layers receive."""
    attend_by_piece(visual)
    patches_by_matmul(visual.patch_embed.proj)
    given = {
        name.removeprefix(_TOWER): value
        for name, value in (*extra.tensors.items(), *extra.host.items())
        if name.startswith(_TOWER)
    }
    seen = visual(extra.tensors[_PIXELS], grid_thw=None, **given)
    return seen.pooler_output, list(getattr(seen, "deepstack_features", None) or ())


def _insert(embeds_BTH: Tensor, places_I: Tensor, features_IH: Tensor) -> Tensor:
    features_IH = features_IH.to(embeds_BTH.device, embeds_BTH.dtype)
    return embeds_BTH.flatten(0, 1).index_copy(0, places_I, features_IH).view_as(embeds_BTH)


def _add(hidden_BTH: Tensor, places_I: Tensor, features_IH: Tensor) -> Tensor:
    features_IH = features_IH.to(hidden_BTH.device, hidden_BTH.dtype)
    return hidden_BTH.flatten(0, 1).index_add(0, places_I.to(hidden_BTH.device), features_IH).view_as(hidden_BTH)


@contextmanager
def _adding_by_place(language: nn.Module) -> Iterator[None]:
    """Qwen3's own code adds by a mask, whose ones would be counted on the device. It adds between layers, never inside
    one, so a recomputation in backward does not need it."""
    language._deepstack_process = _add  # type: ignore[assignment]
    try:
        yield
    finally:
        del language._deepstack_process


def _family(*projector: str) -> family.VisionFamily:
    towers: Mapping[Tower, tuple[str, ...]] = {
        "language": ("model.language_model", "lm_head"),
        "vision": ("model.visual",),
        "projector": projector,
    }
    return family.VisionFamily(qwen_geometry, qwen_processor, QwenForward(towers))


QWEN2 = _family("model.visual.merger")
QWEN3 = _family("model.visual.merger", "model.visual.deepstack_merger_list")
