"""Preference pairs as files that objective dpo reads: made by rules, judged by people, or sampled and scored. report.json accounts for every row."""

import json
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.artifacts.pipelines import Order
from finefit.artifacts.rundir import StageDir
from finefit.data.falsify.make import EVEN, Made, make_pairs
from finefit.data.falsify.words import read_words
from finefit.data.falsify.written import pair_record
from finefit.data.rows import BadRow, Row
from finefit.pipeline.making.pair_splits import Split, named_alone, report_of, require_pairs, rows_of_splits, summary_of
from finefit.pipeline.stage_paths import moved
from finefit.spec.stages import MakePairs, Rules, Sampled, Verdicts

REPORT = "report.json"


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with train.jsonl, where they are asked for validation.jsonl and test.jsonl, and report.json."""
    stage = order.stage
    assert isinstance(stage, MakePairs)
    splits, loaded_bytes = _splits(order, stage, StageDir(out.parent).answers)
    require_pairs(splits)
    for name, split in splits.items():
        write_text(out / f"{name}.jsonl", "".join(f"{json.dumps(pair, ensure_ascii=False)}\n" for pair in split.pairs))
    settings = {"seed": order.seed, "method": moved(stage.method, named_alone).model_dump(mode="json")}
    write_text(
        out / REPORT,
        json.dumps(
            {"version": 1, **settings, "splits": {name: report_of(split) for name, split in splits.items()}}, indent=1
        )
        + "\n",
    )
    return {
        "method": stage.method.kind,
        "splits": {name: summary_of(split) for name, split in splits.items()},
        "loaded_bytes": loaded_bytes,
    }


def _splits(order: Order, stage: MakePairs, answers: Path) -> tuple[dict[str, Split], int | None]:
    """And what was held when a model was there; None where none is asked. `answers`: where what it says is kept."""
    base = Path(order.base)
    match stage.method:
        case Rules() as rules:
            return {
                name: ruled(rows, rules, base, order.seed)
                for name, rows in rows_of_splits(stage, base, order.seed).items()
            }, None
        case Verdicts() as verdicts:
            from finefit.pipeline.making.pairs_judged import judged

            return {"train": judged(verdicts, base)}, None
        case Sampled() as method:
            from finefit.pipeline.making.pairs_sampled import sampled_splits  # torch comes with it

            return sampled_splits(order, stage, method, answers)


def ruled(rows: list[Row | BadRow], method: Rules, base: Path, seed: int) -> Split:
    words = None if method.words is None else read_words(base / method.words)
    made = make_pairs(rows, seed=seed, per_row=method.per_row, shares={**EVEN, **method.shares}, words=words)
    return _split(made)


def _split(made: Made) -> Split:
    pairs = tuple(pair_record(pair) for pair in made.pairs)
    return Split(
        read=made.read,
        used=made.used,
        pairs=pairs,
        unused=made.unused,
        audit=made.audit,
        rules={str(rule): count for rule, count in made.rules.items()},
    )


def lines(summary: dict[str, Any]) -> list[str]:
    """A line or two for each split, and each warning once."""
    told = [line for name, split in summary["splits"].items() for line in _told(name, split)]
    return told + [
        f"warning: {name}: {warning}" for name, split in summary["splits"].items() for warning in split["warnings"]
    ]


def _told(name: str, split: dict[str, Any]) -> list[str]:
    unread = split["read"] - split["used"]
    rules = ", ".join(f"{rule} {count['made']}" for rule, count in split["rules"].items())
    tells = ", ".join(f"by the number of {measure} {auc:.2f}" for measure, auc in split["length_auc"].items())
    first = f"{name}: {split['pairs']:,} pairs of {split['used']:,} of {split['read']:,} rows" + (
        f" ({rules})" if rules else ""
    )
    told = (
        f"; sides are told apart {tells}, by single words {split['words_auc']:.2f} (0.5 is a guess)"
        if split["words_auc"] is not None
        else ""
    )
    left = (
        [
            f"{name}: {unread:,} rows are in no pair: {'; '.join(f'{count:,} {why}' for why, count in split['unused'].items())}"
        ]
        if unread
        else []
    )
    return [first + told, *left]
