"""Preference pairs as files that objective dpo reads: made by rules, judged by people, or sampled and scored.
report.json accounts for every row."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import StageJob
from finefit.artifacts.rundir import is_run, open_run
from finefit.data.fingerprint import prompt_key
from finefit.data.rows import BadRow, Row
from finefit.data.sources import SourceReader, open_source, sampled_rows
from finefit.errors import DataError, RunError
from finefit.negatives.balance import Audit, Sides, audit
from finefit.negatives.lexicon import read_words
from finefit.negatives.pairs import (
    EVEN,
    LENGTHS,
    RuleCount,
    UnusedRow,
    make_pairs,
    messages_record,
    pair_record,
    tools_record,
)
from finefit.review.export import preference_pairs
from finefit.review.items import ReviewSet
from finefit.review.sources import RunTarget, review_set_of_runs
from finefit.review.verdicts import JournalEntry, ReviewOpened, read_entries
from finefit.spec.data import Source
from finefit.spec.stages import MakePairs, Rules, Verdicts, moved

_MAX_SHOWN = 3
_EXPORT = "write the pairs into a file with `finefit review RUN RUN --export-pairs pairs.jsonl`, and name that"
_NOT_CARRIED = "which the pairs of a stage do not carry: train on the file itself"
_HAS_IMAGES = (
    "has images, which the pairs of a stage do not carry: train on the file that `finefit review --export-pairs` writes"
)
_GROUPED_REASONS = {
    "says the same as ": "says the same as another row",
    "has scores from ": "has scores that do not differ enough",
}
"""Reasons that begin like this name one row; they are counted as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSplit:
    read: int
    """Rows, or judged items; each is used or among the unused."""
    used: int
    pairs: tuple[dict[str, Any], ...]
    """As they are written."""
    unused: tuple[UnusedRow, ...]
    audit: Audit | None
    rules: Mapping[str, RuleCount] = field(default_factory=dict)


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """By rules or from verdicts; `sampled_pairs.make` samples."""
    stage, base = job.stage, Path(job.base)
    assert isinstance(stage, MakePairs)
    if isinstance(stage.method, Verdicts):
        return write_pairs(job, {"train": judged_pairs(stage.method, base)}, out)
    assert isinstance(stage.method, Rules)
    splits = rows_of_splits(stage, base, job.seed)
    made = {name: rule_pairs(rows, stage.method, base, job.seed) for name, rows in splits.items()}
    return write_pairs(job, made, out)


def write_pairs(
    job: StageJob, splits: Mapping[str, PairSplit], out: Path, *, loaded_bytes: int | None = None
) -> dict[str, Any]:
    """Fills `out` with a file of pairs for each split and report.json, and returns the stage's summary.
    `loaded_bytes`: held once a model was loaded."""
    assert isinstance(job.stage, MakePairs)
    require_pairs(splits)
    for name, split in splits.items():
        write_text(out / f"{name}.jsonl", "".join(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in split.pairs))
    report = {
        "version": 1,
        "seed": job.seed,
        "method": moved(job.stage.method, _file_name).model_dump(mode="json"),
        "splits": {name: _report(split) for name, split in splits.items()},
    }
    write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    summaries = {name: _summary(split) for name, split in splits.items()}
    return {"method": job.stage.method.kind, "splits": summaries, "loaded_bytes": loaded_bytes}


def rule_pairs(rows: list[Row | BadRow], method: Rules, base: Path, seed: int) -> PairSplit:
    words = None if method.words is None else read_words(base / method.words)
    made = make_pairs(rows, seed=seed, per_row=method.per_row, shares={**EVEN, **method.shares}, words=words)
    return PairSplit(
        read=made.read,
        used=made.used,
        pairs=tuple(pair_record(pair) for pair in made.pairs),
        unused=made.unused,
        audit=made.audit,
        rules={str(rule): count for rule, count in made.rules.items()},
    )


# Rows and accounts, for every method


def rows_of_splits(stage: MakePairs, base: Path, seed: int) -> dict[str, list[Row | BadRow]]:
    """Of the splits that the stage names. Rows that a limit leaves out come as bad rows, so that they are counted.
    A prompt in two splits is refused."""
    named = {"train": stage.train, "validation": (stage.validation,), "test": (stage.test,)}
    splits: dict[str, list[Row | BadRow]] = {}
    for split, sources in named.items():
        if given := [source for source in sources if source is not None]:
            readers = [(open_pair_source(source, base, split=split), source) for source in given]
            splits[split] = [row for reader, source in readers for row in sampled_rows(reader, source, seed)]
    _require_disjoint(splits)
    return splits


def open_pair_source(source: Source, base: Path, *, split: str) -> SourceReader:
    """Files are known by their names, those of a folder by their paths in it: where they lie is not part of a pair."""
    reader = open_source(source, base, split=split)
    top = os.path.commonpath([file.path.parent for file in reader.files])
    files = (
        file if "://" in file.name else replace(file, name=file.path.relative_to(top).as_posix())
        for file in reader.files
    )
    join = None if reader.join is None else replace(reader.join, path=_file_name(reader.join.path))
    return replace(reader, files=tuple(files), join=join)


def _file_name(path: str) -> str:
    """An address stays whole."""
    return path if "://" in path else Path(path).name


def _require_disjoint(splits: Mapping[str, list[Row | BadRow]]) -> None:
    """Prompts are equal but for case and punctuation; a held-out row says nothing if its answer was trained on."""
    seen: dict[int, tuple[str, str]] = {}
    both: list[str] = []
    for split, rows in splits.items():
        for row in rows:
            if isinstance(row, Row) and row.kind != "text":
                first, place = seen.setdefault(prompt_key(row, with_system=True), (split, row.place))
                if first != split:
                    both.append(f"{row.place} ({split}) asks what {place} ({first}) asks")
    if both:
        more = f", and {len(both) - _MAX_SHOWN} more" if len(both) > _MAX_SHOWN else ""
        problem = f"held-out rows are in another split, too: {'; '.join(both[:_MAX_SHOWN])}{more}"
        raise DataError(problem, "keep each row in one of the files")


def require_pairs(splits: Mapping[str, PairSplit]) -> None:
    for name, split in splits.items():
        if not split.pairs:
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in _reasons(split).items())
            raise DataError(
                f"no pair could be made for {name} of {split.read:,} rows: {reasons or 'there was nothing to read'}",
                "give other rows, or another method",
            )


def _summary(split: PairSplit) -> dict[str, Any]:
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


def _report(split: PairSplit) -> dict[str, Any]:
    """With every unused row, and how much longer or shorter rejected sides are."""
    lengths = {} if split.audit is None else {"sizes": [asdict(size) for size in split.audit.sizes]}
    return _summary(split) | lengths | {"unused_rows": [asdict(row) for row in split.unused]}


def _reasons(split: PairSplit) -> dict[str, int]:
    def grouped(reason: str) -> str:
        return next((group for start, group in _GROUPED_REASONS.items() if reason.startswith(start)), reason)

    return dict(Counter(grouped(row.reason) for row in split.unused).most_common())


# Pairs that people have judged: from the reviews in a run directory, or from files of `finefit review --export-pairs`


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedPairs:
    """Pairs with their places, and what did not become a pair."""

    pairs: tuple[tuple[str, dict[str, Any]], ...]
    unused: tuple[UnusedRow, ...]


def judged_pairs(method: Verdicts, base: Path) -> PairSplit:
    found = [part for name in method.of for part in _judged_by(name, base)]
    pairs, repeated = _agreed([pair for part in found for pair in part.pairs])
    unused = [row for part in found for row in part.unused] + repeated
    sides = [Sides(row=str(pair["prompt"]), chosen=pair["chosen"], rejected=pair["rejected"]) for pair in pairs]
    return PairSplit(
        read=len(pairs) + len(unused),
        used=len(pairs),
        pairs=tuple(pairs),
        unused=tuple(unused),
        audit=audit(sides, LENGTHS),
    )


def _judged_by(name: str, base: Path) -> Iterator[_JudgedPairs]:
    path = base / name
    if path.is_file():
        yield _exported(name, base)
    elif not is_run(path):
        problem = f"{name} is neither a run directory nor a file with judged pairs"
        raise RunError(problem, f"name a run that was reviewed, or {_EXPORT}")
    else:
        journals = sorted((path / "reviews").glob("*.jsonl"))
        if not journals:
            problem = f"{name} has no reviews, so nobody has judged its answers"
            raise RunError(problem, f"judge them with `finefit review {name}`")
        for journal in journals:
            yield _reviewed(path, journal, f"{_file_name(name)}/reviews/{journal.name}")


def _reviewed(run: Path, journal: Path, place: str) -> _JudgedPairs:
    entries = read_entries(journal)
    made = preference_pairs(_review_set(run, journal, entries), entries)
    without_images = [row for row in made.rows if not row.get("images")]
    pairs = []
    for row in without_images:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        pairs.append((place, row | {"prompt": messages, "rule": "judged", "row": place}))
    reasons = {**made.left_out, _HAS_IMAGES: len(made.rows) - len(without_images)}
    unused = [UnusedRow(place=place, reason=reason) for reason, count in reasons.items() for _ in range(count)]
    return _JudgedPairs(pairs=tuple(pairs), unused=tuple(unused))


def _review_set(run: Path, journal: Path, entries: Iterable[JournalEntry]) -> ReviewSet:
    """The answers that were judged, found by the names in the journal."""
    opened = next((entry for entry in entries if isinstance(entry, ReviewOpened)), None)
    if opened is None:
        raise RunError(f"{journal} does not say what it judges", f"move the file away, or {_EXPORT}")
    targets = [_run_target(run, model, journal) for model in opened.models]
    return review_set_of_runs(targets, task=opened.task, name=journal.stem)


def _run_target(run: Path, model: str, journal: Path) -> RunTarget:
    """A journal names a model RUN:CHECKPOINT, with as much of the run's path as tells it from the other run."""
    tail, _, checkpoint = model.rpartition(":")
    place = run.resolve().parents[len(Path(tail).parts) - 1] / tail
    if not is_run(place):
        raise RunError(f"{journal} judges {model}, which is not beside {run.name}", _EXPORT)
    return RunTarget(run=open_run(place), checkpoint=checkpoint)


def _exported(name: str, base: Path) -> _JudgedPairs:
    pairs: list[tuple[str, dict[str, Any]]] = []
    unused: list[UnusedRow] = []
    for row in open_pair_source(Source(path=name), base, split="train").rows():
        if isinstance(row, Row) and row.kind != "pair":
            raise DataError(f"{row.place} is not a judged pair of two answers: it is {row.kind}", _EXPORT)
        reason = row.reason if isinstance(row, BadRow) else _unusable(row)
        if isinstance(row, BadRow) or reason:
            unused.append(UnusedRow(place=row.place, reason=reason or ""))
            continue
        sides = {"chosen": row.answer, "rejected": row.rejected[0].content, **tools_record(row)}
        record = {"prompt": messages_record(row.prompt), **sides, "rule": "judged", "row": row.place}
        pairs.append((row.place, record))
    return _JudgedPairs(pairs=tuple(pairs), unused=tuple(unused))


def _unusable(row: Row) -> str | None:
    """Why a pair cannot be taken: each side of a made pair is one text."""
    chosen, rejected = row.messages[row.num_given :], row.rejected
    if row.images:
        return _HAS_IMAGES
    if len(chosen) != 1 or len(rejected) != 1:
        return f"has sides of several messages, {_NOT_CARRIED}"
    if any(side.tool_calls or side.reasoning for side in (*chosen, *rejected)):
        return f"has an answer with tool calls or reasoning, {_NOT_CARRIED}"
    return None


def _agreed(found: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[UnusedRow]]:
    """Each pair once, and none that another review has decided the other way."""

    def key(pair: dict[str, Any]) -> tuple[str, str, str]:
        return str((pair["prompt"], pair.get("tools"))), pair["chosen"], pair["rejected"]

    decided = {key(pair) for _, pair in found}
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    unused: list[UnusedRow] = []
    for place, pair in found:
        prompt, chosen, rejected = own = key(pair)
        if (prompt, rejected, chosen) in decided:
            unused.append(UnusedRow(place=place, reason="is judged the other way in another review"))
        elif own in kept:
            unused.append(UnusedRow(place=place, reason="is judged the same in another review"))
        else:
            kept[own] = pair
    return list(kept.values()), unused
