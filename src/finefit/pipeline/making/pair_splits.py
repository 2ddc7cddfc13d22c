"""What the methods of making pairs share: the rows of a source, and a split of pairs with an account of every row that was read."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from finefit.data.falsify.audit import Audit
from finefit.data.falsify.make import RuleCount, Unused
from finefit.data.fingerprint import prompt_key
from finefit.data.read import Reading, open_source
from finefit.data.rows import BadRow, Row
from finefit.data.selection import sampled
from finefit.errors import DataError
from finefit.spec.rows import Source
from finefit.spec.stages import MakePairs

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    read: int
    """Rows, or judged sheets; each is used or among the unused."""
    used: int
    pairs: tuple[dict[str, Any], ...]
    """As they are written."""
    unused: tuple[Unused, ...]
    audit: Audit | None
    rules: Mapping[str, RuleCount] = field(default_factory=dict)


def rows_of_splits(stage: MakePairs, base: Path, seed: int) -> dict[str, list[Row | BadRow]]:
    """Of every split that is asked for; a prompt that stands in two of them is refused."""
    named = {"train": stage.train, "validation": (stage.validation,), "test": (stage.test,)}
    found = {
        split: [row for source in sources if source for row in _rows(source, base, seed, split)]
        for split, sources in named.items()
    }
    splits = {split: rows for split, rows in found.items() if any(named[split])}
    _require_apart(splits)
    return splits


def _rows(source: Source, base: Path, seed: int, split: str) -> Iterator[Row | BadRow]:
    """All of them; what a limit leaves out is a row that cannot be used, so that it is counted and named like others."""
    reading = open_anywhere(source, base, split=split)
    choice = sampled(reading, source.weight, source.limit, seed)
    ordinal = 0
    for row in reading.rows():
        if isinstance(row, BadRow):
            yield row
            continue
        choice.require(ordinal, source.path)
        is_taken = choice.taken is None or bool(choice.taken[ordinal])
        yield row if is_taken else BadRow(row.source, row.number, choice.reason, row.part)
        ordinal += 1


def open_anywhere(source: Source, base: Path, *, split: str) -> Reading:
    """Files go by their names, those of a folder by their paths within it: where they lie is no part of a pair."""
    reading = open_source(source, base, split=split)
    top = os.path.commonpath([file.path.parent for file in reading.files])
    files = (
        file if "://" in file.name else replace(file, name=file.path.relative_to(top).as_posix())
        for file in reading.files
    )
    join = None if reading.join is None else replace(reading.join, path=named_alone(reading.join.path))
    return replace(reading, files=tuple(files), join=join)


def named_alone(path: str) -> str:
    """An address stays."""
    return path if "://" in path else Path(path).name


def _require_apart(splits: Mapping[str, list[Row | BadRow]]) -> None:
    """Equal but for case and punctuation: what is held out says nothing when its answer was seen."""
    seen: dict[int, tuple[str, str]] = {}
    both: list[str] = []
    for split, rows in splits.items():
        for row in rows:
            if isinstance(row, Row) and row.kind != "text":
                first, place = seen.setdefault(prompt_key(row, with_system=True), (split, row.place))
                if first != split:
                    both.append(f"{row.place} ({split}) asks what {place} ({first}) asks")
    if both:
        more = f", and {len(both) - _SHOWN} more" if len(both) > _SHOWN else ""
        raise DataError(
            f"rows that are held out stand in another split too: {'; '.join(both[:_SHOWN])}{more}",
            "keep each row in one of the files",
        )


def require_pairs(splits: Mapping[str, Split]) -> None:
    for name, split in splits.items():
        if not split.pairs:
            reasons = (
                "; ".join(f"{count:,} {reason}" for reason, count in _reasons(split).items())
                or "there was nothing to read"
            )
            raise DataError(
                f"no pair could be made for {name} of {split.read:,} rows: {reasons}",
                "give other rows, or another method",
            )


def summary_of(split: Split) -> dict[str, Any]:
    """Plain data: what is told and kept beside the files."""
    audit = split.audit
    return {
        "read": split.read,
        "used": split.used,
        "pairs": len(split.pairs),
        "unused": _reasons(split),
        "rules": {name: asdict(count) for name, count in split.rules.items()},
        "length_auc": {} if audit is None else {name: round(auc.worst, 4) for name, auc in audit.length.items()},
        "words_auc": None if audit is None else round(audit.words.worst, 4),
        "warnings": [] if audit is None else list(audit.warnings),
    }


def report_of(split: Split) -> dict[str, Any]:
    """With every unused row by its place, and how much longer or shorter wrong sides are."""
    lengths = {} if split.audit is None else {"sizes": [asdict(size) for size in split.audit.sizes]}
    return summary_of(split) | lengths | {"unused_rows": [asdict(row) for row in split.unused]}


def _reasons(split: Split) -> dict[str, int]:
    """A reason that names another row is one of its kind."""
    return dict(Counter(_kind(row.reason) for row in split.unused).most_common())


def _kind(reason: str) -> str:
    for start in ("says the same as ", "has scores from "):
        if reason.startswith(start):
            return {
                "says the same as ": "says the same as another row",
                "has scores from ": "has scores that do not differ enough",
            }[start]
    return reason
