"""What the images are, by content, that rows name by path: a stage that stands on the rows stands on these too.

Which images rows name is kept by the content of their files; what an image holds by the size and time of the file that it lies in. So a second look
reads neither rows nor images, but those that have changed.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import finefit
from finefit.artifacts.atomic import write_text
from finefit.data.cells import Fault
from finefit.data.files import find_files
from finefit.data.image_files import content_at, find_image
from finefit.data.read import open_source
from finefit.data.rows import Image, Row
from finefit.data.sightings import State, state_of
from finefit.errors import DataError, DiskFull
from finefit.facts.files import finefit_cache
from finefit.spec.rows import Source

_MOST_KEPT = 100
_NUM_READ = 16


class _Seen(NamedTuple):
    """An image as rows name it, and what was found there."""

    root: str
    path: str
    state: State | None = None
    """Of the file or zip that it lies in; None where it is not there, or cannot be read."""
    sha256: str = ""


def images_digest(source: Source, base: Path, *, split: str, content: str) -> str | None:
    """The same wherever the rows lie with their images; None where they name none by a path. `content`: digest of the files of the rows."""
    if source.path.startswith("hf://") and source.images_root is None:
        return None  # what lies beside them is of the same commit
    try:
        place = finefit_cache() / "images" / f"{_key(source, base, split, content)}.jsonl"
        before = _kept(place)
        now = [_looked_at(one) for one in (_named(source, base, split) if before is None else before)]
    except DataError:  # told when the rows are examined
        return None
    if now != before:
        with suppress(OSError, DiskFull):  # a cache that cannot be written costs time and nothing else
            _keep(place, now)
    return hashlib.sha256(json.dumps([(one.path, one.sha256) for one in now]).encode()).hexdigest() if now else None


def _key(source: Source, base: Path, split: str, content: str) -> str:
    """Of all that decides which images are named, and of where they are looked for."""
    code = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted((Path(finefit.__file__).parent / "data").rglob("*.py")))
    ).hexdigest()
    files = [str(file.path.absolute()) for file in find_files(source.path, base, split=split)]
    root = None if source.images_root is None else str((base / source.images_root).absolute())
    asked = source.model_dump(mode="json", include={"fields", "where"})
    return hashlib.sha256(json.dumps([files, root, asked, split, content, code], sort_keys=True).encode()).hexdigest()


def _named(source: Source, base: Path, split: str) -> Iterator[_Seen]:
    """Each once, in the order of the rows. Images that a row holds itself are a part of its file."""
    reading = open_source(source, base, split=split)
    rows = (row for row in reading.rows() if isinstance(row, Row))
    yield from dict.fromkeys(
        _Seen(str(Path(image.root).absolute()), image.path) for row in rows for image in row.images if image.path
    )


def _looked_at(before: _Seen) -> _Seen:
    """A file of the same size and time is taken to be the same."""
    if before.state is not None and state_of(before.state[0]) == before.state:
        return before
    try:
        found = find_image(Image(path=before.path, root=before.root))
        state = state_of(found.path)  # before it is read: should it change meanwhile, it is read again
        return before._replace(state=state, sha256=hashlib.sha256(content_at(found, before.path)).hexdigest())
    except Fault:
        return before._replace(state=None, sha256="")


def _kept(place: Path) -> list[_Seen] | None:
    try:
        return _read(place, place.stat().st_mtime_ns)
    except (OSError, ValueError, TypeError):  # not there, or not to be read
        return None


@lru_cache(_NUM_READ)
def _read(place: Path, changed: int) -> list[_Seen]:  # noqa: ARG001 what was written anew is read anew
    with place.open(encoding="utf-8") as file:
        lines = (json.loads(line) for line in file)
        return [
            _Seen(root, path, None if state is None else tuple(state), sha256) for root, path, state, sha256 in lines
        ]


def _keep(place: Path, seen: list[_Seen]) -> None:
    """The newest ones only: all versions of all rows would be many."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_text(place, "".join(json.dumps(one) + "\n" for one in seen))
    kept = sorted(place.parent.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for old in kept[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)
