"""Tables and items of plain data, built once and rendered on a page, on a terminal or as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from finefit.report.layout import visible

Style = Literal["", "strong", "soft", "good", "bad", "missing"]


@dataclass(frozen=True, slots=True)
class TableCell:
    text: str
    detail: str = ""
    """Less prominent text after the main text, such as an interval."""
    style: Style = ""
    side: int | None = None
    """The side that the cell names; the page shows its colour."""


@dataclass(frozen=True, slots=True)
class TableRow:
    cells: tuple[TableCell, ...]
    kind: Literal["", "soft", "mean"] = ""
    """`soft` is one data set of the row above; `mean` takes the seeds above together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    title: str
    columns: tuple[TableCell, ...]
    rows: tuple[TableRow, ...]
    """The first column names the row."""
    holds_text: bool = False
    """Whether the other columns hold text instead of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """An answered item, with the answers of several models side by side."""

    title: str
    change: str
    prompt: str
    reference: str
    answers: tuple[tuple[str, str, str | None], ...]
    """For each model, its name and score, the answer, and why scoring failed."""


_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#$"} | {"\n": " ", "\t": " "})


def markdown_table(data: TableData) -> Iterator[str]:
    def line(cells: Sequence[TableCell]) -> str:
        texts = (f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in cells)
        return f"| {' | '.join(map(escaped_markdown, texts))} |"

    yield f"\n{line(data.columns)}"
    yield f"|{'---|' * len(data.columns)}"
    yield from (line(row.cells) for row in data.rows)


def escaped_markdown(text: str) -> str:
    return visible(text).translate(_SPECIAL)
