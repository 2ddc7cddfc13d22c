"""Images of the rows that come next, decoded in processes of their own while the model is busy with those before them; and the proof, before anything
is asked, that all of them are still what they were when their rows were prepared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from finefit.data.cells import Fault
from finefit.data.eyes.eye import Eye, Lens, Shown
from finefit.data.looking import See, eye_of, show, unchanged
from finefit.data.pictures import Picture
from finefit.data.rows import Row
from finefit.errors import DataError

Submit = Callable[..., "Future[Any]"]
"""(call, *arguments) -> what it will return, such as `Workers.submit`."""
_AHEAD: Final = 1 << 28
"""Numbers of pixels that wait for their batch; 1 GiB of them."""
_READERS: Final = 8
_NAMED: Final = 5
"""Of the rows at fault."""


class Gallery:
    """Shows each picture once while it is wanted, however many rows ask about it."""

    def __init__(self, see: See, submit: Submit, *, most_ahead: int = _AHEAD) -> None:
        self._see, self._submit, self._most_ahead = see, submit, most_ahead
        self._coming: dict[Picture, Future[Shown]] = {}

    @property
    def lens(self) -> Lens:
        return _eye(self._see).lens

    def ahead(self, now: Iterable[Picture], then: Iterable[Picture]) -> None:
        """What is shown now, all of it, and of what is shown then as much as may wait. Anything else is let go."""
        wanted = dict.fromkeys([*now, *_first(then, self._most_ahead)])
        self._coming = {
            picture: self._coming.get(picture) or self._submit(_shown, self._see, picture) for picture in wanted
        }

    def show(self, picture: Picture) -> Shown:
        found: Future[Shown] = self._coming.get(picture) or self._submit(_shown, self._see, picture)
        return found.result()


def _first(pictures: Iterable[Picture], most: int) -> Iterator[Picture]:
    total = 0
    for picture in pictures:
        total += picture.num_values
        if total > most:
            return
        yield picture


def _shown(see: See, picture: Picture) -> Shown:
    return show(_eye(see), picture)


def _eye(see: See) -> Eye:
    eye = eye_of(see)
    assert eye is not None, "a gallery is for models that see"
    return eye


def require_pictures(rows: Sequence[Row]) -> None:
    """All at once, by file and row, before a model is loaded: an answer about an image that is not there is none."""
    first: dict[Picture, str] = {}
    for row in rows:
        first |= {picture: row.place for picture in row.pictures if picture not in first}
    with ThreadPoolExecutor(_READERS) as readers:
        faults = [
            f"{first[picture]}: {fault}"
            for picture, fault in zip(first, readers.map(_fault, first), strict=True)
            if fault
        ]
    if faults:
        more = f"\nand {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise DataError(
            "\n".join(faults[:_NAMED]) + more,
            "put the images back as they were, or prepare the rows anew: start again with --new",
        )


def _fault(picture: Picture) -> str:
    """Empty where there is none."""
    try:
        unchanged(picture)
    except Fault as fault:
        return f"its image {fault}"
    return ""
