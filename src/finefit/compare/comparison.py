"""Several runs -> one `Comparison`: settings first, then scores on the same items, then predicted against measured."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.forecasts import Forecast
from finefit.artifacts.rundir import evaluation_of
from finefit.artifacts.stage_records import EvalItem, EvalResult, Score
from finefit.compare.pairing import finite_end, is_counted, metrics_of, pairings
from finefit.compare.records import (
    Comparison,
    Group,
    LossCurve,
    Pairing,
    Prediction,
    Quantity,
    QuantityUnit,
    ScoreInterval,
    Setting,
    Side,
    SideDatasetScores,
    SideScores,
    TaskComparison,
)
from finefit.compare.settings import differing_settings, group_by_seed, is_covered, is_trained
from finefit.compare.sides import BEST, LoadedSide, open_sides
from finefit.errors import RunError
from finefit.stats.comparisons import holm, spread
from finefit.stats.intervals import Interval
from finefit.stats.metrics import Metric, cautions, interval_of, table

_MODELS = ("model", "checkpoint")
"""What the models of one evaluation stage are expected to differ in."""


def compare(
    targets: Sequence[str],
    *,
    checkpoint: str | None = None,
    task: str | None = None,
    declared: Sequence[str] = (),
    show: int = 3,
) -> Comparison:
    """`targets` as for `open_sides`. `declared`: settings that are meant to differ. `show`: items of each kind."""
    sides = open_sides(targets, checkpoint=checkpoint)
    groups = group_by_seed(sides)
    differing, without_effect = differing_settings(sides)
    tasks = tuple(_compare_task(name, sides, groups, show) for name in _common_tasks(sides, task))
    _require_common_items(sides, tasks)
    expected = _MODELS if _is_one_evaluation(sides) else ()
    verdict, is_one_variable, unused = _verdict(differing, sides, groups, declared, expected)
    return Comparison(
        sides=tuple(map(_side, sides)),
        groups=tuple(Group(name=_group_name(sides, group), sides=tuple(group)) for group in groups),
        differing=differing,
        without_effect=without_effect,
        declared=tuple(declared),
        verdict=verdict,
        is_one_variable=is_one_variable,
        tasks=_with_corrected_p(tasks),
        predictions=predictions_of(sides),
        curves=loss_curves(sides),
        warnings=(*unused, *_warnings(sides, groups, tasks)),
    )


def _side(side: LoadedSide) -> Side:
    return Side(
        name=side.name,
        run=str(side.run.path),
        checkpoint=side.checkpoint,
        role=side.role,
        seed=side.seed,
        status=side.record.status,
        num_steps=None if side.ended is None else side.ended.step,
        total_steps=None if side.stage is None else side.stage.total_steps,
    )


def _group_name(sides: Sequence[LoadedSide], group: Sequence[int]) -> str:
    first = sides[group[0]].name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more {'seed' if len(group) == 2 else 'seeds'}"


def _common_tasks(sides: Sequence[LoadedSide], wanted: str | None) -> list[str]:
    """The tasks that at least two sides have results for, in the order of the first side."""
    tasks = dict.fromkeys(task for side in sides for task in (*side.evaluated, *side.unread))
    found = [task for task in tasks if wanted in (None, task)]
    common = [task for task in found if sum(task in side.evaluated for side in sides) > 1]
    if not common:
        each = "\n".join(f"  {side.name}: {', '.join(side.evaluated) or 'none'}" for side in sides)
        what = "no two of them were scored on " + ("the same task" if wanted is None else wanted)
        missing = next((side for side in sides if not side.evaluated), sides[-1])
        raise RunError(f"{what}. Results of each:\n{each}", _how_to_score(missing, wanted))
    return common


def _how_to_score(side: LoadedSide, task: str | None) -> str:
    chosen = "" if task is None else f" --task {task}"
    return f"`finefit eval {side.run.path} --checkpoint {side.role}{chosen}` scores it"


def _require_common_items(sides: Sequence[LoadedSide], tasks: Sequence[TaskComparison]) -> None:
    found = [pairing for task in tasks for pairing in task.pairings]
    if any(pairing.n for pairing in found) or not any(pairing.only_first or pairing.only_second for pairing in found):
        return
    lines = []
    for task in tasks:
        counts = (f"{s.name} has {r.n}" for s, r in zip(sides, task.scored, strict=True) if r)
        lines.append(f"  {task.task}: {', '.join(counts)}")
    raise RunError(
        "no item was answered by both, so nothing can be paired. Items of each:\n" + "\n".join(lines),
        "score them on the same rows: `finefit eval RUN --data FILE`",
    )


def _compare_task(task: str, sides: Sequence[LoadedSide], groups: Sequence[Sequence[int]], show: int) -> TaskComparison:
    results = [side.evaluated[task].result if task in side.evaluated else None for side in sides]
    metrics = next(metrics_of(result) for result in results if result is not None)
    scored = tuple(None if result is None else _side_scores(result, metrics) for result in results)

    def value(at: int, metric: Metric) -> float | None:
        found = scored[at]
        return None if found is None or metric.name not in found.metrics else found.metrics[metric.name].value

    return TaskComparison(
        task=task,
        metrics=metrics,
        scored=scored,
        missing={
            at: f"{side.unread.get(task, 'it was not scored')}; {_how_to_score(side, task)}"
            for at, side in enumerate(sides)
            if results[at] is None
        },
        spreads=tuple(
            {metric.name: spread([value(at, metric) for at in group]) for metric in metrics} for group in groups
        ),
        pairings=tuple(pairings(sides, groups, results, metrics, show)),
    )


def _side_scores(result: EvalResult, metrics: Sequence[Metric]) -> SideScores:
    """A metric that this side computes in another way than the first side is missing here."""
    shared = [metric for metric in metrics if metric in metrics_of(result)]
    by_dataset = {}
    for name, part in result.by_dataset.items():
        items = [item for item in result.items if item.dataset == name]
        scores = _scores(shared, result, items, part.metrics)
        by_dataset[name] = SideDatasetScores(n=part.n, coverage=part.coverage, metrics=scores)
    return SideScores(
        n=result.n,
        available=result.available,
        coverage=result.coverage,
        metrics=_scores(shared, result, result.items, result.metrics),
        by_dataset=by_dataset,
    )


def _scores(
    metrics: Sequence[Metric], result: EvalResult, items: Sequence[EvalItem], recorded: Mapping[str, Score]
) -> dict[str, ScoreInterval]:
    """Computed from the items' counts, so that all sides are treated alike whichever version scored them; as recorded
    where items have no counts."""
    found: dict[str, ScoreInterval] = {}
    for metric in metrics:
        score: Interval | Score = recorded[metric.name]
        if is_counted(metric, result):
            score = interval_of(metric, table(metric, [item.counts for item in items]))
        low, high = finite_end(score.low), finite_end(score.high)
        found[metric.name] = ScoreInterval(value=score.value, low=low, high=high)
    return found


def _with_corrected_p(tasks: Sequence[TaskComparison]) -> tuple[TaskComparison, ...]:
    """Holm's correction over all differences of this comparison."""
    corrected = iter(holm([change.p for task in tasks for pairing in task.pairings for change in pairing.changes]))

    def correct(pairing: Pairing) -> Pairing:
        changes = (replace(change, corrected_p=next(corrected)) for change in pairing.changes)
        return replace(pairing, changes=tuple(changes))

    return tuple(replace(task, pairings=tuple(map(correct, task.pairings))) for task in tasks)


def _is_one_evaluation(sides: Sequence[LoadedSide]) -> bool:
    """Whether the sides are the models of one evaluation stage."""
    stages = {evaluation_of(side.run.path) for side in sides}
    return len(stages) == 1 and None not in stages and all(side.stage is None for side in sides)


def _verdict(
    differing: Sequence[Setting],
    sides: Sequence[LoadedSide],
    groups: Sequence[Sequence[int]],
    declared: Sequence[str],
    expected: Sequence[str],
) -> tuple[str, bool, tuple[str, ...]]:
    """What can explain a difference in score, whether that is one thing, and a warning for each declared setting that
    does not differ. `expected`: settings that may differ without being declared."""
    seeds = [{sides[at].seed for at in group} for group in groups]
    has_several = max(len(group) for group in groups) > 1
    is_balanced = len(groups) == 1 or (has_several and all(one == seeds[0] for one in seeds))
    keys = [row.key for row in differing if not (row.key == "seed" and is_balanced)]
    unused = [part for part in declared if not any(is_covered(key, [part]) for key in keys)]
    warnings = tuple(f"{part} is declared to differ but does not" for part in unused)
    others = [key for key in keys if not is_covered(key, (*declared, *expected))]
    if not keys:
        what = "the seed" if len(groups) == 1 else "chance"
        return f"nothing that can change a score differs except {what}", True, warnings
    if not others:
        return f"only declared settings differ: {', '.join(keys)}", True, warnings
    if len(keys) == 1:
        return f"one setting differs: {keys[0]}", True, warnings
    besides = f" besides {', '.join(key for key in keys if key not in others)}" if len(others) < len(keys) else ""
    count = f"{len(others)} {'setting' if len(others) == 1 else 'settings'}"
    what = f"these runs differ in {count}{besides}: a difference in score is not the effect of any one of them"
    return what, False, warnings


def _warnings(
    sides: Sequence[LoadedSide], groups: Sequence[Sequence[int]], tasks: Sequence[TaskComparison]
) -> Iterable[str]:
    for side in sides:
        if side.role == BEST:
            yield f"the best checkpoint of {side.name} is {side.checkpoint}"
        if side.record.status != "finished":
            yield f"{side.name} is not finished: it is {side.record.status}"
    for task in tasks:
        yield from (f"{sides[at].name} has no result of {task.task}: {why}" for at, why in task.missing.items())
        for pairing in task.pairings:
            scored = [[at for at in groups[g] if task.scored[at]] for g in (pairing.first, pairing.second)]
            yield from (f"{task.task}: {words}" for words in _pairing_warnings(pairing, sides, scored))
        if sizes := [pairing.n for pairing in task.pairings if pairing.n]:
            yield from (f"{task.task}: {words}" for words in cautions(min(sizes)))


def _pairing_warnings(pairing: Pairing, sides: Sequence[LoadedSide], groups: Sequence[Sequence[int]]) -> Iterable[str]:
    if pairing.only_first or pairing.only_second:
        yield (
            f"{pairing.n} items are paired; {pairing.only_first} are only in the first, {pairing.only_second} only in "
            "the second"
        )
    if pairing.left_out:
        yield f"{', '.join(pairing.left_out)} has no partner with the same seed and is left out of the difference"
    first, second = ({sides[at].seed for at in group} - {None} for group in groups)
    if first and second and max(len(first), len(second)) > 1 and not first & second:
        yield "no seed in common, so runs are compared as groups and not seed by seed"
    if not pairing.changes:
        yield "no metric is computed alike in both" if pairing.n else "no item is in both records, so none is paired"


_MAX_POINTS = 500
Figure = tuple[float | None, float | None]
"""Predicted and measured."""


def predictions_of(sides: Sequence[LoadedSide]) -> tuple[Prediction, ...]:
    """For sides that were trained; a quantity that no side has is left out."""
    rows = [_prediction(quantity, unit, [_figure(side, read) for side in sides]) for quantity, unit, read in _FIGURES]
    rows.append(_prediction("evaluation memory", "bytes", [_evaluation_memory(side) for side in sides]))
    return tuple(row for row in rows if any(value is not None for value in (*row.predicted, *row.measured)))


def _prediction(quantity: Quantity, unit: QuantityUnit, found: Sequence[Figure]) -> Prediction:
    predicted, measured = zip(*found, strict=True)
    return Prediction(quantity=quantity, unit=unit, predicted=predicted, measured=measured)


def _figure(side: LoadedSide, read: Callable[[LoadedSide, Forecast], Figure]) -> Figure:
    if side.plan is None or side.stage is None or not is_trained(side):
        return None, None
    forecast = side.plan.forecasts.get(side.stage.name)
    return (None, None) if forecast is None else read(side, forecast)


def _training_memory(side: LoadedSide, forecast: Forecast) -> Figure:
    """Reserved memory on a card, the memory of the process on a CPU."""
    on_card = side.stage is not None and side.stage.device == "cuda"
    predicted = forecast.reserved_bytes if on_card else forecast.peak_bytes
    return predicted, None if side.ended is None else side.ended.peak_bytes


def _step_seconds(side: LoadedSide, forecast: Forecast) -> Figure:
    """The median, because the first step and steps held up by other programs are not typical."""
    return forecast.step_seconds, median(seconds) if (seconds := _seconds(side)) else None


def _tokens_per_second(side: LoadedSide, forecast: Forecast) -> Figure:
    steps = [step for step in read_steps(side.where.metrics) if "tokens" in step and "seconds" in step]
    seconds = sum(step["seconds"] for step in steps)
    return forecast.tokens_per_second, sum(step["tokens"] for step in steps) / seconds if seconds else None


def _training_seconds(side: LoadedSide, forecast: Forecast) -> Figure:
    return forecast.total_seconds, sum(_seconds(side)) or None


def _cost(side: LoadedSide, forecast: Forecast) -> Figure:
    price = forecast.price_per_hour
    return forecast.cost, None if price is None else price * sum(_seconds(side)) / 3600


def _seconds(side: LoadedSide) -> list[float]:
    return [step["seconds"] for step in read_steps(side.where.metrics) if "seconds" in step]


_FIGURES: tuple[tuple[Quantity, QuantityUnit, Callable[[LoadedSide, Forecast], Figure]], ...] = (
    ("peak memory", "bytes", _training_memory),
    ("time per step", "seconds", _step_seconds),
    ("tokens per second", "tokens/s", _tokens_per_second),
    ("training time", "seconds", _training_seconds),
    ("cost", "money", _cost),
)


def _evaluation_memory(side: LoadedSide) -> Figure:
    """Of the evaluation that took most memory."""
    results = [found.result for found in side.evaluated.values() if found.result.peak_bytes is not None]
    if not results:
        return None, None
    largest = max(results, key=lambda result: result.peak_bytes or 0)
    return largest.predicted_bytes, largest.peak_bytes


def loss_curves(sides: Sequence[LoadedSide]) -> tuple[LossCurve, ...]:
    trained = ((at, side) for at, side in enumerate(sides) if is_trained(side))
    return tuple(_curve(at, side) for at, side in trained if read_steps(side.where.metrics))


def _curve(at: int, side: LoadedSide) -> LossCurve:
    """Thinned evenly if there are very many steps. A loss that is not finite leaves a gap."""
    steps = read_steps(side.where.metrics)
    steps = [step for step in steps if step["loss"] is not None and math.isfinite(step["loss"])]
    thin = steps[:: max(1, math.ceil(len(steps) / _MAX_POINTS))]
    if steps and thin[-1] is not steps[-1]:
        thin.append(steps[-1])
    last = steps[-1]["step"] if steps else 0
    lines = (line for line in read_lines(side.where.metrics) if line.get("event") == "validated")
    losses = sorted({line["step"]: line["validation_loss"] for line in lines}.items())
    return LossCurve(
        side=at,
        steps=tuple(step["step"] for step in thin),
        losses=tuple(step["loss"] for step in thin),
        validation=tuple((step, loss) for step, loss in losses if step <= last and math.isfinite(loss)),
    )
