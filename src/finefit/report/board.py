"""The checkpoint board: checkpoints x metrics with their intervals, the best of them marked, validation loss and coverage beside."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.evaluations import EvalItem, EvalResult, EvalStage, Score
from finefit.artifacts.journal import read_lines
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.errors import RunError
from finefit.report.fitted import Fitted
from finefit.report.units import finite, three_digits
from finefit.stats.metrics import Metric

_LONGEST = 600


def in_order(results: Iterable[EvalResult]) -> list[EvalResult]:
    """By task, the base first, then by step."""
    return sorted(results, key=lambda r: (r.task, r.checkpoint != "base", step_named(r.checkpoint) or 0, r.checkpoint))


def metric_of(result: EvalResult, name: str) -> Metric:
    """One that does not follow from items, as some of lm-eval's, is a number as it stands."""
    return next(
        (m for m in result.definitions if m.name == name),
        Metric(name=name, aggregate="mean", counts=(name,), unit="number"),
    )


def shown_value(metric: Metric, value: float) -> str:
    match metric.unit:
        case "share":
            return f"{value:.1%}"
        case "points":
            return f"{value:.1f}"
        case "number":
            return three_digits(value)


def shown_score(metric: Metric, score: Score) -> str:
    """The interval below the value, so that several metrics have room beside one another."""
    return f"{shown_value(metric, score.value)}\n{shown_value(metric, score.low)} .. {shown_value(metric, score.high)}"


def shown_n(result: EvalResult) -> str:
    """A sample shows what it is a sample of."""
    return f"{result.n:,}" if result.n == result.available else f"{result.n:,} of {result.available:,}"


def own_metric(result: EvalResult, by: str | None) -> str:
    """What the best is best by: the named metric where the task has it, else the task's own, which is its first."""
    return by if by in result.metrics else next(iter(result.metrics))


def require_metric(results: Sequence[EvalResult], by: str | None) -> None:
    if by is not None and not any(by in result.metrics for result in results):
        there = sorted({name for result in results for name in result.metrics})
        raise RunError(f"--by {by}: no task here has such a metric", f"there are {', '.join(there)}")


def best_of(results: Sequence[EvalResult], by: str | None) -> EvalResult | None:
    """Of one task; none where there is nothing to choose between. Of equals the earliest."""
    name = own_metric(results[0], by)
    if len({result.metrics[name].value for result in results}) < 2:
        return None
    sign = -1 if metric_of(results[0], name).better == "lower" else 1
    return max(results, key=lambda result: sign * result.metrics[name].value)


def boards(results: Sequence[EvalResult], run: RunDir, *, by: str | None = None) -> Group:
    where, by_task = run.stages()[0], dict[str, list[EvalResult]]()
    for result in in_order(results):
        by_task.setdefault(result.task, []).append(result)
    losses = validation_losses(where)
    return Group(*(part for found in by_task.values() for part in _board(found, by, losses, _title(where))))


def _title(where: StageDir) -> str:
    """Whose answers, where no run of ours stands behind them."""
    return f" of {read_record(where.eval_stage, EvalStage).subject.model_name}" if where.eval_stage.exists() else ""


def _board(
    results: Sequence[EvalResult], by: str | None, losses: dict[int, float], whose: str
) -> Iterator[RenderableType]:
    best, name = best_of(results, by), own_metric(results[0], by)
    title = f"{results[0].task}{whose}, 95 % intervals"
    yield Fitted(
        columns=list(results[0].metrics),
        table=lambda names, is_first: _table(results, best, name, losses, names, title if is_first else ""),
    )
    if best is not None:
        yield Text(
            f"* best by {name}" + (", of which less is better" if metric_of(best, name).better == "lower" else ""),
            style="dim",
        )
    for warning in dict.fromkeys(warning for result in results for warning in result.warnings):
        yield Text(f"note: {warning}", style="yellow")


def _table(
    results: Sequence[EvalResult],
    best: EvalResult | None,
    by: str,
    losses: dict[int, float],
    names: Sequence[str],
    title: str,
) -> Table:
    table = Table(title=title or None, title_justify="left")
    table.add_column("checkpoint", no_wrap=True)
    with_loss = any(step_named(result.checkpoint) in losses for result in results)
    for column in (*(["validation\nloss"] if with_loss else []), *names, "n", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        step, is_best = step_named(result.checkpoint), result is best
        loss = [f"{losses[step]:.4f}" if step in losses else ""] if with_loss else []
        scores = [
            Text(shown_score(metric_of(result, m), result.metrics[m]), style="bold" if is_best and m == by else "")
            for m in names
        ]
        table.add_row(
            f"{result.checkpoint} *" if is_best else result.checkpoint,
            *loss,
            *scores,
            shown_n(result),
            f"{result.coverage:.0%}",
        )
        for name, part in result.by_dataset.items():
            told = [shown_score(metric_of(result, m), part.metrics[m]) for m in names]
            table.add_row(
                Text(f"  {name}", style="dim"),
                *([""] if with_loss else []),
                *told,
                f"{part.n:,}",
                f"{part.coverage:.0%}",
            )
    return table


def validation_losses(where: StageDir) -> dict[int, float]:
    """By step, as they were measured last."""
    found = (
        line for line in read_lines(where.metrics) if line.get("event") == "validated" and "validation_loss" in line
    )
    return {int(line["step"]): float(line["validation_loss"]) for line in found}


def samples(results: Sequence[EvalResult], count: int) -> Iterator[Table]:
    """The same items of every checkpoint, evenly spaced and not chosen."""
    by_task: dict[str, list[EvalResult]] = {}
    for result in in_order(results):
        by_task.setdefault(result.task, []).append(result)
    for found in by_task.values():
        there = found[0].items
        for item in list(there[:: max(1, len(there) // max(count, 1))])[:count]:
            yield _sample(item, found)


def _sample(item: EvalItem, results: Sequence[EvalResult]) -> Table:
    table = Table(
        title=Text(_cut(item.prompt)),
        title_justify="left",
        caption=Text(f"reference: {_cut(item.reference)}"),
        caption_justify="left",
    )
    for column in ("checkpoint", "answer", "scores"):
        table.add_column(column, overflow="fold")
    for result in results:
        for other in (other for other in result.items if other.item == item.item):
            scores = other.failure or ", ".join(
                f"{name} {shown_value(metric_of(result, name), value)}" for name, value in other.scores.items()
            )
            table.add_row(
                result.checkpoint,
                Text(_cut(other.answer) or "(empty)"),
                Text(scores, style="red" if other.failure else ""),
            )
    return table


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]} ..."


def scores_document(results: Sequence[EvalResult], where: StageDir, *, by: str | None = None) -> list[dict[str, Any]]:
    """What `--json` prints."""
    losses, tasks = validation_losses(where), dict[str, list[EvalResult]]()
    for result in results:
        tasks.setdefault(result.task, []).append(result)
    best = {task: best_of(found, by) for task, found in tasks.items()}
    return [
        {
            "task": r.task,
            "checkpoint": r.checkpoint,
            "n": r.n,
            "available": r.available,
            "coverage": r.coverage,
            "metrics": _document(r.metrics),
            "by_dataset": {
                name: {"n": part.n, "coverage": part.coverage, "metrics": _document(part.metrics)}
                for name, part in r.by_dataset.items()
            },
            "best": r is best[r.task],
            "validation_loss": losses.get(step_named(r.checkpoint) or -1),
            "warnings": list(r.warnings),
        }
        for r in results
    ]


def _document(metrics: Mapping[str, Score]) -> dict[str, Any]:
    return {name: {"value": s.value, "low": finite(s.low), "high": finite(s.high)} for name, s in metrics.items()}
