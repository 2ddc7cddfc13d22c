"""Images that were found and decoded when their rows were prepared: where each lies, what it is by content, and how large it is shown.

Their pixels are kept nowhere: they are decoded anew whenever they are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

KEPT: Final = "pictures.zip"
"""Among the prepared files: images that no file of their own held, under their digests."""


@dataclass(frozen=True, slots=True)
class Picture:
    path: str
    """The file, or the zip that holds it; what is not absolute lies among the prepared files."""
    member: str
    """Inside the zip; empty where the file is the image."""
    sha256: str
    """Of the encoded image."""
    size: tuple[int, int]
    """Width and height in pixels, as decoded."""
    grid: tuple[int, ...]
    """What the model is given of it, in the units of its family."""
    num_values: int = 0
    """Numbers that its pixels are for the model: what shows most takes most memory."""
    row: str = field(default="", compare=False)
    """File and line of the first row that shows it; empty where no row was prepared."""

    @property
    def place(self) -> str:
        return f"{self.member} in {self.path}" if self.member else self.path


def shown_by(row: str, pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    """With the place of a row that shows them."""
    return tuple(replace(picture, row=row) for picture in pictures)


def as_json(picture: Picture) -> list[Any]:
    return [picture.path, picture.member, picture.sha256, picture.size, picture.grid, picture.num_values, picture.row]


def from_json(values: Sequence[Any], folder: Path) -> Picture:
    """`folder`: where the prepared files lie."""
    path, member, sha256, (width, height), grid, num_values, row = values
    return Picture(str(folder / path), member, sha256, (width, height), tuple(grid), num_values, row)
