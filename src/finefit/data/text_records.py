"""Text files -> records: lines, paragraphs, a whole document, or AMR graphs with their sentences."""

import re
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Literal

from finefit.data.content import HEAD, Numbered, Value, holds_no_rows, open_text
from finefit.data.files import DataFile
from finefit.errors import DataError

Unit = Literal["line", "paragraph", "document"]

_SENTENCE = re.compile(r"^[ \t]*#[ \t]*::snt(?!\S)", re.MULTILINE)


def holds_graphs(file: DataFile) -> bool:
    """Whether it is AMR: a sentence stands above each graph."""
    with open_text(file) as handle:
        return _SENTENCE.search(handle.read(HEAD)) is not None


def read_text(file: DataFile, unit: Unit | None) -> Numbered:
    """Line breaks come back as line feeds. A unit that the user names wins over what the file looks like."""
    if unit is None and holds_graphs(file):
        yield from _read_amr(file)
        return
    found = False
    for number, text in _texts(file, _require_unit(file, unit)):
        found = True
        yield number, {"text": text}
    if not found:
        raise holds_no_rows(file)


def _require_unit(file: DataFile, unit: Unit | None) -> Unit:
    if unit is not None:
        return unit
    num_lines = sum(1 for _ in _texts(file, "line"))
    if not num_lines:
        raise holds_no_rows(file)
    num_paragraphs = sum(1 for _ in _texts(file, "paragraph"))
    raise DataError(
        f"{file.name} is plain text: {num_lines} records by line, {num_paragraphs} by paragraph, 1 as a document",
        "say which is meant with `fields: {text: line}`, `{text: paragraph}` or `{text: document}`",
    )


def _texts(file: DataFile, unit: Unit) -> Iterator[tuple[int, str]]:
    match unit:
        case "line":
            return ((number, line) for number, line in enumerate(_lines(file), start=1) if line.strip())
        case "paragraph":
            return ((number, "\n".join(lines)) for number, lines in enumerate(_blocks(file), start=1))
        case "document":
            text = "\n".join(_lines(file)).strip("\n")
            return iter([(1, text)] if text.strip() else [])


def _lines(file: DataFile) -> Iterator[str]:
    with open_text(file) as handle:
        for line in handle:
            yield line.removesuffix("\n").removesuffix("\r")


def _blocks(file: DataFile) -> Iterator[list[str]]:
    """Lines between lines that are blank; one that holds a tab is blank too."""
    for is_text, lines in groupby(_lines(file), key=lambda line: bool(line.strip())):
        if is_text:
            yield list(lines)


def _read_amr(file: DataFile) -> Numbered:
    number = 0
    for block in chain.from_iterable(map(_graphs, _blocks(file))):
        graph = "\n".join(line for line in block if not _is_comment(line))
        facts = [fact for line in block if _is_comment(line) for fact in _metadata(line)]
        sentences = [text for name, text in facts if name == "snt"]
        if not graph and not sentences:
            continue  # comments alone, such as the head of a release
        number += 1
        if fault := _amr_fault(graph, sentences, {name for name, _ in facts}):
            yield number, fault
        else:
            yield number, {**_joined(facts), "amr": graph}


def _graphs(block: list[str]) -> Iterator[list[str]]:
    """A block, or its parts where the blank line before the next sentence is missing: metadata below a graph belongs to the next one."""
    part: list[str] = []
    for line in block:
        if _metadata(line) and not all(map(_is_comment, part)):
            yield part
            part = []
        part.append(line)
    yield part


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _metadata(line: str) -> list[tuple[str, str]]:
    """`# ::id x ::date y`; a sentence reaches to the end of its line."""
    if not _is_comment(line):
        return []
    before, mark, sentence = _partition(line.lstrip()[1:])
    facts = [re.split(r"\s+", fact, maxsplit=1) for fact in re.split(r"(?:^|(?<=\s))::(?=\S)", before)[1:]]
    return [(fact[0], "".join(fact[1:]).strip()) for fact in facts] + ([("snt", sentence.strip())] if mark else [])


def _partition(text: str) -> tuple[str, str, str]:
    mark = re.search(r"(?:^|(?<=\s))::snt(?!\S)", text)
    return (text[: mark.start()], mark[0], text[mark.end() :]) if mark else (text, "", "")


def _amr_fault(graph: str, sentences: list[str], names: set[str]) -> str | None:
    if not graph:
        return "has a ::snt line but no graph"
    if len(sentences) > 1:
        return f"has one graph below {len(sentences)} ::snt lines"
    if not any(sentences):
        return "has a graph but no sentence in a ::snt line"
    return "has metadata named ::amr, which is the field of the graph" if "amr" in names else None


def _joined(facts: list[tuple[str, str]]) -> Value:
    """A name that stands twice, as the date of annotation and of alignment, keeps both of its values."""
    value: Value = {}
    for name, text in facts:
        value[name] = f"{value[name]}\n{text}" if name in value else text
    return value
