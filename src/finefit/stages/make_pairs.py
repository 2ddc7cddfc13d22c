"""Writes preference pairs as files that objective dpo reads: made by rules, judged by people, or sampled and scored.
report.json accounts for every row."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
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
from finefit.negatives import pairs as negatives
from finefit.negatives.balance import PairAudit, Sides, audit
from finefit.negatives.lexicon import read_words
from finefit.negatives.pairs import EVEN, LENGTHS, RuleCount, UnusedRow, make_pairs, pair_record
from finefit.review.export import preference_pairs
from finefit.review.items import RunTarget, review_set_of_runs
from finefit.review.verdicts import ReviewOpened, read_entries
from finefit.spec.data import Source
from finefit.spec.stages import MakePairs, Rules, Verdicts, moved
from finefit.stages.worker import serve

_MAX_SHOWN = 3
_EXPORT = "write the pairs into a file with `finefit review RUN RUN --export-pairs pairs.jsonl`, and name that"
_NOT_CARRIED = "which the pairs of a stage do not carry: train on the file"
_HAS_IMAGES = f"has images, {_NOT_CARRIED} that `finefit review --export-pairs` writes"
_GROUPED_REASONS = {
    "says the same as ": "says the same as another row",
    "has scores from ": "has scores that do not differ enough",
}
"""Reasons with these beginnings name one row; they are counted as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSplit:
    read: int
    """Rows or judged items; each is used or unused."""
    used: int
    pairs: Sequence[dict[str, Any]]
    """The pairs in the form in which they are written."""
    unused: Sequence[UnusedRow]
    audit: PairAudit | None
    rules: Mapping[str, RuleCount] = field(default_factory=dict)


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Makes pairs by rules or from verdicts; `sampled_pairs.make` samples."""
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
    """Fills `out` with pairs by split and report.json, and returns the summary. `loaded_bytes` is the memory after the
    model was loaded."""
    assert isinstance(job.stage, MakePairs)
    require_pairs(splits)
    for name, split in splits.items():
        write_text(out / f"{name}.jsonl", "".join(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in split.pairs))
    method = moved(job.stage.method, _file_name).model_dump(mode="json")
    report: dict[str, Any] = {"version": 1, "seed": job.seed, "method": method, "splits": {}}
    summaries = {name: _summary(split) for name, split in splits.items()}
    for name, split in splits.items():  # with every unused row, and how much longer or shorter rejected sides are
        lengths = {} if split.audit is None else {"sizes": [asdict(size) for size in split.audit.sizes]}
        report["splits"][name] = summaries[name] | lengths | {"unused_rows": [asdict(row) for row in split.unused]}
    write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    return {"method": job.stage.method.kind, "splits": summaries, "loaded_bytes": loaded_bytes}


def rule_pairs(rows: list[Row | BadRow], method: Rules, base: Path, seed: int) -> PairSplit:
    words = None if method.words is None else read_words(base / method.words)
    made = make_pairs(rows, seed=seed, per_row=method.per_row, shares={**EVEN, **method.shares}, words=words)
    pairs, rules = [pair_record(pair) for pair in made.pairs], {str(rule): made.rules[rule] for rule in made.rules}
    return PairSplit(read=made.read, used=made.used, pairs=pairs, unused=made.unused, audit=made.audit, rules=rules)


def rows_of_splits(stage: MakePairs, base: Path, seed: int) -> dict[str, list[Row | BadRow]]:
    """Rows beyond a limit are returned as bad rows, so that they are counted. A prompt in two splits is refused."""
    named = {"train": stage.train, "validation": (stage.validation,), "test": (stage.test,)}
    splits: dict[str, list[Row | BadRow]] = {}
    for split, sources in named.items():
        if given := [source for source in sources if source is not None]:
            readers = [(open_pair_source(source, base, split=split), source) for source in given]
            splits[split] = [row for reader, source in readers for row in sampled_rows(reader, source, seed)]
    seen: dict[int, tuple[str, str]] = {}
    both: list[str] = []
    for split, rows in splits.items():
        for row in rows:
            if isinstance(row, Row) and row.kind != "text":
                # equal but for case and punctuation: a held-out row says nothing if its answer was trained on
                first, place = seen.setdefault(prompt_key(row, with_system=True), (split, row.place))
                if first != split:
                    both.append(f"{row.place} ({split}) has the prompt of {place} ({first})")
    if both:
        more = f", and {len(both) - _MAX_SHOWN} more" if len(both) > _MAX_SHOWN else ""
        problem = f"held-out rows are in another split, too: {'; '.join(both[:_MAX_SHOWN])}{more}"
        raise DataError(problem, "keep each row in one of the files")
    return splits


def open_pair_source(source: Source, base: Path, *, split: str) -> SourceReader:
    """Files are identified by name, those of a folder by their paths in it; their location is not part of a pair."""
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


def require_pairs(splits: Mapping[str, PairSplit]) -> None:
    for name, split in splits.items():
        if not split.pairs:
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in _reasons(split).items())
            why = reasons or "there was nothing to read"
            problem = f"no pair could be made for {name} of {split.read:,} rows: {why}"
            raise DataError(problem, "give other rows, or another method")


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


def _reasons(split: PairSplit) -> dict[str, int]:
    def grouped(reason: str) -> str:
        return next((group for start, group in _GROUPED_REASONS.items() if reason.startswith(start)), reason)

    return dict(Counter(grouped(row.reason) for row in split.unused).most_common())


_Judged = tuple[list[tuple[str, dict[str, Any]]], list[UnusedRow]]
"""Pairs with their places, and what did not become a pair."""


def judged_pairs(method: Verdicts, base: Path) -> PairSplit:
    """Pairs from the reviews in run directories, or from files of `finefit review --export-pairs`."""
    found: list[_Judged] = []
    for name in method.of:
        path = base / name
        journals = sorted((path / "reviews").glob("*.jsonl"))
        if path.is_file():
            found.append(_exported(name, base))
        elif not is_run(path):
            problem = f"{name} is neither a run directory nor a file with judged pairs"
            raise RunError(problem, f"name a run that was reviewed, or {_EXPORT}")
        elif not journals:
            problem = f"{name} has no reviews, so nobody has judged its answers"
            raise RunError(problem, f"judge them with `finefit review {name}`")
        else:
            places = {journal: f"{_file_name(name)}/reviews/{journal.name}" for journal in journals}
            found += [_reviewed(path, journal, place) for journal, place in places.items()]
    pairs, repeated = _agreed([pair for judged, _ in found for pair in judged])
    unused = [row for _, rows in found for row in rows] + repeated
    sides = [Sides(row=str(pair["prompt"]), chosen=pair["chosen"], rejected=pair["rejected"]) for pair in pairs]
    read = len(pairs) + len(unused)
    return PairSplit(read=read, used=len(pairs), pairs=pairs, unused=unused, audit=audit(sides, LENGTHS))


def _reviewed(run: Path, journal: Path, place: str) -> _Judged:
    """A journal names its models RUN:CHECKPOINT, with as much of the run's path as distinguishes it from the other
    run."""
    entries = read_entries(journal)
    opened = next((entry for entry in entries if isinstance(entry, ReviewOpened)), None)
    if opened is None:
        raise RunError(f"{journal} does not say what it judges", f"move the file away, or {_EXPORT}")
    targets = []
    for model in opened.models:
        tail, _, checkpoint = model.rpartition(":")
        place_of_model = run.resolve().parents[len(Path(tail).parts) - 1] / tail
        if not is_run(place_of_model):
            raise RunError(f"{journal} judges {model}, which is not beside {run.name}", _EXPORT)
        targets.append(RunTarget(run=open_run(place_of_model), checkpoint=checkpoint))
    made = preference_pairs(review_set_of_runs(targets, task=opened.task, name=journal.stem), entries)
    pairs = []
    for row in made.rows:
        if not row.get("images"):
            prompt = row["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            pairs.append((place, row | {"prompt": messages, "rule": "judged", "row": place}))
    reasons = {**made.left_out, _HAS_IMAGES: len(made.rows) - len(pairs)}
    unused = [UnusedRow(place=place, reason=reason) for reason, count in reasons.items() for _ in range(count)]
    return pairs, unused


def _exported(name: str, base: Path) -> _Judged:
    pairs: list[tuple[str, dict[str, Any]]] = []
    unused: list[UnusedRow] = []
    for row in open_pair_source(Source(path=name), base, split="train").rows():
        if isinstance(row, BadRow):
            unused.append(UnusedRow(place=row.place, reason=row.reason))
        elif row.kind != "pair":
            raise DataError(f"{row.place} is not a judged pair of two answers: it is {row.kind}", _EXPORT)
        elif reason := _unusable(row):
            unused.append(UnusedRow(place=row.place, reason=reason))
        else:
            sides = {"chosen": row.answer, "rejected": row.rejected[0].content, **negatives.tools_record(row)}
            record = {"prompt": negatives.messages_record(row.prompt), **sides, "rule": "judged", "row": row.place}
            pairs.append((row.place, record))
    return pairs, unused


def _unusable(row: Row) -> str | None:
    """Why a pair cannot be used: each side of a made pair is one text."""
    chosen, rejected = row.messages[row.num_given :], row.rejected
    if row.images:
        return _HAS_IMAGES
    if len(chosen) != 1 or len(rejected) != 1:
        return f"has sides of several messages, {_NOT_CARRIED} itself"
    if any(side.tool_calls or side.reasoning for side in (*chosen, *rejected)):
        return f"has an answer with tool calls or reasoning, {_NOT_CARRIED} itself"
    return None


def _agreed(found: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[UnusedRow]]:
    """Each pair once, except pairs that another review has decided the other way."""

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


if __name__ == "__main__":
    serve(make)
