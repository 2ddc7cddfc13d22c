"""Turns several runs into one `Comparison`: settings first, then scores on the same items, then predicted against
measured. Items are matched by their question, never by position."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from finefit.artifacts.rundir import evaluation_of
from finefit.artifacts.stage_records import EvalItem, EvalResult, Score
from finefit.compare import records
from finefit.compare.settings import differing_settings, group_by_seed, is_covered
from finefit.compare.sides import BEST, LoadedSide, loss_curves, open_sides, predictions_of
from finefit.errors import RunError
from finefit.stats.comparisons import holm, paired, spread
from finefit.stats.intervals import Interval, Numbers
from finefit.stats.metrics import Metric, cautions, combined, interval_of, table

_MODELS = ("model", "checkpoint")
"""Settings in which the models of one evaluation stage are expected to differ."""
_EQUAL = 1e-9
Sides = Sequence[LoadedSide]
Groups = Sequence[Sequence[int]]
GroupItems = Sequence[Sequence[EvalItem]]
"""The items of a group that are paired, in one order, once per seed."""


def compare(
    targets: Sequence[str],
    *,
    checkpoint: str | None = None,
    task: str | None = None,
    declared: Sequence[str] = (),
    show: int = 3,
) -> records.Comparison:
    """`targets` are as for `open_sides`. `declared` are the settings that are meant to differ. `show` is the number of
    items of each kind."""
    sides = open_sides(targets, checkpoint=checkpoint)
    groups = group_by_seed(sides)
    differing, without_effect = differing_settings(sides)
    tasks = tuple(_compare_task(name, sides, groups, show) for name in _common_tasks(sides, task))
    _require_common_items(sides, tasks)
    stages = {evaluation_of(side.run.path) for side in sides}
    is_one_evaluation = len(stages) == 1 and None not in stages and all(side.stage is None for side in sides)
    expected = (*declared, *(_MODELS if is_one_evaluation else ()))
    verdict, is_one_variable, unused = _verdict(differing, sides, groups, declared, expected)
    return records.Comparison(
        sides=tuple(
            records.Side(
                name=side.name,
                run=str(side.run.path),
                checkpoint=side.checkpoint,
                role=side.role,
                seed=side.seed,
                status=side.record.status,
                num_steps=None if side.ended is None else side.ended.step,
                total_steps=None if side.stage is None else side.stage.total_steps,
            )
            for side in sides
        ),
        groups=tuple(_group(sides, group) for group in groups),
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


def _group(sides: Sides, group: Sequence[int]) -> records.Group:
    others = "" if len(group) == 1 else f" and {len(group) - 1} more {'seed' if len(group) == 2 else 'seeds'}"
    return records.Group(name=f"{sides[group[0]].name}{others}", sides=tuple(group))


def _common_tasks(sides: Sides, wanted: str | None) -> list[str]:
    """The tasks that at least two sides have results for, in the order of the first side."""
    tasks = dict.fromkeys(task for side in sides for task in (*side.evaluated, *side.unread))
    found = [task for task in tasks if wanted in (None, task)]
    common = [task for task in found if sum(task in side.evaluated for side in sides) > 1]
    if not common:
        each = "\n".join(f"  {side.name}: {', '.join(side.evaluated) or 'none'}" for side in sides)
        each += "".join(f"\n  {why}" for side in sides for why in side.unread.values())
        what = "fewer than two of these were scored on " + ("the same task" if wanted is None else wanted)
        missing = next((side for side in sides if not side.evaluated), sides[-1])
        raise RunError(f"{what}. Results of each:\n{each}", _how_to_score(missing, wanted))
    return common


def _how_to_score(side: LoadedSide, task: str | None) -> str:
    chosen = "" if task is None else f" --task {task}"
    return f"`finefit eval {side.run.path} --checkpoint {side.role}{chosen}` scores it"


def _require_common_items(sides: Sides, tasks: Sequence[records.TaskComparison]) -> None:
    found = [pairing for task in tasks for pairing in task.pairings]
    if any(pairing.n for pairing in found) or not any(pairing.only_first or pairing.only_second for pairing in found):
        return
    problem = "no item was answered by both, so nothing can be paired. Items of each:"
    for task in tasks:
        counts = (f"{s.name} has {r.n}" for s, r in zip(sides, task.scored, strict=True) if r)
        problem += f"\n  {task.task}: {', '.join(counts)}"
    raise RunError(problem, "score them on the same rows: `finefit eval RUN --data FILE`")


def _compare_task(task: str, sides: Sides, groups: Groups, show: int) -> records.TaskComparison:
    results = [side.evaluated[task].result if task in side.evaluated else None for side in sides]
    first = next(result for result in results if result is not None)
    metrics = tuple(first.metric(name) for name in first.metrics)
    scored = tuple(None if result is None else _side_scores(result, metrics) for result in results)

    def value(at: int, metric: Metric) -> float | None:
        found = scored[at]
        return None if found is None or metric.name not in found.metrics else found.metrics[metric.name].value

    return records.TaskComparison(
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
        pairings=tuple(_pairings(sides, groups, results, metrics, show)),
    )


def _is_counted(metric: Metric, result: EvalResult) -> bool:
    """Whether every item has the counts that the metric is computed from; results of another program may lack them."""
    return metric in result.definitions and all(name in item.counts for item in result.items for name in metric.counts)


def _side_scores(result: EvalResult, metrics: Sequence[Metric]) -> records.SideScores:
    """A metric that this side computes in another way than the first side is missing. Scores come from the items'
    counts, so that all sides are treated alike whichever version scored them; if items have no counts, the recorded
    scores are used."""
    shared = [metric for metric in metrics if metric.name in result.metrics and metric == result.metric(metric.name)]

    def scores(items: Sequence[EvalItem], recorded: Mapping[str, Score]) -> dict[str, records.ScoreInterval]:
        found: dict[str, records.ScoreInterval] = {}
        for metric in shared:
            score: Interval | Score = recorded[metric.name]
            if _is_counted(metric, result):
                score = interval_of(metric, table(metric, [item.counts for item in items]))
            low, high = records.finite(score.low), records.finite(score.high)
            found[metric.name] = records.ScoreInterval(value=score.value, low=low, high=high)
        return found

    by_dataset = {}
    for name, part in result.by_dataset.items():
        found = scores([item for item in result.items if item.dataset == name], part.metrics)
        by_dataset[name] = records.SideDatasetScores(n=part.n, coverage=part.coverage, metrics=found)
    n, available, found = result.n, result.available, scores(result.items, result.metrics)
    return records.SideScores(n=n, available=available, coverage=result.coverage, metrics=found, by_dataset=by_dataset)


def _pairings(
    sides: Sides, groups: Groups, results: Sequence[EvalResult | None], metrics: Sequence[Metric], show: int
) -> Iterator[records.Pairing]:
    """Pairs every other group with the first, if both have results."""
    for second in range(1, len(groups)):
        scored = [[at for at in groups[group] if results[at] is not None] for group in (0, second)]
        chosen, left_out = _same_seeds(sides, scored)
        both = [[result for at in group if (result := results[at]) is not None] for group in chosen]
        if not all(both):
            continue
        own, other = ([sides[at].seed for at in group] for group in chosen)
        seeds = [seed for seed in own if seed is not None] if own == other and len(own) > 1 else []
        names = tuple(sides[at].name for at in left_out)
        yield _pairing(second, both, metrics, seeds=tuple(seeds), left_out=names, show=show)


def _same_seeds(sides: Sides, groups: Groups) -> tuple[list[list[int]], list[int]]:
    """The sides of each group whose seed the other group also has, in one order, or all sides if there are none; and
    those left out."""
    common = [seed for at in groups[0] if (seed := sides[at].seed) in {sides[other].seed for other in groups[1]}]
    if not common or max(len(group) for group in groups) < 2:
        return [list(group) for group in groups], []
    chosen = [[next(at for at in group if sides[at].seed == seed) for seed in common] for group in groups]
    return chosen, [at for group, kept in zip(groups, chosen, strict=True) for at in group if at not in kept]


def _pairing(
    second_group: int,
    both: Sequence[Sequence[EvalResult]],
    metrics: Sequence[Metric],
    *,
    seeds: tuple[int, ...],
    left_out: tuple[str, ...],
    show: int,
) -> records.Pairing:
    """An item counts if every result of both groups has it. `seeds` is set if the results are compared seed by seed."""
    keyed = [[_by_key(result.items) for result in group] for group in both]
    inner = [set.intersection(*map(set, group)) for group in keyed]
    outer = [set.union(*map(set, group)) for group in keyed]
    common = [key for key in keyed[0][0] if key in inner[0] and key in inner[1]]
    items = [[[found[key] for key in common] for found in group] for group in keyed]
    shared = [metric for metric in metrics if all(_is_counted(metric, result) for group in both for result in group)]
    changes: Numbers = np.zeros(0)
    if shared and common:  # positive is better, or larger if neither direction is better
        before, after = (combined(shared[0], _counts_of(shared[0], group), 1) for group in items)
        changes = (after - before) * (-1 if shared[0].better == "lower" else 1)
    gained, lost, reworded = _shown_items(items[0][0], items[1][0], changes, show)
    return records.Pairing(
        first=0,
        second=second_group,
        n=len(common),
        only_first=len(outer[0] - set(common)),
        only_second=len(outer[1] - set(common)),
        repeated=sum(number > 0 for _, number in common),
        seeds=seeds,
        left_out=left_out,
        changes=tuple(_difference(metric, items, seeds) for metric in shared) if common else (),
        num_better=int((changes > _EQUAL).sum()),
        num_equal=int((np.abs(changes) <= _EQUAL).sum()),
        num_worse=int((changes < -_EQUAL).sum()),
        item_changes=tuple(sorted(changes.tolist(), reverse=True)),
        gained=gained,
        lost=lost,
        reworded=reworded,
    )


def _by_key(items: Sequence[EvalItem]) -> dict[tuple[str, int], EvalItem]:
    """Items by key, and by their number among the items of the run with the same key."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], EvalItem] = {}
    for item in items:
        found[item.key, seen[item.key]] = item
        seen[item.key] += 1
    return found


def _counts_of(metric: Metric, group: GroupItems) -> Numbers:
    """Items x counts, averaged over the group's seeds, so that resampling draws an item with all of its answers."""
    counts: Numbers = np.mean([table(metric, [item.counts for item in items]) for items in group], axis=0)
    return counts


def _difference(metric: Metric, both: Sequence[GroupItems], seeds: Sequence[int]) -> records.MetricDifference:
    def over_all(counts: Numbers) -> float:
        return float(combined(metric, counts.sum(axis=0), len(counts)))

    first, second = (_counts_of(metric, group) for group in both)
    found = paired(metric, first, second)
    by_seed = {}
    for at, seed in enumerate(seeds):
        before, after = (over_all(_counts_of(metric, group[at : at + 1])) for group in both)
        by_seed[seed] = after - before
    return records.MetricDifference(
        metric=metric.name,
        first=over_all(first),
        second=over_all(second),
        value=found.value,
        low=records.finite(found.low),
        high=records.finite(found.high),
        p=found.p,
        corrected_p=found.p,
        by_seed=by_seed,
    )


def _shown_items(
    first: Sequence[EvalItem], second: Sequence[EvalItem], changes: Numbers, show: int
) -> tuple[tuple[records.ItemChange, ...], ...]:
    """The items that gained most, those that lost most, and among the others those reworded most, with the answers of
    the first seed. Ties keep the items' order."""
    if not len(changes):
        return (), (), ()
    words = np.array([_word_distance(one.answer, other.answer) for one, other in zip(first, second, strict=True)])
    gained = [at for at in np.argsort(-changes, kind="stable")[:show] if changes[at] > _EQUAL]
    lost = [at for at in np.argsort(changes, kind="stable")[:show] if changes[at] < -_EQUAL]
    others = [at for at in np.argsort(-words, kind="stable") if words[at] > 0 and at not in gained and at not in lost]

    def change(at: int) -> records.ItemChange:
        one, other = first[at], second[at]
        return records.ItemChange(
            key=one.key,
            place=one.place,
            prompt=one.prompt,
            reference=one.reference,
            answers=(one.answer, other.answer),
            failures=(one.failure, other.failure),
            scores=(one.scores, other.scores),
            change=float(changes[at]),
        )

    return tuple(tuple(change(int(at)) for at in kind) for kind in (gained, lost, others[:show]))


def _word_distance(one: str, other: str) -> float:
    """A distance from 0 (the same words equally often) to 1 (no word in common)."""
    first, second = Counter(one.split()), Counter(other.split())
    total = (first | second).total()
    return 1 - (first & second).total() / total if total else 0.0


def _with_corrected_p(tasks: Sequence[records.TaskComparison]) -> tuple[records.TaskComparison, ...]:
    """Applies Holm's correction over all differences of this comparison."""
    corrected = iter(holm([change.p for task in tasks for pairing in task.pairings for change in pairing.changes]))

    def correct(pairing: records.Pairing) -> records.Pairing:
        changes = (replace(change, corrected_p=next(corrected)) for change in pairing.changes)
        return replace(pairing, changes=tuple(changes))

    return tuple(replace(task, pairings=tuple(map(correct, task.pairings))) for task in tasks)


def _verdict(
    differing: Sequence[records.Setting], sides: Sides, groups: Groups, declared: Sequence[str], expected: Sequence[str]
) -> tuple[str, bool, tuple[str, ...]]:
    """What can explain a difference in score, whether that is a single setting, and a warning for each declared setting
    that does not differ. `expected` has all settings that may differ."""
    seeds = [{sides[at].seed for at in group} for group in groups]
    has_several = max(len(group) for group in groups) > 1
    is_balanced = len(groups) == 1 or (has_several and all(one == seeds[0] for one in seeds))
    keys = [row.key for row in differing if not (row.key == "seed" and is_balanced)]
    unused = [part for part in declared if not any(is_covered(key, [part]) for key in keys)]
    warnings = tuple(f"{part} is declared to differ but does not" for part in unused)
    others = [key for key in keys if not is_covered(key, expected)]
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


def _warnings(sides: Sides, groups: Groups, tasks: Sequence[records.TaskComparison]) -> Iterable[str]:
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


def _pairing_warnings(pairing: records.Pairing, sides: Sides, groups: Groups) -> Iterable[str]:
    if pairing.only_first or pairing.only_second:
        only = f"{pairing.only_first} are only in the first, {pairing.only_second} only in the second"
        yield f"{pairing.n} items are paired; {only}"
    if pairing.left_out:
        yield f"{', '.join(pairing.left_out)} has no partner with the same seed and is left out of the difference"
    first, second = ({sides[at].seed for at in group} - {None} for group in groups)
    if first and second and max(len(first), len(second)) > 1 and not first & second:
        yield "no seed in common, so runs are compared as groups and not seed by seed"
    if not pairing.changes:
        yield (
            "no metric is computed the same way in both"
            if pairing.n
            else "no item is in both records, so none is paired"
        )
