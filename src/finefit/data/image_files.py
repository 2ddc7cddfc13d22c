"""Where an image lies: at its path below a root, a folder or a zip, or in one of the folders, else zips, that lie there.

A path never leaves its root. One without an extension stands for the image of that name. What could be two images is none.
"""

import os
import posixpath
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

from finefit.data.cells import Fault, printable
from finefit.data.rows import BadRow, Image, Row

MAX_BYTES: Final = 256 << 20
_EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff")
_ENDINGS: Final = (*_EXTENSIONS, *(ending.upper() for ending in _EXTENSIONS))
_ENCRYPTED: Final = 0x1
_NUM_SHELVES = 64


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    """The file, or the zip that holds it."""
    member: str = ""
    """Inside the zip."""
    size_bytes: int = 0


def content_of(image: Image) -> bytes:
    if not image.path:
        return image.data
    return content_at(find_image(image), printable(image.path))


def content_at(found: Found, name: str) -> bytes:
    if found.size_bytes > MAX_BYTES:
        raise Fault(f"{name} has {found.size_bytes:,} bytes, and at most {MAX_BYTES:,} are read")
    try:
        return _archive(found.path).read(found.member) if found.member else found.path.read_bytes()
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError) as error:
        raise Fault(f"{name} cannot be read from {found.path}: {error}") from None


def without_images(row: Row) -> BadRow | None:
    """Why a row has not all of its images, where that is so; none is decoded."""
    try:
        for image in row.images:
            if image.path:
                find_image(image)
    except Fault as fault:
        return BadRow(row.source, row.number, str(fault), row.part)
    return None


def find_image(image: Image) -> Found:
    root = Path(image.root)
    name = _inside(root, image.path)
    for shelves in _shelves(root):
        found = [place for shelf in shelves for place in _on_shelf(shelf, name)]
        if len(found) > 1:
            places = " and ".join(_told(place) for place in found[:3])
            raise Fault(f"{printable(image.path)} may be {places}; name the one folder or zip with images_root")
        if found:
            return found[0]
    raise Fault(
        f"{printable(image.path)} is not there: looked in {root}, and in the folders and zips in it; name another place with images_root"
    )


def _inside(root: Path, path: str) -> str:
    """Relative to the root, without detours. Links that lie below the root are the user's own, and are followed."""
    if "\0" in path:
        raise Fault(f"{printable(path)!r} is no path")
    name = posixpath.normpath(posixpath.relpath(path, root.as_posix()) if posixpath.isabs(path) else path)
    if name in (".", "..") or name.startswith("../"):
        raise Fault(
            f"{printable(path)} lies outside of {root}, where its images start; name another folder with images_root"
        )
    return name


def _shelves(root: Path) -> Iterator[Sequence[Path]]:
    """The root itself; if that does not have it, its folders; if those do not, its zips."""
    try:
        changed = root.stat().st_mtime_ns
    except OSError as error:
        raise Fault(f"{root}, where its images start, cannot be read: {error.strerror}") from None
    yield (root,)
    if root.is_dir():
        yield from _inner(root, changed)


@lru_cache(_NUM_SHELVES)
def _inner(root: Path, changed: int) -> tuple[tuple[Path, ...], tuple[Path, ...]]:  # noqa: ARG001 a folder with other entries is listed anew
    with os.scandir(root) as entries:
        seen = sorted(
            Path(entry.path)
            for entry in entries
            if not entry.name.startswith(".") and (entry.is_dir() or entry.name.lower().endswith(".zip"))
        )
    return tuple(path for path in seen if path.is_dir()), tuple(path for path in seen if not path.is_dir())


def _on_shelf(shelf: Path, name: str) -> list[Found]:
    return _in_folder(shelf, name) if shelf.is_dir() else _in_zip(shelf, name)


def _in_folder(folder: Path, name: str) -> list[Found]:
    for names in _names(name):
        there = {_identity(path): path for path in (folder / each for each in names) if _is_file(path)}
        if there:
            return [Found(path, size_bytes=path.stat().st_size) for path in there.values()]
    return []


def _identity(path: Path) -> tuple[int, int]:
    """Where case makes no difference, one file has several names."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _names(name: str) -> Iterator[tuple[str, ...]]:
    yield (name,)
    if PurePosixPath(name).suffix.lower() not in _EXTENSIONS:
        yield tuple(name + ending for ending in _ENDINGS)


def _in_zip(path: Path, name: str) -> list[Found]:
    """At its path inside the zip, or below a folder in it, since many zips hold one that holds all."""
    members = _members(path, path.stat().st_mtime_ns, os.getpid())
    for names in _names(name):
        whole = [member for each in names for member in members.get(posixpath.basename(each), ()) if member == each]
        below = [
            member
            for each in names
            for member in members.get(posixpath.basename(each), ())
            if member.endswith(f"/{each}")
        ]
        if whole or below:
            return [_in_archive(path, member) for member in whole or below]
    return []


def _in_archive(path: Path, member: str) -> Found:
    info = _archive(path).getinfo(member)
    if info.flag_bits & _ENCRYPTED:
        raise Fault(f"{member} in {path} is encrypted")
    return Found(path, member, info.file_size)


@lru_cache(_NUM_SHELVES)
def _members(path: Path, changed: int, process: int) -> dict[str, list[str]]:  # noqa: ARG001 a zip that was written anew is read anew
    """By the last part of their names."""
    members: dict[str, list[str]] = {}
    for name in _archive(path).namelist():
        if not name.endswith("/"):
            members.setdefault(posixpath.basename(name), []).append(name)
    return members


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return _open_archive(path, path.stat().st_mtime_ns, os.getpid())
    except (OSError, zipfile.BadZipFile) as error:
        raise Fault(f"{path} is no zip that can be read: {error}") from None


@lru_cache(_NUM_SHELVES)
def _open_archive(path: Path, changed: int, process: int) -> zipfile.ZipFile:  # noqa: ARG001 a forked process would share its position in the file
    return zipfile.ZipFile(path)


def _told(place: Found) -> str:
    return f"{place.member} in {place.path}" if place.member else str(place.path)
