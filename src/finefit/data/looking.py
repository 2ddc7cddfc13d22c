"""Images looked at: once when their rows are prepared, each found, decoded and measured, or a fault of its row; and again whenever they are shown,
when one that has changed since is an error.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol, runtime_checkable

import PIL.Image

from finefit.data.cells import Fault
from finefit.data.eyes import open_eye
from finefit.data.eyes.eye import Eye, Grid, Shown, Size
from finefit.data.image_files import Found, content_at, find_image
from finefit.data.images import decode, name_of
from finefit.data.pictures import KEPT, Picture
from finefit.data.rows import Image, Row
from finefit.errors import DataError
from finefit.spec.rows import ImageLimits

See = Callable[[], Eye | None]
"""Opens the eye of a model in whatever process needs one; None for a model that sees nothing."""

_REMEMBERED: Final = 1 << 16
"""Images whose size is known already: questions about one image usually stand near one another."""
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class OwnEye:
    """A `See`: of the model with this config, by the processor that lies in `folder`."""

    folder: Path
    config: Path
    limits: ImageLimits

    def __call__(self) -> Eye | None:
        return (
            open_eye(self.folder, json.loads(self.config.read_text(encoding="utf-8")), self.limits)
            if self.config.is_file()
            else None
        )


@lru_cache(4)
def eye_of(see: See) -> Eye | None:
    """Opened once in a process."""
    return see()


def keep_processor(source: Path, target: Path) -> None:
    """What an eye needs beside tokenizer and config, and what other programs want beside the weights."""
    for name in _PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@runtime_checkable
class Counting(Protocol):
    """An eye of a model that says how many images every row must have."""

    views: int | None


class Looker:
    """What the images of a row are. Remembers those that it has seen."""

    def __init__(self, eye: Eye) -> None:
        self._eye = eye
        self._of_file = lru_cache(_REMEMBERED)(self._found)
        self._measures: dict[str, _Measures] = {}

    def __call__(self, row: Row) -> tuple[Picture, ...]:
        """Raises what is wrong with them."""
        if isinstance(self._eye, Counting) and self._eye.views not in (None, len(row.images)):
            raise Fault(f"has {len(row.images)} images, and the model takes {self._eye.views} with every row")
        return tuple(self._looked(row, at) for at in range(len(row.images)))

    def _looked(self, row: Row, at: int) -> Picture:
        image = row.images[at]
        try:
            return self._of_file(image) if image.path else self._picture(image, KEPT, None, image.data)
        except Fault as fault:
            raise Fault(
                f"image {at + 1} of {len(row.images)}: {fault}" if len(row.images) > 1 else str(fault)
            ) from None

    def _found(self, image: Image) -> Picture:
        found = find_image(image)
        return self._picture(image, str(found.path.absolute()), found.member, content_at(found, name_of(image)))

    def _picture(self, image: Image, path: str, member: str | None, content: bytes) -> Picture:
        """`member`: None where the image is to be kept under its digest."""
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._measures:
            if len(self._measures) >= _REMEMBERED:
                self._measures.clear()
            self._measures[sha256] = self._measured(image, content)
        return Picture(path, sha256 if member is None else member, sha256, *self._measures[sha256])

    def _measured(self, image: Image, content: bytes) -> "_Measures":
        size = decode(image, content=content).size
        try:
            grid = self._eye.grid(size)
        except (
            Fault,
            ValueError,
        ) as error:  # of an image that the model's processor does not take, such as one of 1 x 1,000 pixels
            raise Fault(f"{name_of(image)} cannot be shown: {error}") from None
        return _Measures(size, grid, sum(values.size for values in self._eye.lens.blank(grid).values()))


class _Measures(NamedTuple):
    size: Size
    grid: Grid
    num_values: int


def show(eye: Eye, picture: Picture) -> Shown:
    return Shown(picture.grid, eye.pixels(opened(picture)))


def opened(picture: Picture) -> PIL.Image.Image:
    """In RGB, as it was when its rows were prepared."""
    try:
        content = unchanged(picture)
    except Fault as fault:
        whose = f"{picture.row}: its" if picture.row else "the"
        raise DataError(
            f"{whose} image {fault}", "put it back as it was, or start again with --new, which prepares the rows anew"
        ) from None
    return decode(Image(path=picture.place), content=content)


def unchanged(picture: Picture) -> bytes:
    """Its content, which is what it was when its rows were prepared."""
    try:
        content = content_at(Found(Path(picture.path), picture.member), picture.place)
    except Fault as fault:
        raise Fault(f"{fault}; it was there when its rows were prepared") from None
    if hashlib.sha256(content).hexdigest() != picture.sha256:
        raise Fault(f"{picture.place} has changed since its rows were prepared")
    return content


class PictureKeeper:
    """Writes images that came as bytes, each content once. There is no file where none came."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / KEPT
        self._zip: zipfile.ZipFile | None = None
        self._there: set[str] = set()

    def keep(self, images: Sequence[Image], pictures: Sequence[Picture]) -> None:
        for image, picture in zip(images, pictures, strict=True):
            if image.path or picture.sha256 in self._there:
                continue
            if self._zip is None:
                self._zip = zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED)
            self._zip.writestr(
                zipfile.ZipInfo(picture.member), image.data
            )  # dated 1980, so that equal images make equal files
            self._there.add(picture.sha256)

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
            self._zip = None

    def __enter__(self) -> "PictureKeeper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
