"""The same items of two groups side by side: by what was asked, never by position."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finefit.artifacts.evaluations import EvalItem, EvalResult
from finefit.compare.records import ItemChange
from finefit.stats.metrics import Metric, Numbers, combined, table

Key = tuple[str, int]
"""An item's own key, and which of its equals in the run it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Items that both groups have, each group's results of them in the same order; a group may have several, one for each seed."""

    first: tuple[tuple[EvalItem, ...], ...]
    second: tuple[tuple[EvalItem, ...], ...]
    only_first: int
    only_second: int
    repeated: int

    @property
    def n(self) -> int:
        return len(self.first[0])


def pair(first: Sequence[EvalResult], second: Sequence[EvalResult]) -> Paired:
    """One item counts where every result of both groups has it."""
    sides = [[_keyed(result.items) for result in group] for group in (first, second)]
    inner = [set.intersection(*(set(items) for items in group)) for group in sides]
    common = [key for key in sides[0][0] if key in inner[0] and key in inner[1]]
    outer = [set.union(*(set(items) for items in group)) for group in sides]
    chosen = [tuple(tuple(items[key] for key in common) for items in group) for group in sides]
    return Paired(
        first=chosen[0],
        second=chosen[1],
        only_first=len(outer[0] - set(common)),
        only_second=len(outer[1] - set(common)),
        repeated=sum(number > 0 for _, number in common),
    )


def _keyed(items: Sequence[EvalItem]) -> dict[Key, EvalItem]:
    seen: Counter[str] = Counter()
    found: dict[Key, EvalItem] = {}
    for item in items:
        found[item.key, seen[item.key]] = item
        seen[item.key] += 1
    return found


def metrics_of(result: EvalResult) -> tuple[Metric, ...]:
    """One that does not follow from items, as some of lm-eval's, is a number as it stands."""
    defined = {metric.name: metric for metric in result.definitions}
    return tuple(
        defined.get(name) or Metric(name=name, aggregate="mean", counts=(name,), unit="number", better="neither")
        for name in result.metrics
    )


def is_counted(metric: Metric, result: EvalResult) -> bool:
    """Whether its items say what the metric is computed from; those that another program scored may not."""
    return metric in result.definitions and all(name in item.counts for item in result.items for name in metric.counts)


def counts_of(metric: Metric, group: Sequence[Sequence[EvalItem]]) -> Numbers:
    """Items x counts, the mean over the group's seeds: an item is drawn with all of its answers."""
    tables: Numbers = np.mean([table(metric, [item.counts for item in items]) for items in group], axis=0)
    return tables


def changes_of(metric: Metric, paired: Paired) -> Numbers:
    """Of each item alone, above zero for the better. Where neither way is, a larger value is above zero."""
    values = [
        combined(metric, counts_of(metric, group)[:, None, :].sum(axis=1), 1) for group in (paired.first, paired.second)
    ]
    found: Numbers = (values[1] - values[0]) * (-1 if metric.better == "lower" else 1)
    return found


def item_change(paired: Paired, at: int, change: float) -> ItemChange:
    """With the answers of the first seed."""
    first, second = paired.first[0][at], paired.second[0][at]
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


def rewording(paired: Paired) -> Numbers:
    """From 0, the same words equally often, to 1, no word in common."""
    return np.array(
        [
            _distance(first.answer, second.answer)
            for first, second in zip(paired.first[0], paired.second[0], strict=True)
        ]
    )


def _distance(one: str, other: str) -> float:
    words = Counter(one.split()), Counter(other.split())
    whole = (words[0] | words[1]).total()
    return 1 - (words[0] & words[1]).total() / whole if whole else 0.0
