"""What became of every row."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from finefit.artifacts.journal import read_lines
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Preparation, SourceLedger

_GUTTER = 12
_SOURCE = TypeAdapter(SourceLedger)


def show_ledger(found: Preparation, console: Console) -> None:
    for source in found.sources:
        console.print(f"{source.split:<{_GUTTER}}{source.source}", soft_wrap=True)
        for line in (_read_as(source), "; ".join(_counts(source)), _tokens(source)):
            console.print(" " * _GUTTER + line, soft_wrap=True)


def _read_as(source: SourceLedger) -> str:
    return f"read as {source.shape}: " + ", ".join(f"{use} = {column}" for use, column in source.mapping.items())


def ledger_lines(where: StageDir) -> list[str]:
    """Of a run: one for each source."""
    entries = [_SOURCE.validate_python(entry) for entry in read_lines(where.ledger) if "read" in entry]
    return [f"{entry.split} {entry.source}: {'; '.join((*_counts(entry), _tokens(entry)))}" for entry in entries]


def _counts(source: SourceLedger) -> Iterator[str]:
    if source.records:
        yield f"{source.records:,} {'record' if source.records == 1 else 'records'}"
    if source.read != source.records:
        yield _rows(source.read)
    yield f"{source.used:,} used" + (
        f" ({source.cut:,} cut, {source.cut_tokens:,} tokens of their prompts lost)" if source.cut else ""
    )
    if source.dropped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in source.dropped.items())
        yield f"{sum(source.dropped.values()):,} dropped ({reasons})"
    if source.examples and source.examples != source.used:
        yield f"{source.examples:,} sequences"
    if source.repeated:
        yield f"{source.repeated:,} repeated by weight"
    if source.images:
        yield f"{source.images:,} {'image' if source.images == 1 else 'images'}"


def _tokens(source: SourceLedger) -> str:
    if source.split == "test":
        return f"{source.tokens:,} tokens of prompts"
    share = source.supervised_tokens / source.tokens if source.tokens else 0
    return f"{source.tokens:,} tokens, {source.supervised_tokens:,} supervised ({share:.0%})"


def _rows(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"


def ledger_document(found: Preparation) -> dict[str, Any]:
    sources = TypeAdapter(list[SourceLedger]).dump_python(list(found.sources), mode="json")
    return {**_totals(found.sources), "sources": sources}


def _totals(sources: Sequence[SourceLedger]) -> dict[str, Any]:
    names = (
        "records",
        "read",
        "used",
        "cut",
        "cut_tokens",
        "examples",
        "repeated",
        "tokens",
        "supervised_tokens",
        "images",
    )
    dropped: Counter[str] = Counter()
    for source in sources:
        dropped.update(source.dropped)
    return {name: sum(getattr(source, name) for source in sources) for name in names} | {"dropped": dict(dropped)}
