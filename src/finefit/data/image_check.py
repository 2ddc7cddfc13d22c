"""Images, checked once when their rows are prepared: each is found, decoded and measured, or its row is bad. When an
image is loaded again for a batch, it must not have changed."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import PIL.Image

from finefit.data.columns import RecordError
from finefit.data.images import ImageLocation, content_at, decode, find_image, image_name
from finefit.data.rows import IMAGE_ARCHIVE, Image, ImageRef, Row
from finefit.errors import DataError
from finefit.spec.data import ImageLimits
from finefit.vision import open_image_processor
from finefit.vision.family import Grid, ImageInput, ImageProcessor, Size

ProcessorFactory = Callable[[], ImageProcessor | None]
"""Opens the image processor of a model in whatever process needs one; None for a text model."""

_MAX_CACHED: Final = 1 << 16
"""Images whose size is remembered: questions about one image usually lie near one another."""
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class ModelProcessor:
    """A ProcessorFactory: for the model with this config, by the processor files in `folder`."""

    folder: Path
    config: Path
    limits: ImageLimits

    def __call__(self) -> ImageProcessor | None:
        if not self.config.is_file():
            return None
        return open_image_processor(self.folder, json.loads(self.config.read_text(encoding="utf-8")), self.limits)


@lru_cache(4)
def image_processor_of(processor_factory: ProcessorFactory) -> ImageProcessor | None:
    """Opened once in a process."""
    return processor_factory()


def copy_processor_files(source: Path, target: Path) -> None:
    for name in _PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@runtime_checkable
class FixedImageCount(Protocol):
    """An image processor of a model that says how many images every row must have."""

    views: int | None


class ImageChecker:
    """Finds, decodes and measures the images of rows. Remembers those that it has seen."""

    def __init__(self, image_processor: ImageProcessor) -> None:
        self._image_processor = image_processor
        self._of_file = lru_cache(_MAX_CACHED)(self._found)
        self._measures: dict[str, tuple[Size, Grid, int]] = {}

    def __call__(self, row: Row) -> tuple[ImageRef, ...]:
        """Raises RecordError where an image cannot be used."""
        views = self._image_processor.views if isinstance(self._image_processor, FixedImageCount) else None
        if views not in (None, len(row.images)):
            raise RecordError(f"has {len(row.images)} images, and the model takes {views} with every row")
        return tuple(self._checked(row, at) for at in range(len(row.images)))

    def _checked(self, row: Row, at: int) -> ImageRef:
        image = row.images[at]
        try:
            return self._of_file(image) if image.path else self._ref(image, IMAGE_ARCHIVE, None, image.data)
        except RecordError as error:
            which = f"image {at + 1} of {len(row.images)}: " if len(row.images) > 1 else ""
            raise RecordError(f"{which}{error}") from None

    def _found(self, image: Image) -> ImageRef:
        found = find_image(image)
        return self._ref(image, str(found.path.absolute()), found.member, content_at(found, image_name(image)))

    def _ref(self, image: Image, path: str, member: str | None, content: bytes) -> ImageRef:
        """`member`: None where the image is to be kept under its digest."""
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._measures:
            if len(self._measures) >= _MAX_CACHED:
                self._measures.clear()
            self._measures[sha256] = self._measured(image, content)
        return ImageRef(path, sha256 if member is None else member, sha256, *self._measures[sha256])

    def _measured(self, image: Image, content: bytes) -> tuple[Size, Grid, int]:
        size = decode(image, content=content).size
        try:
            grid = self._image_processor.grid(size)
        except ValueError as error:  # an image that the model's processor refuses, such as one of 1 x 1,000 pixels
            raise RecordError(f"{image_name(image)} cannot be shown to the model: {error}") from None
        pixels = self._image_processor.geometry.blank_pixels(grid)
        return size, grid, sum(values.size for values in pixels.values())


def image_input(image_processor: ImageProcessor, ref: ImageRef) -> ImageInput:
    return ImageInput(ref.grid, image_processor.pixels(load_image(ref)))


def load_image(ref: ImageRef) -> PIL.Image.Image:
    """In RGB, as it was when its rows were prepared."""
    try:
        content = read_unchanged(ref)
    except RecordError as error:
        whose = f"{ref.row}: its" if ref.row else "the"
        remedy = "put it back as it was, or start again with --new, which prepares the rows again"
        raise DataError(f"{whose} image {error}", remedy) from None
    return decode(Image(path=ref.place), content=content)


def read_unchanged(ref: ImageRef) -> bytes:
    """The encoded image; an error where it is not what it was when its rows were prepared."""
    try:
        content = content_at(ImageLocation(Path(ref.path), ref.member), ref.place)
    except RecordError as error:
        raise RecordError(f"{error}; it was there when its rows were prepared") from None
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise RecordError(f"{ref.place} has changed since its rows were prepared")
    return content


class ImageArchive:
    """Writes images that came as bytes, each content once. Without such images there is no file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / IMAGE_ARCHIVE
        self._zip: zipfile.ZipFile | None = None
        self._there: set[str] = set()

    def keep(self, images: Sequence[Image], image_refs: Sequence[ImageRef]) -> None:
        for image, ref in zip(images, image_refs, strict=True):
            if image.path or ref.sha256 in self._there:
                continue
            if self._zip is None:
                self._zip = zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED)
            self._zip.writestr(zipfile.ZipInfo(ref.member), image.data)  # dated 1980, so equal images give equal files
            self._there.add(ref.sha256)

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
            self._zip = None

    def __enter__(self) -> "ImageArchive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
