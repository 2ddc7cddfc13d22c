"""The stage that compares: what others have scored as one record, one page and one file of tables, settings that differ named first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from finefit.artifacts.pipelines import Order
from finefit.artifacts.records import write_record
from finefit.compare.comparing import compare
from finefit.compare.records import Comparison, Pairing, TaskComparison
from finefit.compare.targets import FILE, widened
from finefit.errors import FinefitError, SpecError
from finefit.spec.stages import CompareStage

_PAGES = "finefit.report.compare_files"
_TAIL_LINES = 12


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with comparison.json, .html and .md."""
    stage = order.stage
    assert isinstance(stage, CompareStage)
    found = compare(_targets(order, stage), task=stage.task, declared=stage.varies)
    write_record(out / FILE, found)
    _write_pages(out / FILE)
    return _summary(found)


def _targets(order: Order, stage: CompareStage) -> list[str]:
    """Each once, in the order of the spec."""
    if unknown := [part for part in stage.of if not order.scores[part]]:
        raise SpecError(
            f"of: {unknown[0]} is no model of that evaluation",
            f"name one that stands under its models, or {unknown[0].partition(':')[0]}",
        )
    return widened(list(dict.fromkeys(target for part in stage.of for target in order.scores[part])))


def _write_pages(record: Path) -> None:
    """By a process: pages are made above this room, and what draws takes memory of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PAGES, str(record)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
        raise FinefitError(
            f"the page of {record} could not be written, which is a fault of finefit:\n{tail}",
            "please report it with these lines",
        )


def _summary(found: Comparison) -> dict[str, Any]:
    return {
        "sides": [side.name for side in found.sides],
        "verdict": found.verdict,
        "is_one_variable": found.is_one_variable,
        "differing": [setting.key for setting in found.differing],
        "tasks": {
            task.task: [_difference(found, task, pairing) for pairing in task.pairings if pairing.changes]
            for task in found.tasks
        },
        "warnings": list(found.warnings),
        "files": [FILE, *(Path(FILE).with_suffix(end).name for end in (".html", ".md"))],
    }


def _difference(found: Comparison, task: TaskComparison, pairing: Pairing) -> dict[str, Any]:
    """Of the task's own metric; p as it counts among all differences here."""
    change = pairing.changes[0]
    metric = next(metric for metric in task.metrics if metric.name == change.metric)
    return {
        "metric": change.metric,
        "unit": metric.unit,
        "is_better": change.value != 0 and (change.value > 0) == (metric.better == "higher"),
        "first": found.groups[pairing.first].name,
        "second": found.groups[pairing.second].name,
        "n": pairing.n,
        "value": change.value,
        "low": change.low,
        "high": change.high,
        "p": change.corrected_p,
        "is_clear": change.is_clear,
    }


def lines(summary: dict[str, Any]) -> list[str]:
    found = [
        f"{task}: {_told(difference)}" for task, differences in summary["tasks"].items() for difference in differences
    ]
    return [summary["verdict"], *found, *(f"note: {warning}" for warning in summary["warnings"])]


def _told(found: dict[str, Any]) -> str:
    value, low, high = (_signed(found[key], found["unit"]) for key in ("value", "low", "high"))
    word = "not clear" if not found["is_clear"] else "better" if found["is_better"] else "worse"
    return f"{found['second']} against {found['first']}: {found['metric']} {value} ({low} to {high}), p {found['p']:.2g}, n {found['n']}: {word}"


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    return f"{100 * value:+.1f} points" if unit == "share" else f"{value:+.3g}"
