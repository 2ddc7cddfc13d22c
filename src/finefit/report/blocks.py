"""A report as a list of blocks, which become HTML or Markdown."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from finefit.report.layout import shortened
from finefit.report.page import escaped, figure, html_item, html_table, pre
from finefit.report.plots import can_plot
from finefit.report.tables import ItemView, TableData, escaped_markdown, markdown_table

_MAX_LISTING = 60_000
_MAX_ANSWER = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A list of sentences."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Names with what is to be said of each."""

    pairs: tuple[tuple[str, str], ...]
    title: str = ""
    """With a title, they open on demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plots:
    """Small plots side by side, or one large one: captions with what draws their SVG. Markdown has none."""

    plots: tuple[tuple[str, Callable[[], str]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A text of its own, such as a spec, which opens on demand."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A table that opens on demand."""

    title: str
    table: TableData


Block = Heading | Lines | Pairs | Plots | Listing | Folded | TableData | ItemView


def html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{escaped(block.text)}</h{block.level}>"
        case Lines():
            return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in block.lines)}</ul>"
        case Pairs():
            shown = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(words)}</dd>" for name, words in block.pairs)
            listed = f"<dl>{shown}</dl>"
            summary = f"<summary>{escaped(block.title)}</summary>"
            return f"<details>{summary}{listed}</details>" if block.title else listed
        case Plots():
            drawn = [_captioned(draw(), caption) for caption, draw in block.plots] if can_plot() else []
            return f'<div class="plots{" several" if len(drawn) > 1 else ""}">{"".join(drawn)}</div>'
        case Listing():
            return f"<details><summary>{escaped(block.title)}</summary>{pre(block.text, _MAX_LISTING)}</details>"
        case Folded():
            return f"<details><summary>{escaped(block.title)}</summary>{html_table(block.table)}</details>"
        case TableData():
            return (f"<h4>{escaped(block.title)}</h4>" if block.title else "") + html_table(block)
        case ItemView():
            return html_item(block)


def _captioned(svg: str, caption: str) -> str:
    return f"<div><h4>{escaped(caption)}</h4>{figure(svg, caption)}</div>"


def markdown(blocks: Iterable[Block]) -> str:
    return "\n".join(line for block in blocks for line in _markdown_lines(block)).strip() + "\n"


def _markdown_lines(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"\n{'#' * block.level} {escaped_markdown(block.text)}"
        case Lines():
            yield ""
            yield from (f"- {escaped_markdown(line)}" for line in block.lines)
        case Pairs():
            yield f"\n{escaped_markdown(block.title)}:\n" if block.title else ""
            yield from (f"- **{escaped_markdown(name)}** {escaped_markdown(words)}" for name, words in block.pairs)
        case Plots():
            pass
        case Listing():
            yield f"\n{escaped_markdown(block.title)}:\n"
            yield from _fenced(shortened(block.text, _MAX_LISTING))
        case Folded():
            yield f"\n{escaped_markdown(block.title)}:"
            yield from markdown_table(block.table)
        case TableData():
            yield from ([f"\n**{escaped_markdown(block.title)}**"] if block.title else [])
            yield from markdown_table(block)
        case ItemView():
            yield f"\n**{escaped_markdown(block.title)}**\n"
            answers = [(name, f"{answer} ({failed})" if failed else answer) for name, answer, failed in block.answers]
            for name, text in (("prompt", block.prompt), ("reference", block.reference), *answers):
                yield f"- {escaped_markdown(name)}: {escaped_markdown(shortened(text.strip(), _MAX_ANSWER))}"


def _fenced(text: str) -> Iterator[str]:
    """As code, with each line indented, so that no text can end it."""
    yield from (f"    {line}" for line in text.rstrip().splitlines())
