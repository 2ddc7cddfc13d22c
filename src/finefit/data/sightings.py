"""Which files the images of a preparation came from, so that one that was changed, mended or taken away is known without decoding all of them again.

A file of the same size and time is taken to be the same; of any other its content is read. Training looks at the content in any case.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from finefit.data.cells import Fault
from finefit.data.image_files import Found, content_at, find_image
from finefit.data.pictures import Picture
from finefit.data.rows import Image

NAME = "sightings.jsonl"

State = tuple[str, int, int]
"""Path, bytes, and when it was last written, in nanoseconds."""


class Sightings:
    def __init__(self) -> None:
        self._contents: dict[str, dict[str, str]] = {}
        self._faulty: dict[tuple[str, str], Image] = {}
        self._shown = hashlib.sha256()
        self._num_shown = 0

    def add(self, images: Sequence[Image], pictures: Sequence[Picture]) -> None:
        """What a row was found to show."""
        for image, picture in zip(images, pictures, strict=True):
            if image.path:
                self._contents.setdefault(picture.path, {})[picture.member] = picture.sha256

    def add_faulty(self, images: Iterable[Image]) -> None:
        """Of a row that cannot be used for one of them; it may be mended later."""
        self._faulty |= {(image.root, image.path): image for image in images if image.path}

    def show(self, split: str, pictures: Sequence[Picture]) -> None:
        """In the order of the rows that are used."""
        self._num_shown += len(pictures)
        self._shown.update(json.dumps([split, *(picture.sha256 for picture in pictures)]).encode())

    @property
    def sha256(self) -> str | None:
        """Of all that is shown, wherever it lies; None where nothing is."""
        return self._shown.hexdigest() if self._num_shown else None

    def write(self, folder: Path) -> None:
        """Nothing where no image lies in a file."""
        lines: list[object] = [
            {"state": state_of(path), "contents": contents} for path, contents in self._contents.items()
        ]
        lines += [
            {"root": image.root, "path": image.path, "state": _state_of_image(image)} for image in self._faulty.values()
        ]
        if lines:
            (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def are_unchanged(folder: Path) -> bool:
    """Whether all images are what they were when the rows in `folder` were prepared."""
    path = folder / NAME
    if not path.is_file():
        return True
    with path.open(encoding="utf-8") as file:
        return all(_is_unchanged(json.loads(line)) for line in file)


def _is_unchanged(line: dict[str, object]) -> bool:
    match line:
        case {"state": [str(path), size, time], "contents": dict(contents)}:
            found = state_of(path)
            return found == (path, size, time) or (
                found is not None and all(_has(path, member, sha256) for member, sha256 in contents.items())
            )
        case {"root": str(root), "path": str(path), "state": state}:
            found = _state_of_image(Image(path=path, root=root))
            return (None if found is None else list(found)) == state
        case _:
            return False


def _has(path: str, member: str, sha256: str) -> bool:
    try:
        return hashlib.sha256(content_at(Found(Path(path), member), path)).hexdigest() == sha256
    except Fault:
        return False


def _state_of_image(image: Image) -> State | None:
    """Of the file that an image is found in; None where there is none."""
    try:
        return state_of(find_image(image).path.absolute())
    except Fault:
        return None


def state_of(path: str | Path) -> State | None:
    """Of a file; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 of a hundred thousand files, most of the time would go into making paths
    except (OSError, ValueError):
        return None
    return str(path), status.st_size, status.st_mtime_ns
