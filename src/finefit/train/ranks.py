"""The processes of a stage as one of them sees the others. Everything that one rank decides and all must follow goes through here."""

from collections.abc import Sequence
from typing import Any, Protocol


class Ranks(Protocol):
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """The one that writes: metrics, checkpoints, the result."""
        ...

    def any(self, claim: bool) -> bool:
        """Whether it is true of any rank; every rank gets the same answer, so every rank has to ask."""
        ...

    def gather(self, value: Any) -> Sequence[Any]:
        """Plain data of every rank, by rank."""
        ...

    def barrier(self) -> None: ...


class OneRank:
    rank, size = 0, 1
    is_first = True

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: Any) -> Sequence[Any]:
        return [value]

    def barrier(self) -> None:
        return


ONE_RANK = OneRank()
