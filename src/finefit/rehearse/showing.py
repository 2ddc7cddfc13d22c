"""What a rehearsed batch shows: images as large as those of the row that shows most, with shapes and without values.

What a lens makes of a batch is made outside of the rehearsal, from blank pixels, since it counts and orders; of its tensors the shapes are kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from finefit.data.eyes import lens_of
from finefit.data.eyes.eye import Grid, Lens, Shown
from finefit.objective.batch import Extra


def shown(config: Mapping[str, Any], *, rows: int, tokens: int, grids: Sequence[Grid]) -> Extra | None:
    """Of `rows` equal rows, on the meta device; None for a model that sees nothing. Not to be called among fake tensors."""
    lens = _lens(json.dumps(config, sort_keys=True, default=str))
    return None if lens is None else _shown(lens, rows, tokens, tuple(grids))  # type: ignore[arg-type] # every lens is frozen


@lru_cache(maxsize=64)
def _lens(config: str) -> Lens | None:
    return lens_of(json.loads(config))


@lru_cache(maxsize=64)
def _shown(lens: Lens, rows: int, tokens: int, grids: tuple[Grid, ...]) -> Extra:
    """Known by the lens: it is the same for a model of fewer layers."""
    row = [Shown(grid, lens.blank(grid)) for grid in grids]
    ids_BT = np.tile(np.array(list(_ids(lens, grids, tokens)), dtype=np.int64), (rows, 1))
    return lens.extra(ids_BT, [ids_BT.shape[1]] * rows, [row] * rows).moved(
        lambda tensor: torch.empty_like(tensor, device="meta")
    )


def _ids(lens: Lens, grids: Sequence[Grid], tokens: int) -> Iterator[int]:
    """Images one after the other, a word before each, and words to the end."""
    word, count = int(lens.image_token == 0), 0
    for grid in grids:
        yield word
        yield from (lens.image_token for _ in range(lens.num_tokens(grid)))
        count += 1 + lens.num_tokens(grid)
    yield from (word for _ in range(tokens - count))


def num_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """That a row with these images has at least: theirs, a word before each and one to be answered."""
    return image_tokens(config, grids) + len(grids) + 1


def image_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    lens = lens_of(config)
    return 0 if lens is None else sum(map(lens.num_tokens, grids))


def fitting(config: Mapping[str, Any], grids: Sequence[Grid], tokens: int) -> tuple[Grid, ...]:
    """As many of the images as a shorter row has room for."""
    return next(
        (tuple(grids[:count]) for count in range(len(grids), 0, -1) if num_tokens(config, grids[:count]) <= tokens), ()
    )


def num_values(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Numbers that the pixels of these images are."""
    lens = lens_of(config)
    return 0 if lens is None else sum(values.size for grid in grids for values in lens.blank(grid).values())
