"""The scores of other stages as one record, one page and one file of tables, with differing settings first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from finefit.artifacts.records import StageJob, write_record
from finefit.compare.comparison import compare
from finefit.compare.records import Comparison, Pairing, TaskComparison
from finefit.compare.sides import COMPARISON_FILE, expand_targets
from finefit.errors import FinefitError, SpecError
from finefit.spec.stages import CompareStage
from finefit.stages.worker import serve

_TAIL_LINES = 12


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Fills `out` with comparison.json, .html and .md."""
    stage, record = job.stage, out / COMPARISON_FILE
    assert isinstance(stage, CompareStage)
    if unknown := [part for part in stage.of if not job.scores[part]]:
        remedy = f"name one of its models, or {unknown[0].partition(':')[0]}"
        raise SpecError(f"of: {unknown[0]} is not a model of that evaluation", remedy)
    targets = expand_targets(list(dict.fromkeys(target for part in stage.of for target in job.scores[part])))
    found = compare(targets, task=stage.task, declared=stage.varies)
    write_record(record, found)
    # in another process: `report` is a layer above this one, and drawing takes memory of its own
    command = [sys.executable, "-P", "-m", "finefit.report.compare_page", str(record)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
        problem = f"the page of {record} could not be written, which is a bug in finefit:\n{tail}"
        raise FinefitError(problem, "please report it with these lines")
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
        "files": [record.with_suffix(end).name for end in (".json", ".html", ".md")],
    }


def _difference(found: Comparison, task: TaskComparison, pairing: Pairing) -> dict[str, Any]:
    """The difference in the task's own metric, with p corrected for all comparisons here."""
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


if __name__ == "__main__":
    serve(make)
