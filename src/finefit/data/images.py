"""What the images of a row show: found, read and decoded to RGB, or a fault of their row. Nothing is fetched, and nothing stands in for an image.

Decoding is the same everywhere: turned as EXIF says, what is transparent laid on white, sixteen bits taken as eight, of an animation the first frame.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps

from finefit.data.cells import Fault, printable
from finefit.data.image_files import content_of
from finefit.data.rows import BadRow, Image, Row

MAX_PIXELS: Final = 89_478_485
"""Pillow's own limit: a few bytes may unpack to more memory than there is."""
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
"""No other is tried: some start programs of their own."""
_HEADS: Final = (
    (b"\x89PNG\r\n\x1a\n", struct.Struct(">II"), 16),
    (b"GIF8", struct.Struct("<HH"), 6),
    (b"BM", struct.Struct("<ii"), 18),
)
"""What a form begins with, and where width and height follow."""
_BROKEN: Final = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""What Pillow raises on bytes that are no whole image."""
_WHITE: Final = (255, 255, 255, 255)
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})
_ORIENTATION: Final = 0x0112
"""Of EXIF; four of its values turn an image on its side."""


def decoded(row: Row, *, max_pixels: int = MAX_PIXELS) -> tuple[PIL.Image.Image, ...] | BadRow:
    """All images of a row, or why it cannot be used."""
    shown: list[PIL.Image.Image] = []
    for at, image in enumerate(row.images, start=1):
        try:
            shown.append(decode(image, max_pixels=max_pixels))
        except Fault as fault:
            which = f"image {at} of {len(row.images)}: " if len(row.images) > 1 else ""
            return BadRow(row.source, row.number, f"{which}{fault}", row.part)
    return tuple(shown)


def decode(image: Image, *, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> PIL.Image.Image:
    """`content`: where it has been read already."""
    with _faults_of(image), _opened(image, max_pixels, content) as opened:
        return _rgb(PIL.ImageOps.exif_transpose(opened), name_of(image))


def size_of(image: Image, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height as decoded, from the head of the file alone."""
    with _faults_of(image), _opened(image, max_pixels) as opened:
        width, height = opened.size
        is_turned = (
            opened.format != "TIFF" and opened.getexif().get(_ORIENTATION) in _SIDEWAYS
        )  # Pillow turns TIFF itself
        return (height, width) if is_turned else (width, height)


def name_of(image: Image) -> str:
    return printable(image.path) if image.path else "its image"


@contextmanager
def _faults_of(image: Image) -> Iterator[None]:
    """Pillow's complaints, told of the image. It warns of broken notes beside a picture (EXIF); the picture is whole, and taken as it lies there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PIL.Image.DecompressionBombError as error:
        raise Fault(f"{name_of(image)} has too many pixels: {error}") from None
    except _BROKEN as error:
        raise Fault(f"{name_of(image)} cannot be decoded: {printable(str(error)) or type(error).__name__}") from None


def _opened(image: Image, max_pixels: int, content: bytes | None = None) -> PIL.Image.Image:
    """Only its head is read so far."""
    content = content_of(image) if content is None else content
    try:
        opened = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
    except PIL.UnidentifiedImageError:
        raise Fault(f"{name_of(image)} {_unread(content)}") from None
    width, height = opened.size
    if width * height > max_pixels:
        raise Fault(
            f"{name_of(image)} has too many pixels: {width:,} x {height:,}, and at most {max_pixels:,} are decoded"
        )
    return opened


def _unread(content: bytes) -> str:
    """Why Pillow knows no image in it: one without pixels is none to it."""
    for start, size, offset in _HEADS:
        if content.startswith(start) and len(content) >= offset + size.size:
            width, height = size.unpack_from(content, offset)
            if not width or not height:
                return f"is empty: it has {width} x {height} pixels"
    return f"is no image that can be read: its {len(content):,} bytes begin with {content[:8]!r}"


def _rgb(image: PIL.Image.Image, name: str) -> PIL.Image.Image:
    if image.mode.startswith("I;16"):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Fault(
            f"{name} has pixels of 32 bits, of which nothing says what is black and what is white; save it with 8 or 16"
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, _WHITE), image.convert("RGBA")).convert("RGB")
