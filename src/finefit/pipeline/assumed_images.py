"""What rows show of which nothing is known yet: of a model that sees, every one has its images.

Torch is imported only for such a model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from finefit.model.custom_files import written_in
from finefit.model.locate import Outline
from finefit.spec.rows import ImageLimits

_SIDE_STEP, _LARGEST_SIDE = 28, 4480
"""Pixels of the square images that are tried."""
_BESIDE = 2
"""Tokens that a row has beside those of its image: one before it, and one to be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedImages:
    grids: tuple[tuple[int, ...], ...] = ()
    """Of one row."""
    told: str = ""
    """What is assumed, behind what is said of the rows; empty for a model that sees nothing."""


def assume_images(known: Outline, limits: ImageLimits, tokens: int) -> AssumedImages:
    """In rows of so many tokens, those of the image among them: the largest that `max_pixels` lets in; where that is not given, one whose tokens fill
    half a row, or the smallest."""
    if written_in(known.config) is not None:
        return _of_own(known)
    if "vision_config" not in known.config:
        return AssumedImages()
    from finefit.data.eyes import lens_of  # torch comes with it

    lens = lens_of(known.config)
    if lens is None:
        return AssumedImages()
    fitting = [grid for grid in _grids(known, limits) if lens.num_tokens(grid) <= tokens - _BESIDE]
    small = [grid for grid in fitting if limits.max_pixels is not None or 2 * lens.num_tokens(grid) <= tokens]
    if not fitting:
        return AssumedImages(told=f", without images: none fits into {tokens:,} tokens")
    grid = max(small or fitting[:1], key=lens.num_tokens)
    return AssumedImages(grids=(grid,), told=f", each with an image of {lens.num_tokens(grid):,} tokens")


def _grids(known: Outline, limits: ImageLimits) -> Iterator[tuple[int, ...]]:
    """Of square images, the smallest first, up to `max_pixels` where that is given. A mere shape has no processor, and is taken to scale no image."""
    from finefit.data.eyes import lens_of, open_eye

    lens = lens_of(known.config)
    assert lens is not None
    eye = None if known.tokenizer is None else open_eye(known.tokenizer, known.config, limits)
    largest = _LARGEST_SIDE if limits.max_pixels is None else math.isqrt(limits.max_pixels)
    for side in (*range(_SIDE_STEP, largest, _SIDE_STEP), largest):
        yield lens.square(side) if eye is None else eye.grid((side, side))


def _of_own(known: Outline) -> AssumedImages:
    """A model of the user's own is given images as they are, as many as it asks for, or one."""
    from finefit.rehearse.custom import UNKNOWN_SIZE
    from finefit.step.custom import twin_of

    found = written_in(known.config)
    assert found is not None
    twin = twin_of(found)
    count = (1 if twin.views is None else twin.views) if twin.sees else 0
    if not count:
        return AssumedImages()
    width, height = UNKNOWN_SIZE
    images = "an image" if count == 1 else f"{count} images"
    return AssumedImages(grids=(UNKNOWN_SIZE,) * count, told=f", each with {images} of {width} x {height} pixels")
