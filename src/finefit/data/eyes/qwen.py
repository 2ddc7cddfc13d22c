"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image is scaled to whole blocks of patches near its own size and shape; each block becomes one token.

What the towers would work out on the device (positions, boundaries, windows, weights between learned positions) is made here, by transformers' own
functions, and travels with the batch. B rows, T tokens, I image tokens of a whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from finefit.data.cells import Fault
from finefit.data.eyes.eye import Grid, Pixels, Shown, Size
from finefit.data.eyes.opening import identity_of, image_processor, settings_of
from finefit.errors import DataError, ModelError
from finefit.objective.batch import Extra
from finefit.spec.rows import ImageLimits

MARK: Final = "<|image_pad|>"
_PIXELS: Final = "pixel_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenLens:
    """A grid is (frames, rows, columns) of patches; an image has one frame."""

    image_token: int
    merge: int
    """A block has so many patches down and across."""
    patch_size: int
    channels: int
    frames: int
    """That an image is repeated to."""
    window_size: int | None
    """Side in pixels of the windows that most layers of Qwen2.5 see alone."""
    table_side: int | None
    """Of the square of learned positions that Qwen3 stretches over an image."""

    def num_tokens(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return frames * rows * columns // self.merge**2

    def square(self, side: int) -> Grid:
        patches = max(1, side // (self.patch_size * self.merge)) * self.merge
        return 1, patches, patches

    def blank(self, grid: Grid) -> Pixels:
        frames, rows, columns = grid
        return {
            _PIXELS: np.zeros(
                (frames * rows * columns, self.channels * self.frames * self.patch_size**2), dtype=np.float32
            )
        }

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        """`prompts` tells these models nothing: what stands before a token is all that it sees."""
        positions_3BT = np.zeros((3, *input_ids_BT.shape), dtype=np.int64)
        following, places = [], []
        for row, (length, images) in enumerate(zip(lengths, rows, strict=True)):
            own = np.flatnonzero(input_ids_BT[row, :length] == self.image_token)
            grids = [image.grid for image in images]
            positions_3BT[:, row, :length], after = _positions(length, self._starts(own, grids), grids, self.merge)
            following.append(after)
            places.append(own + row * input_ids_BT.shape[1])
        tensors = {
            "places_I": torch.from_numpy(np.concatenate(places)),
            "positions_3BT": torch.from_numpy(positions_3BT),
        }
        tower_tensors, tower_host = self._tower([image for images in rows for image in images])
        return Extra(tensors=tensors | tower_tensors, host={"next_positions": tuple(following)} | tower_host)

    def _starts(self, places: NDArray[np.int64], grids: Sequence[Grid]) -> list[int]:
        """Where each image of a row begins, or an error: features would take the places of others."""
        counts = [self.num_tokens(grid) for grid in grids]
        ends = np.cumsum(counts, dtype=np.int64)
        firsts = ends - np.array(counts, dtype=np.int64)
        if len(places) != sum(counts) or any(
            places[end - 1] - places[first] != end - 1 - first for first, end in zip(firsts, ends, strict=True)
        ):
            raise DataError(
                f"a row has {len(places)} image tokens, but its {len(grids)} images make {sum(counts)}, each in one piece",
                "prepare the rows again with the same model and the same data.images",
            )
        return [int(places[first]) for first in firsts]

    def _tower(self, images: Sequence[Shown]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What its own code would work out from the grids, by the names that it takes them under."""
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


def _positions(length: int, starts: Sequence[int], grids: Sequence[Grid], merge: int) -> tuple[NDArray[np.int64], int]:
    """Of a row in time, down and across, and the one that follows. Text goes on by one in all three; an image stands at one time, and its blocks
    down and across count from there; what follows it begins behind its longer side."""
    parts, at, now = [], 0, 0
    for start, (frames, rows, columns) in zip(starts, grids, strict=True):
        parts.append(_spread(start - at) + now)
        now += start - at
        blocks = np.indices((frames, rows // merge, columns // merge)).reshape(3, -1)
        parts.append(blocks + now)
        now += max(rows, columns) // merge
        at = start + blocks.shape[1]
    parts.append(_spread(length - at) + now)
    return np.concatenate(parts, axis=1), now + length - at


def _spread(length: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(length, dtype=np.int64), (3, length))


def qwen_lens(config: Mapping[str, Any]) -> QwenLens:
    settings = settings_of(config)
    vision = settings.vision_config
    learned = getattr(vision, "num_position_embeddings", None)
    return QwenLens(
        image_token=settings.image_token_id,
        merge=vision.spatial_merge_size,
        patch_size=vision.patch_size,
        channels=vision.in_channels,
        frames=vision.temporal_patch_size,
        window_size=getattr(vision, "window_size", None),
        table_side=None if learned is None else int(learned**0.5),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenEye:
    lens: QwenLens
    mark: str
    identity: str
    processor: Qwen2VLImageProcessorPil
    fewest: int
    """Pixels of an image once it is scaled; `most` likewise."""
    most: int

    def grid(self, size: Size) -> Grid:
        width, height = size
        try:
            scaled = smart_resize(
                height, width, self.lens.patch_size * self.lens.merge, min_pixels=self.fewest, max_pixels=self.most
            )
        except ValueError:
            raise Fault(
                f"it has {width:,} x {height:,} pixels: one side is more than 200 times the other, which the model's processor refuses"
            ) from None
        return (1, scaled[0] // self.lens.patch_size, scaled[1] // self.lens.patch_size)

    def text(self, size: Size) -> str:
        return self.mark * self.lens.num_tokens(self.grid(size))

    def plain(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        size = {"shortest_edge": self.fewest, "longest_edge": self.most}
        return {_PIXELS: self.processor([image], size=size, return_tensors="np")[_PIXELS]}


def qwen_eye(folder: Path, config: Mapping[str, Any], limits: ImageLimits) -> QwenEye:
    lens, processor = qwen_lens(config), image_processor(folder, Qwen2VLImageProcessorPil)
    _require_equal(folder, processor, lens)
    fewest, most = _range(processor, limits)
    return QwenEye(
        lens=lens,
        mark=MARK,
        identity=identity_of(processor, fewest, most),
        processor=processor,
        fewest=fewest,
        most=most,
    )


def _require_equal(folder: Path, processor: Qwen2VLImageProcessorPil, lens: QwenLens) -> None:
    cut = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    if cut != (lens.patch_size, lens.merge, lens.frames):
        raise ModelError(
            f"the image processor of {folder.name} cuts patches of {cut[0]} pixels, {cut[1]} to a block, {cut[2]} frames; "
            f"the tower takes {lens.patch_size}, {lens.merge} and {lens.frames}",
            "take preprocessor_config.json and config.json of one model",
        )


def _range(processor: Qwen2VLImageProcessorPil, limits: ImageLimits) -> tuple[int, int]:
    """A limit that is asked for moves the processor's other one, never another that is asked for."""
    fewest, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    most = limits.max_pixels or max(most, limits.min_pixels or 0)
    return limits.min_pixels or min(fewest, most), most
