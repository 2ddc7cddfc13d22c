"""How a model of the user's own is shown images: as they are. What stands in a prompt in their place, and how many a row must have, the model says.

One that says neither sees nothing, and rows with images are refused for it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from finefit.data.eyes.eye import Eye, Grid, Pixels, Shown, Size
from finefit.data.looking import OwnEye, See
from finefit.errors import FinefitError, SpecError
from finefit.model.custom_files import written, written_in
from finefit.objective.batch import Extra
from finefit.spec.models import CustomModel, Model
from finefit.spec.rows import ImageLimits
from finefit.step.custom import twin_of


def see_of(model: Model, base: Path, folder: Path, limits: ImageLimits) -> See:
    """Of any model. `base`: where the paths of the model start; `folder`: where its config and its processor lie."""
    if not isinstance(model, CustomModel):
        return OwnEye(folder, folder / "config.json", limits)
    if limits != ImageLimits():
        problem = "data.images limits what a processor of transformers makes of an image, and a model of your own is given images as they are"
        raise SpecError(problem, "leave data.images out, and scale images in inputs")
    return CustomEye(json.dumps(written(model, base).as_config(), sort_keys=True))


@dataclass(frozen=True, slots=True)
class CustomEye:
    """A `See`: opens in whatever process, by building the model without weights."""

    config: str
    """As JSON, since it must be hashable."""

    def __call__(self) -> Eye | None:
        found = written_in(json.loads(self.config))
        assert found is not None
        twin = twin_of(found)
        return Plain(twin.image_text, twin.views) if twin.sees else None


class PlainLens:
    """An image is given as it is, and no token of the prompt stands for its features."""

    image_token = -1

    def num_tokens(self, grid: Grid) -> int:  # noqa: ARG002
        return 0

    def square(self, side: int) -> Grid:
        return side, side

    def blank(self, grid: Grid) -> Pixels:
        """`grid`: width and height."""
        zero: NDArray[Any] = np.broadcast_to(np.uint8(0), (grid[1], grid[0], 3))
        return {"image": zero}

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],  # noqa: ARG002
        lengths: Sequence[int],  # noqa: ARG002
        rows: Sequence[Sequence[Shown]],  # noqa: ARG002
        prompts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Extra:
        raise FinefitError("a model of the user's own makes its inputs itself")


class Plain:
    """An `Eye`."""

    def __init__(self, image_text: str, views: int | None) -> None:
        self.lens, self.mark, self.views = PlainLens(), "", views
        self._text = image_text
        self.identity = hashlib.sha256(f"custom {views} {image_text}".encode()).hexdigest()

    def grid(self, size: Size) -> Grid:
        return size

    def text(self, size: Size) -> str:  # noqa: ARG002
        return self._text

    def plain(self, prompt: str, start: str) -> str:
        return start + prompt

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        return {"image": np.asarray(image)}
