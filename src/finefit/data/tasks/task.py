"""A task reads the result from a reply, and counts what was found in it against what was to be found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finefit.data.rows import Row
from finefit.stats.metrics import Metric, value


class NoResult(Exception):
    """The reply holds no result; the item counts as nothing found, and this is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Of a given answer behind the prompt of an item."""

    text: str
    logprob: float
    """Natural, summed over its tokens."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model has to say to one item, as far as the task asks for it."""

    text: str = ""
    right: tuple[Likelihood, ...] = ()
    wrong: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was found in a reply."""

    extracted: Any
    """Plain data that a JSON record can hold."""
    counts: Mapping[str, float]
    """All that the task's metrics are computed from."""
    reference: str | None = None
    """The one that the reply was held against, where an item has several."""
    failure: str | None = None
    """Why a part of it holds no result, where the rest counts all the same."""


def _no_candidates(_: Row) -> tuple[Sequence[str], Sequence[str]]:
    return (), ()


Finish = Callable[[Sequence[tuple[Row, Reply]]], Sequence[Mapping[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    metrics: tuple[Metric, ...]
    """The first one is the task's own score."""
    read: Callable[[Reply, Row], Reading]
    """Raises NoResult, and then the item has the counts of `nothing`."""
    nothing: Callable[[Row], Mapping[str, float]]
    """The counts of an item in which nothing was found: it still counts with all that was to be found."""
    require: Callable[[Row], None]
    """Raises NoResult where a row cannot be an item: its reference cannot be read, or what the task compares is missing."""
    generates: bool = True
    """Whether an answer is generated."""
    candidates: Callable[[Row], tuple[Sequence[str], Sequence[str]]] = _no_candidates
    """Right and wrong answers whose likelihoods are asked for."""
    window: int = 2048
    """Tokens of plain text whose likelihood is asked for together; a longer text is looked at in windows behind one another."""
    finish: Finish | None = None
    """Further counts of every item, once all are answered: what only a model of the task's own can tell."""
    signature: Mapping[str, str] = field(default_factory=dict)
    """Settings and versions that the numbers depend on."""

    def scores(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Of one item alone, as far as it is counted: what `finish` counts comes last."""
        return {metric.name: value(metric, [counts]) for metric in self.metrics if counts.keys() >= set(metric.counts)}


def against_references(
    name: str,
    *,
    metrics: tuple[Metric, ...],
    extract: Callable[[str], Any],
    compare: Callable[[Any, Any], Mapping[str, float]],
    nothing: Callable[[Any], Mapping[str, float]] | None = None,
    best_of_each: bool = False,
    **more: Any,
) -> Task:
    """Extracts the same from answer and references, and counts what the nearest reference gives; of equals, the one trained on.

    `nothing`: the counts of a reference that nothing was found for; by default all zero. `best_of_each`: every count is the highest that any
    reference gives, instead of all being those of the nearest."""
    names = tuple(dict.fromkeys(count for metric in metrics for count in metric.counts))

    def references(row: Row) -> dict[str, Any]:
        read: dict[str, Any] = {}
        unread: list[NoResult] = []
        for text in (row.answer, *row.references):
            try:
                read[text] = extract(text)
            except NoResult as reason:
                unread.append(reason)
        if not read:
            raise unread[0]
        return read

    def read(reply: Reply, row: Row) -> Reading:
        found, wanted = extract(reply.text), references(row)
        counted = {text: compare(found, reference) for text, reference in wanted.items()}
        nearest = max(counted, key=lambda text: [value(metric, [counted[text]]) for metric in metrics])
        best = (
            {count: max(given[count] for given in counted.values()) for count in names}
            if best_of_each
            else counted[nearest]
        )
        return Reading(extracted=found, counts=best, reference=nearest)

    def counts_of_nothing(row: Row) -> Mapping[str, float]:
        return dict.fromkeys(names, 0.0) if nothing is None else nothing(next(iter(references(row).values())))

    def require(row: Row) -> None:
        references(row)

    return Task(name=name, metrics=metrics, read=read, nothing=counts_of_nothing, require=require, **more)
