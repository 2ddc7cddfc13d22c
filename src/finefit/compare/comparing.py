"""Several runs -> one Comparison: settings first, then the same items paired, then what was foretold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from finefit.artifacts.evaluations import EvalItem, EvalResult, Score
from finefit.artifacts.stages import evaluation_of
from finefit.compare.effort import curves_of, foretold_of
from finefit.compare.pairing import Paired, changes_of, counts_of, is_counted, item_change, metrics_of, pair, rewording
from finefit.compare.records import (
    Cell,
    Change,
    Comparison,
    Group,
    ItemChange,
    Pairing,
    Scored,
    ScoredPart,
    Setting,
    Side,
    TaskComparison,
)
from finefit.compare.settings import alike_but_for_seeds, differing, is_covered
from finefit.compare.sides import BEST, Opened, open_sides
from finefit.errors import RunError
from finefit.stats import Interval, cautions, holm, interval_of, paired, spread
from finefit.stats.metrics import Metric, Numbers, combined, table

_EQUAL = 1e-9
_MODELS = ("model", "checkpoint")
"""What the models of one evaluation are declared to differ in, by standing there."""


def compare(
    targets: Sequence[str],
    *,
    checkpoint: str | None = None,
    task: str | None = None,
    declared: Sequence[str] = (),
    show: int = 3,
) -> Comparison:
    """`targets` as `open_sides` takes them. `declared`: settings that are meant to differ. `show`: items of each kind."""
    sides = open_sides(targets, checkpoint=checkpoint)
    groups = alike_but_for_seeds(sides)
    can, cannot = differing(sides)
    tasks = tuple(_task(name, sides, groups, show) for name in _tasks(sides, task))
    pairings = [pairing for one in tasks for pairing in one.pairings]
    if any(pairing.only_first or pairing.only_second for pairing in pairings) and not any(
        pairing.n for pairing in pairings
    ):
        _refuse_unpaired(sides, tasks)
    verdict, is_one_variable, warnings = _verdict(
        can, sides, groups, declared, _MODELS if _is_one_evaluation(sides) else ()
    )
    return Comparison(
        sides=tuple(_side(side) for side in sides),
        groups=tuple(Group(name=_group_name(sides, group), sides=tuple(group)) for group in groups),
        differing=can,
        apart=cannot,
        declared=tuple(declared),
        verdict=verdict,
        is_one_variable=is_one_variable,
        tasks=_corrected(tasks),
        foretold=foretold_of(sides),
        curves=curves_of(sides),
        warnings=(*warnings, *_warnings(sides, groups, tasks)),
    )


def _side(side: Opened) -> Side:
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


def _group_name(sides: Sequence[Opened], group: Sequence[int]) -> str:
    first = sides[group[0]].name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more {'seed' if len(group) == 2 else 'seeds'}"


def _tasks(sides: Sequence[Opened], asked: str | None) -> list[str]:
    """Those that two sides at least have been scored on, in the order of the first."""
    have = [dict.fromkeys((*side.evaluated, *side.unread)) for side in sides]
    tasks = [task for task in dict.fromkeys(task for tasks in have for task in tasks) if asked in (None, task)]
    common = [task for task in tasks if sum(task in side.evaluated for side in sides) > 1]
    if not common:
        each = "\n".join(f"  {side.name}: {', '.join(side.evaluated) or 'none'}" for side in sides)
        what = (
            "there is no task that two of them were scored on"
            if asked is None
            else f"no two of them were scored on {asked}"
        )
        missing = next((side for side in sides if not side.evaluated), sides[-1])
        raise RunError(f"{what}. Results of each:\n{each}", _how_to_score(missing, asked))
    return common


def _how_to_score(side: Opened, task: str | None) -> str:
    words = [
        f"finefit eval {side.run.path}",
        f"--checkpoint {side.role}",
        *([] if task is None else [f"--task {task}"]),
    ]
    return f"`{' '.join(words)}` scores it"


def _refuse_unpaired(sides: Sequence[Opened], tasks: Sequence[TaskComparison]) -> None:
    each = "\n".join(
        f"  {task.task}: " + ", ".join(f"{s.name} has {r.n}" for s, r in zip(sides, task.scored, strict=True) if r)
        for task in tasks
    )
    raise RunError(
        f"no item is answered by both: nothing can be paired. Items of each:\n{each}",
        "score them on the same rows: `finefit eval RUN --data FILE`",
    )


def _task(task: str, sides: Sequence[Opened], groups: Sequence[Sequence[int]], show: int) -> TaskComparison:
    results = [side.evaluated[task].result if task in side.evaluated else None for side in sides]
    metrics = next(metrics_of(result) for result in results if result is not None)
    scored = tuple(None if result is None else _scored(result, metrics) for result in results)
    return TaskComparison(
        task=task,
        metrics=metrics,
        scored=scored,
        missing={at: _why_missing(sides[at], task) for at, result in enumerate(results) if result is None},
        spreads=tuple(
            {metric.name: spread([_value(scored[at], metric) for at in group]) for metric in metrics}
            for group in groups
        ),
        pairings=tuple(_pairings(sides, groups, results, metrics, show)),
    )


def _scored(result: EvalResult, metrics: Sequence[Metric]) -> Scored:
    """A metric that this side computes in another way than the first is missing here."""
    shared = [metric for metric in metrics if metric in metrics_of(result)]
    parts = {
        name: ScoredPart(n=part.n, coverage=part.coverage, metrics=_cells(shared, result, part.metrics, dataset=name))
        for name, part in result.by_dataset.items()
    }
    return Scored(
        n=result.n,
        available=result.available,
        coverage=result.coverage,
        metrics=_cells(shared, result, result.metrics),
        by_dataset=parts,
    )


def _cells(
    metrics: Sequence[Metric], result: EvalResult, recorded: Mapping[str, Score], *, dataset: str | None = None
) -> dict[str, Cell]:
    """Of all items, or of those of one data set. From the counts, so that all sides are reckoned alike, whichever version scored them; as recorded
    where items have none."""
    items = [item for item in result.items if dataset in (None, item.dataset)]
    return {metric.name: _cell(metric, items if is_counted(metric, result) else None, recorded) for metric in metrics}


def _cell(metric: Metric, items: Sequence[EvalItem] | None, recorded: Mapping[str, Score]) -> Cell:
    found: Interval | Score = (
        recorded[metric.name] if items is None else interval_of(metric, table(metric, [item.counts for item in items]))
    )
    return Cell(value=found.value, low=_end(found.low), high=_end(found.high))


def _end(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _why_missing(side: Opened, task: str) -> str:
    return f"{side.unread.get(task, 'it was not scored')}; {_how_to_score(side, task)}"


def _value(scored: Scored | None, metric: Metric) -> float | None:
    return None if scored is None or metric.name not in scored.metrics else scored.metrics[metric.name].value


def _pairings(
    sides: Sequence[Opened],
    groups: Sequence[Sequence[int]],
    results: Sequence[EvalResult | None],
    metrics: Sequence[Metric],
    show: int,
) -> Iterable[Pairing]:
    """Every other group with the first, as far as both have results."""
    for second in range(1, len(groups)):
        chosen, left_out = _same_seeds(
            sides, [[at for at in groups[g] if results[at] is not None] for g in (0, second)]
        )
        both = [[result for at in group if (result := results[at]) is not None] for group in chosen]
        if all(both):
            seeds = _paired_seeds(sides, chosen)
            yield _pairing(
                (0, second), both, metrics, seeds=seeds, left_out=tuple(sides[at].name for at in left_out), show=show
            )


def _same_seeds(sides: Sequence[Opened], groups: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Of groups of several, those with a partner of the same seed, in one order; all of them where none has one."""
    if max(len(group) for group in groups) < 2:
        return [list(group) for group in groups], []
    common = [seed for at in groups[0] if (seed := sides[at].seed) in {sides[other].seed for other in groups[1]}]
    if not common:
        return [list(group) for group in groups], []
    chosen = [[next(at for at in group if sides[at].seed == seed) for seed in common] for group in groups]
    return chosen, [at for group, kept in zip(groups, chosen, strict=True) for at in group if at not in kept]


def _paired_seeds(sides: Sequence[Opened], chosen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Where every run has a partner of its own seed at the same place."""
    first, second = ([sides[at].seed for at in group] for group in chosen)
    return tuple(seed for seed in first if seed is not None) if first == second and len(first) > 1 else ()


def _pairing(
    places: tuple[int, int],
    both: Sequence[Sequence[EvalResult]],
    metrics: Sequence[Metric],
    *,
    seeds: tuple[int, ...],
    left_out: tuple[str, ...],
    show: int,
) -> Pairing:
    items = pair(*both)
    shared = [metric for metric in metrics if all(is_counted(metric, result) for group in both for result in group)]
    changes = changes_of(shared[0], items) if shared and items.n else np.zeros(0)
    gained, lost, reworded = _shown(items, changes, show)
    return Pairing(
        first=places[0],
        second=places[1],
        n=items.n,
        only_first=items.only_first,
        only_second=items.only_second,
        repeated=items.repeated,
        seeds=seeds,
        left_out=left_out,
        changes=tuple(_change(metric, items, seeds) for metric in shared) if items.n else (),
        num_better=int((changes > _EQUAL).sum()),
        num_equal=int((np.abs(changes) <= _EQUAL).sum()),
        num_worse=int((changes < -_EQUAL).sum()),
        item_changes=tuple(sorted(changes.tolist(), reverse=True)),
        gained=gained,
        lost=lost,
        reworded=reworded,
    )


def _change(metric: Metric, items: Paired, seeds: Sequence[int]) -> Change:
    first, second = counts_of(metric, items.first), counts_of(metric, items.second)
    found = paired(metric, first, second)
    return Change(
        metric=metric.name,
        first=_over_all(metric, first),
        second=_over_all(metric, second),
        value=found.value,
        low=_end(found.low),
        high=_end(found.high),
        p=found.p,
        corrected_p=found.p,
        by_seed={seed: _of_seed(metric, items, at) for at, seed in enumerate(seeds)},
    )


def _of_seed(metric: Metric, items: Paired, at: int) -> float:
    return _over_all(metric, counts_of(metric, items.second[at : at + 1])) - _over_all(
        metric, counts_of(metric, items.first[at : at + 1])
    )


def _over_all(metric: Metric, counts: Numbers) -> float:
    return float(combined(metric, counts.sum(axis=0), len(counts)))


def _shown(items: Paired, changes: Numbers, show: int) -> tuple[tuple[ItemChange, ...], ...]:
    """The most gained, the most lost, and of the others the most reworded; of equals the first."""
    if not len(changes):
        return (), (), ()
    words = rewording(items)
    gained = [at for at in np.argsort(-changes, kind="stable")[:show] if changes[at] > _EQUAL]
    lost = [at for at in np.argsort(changes, kind="stable")[:show] if changes[at] < -_EQUAL]
    others = [at for at in np.argsort(-words, kind="stable") if words[at] > 0 and at not in gained and at not in lost]
    return tuple(
        tuple(item_change(items, int(at), float(changes[at])) for at in chosen)
        for chosen in (gained, lost, others[:show])
    )


def _corrected(tasks: Sequence[TaskComparison]) -> tuple[TaskComparison, ...]:
    """Each p among all of this comparison."""
    corrected = iter(holm([change.p for task in tasks for pairing in task.pairings for change in pairing.changes]))
    return tuple(
        replace(
            task,
            pairings=tuple(
                replace(
                    pairing, changes=tuple(replace(change, corrected_p=next(corrected)) for change in pairing.changes)
                )
                for pairing in task.pairings
            ),
        )
        for task in tasks
    )


def _is_one_evaluation(sides: Sequence[Opened]) -> bool:
    """A stage that asks several models the same."""
    places = {evaluation_of(side.run.path) for side in sides}
    return len(places) == 1 and None not in places and all(side.stage is None for side in sides)


def _verdict(
    can: Sequence[Setting],
    sides: Sequence[Opened],
    groups: Sequence[Sequence[int]],
    declared: Sequence[str],
    meant: Sequence[str],
) -> tuple[str, bool, tuple[str, ...]]:
    """What a difference in score can be laid to, whether that is one thing, and what the user should know of the declared ones. `meant`: what may
    differ without a word."""
    seeds = [{sides[at].seed for at in group} for group in groups]
    is_balanced = len(groups) == 1 or (
        max(len(group) for group in groups) > 1 and all(one == seeds[0] for one in seeds)
    )
    keys = [row.key for row in can if not (row.key == "seed" and is_balanced)]
    idle = [part for part in declared if not any(is_covered(key, [part]) for key in keys)]
    warnings = tuple(f"{part} is declared to differ and does not" for part in idle)
    others = [key for key in keys if not is_covered(key, (*declared, *meant))]
    if not keys:
        what = "their seed" if len(groups) == 1 else "chance"
        return f"nothing that can change a score differs but {what}", True, warnings
    if not others:
        return f"only what was declared differs: {', '.join(keys)}", True, warnings
    if len(keys) == 1:
        return f"one setting differs: {keys[0]}", True, warnings
    besides = f" besides {', '.join(key for key in keys if key not in others)}" if len(others) < len(keys) else ""
    count = f"{len(others)} {'setting' if len(others) == 1 else 'settings'}"
    return (
        f"these runs differ in {count}{besides}: a difference in score is not the effect of any one of them",
        False,
        warnings,
    )


def _warnings(
    sides: Sequence[Opened], groups: Sequence[Sequence[int]], tasks: Sequence[TaskComparison]
) -> Iterable[str]:
    for side in sides:
        if side.role == BEST:
            yield f"the best of {side.name} is {side.checkpoint}"
        if side.record.status != "finished":
            yield f"{side.name} is not finished: it is {side.record.status}"
    for task in tasks:
        for at, why in task.missing.items():
            yield f"{sides[at].name} has no result of {task.task}: {why}"
        for pairing in task.pairings:
            if pairing.only_first or pairing.only_second:
                yield f"{task.task}: {pairing.n} items are paired; {pairing.only_first} only the first has, {pairing.only_second} only the other"
            if pairing.left_out:
                yield f"{task.task}: {', '.join(pairing.left_out)} has no partner of the same seed and is left out of the difference"
            if _has_no_common_seed(
                sides, [[at for at in groups[g] if task.scored[at]] for g in (pairing.first, pairing.second)]
            ):
                yield f"{task.task}: no seed in common, so runs are compared as groups and not seed by seed"
            if not pairing.changes:
                yield f"{task.task}: {'no metric is computed alike in both' if pairing.n else 'no item is in both records, so nothing is paired'}"
        smallest = min((pairing.n for pairing in task.pairings if pairing.n), default=None)
        yield from () if smallest is None else (f"{task.task}: {words}" for words in cautions(smallest))


def _has_no_common_seed(sides: Sequence[Opened], groups: Sequence[Sequence[int]]) -> bool:
    """Of groups of which one at least has several seeds; where nothing was trained there is none to share."""
    first, second = ({sides[at].seed for at in group} - {None} for group in groups)
    return bool(first and second) and max(len(first), len(second)) > 1 and not first & second
