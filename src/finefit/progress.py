"""What a long call is doing, for the callbacks of the Python API and for the terminal."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A training counts steps, an evaluation answers. News, such as a saved checkpoint, has no count.

    >>> print(Progress(subject="training", words="step 3/8  loss 1.2500", done=3, total=8))
    step 3/8  loss 1.2500
    """

    subject: str
    words: str
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        return self.words


OnProgress = Callable[[Progress], None]
