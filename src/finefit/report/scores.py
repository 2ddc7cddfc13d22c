"""Scores of an evaluation: the board of checkpoints x metrics with intervals, sample answers, and the JSON document."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.atomic import read_validations
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.records import read_if_there
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalResult, EvalStage, Score
from finefit.compare.records import SideScores, finite
from finefit.errors import RunError
from finefit.report.layout import SplitTable, three_digits, without_markup
from finefit.stats.metrics import Metric

_NUM_SHOWN = 3


def sorted_results(results: Iterable[EvalResult]) -> list[EvalResult]:
    """Results by task, the base first, then by step."""
    return sorted(results, key=lambda r: (r.task, r.checkpoint != "base", step_named(r.checkpoint) or 0, r.checkpoint))


def _by_task(results: Iterable[EvalResult]) -> dict[str, list[EvalResult]]:
    found: dict[str, list[EvalResult]] = {}
    for result in results:
        found.setdefault(result.task, []).append(result)
    return found


def format_value(metric: Metric, value: float) -> str:
    match metric.unit:
        case "share":
            return f"{value:.1%}"
        case "points":
            return f"{value:.1f}"
        case "number":
            return three_digits(value)


def format_score(metric: Metric, score: Score) -> str:
    """The interval is below the value, so that several metrics fit side by side."""
    low, high = format_value(metric, score.low), format_value(metric, score.high)
    return f"{format_value(metric, score.value)}\n{low} .. {high}"


def format_n(result: EvalResult | SideScores) -> str:
    return f"{result.n:,}" if result.n == result.available else f"{result.n:,} of {result.available:,}"


def main_metric(result: EvalResult, by: str | None) -> str:
    """The metric that ranks checkpoints: the named metric if the task has it, otherwise the task's first one."""
    return by if by in result.metrics else next(iter(result.metrics))


def require_metric(results: Sequence[EvalResult], by: str | None) -> None:
    if by is not None and not any(by in result.metrics for result in results):
        there = sorted({name for result in results for name in result.metrics})
        raise RunError(f"--by {by}: no task here has this metric", f"choose from {', '.join(there)}")


def best_of(results: Sequence[EvalResult], by: str | None) -> EvalResult | None:
    """The best result of one task; None if all are equal, or if the metric has no better side. If several are equally
    good, the earliest."""
    name = main_metric(results[0], by)
    better = results[0].metric(name).better
    if better == "neither" or len({result.metrics[name].value for result in results}) < 2:
        return None
    sign = -1 if better == "lower" else 1
    return max(results, key=lambda result: sign * result.metrics[name].value)


def score_boards(results: Sequence[EvalResult], run: RunDir, *, by: str | None = None) -> Group:
    where = run.stages()[0]
    only = read_if_there(where.eval_stage, EvalStage)
    of_model = "" if only is None else f" of {only.subject.model_name}"
    losses = validation_losses(where)
    boards = _by_task(sorted_results(results)).values()
    return Group(*(part for found in boards for part in _board(found, by, losses, of_model)))


def _board(
    results: Sequence[EvalResult], by: str | None, losses: dict[int, float], of_model: str
) -> Iterator[RenderableType]:
    best, main = best_of(results, by), main_metric(results[0], by)
    has_loss = any(step_named(result.checkpoint) in losses for result in results)

    def table(names: Sequence[str], is_first: bool) -> Table:
        title = f"{results[0].task}{of_model}, 95 % intervals" if is_first else None
        table = Table(title=title, title_justify="left")
        table.add_column("checkpoint", no_wrap=True)
        for column in (*(["validation\nloss"] if has_loss else []), *names, "n", "coverage"):
            table.add_column(column, justify="right", no_wrap=True)
        for result in results:
            step, is_best = step_named(result.checkpoint), result is best
            loss = [f"{losses[step]:.4f}" if step in losses else ""] if has_loss else []
            cells = []
            for name in names:
                score = format_score(result.metric(name), result.metrics[name])
                cells.append(Text(score, style="bold" if is_best and name == main else ""))
            checkpoint = f"{result.checkpoint} *" if is_best else result.checkpoint
            table.add_row(checkpoint, *loss, *cells, format_n(result), f"{result.coverage:.0%}")
            for dataset, part in result.by_dataset.items():
                values = [format_score(result.metric(name), part.metrics[name]) for name in names]
                figures = (*([""] if has_loss else []), *values, f"{part.n:,}", f"{part.coverage:.0%}")
                table.add_row(Text(f"  {dataset}", style="dim"), *figures)
        return table

    yield SplitTable(columns=list(results[0].metrics), table=table)
    if best is not None:
        lower = ", where lower is better" if best.metric(main).better == "lower" else ""
        yield Text(f"* best by {main}{lower}", style="dim")
    for warning in dict.fromkeys(warning for result in results for warning in result.warnings):
        yield Text(f"note: {warning}", style="yellow")


def validation_losses(where: StageDir) -> dict[int, float]:
    """Maps a step to the loss measured last."""
    lines = (line for line in read_validations(where.metrics) if "validation_loss" in line)
    return {line["step"]: line["validation_loss"] for line in lines}


def sample_answers(results: Sequence[EvalResult], count: int) -> Iterator[Table]:
    """The same items for every checkpoint, evenly spaced."""
    for found in _by_task(sorted_results(results)).values():
        items = found[0].items
        for item in list(items[:: max(1, len(items) // max(count, 1))])[:count]:
            title, reference = Text(_cut(without_markup(item.prompt))), Text(f"reference: {_cut(item.reference)}")
            table = Table(title=title, title_justify="left", caption=reference, caption_justify="left")
            for column in ("checkpoint", "answer", "scores"):
                table.add_column(column, overflow="fold")
            for result in found:
                for other in (other for other in result.items if other.item == item.item):
                    scores = (f"{n} {format_value(result.metric(n), value)}" for n, value in other.scores.items())
                    shown = Text(other.failure or ", ".join(scores), style="red" if other.failure else "")
                    table.add_row(result.checkpoint, Text(_cut(other.answer) or "(empty)"), shown)
            yield table


def _cut(text: str, max_characters: int = 600) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= max_characters else f"{plain[:max_characters]} ..."


def change_tables(base: EvalResult, tuned: EvalResult, messages: Sequence[str]) -> Iterator[Table]:
    """The scores of both over all items, with a failure as zero; then some answers side by side."""
    table = Table(title=f"held-out items, task {base.task}", title_justify="left")
    for column in ("model", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "score", "95 % interval", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    for model, result in {"base": base, "fine-tuned": tuned}.items():
        for at, (name, score) in enumerate(result.metrics.items()):
            metric = result.metric(name)
            value, low, high = (format_value(metric, one) for one in (score.value, score.low, score.high))
            label = model if at == 0 else ""
            table.add_row(label, name, format_n(result), value, f"{low} .. {high}", f"{result.coverage:.0%}")
    yield table
    pairs = list(zip(base.items, tuned.items, strict=True))
    for before, after in pairs[:: max(1, base.n // _NUM_SHOWN)][:_NUM_SHOWN]:  # evenly spaced, not chosen
        title, reference = Text(messages[before.item]), Text(f"reference: {before.reference}")
        table = Table(title=title, title_justify="left", caption=reference, caption_justify="left", expand=True)
        for column in ("base", "fine-tuned"):
            table.add_column(column, overflow="fold", ratio=1)
        answers = []
        for item in (before, after):
            is_right = all(score == 1.0 for score in item.scores.values())
            answers.append(Text(_cut(item.answer, 240) or "(empty)", style="green" if is_right else "red"))
        table.add_row(*answers)
        yield table


def scores_document(results: Sequence[EvalResult], where: StageDir, *, by: str | None = None) -> list[dict[str, Any]]:
    """The output of `--json`."""
    losses = validation_losses(where)
    best = {task: best_of(found, by) for task, found in _by_task(results).items()}
    return [
        {
            "task": result.task,
            "checkpoint": result.checkpoint,
            "n": result.n,
            "available": result.available,
            "coverage": result.coverage,
            "metrics": _scores(result.metrics),
            "by_dataset": {
                name: {"n": part.n, "coverage": part.coverage, "metrics": _scores(part.metrics)}
                for name, part in result.by_dataset.items()
            },
            "best": result is best[result.task],
            "validation_loss": losses.get(step_named(result.checkpoint) or -1),
            "warnings": list(result.warnings),
        }
        for result in results
    ]


def _scores(metrics: Mapping[str, Score]) -> dict[str, Any]:
    return {name: {"value": s.value, "low": finite(s.low), "high": finite(s.high)} for name, s in metrics.items()}
