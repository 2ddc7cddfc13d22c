"""Rows -> tokens, once, in files that the worker reads: a run directory needs neither the data files nor the template again."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from finefit.artifacts.records import DroppedRow, SourceLedger
from finefit.data.render import Example, Renderer
from finefit.data.rows import Message, Row
from finefit.errors import DataError

_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    examples: tuple[Example, ...]
    ledger: tuple[SourceLedger, ...]
    dropped: tuple[DroppedRow, ...]


def prepare(rows: Sequence[Row], renderer: Renderer, *, split: str, max_tokens: int, too_long: Literal["error", "drop"]) -> Prepared:
    examples: list[tuple[str, Example]] = []
    dropped: list[DroppedRow] = []
    for row in rows:
        example = _rendered(row, renderer)
        if len(example.tokens) <= max_tokens:
            examples.append((row.source, example))
        else:
            reason = f"too long: {len(example.tokens)} tokens, max_tokens is {max_tokens}"
            dropped.append(DroppedRow(split=split, source=row.source, row=row.number, reason=reason))
    if dropped and too_long == "error":
        more = f"\nand {len(dropped) - _SHOWN} more" if len(dropped) > _SHOWN else ""
        raise DataError(
            "\n".join(f"{d.source}:{d.row} {d.reason}" for d in dropped[:_SHOWN]) + more,
            "raise data.max_tokens, or set data.too_long: drop to leave these rows out; an answer is never cut",
        )
    if not examples:
        raise DataError(f"all {len(rows)} {split} rows are longer than max_tokens {max_tokens}", "raise data.max_tokens")
    return Prepared(examples=tuple(e for _, e in examples), ledger=_ledger(rows, examples, dropped, split), dropped=tuple(dropped))


def _rendered(row: Row, renderer: Renderer) -> Example:
    try:
        return renderer.example(row.messages, num_given=row.num_given)
    except DataError as error:
        raise DataError(f"{row.place} {error.problem}", error.remedy) from None


def _ledger(rows: Sequence[Row], examples: Sequence[tuple[str, Example]], dropped: Sequence[DroppedRow], split: str) -> tuple[SourceLedger, ...]:
    read = Counter(row.source for row in rows)
    too_long = Counter(d.source for d in dropped)
    return tuple(
        SourceLedger(
            split=split,
            source=source,
            read=count,
            used=count - too_long[source],
            dropped={"too long": too_long[source]} if too_long[source] else {},
            tokens=sum(len(e.tokens) for s, e in examples if s == source),
            supervised_tokens=sum(sum(e.supervised) for s, e in examples if s == source),
        )
        for source, count in read.items()
    )


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    lengths = [len(e.tokens) for e in examples]
    save_file(
        {
            "tokens": np.concatenate([np.asarray(e.tokens, dtype=np.int32) for e in examples]),
            "supervised": np.concatenate([np.asarray(e.supervised, dtype=np.uint8) for e in examples]),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        },
        path,
    )


def read_examples(path: Path) -> list[Example]:
    arrays = load_file(path)
    tokens, supervised, offsets = (arrays[name].tolist() for name in ("tokens", "supervised", "offsets"))
    return [Example(tuple(tokens[start:end]), tuple(bool(flag) for flag in supervised[start:end])) for start, end in pairwise(offsets)]


def write_items(path: Path, rows: Sequence[Row]) -> None:
    """Test rows keep their text: a task builds its prompt and reads its reference from them."""
    lines = [json.dumps([{"role": m.role, "content": m.content} for m in row.messages], ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_items(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [
        Row(source=path.name, number=at, messages=tuple(Message(**message) for message in json.loads(line)))
        for at, line in enumerate(lines, start=1)
        if line
    ]
