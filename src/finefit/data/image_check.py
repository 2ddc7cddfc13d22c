"""Prepares images for a model. Each image is checked once when its row is prepared: it is found, decoded and measured,
or the row is bad. It must not have changed when it is loaded again for a batch. A placeholder marks its position in the
row's text."""

import hashlib
import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import PIL.Image

from finefit.data.columns import RecordError
from finefit.data.images import ImageLocation, content_at, decode, find_image, image_name
from finefit.data.rows import IMAGE_ARCHIVE, IMAGE_PLACEHOLDER, Image, ImageRef, Message, Row
from finefit.errors import DataError
from finefit.facts.files import read_object
from finefit.spec.data import ImageLimits
from finefit.vision import open_image_processor
from finefit.vision.family import Grid, ImageInput, ImageProcessor, Size

ProcessorFactory = Callable[[], ImageProcessor | None]
"""Opens a model's image processor in the process that needs it; returns None for a text model."""

_MAX_CACHED: Final = 1 << 16
"""Number of images whose size is cached; questions about one image are usually close together."""
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class ModelProcessor:
    """The ProcessorFactory for the model with this config, using the processor files in `folder`."""

    folder: Path
    config: Path
    limits: ImageLimits

    def __call__(self) -> ImageProcessor | None:
        if not self.config.is_file():
            return None
        return open_image_processor(self.folder, read_object(self.config), self.limits)


@lru_cache(4)
def image_processor_of(processor_factory: ProcessorFactory) -> ImageProcessor | None:
    """The processor is opened once per process."""
    return processor_factory()


def copy_processor_files(source: Path, target: Path) -> None:
    for name in _PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


class ImageChecker:
    """Finds, decodes and measures the images of rows, and caches the results by image."""

    def __init__(self, image_processor: ImageProcessor) -> None:
        self._image_processor = image_processor
        self._of_file = lru_cache(_MAX_CACHED)(self._found)
        self._measures: dict[str, tuple[Size, Grid, int]] = {}

    def __call__(self, row: Row) -> tuple[ImageRef, ...]:
        """Raises RecordError if an image cannot be used."""
        total, views = len(row.images), self._image_processor.views
        if views not in (None, total):
            raise RecordError(f"has {total} images, and the model takes {views} with every row")
        refs: list[ImageRef] = []
        for at, image in enumerate(row.images, start=1):
            try:
                found = self._of_file(image) if image.path else self._ref(image, IMAGE_ARCHIVE, None, image.data)
                refs.append(found)
            except RecordError as error:
                raise RecordError(f"image {at} of {total}: {error}" if total > 1 else str(error)) from None
        return tuple(refs)

    def _found(self, image: Image) -> ImageRef:
        found = find_image(image)
        return self._ref(image, str(found.path.absolute()), found.member, content_at(found, image_name(image)))

    def _ref(self, image: Image, path: str, member: str | None, content: bytes) -> ImageRef:
        """`member`: None if the image is stored in the archive under its digest."""
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._measures:
            size = decode(image, content=content).size
            try:
                grid = self._image_processor.grid(size)
            except ValueError as error:  # an image that the model's processor rejects, such as one of 1 x 1,000 pixels
                raise RecordError(f"{image_name(image)} cannot be processed for the model: {error}") from None
            pixels = self._image_processor.geometry.blank_pixels(grid)
            if len(self._measures) >= _MAX_CACHED:
                self._measures.clear()
            self._measures[sha256] = size, grid, sum(values.size for values in pixels.values())
        return ImageRef(path, sha256 if member is None else member, sha256, *self._measures[sha256])


def image_input(image_processor: ImageProcessor, ref: ImageRef) -> ImageInput:
    return ImageInput(ref.grid, image_processor.pixels(load_image(ref)))


def load_image(ref: ImageRef) -> PIL.Image.Image:
    """Loads the image in RGB, and raises an error if it has changed since its rows were prepared."""
    return decode(Image(path=ref.place), content=read_content(ref))


def read_content(ref: ImageRef) -> bytes:
    """Returns the encoded image; for callers to whom a changed image is an error of the data."""
    try:
        return read_unchanged(ref)
    except RecordError as error:
        whose = f"{ref.row}: its" if ref.row else "the"
        remedy = "restore the image, or start again with --new, which prepares the rows again"
        raise DataError(f"{whose} image {error}", remedy) from None


def read_unchanged(ref: ImageRef) -> bytes:
    """Returns the encoded image, and raises an error if it has changed since its rows were prepared."""
    try:
        content = content_at(ImageLocation(Path(ref.path), ref.member), ref.place)
    except RecordError as error:
        raise RecordError(f"{error}; it was there when its rows were prepared") from None
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise RecordError(f"{ref.place} has changed since its rows were prepared")
    return content


class ImageArchive:
    """Writes images that came as bytes, each distinct content once. Without such images no file is written."""

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

    def __enter__(self) -> "ImageArchive":
        return self

    def __exit__(self, *_: object) -> None:
        if self._zip is not None:
            self._zip.close()


def num_placeholders(messages: Iterable[Message]) -> int:
    return sum(message.content.count(IMAGE_PLACEHOLDER) for message in messages)


def with_placeholders(messages: Sequence[Message], num_images: int) -> tuple[Message, ...]:
    """Ensures one placeholder per image; if there are none, they are put before the text of the first user message."""
    if not num_images:
        return tuple(messages)
    if num_placeholders(message for message in messages if message.role == "assistant"):
        problem = "an image is in an answer, and vision-language models write text alone"
        raise DataError(problem, f"move {IMAGE_PLACEHOLDER} into the prompt")
    found = num_placeholders(messages)
    if found == num_images:
        return tuple(messages)
    if found:
        problem = f"the messages have {found} {IMAGE_PLACEHOLDER} placeholders, and the row has {num_images} images"
        raise DataError(problem, "give as many placeholders as images, or none")
    first = next((at for at, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        problem = f"the row has {num_images} images, but no user message that they could belong to"
        raise DataError(problem, "give the row a prompt")
    asked = replace(messages[first], content=IMAGE_PLACEHOLDER * num_images + messages[first].content)
    return (*messages[:first], asked, *messages[first + 1 :])


def require_no_image_text(messages: Iterable[Message], image_texts: Iterable[str], *, has_images: bool) -> None:
    """Text that the model would read as an image is an error; the placeholders of a row with images are allowed."""
    for message in messages:
        texts = [message.reasoning, *(message.content.split(IMAGE_PLACEHOLDER) if has_images else [message.content])]
        for image_text in filter(None, image_texts):
            if any(image_text in text for text in texts):
                what = f"{image_text!r}, which the model reads as an image, and no image belongs there"
                remedy = f"give an image beside the text, with {IMAGE_PLACEHOLDER} in its place, or rephrase the text"
                raise DataError(f"the text holds {what}", remedy)


def fill_placeholders(
    texts: Sequence[str], placeholder: str, image_processor: ImageProcessor, image_refs: Sequence[ImageRef]
) -> list[str]:
    """Replaces each placeholder in the texts by the text of its image."""
    if not placeholder:
        return list(texts)
    found = sum(text.count(placeholder) for text in texts)
    if found != len(image_refs):
        problem = f"the template writes {found} places for images ({placeholder}), and {len(image_refs)} belong there"
        remedy = "change the messages to what the template supports: some write only the images of user messages"
        raise DataError(problem, remedy)
    filled = (image_processor.text(ref.size) for ref in image_refs)
    split = (text.split(placeholder) for text in texts)
    return ["".join([first, *(next(filled) + rest for rest in others)]) for first, *others in split]


def num_image_tokens(image_processor: ImageProcessor | None, image_refs: Sequence[ImageRef]) -> int:
    return sum(image_processor.geometry.num_tokens(ref.grid) for ref in image_refs) if image_processor else 0


def require_image_tokens(
    tokens: Sequence[int], image_processor: ImageProcessor | None, image_refs: Sequence[ImageRef]
) -> None:
    """There must be as many image tokens as features, because the model replaces each token by a feature."""
    if image_processor is None:
        return
    found, expected = tokens.count(image_processor.geometry.image_token), num_image_tokens(image_processor, image_refs)
    if found != expected:
        problem = f"the prompt has {found} image tokens, and its {len(image_refs)} images have {expected} features"
        raise DataError(problem, "look for the model's own placeholders in the text of the row")
