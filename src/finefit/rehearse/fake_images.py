"""The images of a rehearsed batch: as large as those of the row with the most image tokens, with shapes and without
values. The geometry works on blank pixels outside of the rehearsal, since it counts and sorts; only the shapes of its
tensors are kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from finefit.objective.batch import Extra
from finefit.vision import geometry_of
from finefit.vision.family import Grid, ImageGeometry, ImageInput


def fake_images(config: Mapping[str, Any], *, rows: int, tokens: int, grids: Sequence[Grid]) -> Extra | None:
    """Of `rows` equal rows, on the meta device; None for a model that takes no images. Not to be called under fake
    tensors."""
    geometry = _geometry(json.dumps(config, sort_keys=True, default=str))
    return None if geometry is None else _fake_images(geometry, rows, tokens, tuple(grids))  # type: ignore[arg-type] # every geometry is frozen


@lru_cache(maxsize=64)
def _geometry(config: str) -> ImageGeometry | None:
    return geometry_of(json.loads(config))


@lru_cache(maxsize=64)
def _fake_images(geometry: ImageGeometry, rows: int, tokens: int, grids: tuple[Grid, ...]) -> Extra:
    """Cached by geometry, which is the same for a model of fewer layers."""
    row = [ImageInput(grid, geometry.blank_pixels(grid)) for grid in grids]
    ids_BT = np.tile(np.array(list(_ids(geometry, grids, tokens)), dtype=np.int64), (rows, 1))
    return geometry.extra(ids_BT, [ids_BT.shape[1]] * rows, [row] * rows).moved(
        lambda tensor: torch.empty_like(tensor, device="meta")
    )


def _ids(geometry: ImageGeometry, grids: Sequence[Grid], tokens: int) -> Iterator[int]:
    """One image after the other, a word before each, and words to the end."""
    word, count = int(geometry.image_token == 0), 0
    for grid in grids:
        yield word
        yield from (geometry.image_token for _ in range(geometry.num_tokens(grid)))
        count += 1 + geometry.num_tokens(grid)
    yield from (word for _ in range(tokens - count))


def num_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """The fewest tokens of a row with these images: theirs, a word before each and one of the answer."""
    return image_tokens(config, grids) + len(grids) + 1


def image_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    geometry = geometry_of(config)
    return 0 if geometry is None else sum(map(geometry.num_tokens, grids))


def fitting(config: Mapping[str, Any], grids: Sequence[Grid], tokens: int) -> tuple[Grid, ...]:
    """As many of the images as a shorter row has room for."""
    counts = range(len(grids), 0, -1)
    return next((tuple(grids[:count]) for count in counts if num_tokens(config, grids[:count]) <= tokens), ())


def num_values(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Of the pixels of these images."""
    geometry = geometry_of(config)
    if geometry is None:
        return 0
    return sum(values.size for grid in grids for values in geometry.blank_pixels(grid).values())
