"""Numbers, texts, lines and tables as people read them. Units such as GiB appear only in `report`.

Lines are laid out by hand so that a file gets plain lines without trailing spaces."""

import io
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

C = TypeVar("C")
GUTTER, GAP = 12, 2
MIN_ROOM = 24
"""Minimum width of a column whose text is wrapped."""
PLAIN_TABLE: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 2, 0, 0)}
"""Arguments of a rich table without lines."""
_TURN = re.compile(
    r"(?:<\|(?:im_start|start_header_id|turn|start)\|>|<start_of_turn>)(?P<role>\w+)(?:<\|(?:end_header_id|message)\|>)?\n*"
    r"|<\|(?P<tag>system|user|assistant|tool)\|>\n*"
)
"""The openings of a turn in the templates of ChatML, Llama 3, Gemma, gpt-oss and Phi."""
_CONTROL = re.compile(r"<\|[^|<>\s]*\|>|</?s>|<(?:bos|eos|end_of_turn)>|\[/?INST\]|<<SYS>>|<</SYS>>")
_DIRECTION_MARKS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line)


_HTML = '<pre style="font-family: ui-monospace, monospace; line-height: 1.35; overflow-x: auto">{code}</pre>'


def terminal_html(show: Callable[[Console], None], *, width: int = 110) -> str:
    """What `show` prints on a terminal, as HTML for a notebook; rich escapes all text."""
    console = Console(record=True, file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    show(console)
    return console.export_html(inline_styles=True, code_format=_HTML)


def section(label: str, lines: Iterable[Text]) -> Iterator[Text]:
    """Lines with a label in the gutter; the label may have several lines itself."""
    for name, line in zip_longest(label.splitlines(), lines, fillvalue=None):
        yield trimmed(Text.assemble((f"{name or '':<{GUTTER}}", "cyan"), line or Text()))


def hanging(console: Console, lead: Text, body: Text, *, indent: int, width: int) -> Iterator[Text]:
    """`body` wrapped at `indent`, its first line after `lead`, which has a line of its own if it is longer; spaces at
    its beginning indent all lines further."""
    deeper = len(body.plain) - len(body.plain.lstrip())
    if len(lead) > indent + deeper:
        yield trimmed(lead)
        if not body.plain.strip():
            return
        lead = Text()
    words = body[deeper:] if body.plain.strip() else body
    for at, line in enumerate(words.wrap(console, max(width - indent - deeper, 16))):
        left = Text() if at else lead
        yield trimmed(Text.assemble(left, " " * (indent + deeper - len(left)), line))


def table(
    console: Console, rows: Sequence[Mapping[str, Text]], *, right: Collection[str], below: Sequence[str]
) -> Iterator[Text]:
    """Empty columns are left out. If a line is too wide, the columns of `below` move under their row, and the last
    column is wrapped."""
    *columns, last = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {
        name: max(len(name), *(len(line) for row in rows for line in row[name].plain.split("\n")))
        for name in (*columns, last)
    }
    width_left = console.width - sum(widths[name] + GAP for name in columns)
    moved = [name for name in below if name in columns and widths[last] > width_left]
    columns = [name for name in columns if name not in moved]
    width_left += sum(widths[name] + GAP for name in moved)
    beside = [len(row[last]) <= width_left or width_left >= MIN_ROOM for row in rows]
    header = [Text(name, style="dim") for name in columns] + [Text(last if any(beside) else "", style="dim")]
    yield from _table_lines(header, [*columns, last], widths, right)
    for row, is_beside in zip(rows, beside, strict=True):
        words = Text()
        if is_beside:
            words = Text("\n").join(trimmed(line) for line in row[last].wrap(console, max(width_left, 1)))
        yield from _table_lines([*(row[name] for name in columns), words], [*columns, last], widths, right)
        for under in filter(None, [row[name] for name in moved] + ([] if is_beside else [row[last]])):
            yield from hanging(console, Text(), under, indent=widths[columns[0]] + GAP, width=console.width)


def _table_lines(
    row: Iterable[Text], columns: Sequence[str], widths: Mapping[str, int], right: Collection[str]
) -> Iterator[Text]:
    for cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=Text()):
        line = []
        for name, cell in zip(columns, cells, strict=True):
            padding = Text(" " * (widths[name] - len(cell)))
            line.append(padding + cell if name in right else cell + padding)
        yield trimmed(Text(" " * GAP).join(line))


def trimmed(line: Text) -> Text:
    line.rstrip()
    return line


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTable(Generic[C]):
    """Splits a table that is too wide for the terminal into several tables below one another, so that no figure is cut
    off."""

    columns: Sequence[C]
    """The columns to distribute; all other columns are in every table."""
    table: Callable[[Sequence[C], bool], Table]
    """Makes a table of some of the columns; True for the first one, which has the title."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = console.options.update(max_width=10_000)

        def fits(columns: Sequence[C]) -> bool:
            return console.measure(self.table(columns, False), options=unlimited).maximum <= options.max_width

        left, is_first = list(self.columns), True
        while left or is_first:
            count = next((n for n in range(len(left), 1, -1) if fits(left[:n])), 1)
            yield self.table(left[:count], is_first)
            left, is_first = left[count:], False


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """At most two units: 43 ms, 0.43 s, 8 min 37 s, 3 h 12 min, 2 d 4 h."""
    if seconds < 59.95:
        if seconds < 0.0995:
            return f"{seconds * 1000:.0f} ms"
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def apportion(weights: Sequence[int], total: int) -> list[int]:
    """Integers in proportion to the weights that add up to `total`, so that rounded figures still add up."""
    whole = max(sum(weights), 1)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda at: total * weights[at] % whole, reverse=True)
    for at in by_remainder[: total - sum(shares)]:
        shares[at] += 1
    return shares


def visible(text: str) -> str:
    """Spells out control characters and marks that change the writing direction, so that an answer can neither control
    a terminal nor break a page. Joiners, which scripts and emoji need, stay."""

    def is_unprintable(character: str) -> bool:
        is_control = character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs", "Co", "Cn")
        return is_control or character in _DIRECTION_MARKS

    return "".join(f"\\u{ord(c):04x}" if is_unprintable(c) else c for c in text)


def without_markup(prompt: str) -> str:
    """A rendered prompt made readable: each turn begins with its speaker, and control tokens are removed."""
    named = _TURN.sub(lambda found: f"\n{found['role'] or found['tag']}: ", prompt)
    text = _CONTROL.sub("", named)
    return re.sub(r"\n(assistant|model): *$", "", text.rstrip()).strip()


def shortened(text: str, max_characters: int) -> str:
    """Keeps the beginning and the end: a question is often at the end of a prompt."""
    if len(text) <= max_characters:
        return text
    head = max_characters // 2
    cut = len(text) - max_characters
    return f"{text[:head]} [... {cut:,} characters ...] {text[head + cut :]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
