"""A self-contained page: no script, no external resource, all text escaped, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from finefit.report.layout import shortened, visible
from finefit.report.plots import INSTALL, colour
from finefit.report.tables import ItemView, TableCell, TableData

_MAX_CELL, _MAX_TEXT = 400, 4000
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_CLASSES = {"strong": "strong", "soft": "soft", "good": "good", "bad": "bad", "missing": "warn"}


def html_page(kind: str, title: str, parts: Iterable[str]) -> str:
    """`parts` are HTML; the rest is text."""
    style = files("finefit.report").joinpath("compare.css").read_text(encoding="utf-8")
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>",
        f'<p class="soft">{escaped(kind)}</p>\n<h1>{escaped(title)}</h1>',
    ]
    return "\n".join([*head, *parts, "</body>\n</html>\n"])


def framed(page: str) -> str:
    """A page within a notebook, which neither its styles nor its answers can touch."""
    style = "width: 100%; height: 44rem; border: 1px solid #8884; border-radius: 6px"
    return f'<iframe sandbox title="finefit" srcdoc="{escape(page)}" style="{style}"></iframe>'


def no_plots() -> str:
    return f"<p class=warn>This page has no plots, because matplotlib is not installed: {escaped(INSTALL)}</p>"


def escaped(text: str) -> str:
    return escape(visible(text))


def figure(svg: str, caption: str) -> str:
    return f'<figure role="img" aria-label="{escaped(caption)}">{svg}</figure>'


def html_table(data: TableData) -> str:
    def line(cells: Sequence[TableCell], tag: str) -> str:
        of_number = "" if data.holds_text else " class=n"
        return "".join(f"<{tag}{of_number if at else ''}>{_cell(cell)}</{tag}>" for at, cell in enumerate(cells))

    rows = (f"<tr{f' class={row.kind}' if row.kind else ''}>{line(row.cells, 'td')}</tr>" for row in data.rows)
    kind = " class=settings" if data.holds_text else ""
    head = f"<thead><tr>{line(data.columns, 'th')}</tr></thead>"
    return f'<div class="wide"><table{kind}>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _cell(cell: TableCell) -> str:
    dot = "" if cell.side is None else f'<span class="dot" style="background:{colour(cell.side)}"></span>'
    text = escaped(shortened(cell.text, _MAX_CELL))
    if cell.style:
        text = f'<span class="{_CLASSES[cell.style]}">{text}</span>'
    return f'{dot}{text} <span class="soft">{escaped(cell.detail)}</span>' if cell.detail else f"{dot}{text}"


def pre(text: str, at_most: int = _MAX_TEXT) -> str:
    return f'<pre dir="auto">{escaped(shortened(text.strip(), at_most))}</pre>'


def html_item(item: ItemView) -> str:
    parts = [f'<div class="both"><h4>prompt</h4>{pre(item.prompt)}</div>']
    parts.append(f'<div class="both"><h4>reference</h4>{pre(item.reference)}</div>')
    for name, answer, failure in item.answers:
        failed = "" if failure is None else f'<p class="warn">{escaped(failure)}</p>'
        parts.append(f"<div><h4>{escaped(name)}</h4>{pre(answer)}{failed}</div>")
    summary = escaped(", ".join(filter(None, (item.title, item.change))))
    return f'<details><summary>{summary}</summary><div class="item">{"".join(parts)}</div></details>'
