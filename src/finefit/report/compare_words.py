"""A comparison's numbers and texts as people read them, in tables, pages and papers alike."""

import json
import unicodedata
from typing import Any

from finefit.compare.records import Cell, Change, Comparison, Foretold, Pairing, ScoredPart, Setting, TaskComparison
from finefit.report.board import shown_value
from finefit.report.units import duration, gib, three_digits
from finefit.stats import Spread
from finefit.stats.metrics import Metric

MISSING = "missing"


def change(metric: Metric, value: float) -> str:
    """Of shares in percentage points."""
    match metric.unit:
        case "share":
            return f"{100 * value:+.1f} pp"
        case "points":
            return f"{value:+.1f}"
        case "number":
            return f"{'+' if value > 0 else ''}{three_digits(value)}"


def interval(metric: Metric, cell: Cell | Change) -> str:
    words = change if isinstance(cell, Change) else shown_value
    if cell.low is None or cell.high is None:
        return "anything"
    low, high = (words(metric, end).removesuffix(" pp") for end in (cell.low, cell.high))
    return f"{low} .. {high}"


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def spread_words(metric: Metric, found: Spread) -> str:
    """Mean and standard deviation over the seeds, and how many of those are missing."""
    if found.mean is None:
        return MISSING
    deviation = "" if found.deviation is None else f" ± {shown_value(metric, found.deviation)}"
    missing = f", {found.missing} missing" if found.missing else ""
    return f"{shown_value(metric, found.mean)}{deviation} ({found.n} {'seed' if found.n == 1 else 'seeds'}{missing})"


def setting_value(setting: Setting, at: int) -> str:
    return value_words(setting.values[at])


def value_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


FORETOLD = "foretold -> measured (error of the forecast)"


def foretold_words(row: Foretold, at: int) -> str:
    predicted, measured = row.predicted[at], row.measured[at]
    if predicted is None and measured is None:
        return "-"
    if predicted is None or measured is None:
        return f"{_quantity(row, predicted)} foretold" if measured is None else f"{_quantity(row, measured)} measured"
    return f"{_quantity(row, predicted)} -> {_quantity(row, measured)} ({predicted / measured - 1:+.0%})"


def _quantity(row: Foretold, value: float | None) -> str:
    if value is None:
        return "-"
    match row.unit:
        case "bytes":
            return gib(value)
        case "seconds":
            return duration(value)
        case "tokens/s":
            return f"{three_digits(value)}/s"
        case "money":
            return f"{value:.2f}"


def parts_of(task: TaskComparison, at: int) -> list[tuple[str, ScoredPart]]:
    """What a side has of each data set, where there are several."""
    scored = task.scored[at]
    return [] if scored is None else list(scored.by_dataset.items())


def own_metric(task: TaskComparison, pairing: Pairing) -> Metric:
    """By which items are ranked: the first that both sides have counts of."""
    return next(metric for metric in task.metrics if metric.name == pairing.changes[0].metric)


def counts_words(pairing: Pairing, metric: Metric) -> str:
    if metric.better == "neither":
        return f"{pairing.num_better} larger, {pairing.num_equal} equal, {pairing.num_worse} smaller in {metric.name}"
    return f"{pairing.num_better} better, {pairing.num_equal} equal, {pairing.num_worse} worse by {metric.name}"


def against(comparison: Comparison, pairing: Pairing) -> str:
    return f"{comparison.groups[pairing.second].name} less {comparison.groups[pairing.first].name}"


def is_better(metric: Metric, found: Change) -> bool | None:
    """Clearly so, or clearly worse; None where it is neither, or where no direction is the better one."""
    if not found.is_clear or metric.better == "neither":
        return None
    return (found.value > 0) == (metric.better == "higher")


def visible(text: str) -> str:
    """With control characters spelt out: an answer must not steer a terminal, nor break a page."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Co", "Cn") else f"\\u{ord(c):04x}"
        for c in text
    )


def shortened(text: str, most: int) -> str:
    """Its beginning and its end: what is asked often stands last."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]} [... {len(text) - most:,} characters ...] {text[len(text) - (most - head) :]}"
