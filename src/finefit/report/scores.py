"""Scores of an evaluation: the board of checkpoints x metrics with intervals, sample answers, and the JSON document."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalItem, EvalResult, EvalStage, Score
from finefit.errors import RunError
from finefit.report.layout import SplitTable, finite, three_digits
from finefit.stats.metrics import Metric

_MAX_TEXT = 600


def sorted_results(results: Iterable[EvalResult]) -> list[EvalResult]:
    """By task, the base first, then by step."""
    return sorted(results, key=lambda r: (r.task, r.checkpoint != "base", step_named(r.checkpoint) or 0, r.checkpoint))


def _by_task(results: Iterable[EvalResult]) -> dict[str, list[EvalResult]]:
    found: dict[str, list[EvalResult]] = {}
    for result in results:
        found.setdefault(result.task, []).append(result)
    return found


def metric_of(result: EvalResult, name: str) -> Metric:
    """A metric that is not defined over items, such as some of lm-eval's, is a plain number."""
    plain = Metric(name=name, aggregate="mean", counts=(name,), unit="number")
    return next((metric for metric in result.definitions if metric.name == name), plain)


def format_value(metric: Metric, value: float) -> str:
    match metric.unit:
        case "share":
            return f"{value:.1%}"
        case "points":
            return f"{value:.1f}"
        case "number":
            return three_digits(value)


def format_score(metric: Metric, score: Score) -> str:
    """The interval below the value, so that several metrics fit side by side."""
    low, high = format_value(metric, score.low), format_value(metric, score.high)
    return f"{format_value(metric, score.value)}\n{low} .. {high}"


def format_n(result: EvalResult) -> str:
    return f"{result.n:,}" if result.n == result.available else f"{result.n:,} of {result.available:,}"


def main_metric(result: EvalResult, by: str | None) -> str:
    """What checkpoints are ranked by: the named metric if the task has it, otherwise the task's first one."""
    return by if by in result.metrics else next(iter(result.metrics))


def require_metric(results: Sequence[EvalResult], by: str | None) -> None:
    if by is not None and not any(by in result.metrics for result in results):
        there = sorted({name for result in results for name in result.metrics})
        raise RunError(f"--by {by}: no task here has this metric", f"choose from {', '.join(there)}")


def best_of(results: Sequence[EvalResult], by: str | None) -> EvalResult | None:
    """Of one task; None if all are equal. Of several equal bests the earliest."""
    name = main_metric(results[0], by)
    if len({result.metrics[name].value for result in results}) < 2:
        return None
    sign = -1 if metric_of(results[0], name).better == "lower" else 1
    return max(results, key=lambda result: sign * result.metrics[name].value)


def score_boards(results: Sequence[EvalResult], run: RunDir, *, by: str | None = None) -> Group:
    """One board per task."""
    where = run.stages()[0]
    of_model = f" of {read_record(where.eval_stage, EvalStage).subject.model_name}" if where.eval_stage.exists() else ""
    losses = validation_losses(where)
    boards = _by_task(sorted_results(results)).values()
    return Group(*(part for found in boards for part in _board(found, by, losses, of_model)))


def _board(
    results: Sequence[EvalResult], by: str | None, losses: dict[int, float], of_model: str
) -> Iterator[RenderableType]:
    best, name = best_of(results, by), main_metric(results[0], by)
    title = f"{results[0].task}{of_model}, 95 % intervals"

    def table(names: Sequence[str], is_first: bool) -> Table:
        return _table(results, best, name, losses, names, title if is_first else "")

    yield SplitTable(columns=list(results[0].metrics), table=table)
    if best is not None:
        lower = ", where lower is better" if metric_of(best, name).better == "lower" else ""
        yield Text(f"* best by {name}{lower}", style="dim")
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
    has_loss = any(step_named(result.checkpoint) in losses for result in results)
    for column in (*(["validation\nloss"] if has_loss else []), *names, "n", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        step, is_best = step_named(result.checkpoint), result is best
        loss = [f"{losses[step]:.4f}" if step in losses else ""] if has_loss else []
        styles = ("bold" if is_best and name == by else "" for name in names)
        scores = (format_score(metric_of(result, name), result.metrics[name]) for name in names)
        cells = [Text(score, style=style) for score, style in zip(scores, styles, strict=True)]
        checkpoint = f"{result.checkpoint} *" if is_best else result.checkpoint
        table.add_row(checkpoint, *loss, *cells, format_n(result), f"{result.coverage:.0%}")
        for dataset, part in result.by_dataset.items():
            values = [format_score(metric_of(result, name), part.metrics[name]) for name in names]
            no_loss = [""] if has_loss else []
            table.add_row(Text(f"  {dataset}", style="dim"), *no_loss, *values, f"{part.n:,}", f"{part.coverage:.0%}")
    return table


def validation_losses(where: StageDir) -> dict[int, float]:
    """Step -> the loss measured last."""
    lines = (line for line in read_lines(where.metrics) if line.get("event") == "validated")
    return {int(line["step"]): float(line["validation_loss"]) for line in lines if "validation_loss" in line}


def sample_answers(results: Sequence[EvalResult], count: int) -> Iterator[Table]:
    """The same items for every checkpoint, evenly spaced."""
    for found in _by_task(sorted_results(results)).values():
        items = found[0].items
        for item in list(items[:: max(1, len(items) // max(count, 1))])[:count]:
            yield _sample(item, found)


def _sample(item: EvalItem, results: Sequence[EvalResult]) -> Table:
    reference = Text(f"reference: {_cut(item.reference)}")
    table = Table(title=Text(_cut(item.prompt)), title_justify="left", caption=reference, caption_justify="left")
    for column in ("checkpoint", "answer", "scores"):
        table.add_column(column, overflow="fold")
    for result in results:
        for other in (other for other in result.items if other.item == item.item):
            values = (f"{name} {format_value(metric_of(result, name), value)}" for name, value in other.scores.items())
            scores = Text(other.failure or ", ".join(values), style="red" if other.failure else "")
            table.add_row(result.checkpoint, Text(_cut(other.answer) or "(empty)"), scores)
    return table


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _MAX_TEXT else f"{plain[:_MAX_TEXT]} ..."


def scores_document(results: Sequence[EvalResult], where: StageDir, *, by: str | None = None) -> list[dict[str, Any]]:
    """What `--json` prints."""
    losses = validation_losses(where)
    best = {task: best_of(found, by) for task, found in _by_task(results).items()}
    documents = []
    for result in results:
        parts = {
            name: {"n": part.n, "coverage": part.coverage, "metrics": _scores(part.metrics)}
            for name, part in result.by_dataset.items()
        }
        documents.append(
            {
                "task": result.task,
                "checkpoint": result.checkpoint,
                "n": result.n,
                "available": result.available,
                "coverage": result.coverage,
                "metrics": _scores(result.metrics),
                "by_dataset": parts,
                "best": result is best[result.task],
                "validation_loss": losses.get(step_named(result.checkpoint) or -1),
                "warnings": list(result.warnings),
            }
        )
    return documents


def _scores(metrics: Mapping[str, Score]) -> dict[str, Any]:
    return {name: {"value": s.value, "low": finite(s.low), "high": finite(s.high)} for name, s in metrics.items()}
