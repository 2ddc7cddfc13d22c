"""Image files: where an image lies, and its content decoded to RGB. Nothing is downloaded, and nothing replaces a
missing image.

An image lies at its path below a root (a folder or a zip), or in one of the folders, else the zips, directly in that
root. A path never leaves its root; one without an extension means the image of that name. An ambiguous path is an
error.

Decoding is the same everywhere: EXIF rotation is applied, transparency is laid on white, 16 bits are reduced to 8, and
an animation counts as its first frame.
"""

import hashlib
import io
import json
import lzma
import os
import posixpath
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps

from finefit import bounded
from finefit.artifacts.reading import lines_of
from finefit.data.columns import RecordError, printable
from finefit.data.rows import Image, ImageRef

MAX_BYTES: Final = 256 << 20
MAX_PIXELS: Final = 89_478_485
"""Pillow's own limit: a few bytes may decompress to more memory than there is."""
_EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff")
_CACHED_PLACES = 64
_FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
"""No other is tried: some start programs of their own."""
_STRIP: Final = 256
"""Rows of pixels whose transparency is laid on white at a time."""
_HEADS: Final = (
    (b"\x89PNG\r\n\x1a\n", struct.Struct(">II"), 16),
    (b"GIF8", struct.Struct("<HH"), 6),
    (b"BM", struct.Struct("<ii"), 18),
)
"""For each format: its leading bytes, and the layout and offset of width and height."""
_BROKEN: Final = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""Errors that Pillow raises on bytes that are not a whole image."""
_BROKEN_ZIP: Final = (*_BROKEN, zipfile.BadZipFile, lzma.LZMAError, NotImplementedError, RuntimeError, KeyError)
"""Errors that `zipfile` and its decompressors raise on bytes that are not a whole zip; RuntimeError on an encrypted
one."""


@dataclass(frozen=True, slots=True)
class ImageLocation:
    path: Path
    """The image file, or the zip that holds it."""
    member: str = ""

    def __str__(self) -> str:
        return f"{self.member} in {self.path}" if self.member else str(self.path)


def content_of(image: Image) -> bytes:
    return content_at(find_image(image), printable(image.path)) if image.path else image.data


def content_at(found: ImageLocation, name: str) -> bytes:
    try:
        with _archive(found.path).open(found.member) if found.member else bounded.open_binary(found.path) as file:
            content = file.read(MAX_BYTES + 1)
    except _BROKEN_ZIP as error:
        raise RecordError(f"{name} cannot be read from {found.path}: {error}") from None
    if len(content) > MAX_BYTES:
        remedy = "save it smaller, or leave its row out"
        raise RecordError(f"{name} has more than {MAX_BYTES:,} bytes, and no larger image is read; {remedy}")
    return content


def find_image(image: Image) -> ImageLocation:
    root, path, shown = Path(image.root), image.path, printable(image.path)
    if "\0" in path:
        raise RecordError(f"{shown!r} is not a path")
    # The name is relative to the root. Links below the root are the user's own, and are followed.
    name = posixpath.normpath(posixpath.relpath(path, root.as_posix()) if posixpath.isabs(path) else path)
    if name in (".", "..") or name.startswith("../"):
        problem = f"{shown} is outside of {root}, the root of its images"
        raise RecordError(f"{problem}; name another folder with images_root")
    for places in _places(root):
        found = [at for place in places for at in (_in_folder if place.is_dir() else _in_zip)(place, name)]
        if len(found) > 1:
            several = " and ".join(map(str, found[:3]))
            raise RecordError(f"{shown} may be {several}; name the one folder or zip with images_root")
        if found:
            return found[0]
    where = f"looked in {root}, and in the folders and zips in it"
    raise RecordError(f"{shown} does not exist: {where}; name another place with images_root")


def _places(root: Path) -> Iterator[Sequence[Path]]:
    """Yields the root itself, then its folders, then its zips; the first group that has the image is used."""
    try:
        changed = root.stat().st_mtime_ns
    except OSError as error:
        raise RecordError(f"{root}, the root of the images, cannot be read: {error.strerror}") from None
    yield (root,)
    if root.is_dir():
        yield from _inner(root, changed)


@lru_cache(_CACHED_PLACES)
def _inner(root: Path, changed: int) -> tuple[tuple[Path, ...], tuple[Path, ...]]:  # noqa: ARG001 a changed folder is listed again
    with os.scandir(root) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    seen = sorted(Path(e.path) for e in shown if e.is_dir() or e.name.lower().endswith(".zip"))
    return tuple(path for path in seen if path.is_dir()), tuple(path for path in seen if not path.is_dir())


def _in_folder(folder: Path, name: str) -> list[ImageLocation]:
    for names in _names(name):
        there: dict[tuple[int, int], ImageLocation] = {}
        for path in (folder / each for each in names):
            with suppress(OSError, ValueError):  # a name that no file can have
                if path.is_file():
                    status = path.stat()  # on a file system that ignores case, one file has several names
                    there[status.st_dev, status.st_ino] = ImageLocation(path)
        if there:
            return list(there.values())
    return []


def _names(name: str) -> Iterator[tuple[str, ...]]:
    yield (name,)
    if PurePosixPath(name).suffix.lower() not in _EXTENSIONS:
        yield tuple(name + ending for ending in (*_EXTENSIONS, *map(str.upper, _EXTENSIONS)))


def _in_zip(path: Path, name: str) -> list[ImageLocation]:
    """Matches the member at this path in the zip or below a folder in it, since many zips hold one folder with
    everything."""
    members = _members(path, path.stat().st_mtime_ns, os.getpid())
    for names in _names(name):
        found = [(each, member) for each in names for member in members.get(posixpath.basename(each), ())]
        whole = [member for each, member in found if member == each]
        if matching := whole or [member for each, member in found if member.endswith(f"/{each}")]:
            infos = [_archive(path).getinfo(member) for member in matching]
            if encrypted := [info.filename for info in infos if info.flag_bits & 0x1]:
                raise RecordError(f"{encrypted[0]} in {path} is encrypted")
            return [ImageLocation(path, info.filename) for info in infos]
    return []


@lru_cache(_CACHED_PLACES)
def _members(path: Path, changed: int, process: int) -> dict[str, list[str]]:  # noqa: ARG001 a changed zip is read again
    """Maps the last part of a name to the members with that name."""
    members: dict[str, list[str]] = {}
    for name in _archive(path).namelist():
        if not name.endswith("/"):
            members.setdefault(posixpath.basename(name), []).append(name)
    return members


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return _open_archive(path, path.stat().st_mtime_ns, os.getpid())
    except _BROKEN_ZIP as error:
        raise RecordError(f"{path} is not a zip that can be read: {error}") from None


@lru_cache(_CACHED_PLACES)
def _open_archive(path: Path, changed: int, process: int) -> zipfile.ZipFile:  # noqa: ARG001 a fork would share the file position
    return zipfile.ZipFile(path)


def decode(image: Image, *, content: bytes | None = None, max_pixels: int = MAX_PIXELS) -> PIL.Image.Image:
    """`content`: the encoded image, if it has been read already."""
    name = image_name(image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore warnings about broken EXIF data: the image itself is whole
            with _open_image(name, content_of(image) if content is None else content, max_pixels) as opened:
                PIL.ImageOps.exif_transpose(opened, in_place=True)
                return _rgb(opened, name)
    except PIL.Image.DecompressionBombError as error:
        raise RecordError(f"{name} has too many pixels: {error}") from None
    except _BROKEN as error:
        raise RecordError(f"{name} cannot be decoded: {printable(str(error)) or type(error).__name__}") from None


def image_name(image: Image) -> str:
    return printable(image.path) if image.path else "its image"


def _open_image(name: str, content: bytes, max_pixels: int) -> PIL.Image.Image:
    """Reads only the image's header."""
    try:
        opened = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
    except PIL.UnidentifiedImageError:
        for start, size, offset in _HEADS:  # Pillow rejects an image without pixels
            if content.startswith(start) and len(content) >= offset + size.size:
                width, height = size.unpack_from(content, offset)
                if not width or not height:
                    raise RecordError(f"{name} is empty: it has {width} x {height} pixels") from None
        problem = f"its {len(content):,} bytes begin with {content[:8]!r}"
        raise RecordError(f"{name} is not an image that can be read: {problem}") from None
    width, height = opened.size
    if width * height > max_pixels:
        shown = f"{width:,} x {height:,}, and at most {max_pixels:,} are decoded"
        raise RecordError(f"{name} has too many pixels: {shown}")
    return opened


def _rgb(image: PIL.Image.Image, name: str) -> PIL.Image.Image:
    if image.mode.startswith("I;16"):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        problem = "has pixels of 32 bits, and it is unknown which value is black and which is white"
        raise RecordError(f"{name} {problem}; save it with 8 or 16")
    if not image.has_transparency_data:
        return image.convert("RGB")
    laid = PIL.Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):  # a whole one would be in memory four times
        box = (0, top, image.width, min(image.height, top + _STRIP))
        strip = image.crop(box).convert("RGBA")
        white = PIL.Image.new("RGBA", strip.size, (255, 255, 255, 255))
        laid.paste(PIL.Image.alpha_composite(white, strip).convert("RGB"), box)
    return laid


FileState = tuple[str, int, int]
"""A file's path, size in bytes, and modification time in nanoseconds."""
IMAGE_MANIFEST: Final = "image_manifest.jsonl"


class ImageManifest:
    """The files that the images of a preparation came from, so that a changed, repaired or removed file is noticed
    without decoding all of them again. A file of the same size and time counts as unchanged; the content of any other
    is read."""

    def __init__(self) -> None:
        self._contents: dict[str, dict[str, str]] = {}
        self._faulty: dict[tuple[str, str], Image] = {}
        self._used = hashlib.sha256()
        self._num_used = 0

    def add(self, images: Sequence[Image], image_refs: Sequence[ImageRef]) -> None:
        """Adds the images of a row. Without `image_refs` one of them cannot be used; it may be repaired later."""
        if not image_refs:
            self._faulty |= {(image.root, image.path): image for image in images if image.path}
            return
        for image, ref in zip(images, image_refs, strict=True):
            if image.path:
                self._contents.setdefault(ref.path, {})[ref.member] = ref.sha256

    def use(self, split: str, image_refs: Sequence[ImageRef]) -> None:
        """Call it in the order of the rows in use."""
        self._num_used += len(image_refs)
        self._used.update(json.dumps([split, *(ref.sha256 for ref in image_refs)]).encode())

    @property
    def sha256(self) -> str | None:
        """Digest of all images in use, wherever they are stored; None without images."""
        return self._used.hexdigest() if self._num_used else None

    def write(self, folder: Path) -> None:
        """Writes nothing if no image is in a file."""
        lines: list[object] = [{"state": file_state(path), "contents": c} for path, c in self._contents.items()]
        lines += [{"root": i.root, "path": i.path, "state": _image_state(i)} for i in self._faulty.values()]
        if lines:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / IMAGE_MANIFEST).write_text(text, encoding="utf-8")


def are_unchanged(folder: Path) -> bool:
    """Returns whether all images are the same as when the rows in `folder` were prepared."""
    path = folder / IMAGE_MANIFEST
    if not path.is_file():
        return True
    try:
        with bounded.open_binary(path) as file:
            return all(_is_unchanged(bounded.parse_json(line)) for line in lines_of(file, path))
    except RecordError:
        return False


def _is_unchanged(line: dict[str, object]) -> bool:
    match line:
        case {"state": [str(path), size, time], "contents": dict(contents)}:
            found = file_state(path)
            if found is None or found == (path, size, time):
                return found is not None
            read = ((content_at(ImageLocation(Path(path), name), path), sha256) for name, sha256 in contents.items())
            return all(hashlib.sha256(content).hexdigest() == sha256 for content, sha256 in read)
        case {"root": str(root), "path": str(path), "state": state}:
            found = _image_state(Image(path=path, root=root))
            return (None if found is None else list(found)) == state
        case _:
            return False


def _image_state(image: Image) -> FileState | None:
    """Returns the state of the file that holds the image; None if there is no file."""
    try:
        return file_state(find_image(image).path.absolute())
    except RecordError:
        return None


def file_state(path: str | Path) -> FileState | None:
    """Returns None if there is no such file."""
    try:
        status = os.stat(path)  # noqa: PTH116 for a hundred thousand files, most of the time would go into making paths
    except (OSError, ValueError):
        return None
    return str(path), status.st_size, status.st_mtime_ns
