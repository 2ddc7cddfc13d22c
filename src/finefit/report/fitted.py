"""A table with more columns than the terminal has room for becomes several below one another: no figure is ever cut off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

C = TypeVar("C")
_WIDEST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[C]):
    columns: Sequence[C]
    """Those that may be divided; what stands beside them is in every table."""
    table: Callable[[Sequence[C], bool], Table]
    """Of some of the columns; the first one has the title."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left, is_first = list(self.columns), True
        while left or is_first:
            count = next((n for n in range(len(left), 1, -1) if self._width(console, left[:n]) <= options.max_width), 1)
            yield self.table(left[:count], is_first)
            left, is_first = left[count:], False

    def _width(self, console: Console, columns: Sequence[C]) -> int:
        return console.measure(self.table(columns, False), options=console.options.update(max_width=_WIDEST)).maximum
