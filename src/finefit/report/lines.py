"""Lines of a report, laid out by hand and not by rich's tables, so that a file gets plain lines without padding."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

GUTTER, GAP = 12, 2
MIN_ROOM = 24
"""Characters that a column of words needs to be wrapped in."""


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line)


def section(label: str, lines: Iterable[Text]) -> Iterator[Text]:
    """The label stands in the gutter, in as many lines as it has."""
    for name, line in zip_longest(label.splitlines(), lines, fillvalue=None):
        yield trimmed(Text.assemble((f"{name or '':<{GUTTER}}", "cyan"), line or Text()))


def hanging(console: Console, lead: Text, body: Text, *, indent: int, width: int) -> Iterator[Text]:
    """`body` in lines that all begin at `indent`, the first behind `lead`; spaces at its own beginning are kept for all of them."""
    deeper = len(body.plain) - len(body.plain.lstrip())
    words = body[deeper:] if body.plain.strip() else body
    for at, line in enumerate(words.wrap(console, max(width - indent - deeper, 16))):
        left = Text() if at else lead
        yield trimmed(Text.assemble(left, " " * (indent + deeper - len(left)), line))


def table(
    console: Console, rows: Sequence[Mapping[str, Text]], *, right: Collection[str], below: Sequence[str]
) -> Iterator[Text]:
    """Columns without a value are left out. Where a line is too wide, `below` moves under its row, and the words of the last column are wrapped."""
    *columns, last = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {
        name: max(len(name), *(len(line) for row in rows for line in row[name].plain.split("\n")))
        for name in (*columns, last)
    }
    room = console.width - sum(widths[name] + GAP for name in columns)
    moved = [name for name in below if name in columns and widths[last] > room]
    columns = [name for name in columns if name not in moved]
    room += sum(widths[name] + GAP for name in moved)
    beside = [len(row[last]) <= room or room >= MIN_ROOM for row in rows]
    header = [Text(name, style="dim") for name in columns] + [Text(last if any(beside) else "", style="dim")]
    yield from _table_lines(header, [*columns, last], widths, right)
    for row, is_beside in zip(rows, beside, strict=True):
        words = _unpadded(row[last].wrap(console, max(room, 1))) if is_beside else Text()
        yield from _table_lines([*(row[name] for name in columns), words], [*columns, last], widths, right)
        for under in filter(None, [row[name] for name in moved] + ([] if is_beside else [row[last]])):
            yield from hanging(console, Text(), under, indent=widths[columns[0]] + GAP, width=console.width)


def _unpadded(lines: Iterable[Text]) -> Text:
    return Text("\n").join(trimmed(line) for line in lines)


def _table_lines(
    row: Iterable[Text], columns: Sequence[str], widths: Mapping[str, int], right: Collection[str]
) -> Iterator[Text]:
    for cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=Text()):
        line = [_padded(cell, widths[name], name in right) for name, cell in zip(columns, cells, strict=True)]
        yield trimmed(Text(" " * GAP).join(line))


def _padded(cell: Text, width: int, is_right: bool) -> Text:
    padding = Text(" " * (width - len(cell)))
    return padding + cell if is_right else cell + padding


def trimmed(line: Text) -> Text:
    line.rstrip()
    return line
