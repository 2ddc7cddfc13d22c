"""What a review judges: items, each with a prompt, the answers of one or two models, and the images of the prompt."""

import hashlib
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from finefit.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewImage:
    """An image identified by its digest and read from where it was when its row was prepared."""

    name: str
    """Shown to the rater."""
    sha256: str
    path: Path | None
    """The file, or the zip that holds it; None if the run no longer knows."""
    member: str = ""
    """Its name inside the zip."""


class ImageUnavailable(Exception):
    """An image cannot be shown; the message is for the rater."""


def read_image(image: ReviewImage) -> bytes:
    """Never returns another image than the one that was answered."""
    if image.path is None:
        raise ImageUnavailable(f"{image.name} cannot be shown: the run's rows have changed since they were answered")
    try:
        content = _read(image.path, image.member)
    except (OSError, zipfile.BadZipFile, KeyError) as error:  # its message would reveal a path
        reason = getattr(error, "strerror", None) or "no readable zip holds it"
        raise ImageUnavailable(f"{image.name} is no longer there ({reason})") from None
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise ImageUnavailable(f"{image.name} has changed since it was answered: the file is another image now")
    return content


def _read(path: Path, member: str) -> bytes:
    if not member:
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def copy_images(path: Path, images: Iterable[ReviewImage]) -> dict[str, str]:
    """Copies images into a folder next to an exported file. Digest -> path relative to that file."""
    folder = path.with_name(f"{path.stem}-images")
    names: dict[str, str] = {}
    for image in images:
        if image.sha256 in names:
            continue
        try:
            content = read_image(image)
        except ImageUnavailable as reason:
            raise RunError(f"the export would lack an image: {reason}", "put the image back where it was") from None
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{image.sha256}{Path(image.member or image.path or '').suffix.lower()}"
        target.write_bytes(content)
        names[image.sha256] = f"{folder.name}/{target.name}"
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMessage:
    role: str
    """Empty if the prompt is one plain text."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewItem:
    key: str
    """The same item has the same key in every run."""
    prompt: tuple[PromptMessage, ...]
    answers: tuple[str, ...]
    """In the order of the review set's models."""
    tools: str = ""
    """The tools that the prompt offers, as a JSON list, or nothing."""
    reference: str | None = None
    is_reference_whole: bool = True
    """Whether the reference is the row's whole answer, without tool calls or reasoning beside it."""
    place: str = ""
    """Where the item comes from. It is shown, so it must not reveal a model."""
    images: tuple[ReviewImage, ...] = ()
    """In the order in which the prompt shows them."""
    is_rendered: bool = False
    """Whether the prompt is only known as rendered by a chat template; training would render it a second time."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the answers: a verdict on one text says nothing about another text in its place."""
        return tuple(digest(answer) for answer in self.answers)

    @property
    def handle(self) -> str:
        """The page's name for the item. The key may come from the user and name a model."""
        return digest(json.dumps([self.key, *self.digests]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewSet:
    name: str
    """The journal with its verdicts is `reviews/<name>.jsonl`."""
    task: str
    models: tuple[str, ...]
    """One or two."""
    items: tuple[ReviewItem, ...] = field(repr=False)
    unpaired: int = 0
    """Items that only one of two models answered."""


@lru_cache(maxsize=1 << 16)  # every turn needs the digests of all items
def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
