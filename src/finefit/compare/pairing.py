"""The same items of two groups side by side, matched by what was asked, never by position; and what changed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from finefit.artifacts.stage_records import EvalItem, EvalResult
from finefit.compare.records import ItemChange, MetricDifference, Pairing
from finefit.compare.sides import LoadedSide
from finefit.stats.comparisons import paired
from finefit.stats.intervals import Numbers
from finefit.stats.metrics import Metric, combined, table

Key = tuple[str, int]
"""An item's key, and its number among the items of the run with the same key."""
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedItems:
    """Items that both groups have, in the same order. A group may have several results, one per seed."""

    first: tuple[tuple[EvalItem, ...], ...]
    second: tuple[tuple[EvalItem, ...], ...]
    only_first: int
    only_second: int
    repeated: int

    @property
    def n(self) -> int:
        return len(self.first[0])


def pair(first: Sequence[EvalResult], second: Sequence[EvalResult]) -> PairedItems:
    """An item counts if every result of both groups has it."""
    sides = [[_by_key(result.items) for result in group] for group in (first, second)]
    inner = [set.intersection(*(set(items) for items in group)) for group in sides]
    common = [key for key in sides[0][0] if key in inner[0] and key in inner[1]]
    outer = [set.union(*(set(items) for items in group)) for group in sides]
    chosen = [tuple(tuple(items[key] for key in common) for items in group) for group in sides]
    return PairedItems(
        first=chosen[0],
        second=chosen[1],
        only_first=len(outer[0] - set(common)),
        only_second=len(outer[1] - set(common)),
        repeated=sum(number > 0 for _, number in common),
    )


def _by_key(items: Sequence[EvalItem]) -> dict[Key, EvalItem]:
    seen: Counter[str] = Counter()
    found: dict[Key, EvalItem] = {}
    for item in items:
        found[item.key, seen[item.key]] = item
        seen[item.key] += 1
    return found


def metrics_of(result: EvalResult) -> tuple[Metric, ...]:
    """A metric that is not defined over items, such as some of lm-eval's, is a plain number."""
    defined = {metric.name: metric for metric in result.definitions}
    return tuple(
        defined.get(name) or Metric(name=name, aggregate="mean", counts=(name,), unit="number", better="neither")
        for name in result.metrics
    )


def is_counted(metric: Metric, result: EvalResult) -> bool:
    """Whether every item has the counts that the metric is computed from; another program's results may lack them."""
    return metric in result.definitions and all(name in item.counts for item in result.items for name in metric.counts)


def counts_of(metric: Metric, group: Sequence[Sequence[EvalItem]]) -> Numbers:
    """Items x counts, averaged over the group's seeds, so that resampling draws an item with all of its answers."""
    counts: Numbers = np.mean([table(metric, [item.counts for item in items]) for items in group], axis=0)
    return counts


def changes_of(metric: Metric, items: PairedItems) -> Numbers:
    """Per item; positive is better, or larger if neither direction is better."""
    counts = (counts_of(metric, group) for group in (items.first, items.second))
    first, second = (combined(metric, group[:, None, :].sum(axis=1), 1) for group in counts)
    found: Numbers = (second - first) * (-1 if metric.better == "lower" else 1)
    return found


def rewording(items: PairedItems) -> Numbers:
    """From 0, the same words equally often, to 1, no word in common."""
    answers = zip(items.first[0], items.second[0], strict=True)
    return np.array([_word_distance(first.answer, second.answer) for first, second in answers])


def _word_distance(one: str, other: str) -> float:
    first, second = Counter(one.split()), Counter(other.split())
    total = (first | second).total()
    return 1 - (first & second).total() / total if total else 0.0


def pairings(
    sides: Sequence[LoadedSide],
    groups: Sequence[Sequence[int]],
    results: Sequence[EvalResult | None],
    metrics: Sequence[Metric],
    show: int,
) -> Iterable[Pairing]:
    """Every other group with the first, as far as both have results."""
    for second in range(1, len(groups)):
        scored = [[at for at in groups[group] if results[at] is not None] for group in (0, second)]
        chosen, left_out = _same_seeds(sides, scored)
        both = [[result for at in group if (result := results[at]) is not None] for group in chosen]
        if all(both):
            names = tuple(sides[at].name for at in left_out)
            seeds = _paired_seeds(sides, chosen)
            yield _pairing((0, second), both, metrics, seeds=seeds, left_out=names, show=show)


def _same_seeds(sides: Sequence[LoadedSide], groups: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The sides of each group whose seed the other group has too, in one order, and the sides left out. If no seed is
    shared, all sides are kept."""
    if max(len(group) for group in groups) < 2:
        return [list(group) for group in groups], []
    common = [seed for at in groups[0] if (seed := sides[at].seed) in {sides[other].seed for other in groups[1]}]
    if not common:
        return [list(group) for group in groups], []
    chosen = [[next(at for at in group if sides[at].seed == seed) for seed in common] for group in groups]
    return chosen, [at for group, kept in zip(groups, chosen, strict=True) for at in group if at not in kept]


def _paired_seeds(sides: Sequence[LoadedSide], chosen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The seeds, if there are several and every run has a partner with its own seed."""
    first, second = ([sides[at].seed for at in group] for group in chosen)
    return tuple(seed for seed in first if seed is not None) if first == second and len(first) > 1 else ()


def _pairing(
    groups: tuple[int, int],
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
    gained, lost, reworded = _shown_items(items, changes, show)
    return Pairing(
        first=groups[0],
        second=groups[1],
        n=items.n,
        only_first=items.only_first,
        only_second=items.only_second,
        repeated=items.repeated,
        seeds=seeds,
        left_out=left_out,
        changes=tuple(_difference(metric, items, seeds) for metric in shared) if items.n else (),
        num_better=int((changes > _EQUAL).sum()),
        num_equal=int((np.abs(changes) <= _EQUAL).sum()),
        num_worse=int((changes < -_EQUAL).sum()),
        item_changes=tuple(sorted(changes.tolist(), reverse=True)),
        gained=gained,
        lost=lost,
        reworded=reworded,
    )


def _difference(metric: Metric, items: PairedItems, seeds: Sequence[int]) -> MetricDifference:
    first, second = counts_of(metric, items.first), counts_of(metric, items.second)
    found = paired(metric, first, second)
    by_seed = {}
    for at, seed in enumerate(seeds):
        pair_of_seed = (counts_of(metric, group[at : at + 1]) for group in (items.first, items.second))
        before, after = (_over_all(metric, counts) for counts in pair_of_seed)
        by_seed[seed] = after - before
    return MetricDifference(
        metric=metric.name,
        first=_over_all(metric, first),
        second=_over_all(metric, second),
        value=found.value,
        low=finite_end(found.low),
        high=finite_end(found.high),
        p=found.p,
        corrected_p=found.p,
        by_seed=by_seed,
    )


def finite_end(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _over_all(metric: Metric, counts: Numbers) -> float:
    return float(combined(metric, counts.sum(axis=0), len(counts)))


def _shown_items(items: PairedItems, changes: Numbers, show: int) -> tuple[tuple[ItemChange, ...], ...]:
    """The items that gained most, that lost most, and of the others those reworded most. Ties keep the items' order."""
    if not len(changes):
        return (), (), ()
    words = rewording(items)
    gained = [at for at in np.argsort(-changes, kind="stable")[:show] if changes[at] > _EQUAL]
    lost = [at for at in np.argsort(changes, kind="stable")[:show] if changes[at] < -_EQUAL]
    others = [at for at in np.argsort(-words, kind="stable") if words[at] > 0 and at not in gained and at not in lost]
    chosen = (gained, lost, others[:show])
    return tuple(tuple(_item_change(items, int(at), float(changes[at])) for at in kind) for kind in chosen)


def _item_change(items: PairedItems, at: int, change: float) -> ItemChange:
    """With the answers of the first seed."""
    first, second = items.first[0][at], items.second[0][at]
    return ItemChange(
        key=first.key,
        place=first.place,
        prompt=first.prompt,
        reference=first.reference,
        answers=(first.answer, second.answer),
        failures=(first.failure, second.failure),
        scores=(first.scores, second.scores),
        change=change,
    )
