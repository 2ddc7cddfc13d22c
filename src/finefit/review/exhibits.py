"""Images that sheets show: each known by what it is, read from where it lay when its rows were prepared, and never anything else in its place."""

import hashlib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from finefit.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    name: str
    """As a rater is told it."""
    sha256: str
    path: Path | None
    """The file, or the zip that holds it; None where the run no longer says."""
    member: str = ""
    """Inside the zip."""

    @property
    def suffix(self) -> str:
        return Path(self.member or self.path or "").suffix.lower()


class Gone(Exception):
    """An image that cannot be shown; the reason is for the rater."""


def content_of(exhibit: Exhibit) -> bytes:
    if exhibit.path is None:
        raise Gone(f"{exhibit.name} cannot be shown: the run's rows have changed since they were answered")
    try:
        content = _read(exhibit.path, exhibit.member)
    except (OSError, zipfile.BadZipFile, KeyError) as error:  # without its words, which hold a path
        raise Gone(
            f"{exhibit.name} is not there any more ({getattr(error, 'strerror', None) or 'it is in no zip that can be read'})"
        ) from None
    if hashlib.sha256(content).hexdigest() != exhibit.sha256:
        raise Gone(f"{exhibit.name} has changed since it was answered: what lies there now is another image")
    return content


def _read(path: Path, member: str) -> bytes:
    if not member:
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def keep_beside(path: Path, exhibits: Iterable[Exhibit]) -> dict[str, str]:
    """Copies images into a folder beside an exported file; by digest, what it calls them, relative to itself."""
    folder = path.with_name(f"{path.stem}-images")
    names: dict[str, str] = {}
    for exhibit in exhibits:
        if exhibit.sha256 in names:
            continue
        try:
            content = content_of(exhibit)
        except Gone as gone:
            raise RunError(f"the export would lack an image: {gone}", "put the image back where it was") from None
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{exhibit.sha256}{exhibit.suffix}"
        target.write_bytes(content)
        names[exhibit.sha256] = f"{folder.name}/{target.name}"
    return names
