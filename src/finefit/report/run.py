"""What a run is going to do, and what came of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.evaluations import EvalResult
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.journal import read_lines, read_steps
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.trainings import StageResult
from finefit.errors import RunError
from finefit.report.board import boards, in_order, metric_of, scores_document, shown_n, shown_value
from finefit.report.events import validation_words
from finefit.report.plan import tower_lines
from finefit.report.units import clock, gib


def plan_view(plan: Plan) -> RenderableType:
    """Every value with its source: what was decided in a table, what the spec says and what nobody asked for in a paragraph each."""
    parts: list[RenderableType] = []
    for name, values in plan.stages.items():
        table = Table(
            title=f"stage {name}, decided", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
        )
        for key, resolved in values.items():
            if resolved.source not in ("spec", "default"):
                table.add_row(key, _shown(resolved), Text(resolved.source, style="dim"))
        parts += [table, _paragraph("from the spec", "spec", values), _paragraph("defaults", "default", values)]
    towers = (line for forecast in plan.forecasts.values() for line in tower_lines(forecast.towers))
    return Group(*parts, *(Text(f"tower    {line}") for line in towers))


def _paragraph(title: str, source: str, values: dict[str, Resolved]) -> Text:
    return Text(
        f"{title}: " + ", ".join(f"{key} {_shown(r)}" for key, r in values.items() if r.source == source), style="dim"
    )


def _shown(resolved: Resolved) -> str:
    return resolved.value if isinstance(resolved.value, str) else json.dumps(resolved.value, ensure_ascii=False)


def result_lines(result: StageResult) -> list[str]:
    share = result.trainable_parameters / result.parameters
    return [
        f"trained {result.trainable_parameters:,} of {result.parameters:,} parameters ({share:.2%})",
        f"{result.step} steps, {result.tokens:,} tokens; {clock(result.seconds)} since it was last started; peak memory {gib(result.peak_bytes)}",
    ]


def waited_share(where: StageDir) -> float:
    """Of the time of all steps, what they waited for their rows."""
    steps = read_steps(where.metrics)
    seconds = sum(step["seconds"] for step in steps)
    return float(sum(step.get("wait_seconds", 0.0) for step in steps) / seconds) if seconds else 0.0


def last_validation(where: StageDir) -> dict[str, Any] | None:
    """What was found, and at which step."""
    found = [line for line in read_lines(where.metrics) if line.get("event") == "validated"]
    return {name: value for name, value in found[-1].items() if name != "event"} if found else None


def evals_of(where: StageDir) -> list[EvalResult]:
    """Those that this version can read; others are scored anew when they are asked for."""
    return in_order(result for paths in where.evaluations() if (result := _readable(paths.result)) is not None)


def _readable(path: Path) -> EvalResult | None:
    try:
        return read_record(path, EvalResult) if path.exists() else None
    except RunError:
        return None


def evals_table(results: Sequence[EvalResult], *, names: dict[str, str] | None = None) -> Table:
    """All items count, a failure scores zero."""
    table = Table(title=f"held-out items, task {results[0].task}", title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for column in ("n", "score", "95 % interval", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        for at, (metric, score) in enumerate(result.metrics.items()):
            model = (names or {}).get(result.checkpoint, result.checkpoint) if at == 0 else ""
            about = metric_of(result, metric)
            interval = f"{shown_value(about, score.low)} .. {shown_value(about, score.high)}"
            table.add_row(
                model, metric, shown_n(result), shown_value(about, score.value), interval, f"{result.coverage:.0%}"
            )
            for name, part in result.by_dataset.items():
                own = part.metrics[metric]
                interval = f"{shown_value(about, own.low)} .. {shown_value(about, own.high)}"
                table.add_row(
                    "", f"  {name}", f"{part.n:,}", shown_value(about, own.value), interval, f"{part.coverage:.0%}"
                )
    return table


def run_document(run: RunDir) -> dict[str, Any]:
    """What `--json` prints of a run."""
    where = run.stages()[0]
    record = read_record(run.run, Run)
    result = read_record(where.result, StageResult) if where.result.exists() else None
    return {
        "run": str(run.path),
        "status": record.status,
        "failure": None
        if record.failure is None
        else {k: getattr(record.failure, k) for k in ("kind", "problem", "remedy", "exit_code")},
        "checkpoints": str(where.checkpoints),
        "plan": {
            stage: {key: {"value": r.value, "source": r.source} for key, r in values.items()}
            for stage, values in read_record(run.plan, Plan).stages.items()
        },
        "ledger": [line for line in read_lines(where.ledger) if "read" in line],
        "result": None
        if result is None
        else {
            k: getattr(result, k)
            for k in (
                "step",
                "total_steps",
                "checkpoint",
                "trainable_parameters",
                "parameters",
                "tokens",
                "seconds",
                "peak_bytes",
            )
        },
        "loss": next((line["loss"] for line in reversed(read_steps(where.metrics))), None),
        "validation": last_validation(where),
        "waited_share": waited_share(where),
        "evaluations": scores_document(evals_of(where), where),
    }


def show_end(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    for line in result_lines(read_record(where.result, StageResult)):
        console.print(line, highlight=False)
    console.print(f"{waited_share(where):.1%} of the time was spent waiting for rows", highlight=False)
    if (found := last_validation(where)) is not None:
        console.print(f"{validation_words(found)} at step {found['step']}", highlight=False)
    if results := evals_of(where):
        console.print(boards(results, run))
    console.print(f"run      {run.path}\nmodel    {where.checkpoints / 'final'}", highlight=False, soft_wrap=True)
