"""How images become tokens and what a vision tower is given. A `Lens` is what a model's config tells of that, enough for shapes; an `Eye` adds the
model's own processor, which scales and cuts the pixels. Both belong to a family of models.

B rows, T tokens, I image tokens of a whole batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from finefit.objective.batch import Extra

Size = tuple[int, int]
"""Width and height in pixels, as decoded."""
Grid = tuple[int, ...]
"""What the tower is given of an image, in the family's own units: patches (frames, height, width), or tiles of so many pixels."""
Pixels = Mapping[str, NDArray[Any]]
"""Of one image, as the tower takes them, by name."""


class Shown(NamedTuple):
    """An image of a row, ready for the tower."""

    grid: Grid
    pixels: Pixels


class Lens(Protocol):
    """Known from the config alone."""

    @property
    def image_token(self) -> int:
        """Its embeddings are replaced by what the tower makes of the images, in their order."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Image tokens of one image: as many as the tower gives features."""
        ...

    def square(self, side: int) -> Grid:
        """Of an image with so many pixels along each side, where no processor says how it is scaled: as it is, in whole units of the family."""
        ...

    def blank(self, grid: Grid) -> Pixels:
        """Zeros in the shapes and types of real pixels."""
        ...

    def extra(
        self,
        input_ids_BT: NDArray[np.int64],
        lengths: Sequence[int],
        rows: Sequence[Sequence[Shown]],
        prompts: Sequence[int] | None = None,
    ) -> Extra:
        """What the batch is given beside its tokens, which are padded on the right and have `lengths` of their own: one sequence of images for each
        row, in the order of their marks. It has the tensor `places_I`, the flat positions in B x T of the image tokens, in order; the rest is between
        a family's lens and its sight. Where no row has an image, what a row of text needs (positions, masks) or nothing. `prompts`: tokens of each
        row before its first supervised one, for families whose prompts see both ways; None: rows are prompts alone."""
        ...


class Eye(Protocol):
    """With the model's own processor."""

    @property
    def lens(self) -> Lens: ...

    @property
    def mark(self) -> str:
        """What the chat template writes where an image belongs; not text that a user may write."""
        ...

    @property
    def identity(self) -> str:
        """Equal where equal images become equal pixels and tokens."""
        ...

    def grid(self, size: Size) -> Grid:
        """Of an image of this size."""
        ...

    def text(self, size: Size) -> str:
        """What stands in the prompt in place of the mark, with as many image tokens as there will be features."""
        ...

    def plain(self, prompt: str, start: str) -> str:
        """The text of a prompt without a chat template. `prompt` has marks where its images belong, `start` is what the tokenizer begins with."""
        ...

    def pixels(self, image: PIL.Image.Image) -> Pixels:
        """Of an image in RGB. Called in processes that have no card."""
        ...
