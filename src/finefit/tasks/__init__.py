"""Tasks score answers: a task reads the result from a reply and counts what was found. `tasks.make` lists all tasks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finefit.data.rows import Row
from finefit.stats.metrics import Metric, value


class NoResult(Exception):
    """The reply has no result, for this reason; the item counts as nothing found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """The likelihood of a given answer after the prompt of an item."""

    text: str
    logprob: float
    """Natural logarithm, summed over its tokens."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model gave for one item, as far as the task needs it."""

    text: str = ""
    right: tuple[Likelihood, ...] = ()
    wrong: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredReply:
    extracted: Any
    """Plain data that a JSON record can store."""
    counts: Mapping[str, float]
    """Everything that the task's metrics are computed from."""
    reference: str | None = None
    """The reference that the reply was compared with, if an item has several."""
    failure: str | None = None
    """Why a part of the reply has no result while the rest still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    metrics: tuple[Metric, ...]
    """The first one is the task's main score."""
    read: Callable[[Reply, Row], ScoredReply]
    """Reads the counts from a reply. After a NoResult the item has the counts of `nothing`."""
    nothing: Callable[[Row], Mapping[str, float]]
    """The counts of an item in which nothing was found: everything that was to be found still counts."""
    require: Callable[[Row], object]
    """Raises NoResult if a row cannot be an item, for example because its reference cannot be read."""
    generates: bool = True
    candidates: Callable[[Row], tuple[Sequence[str], Sequence[str]]] = lambda _: ((), ())
    """Right and wrong answers whose likelihoods the task needs."""
    window: int = 2048
    """Tokens of plain text whose likelihood is computed together; a longer text is cut into windows."""
    finish: Callable[[Sequence[tuple[Row, Reply]]], Sequence[Mapping[str, float]]] | None = None
    """Further counts of every item, once all are answered, such as those of a model that the task itself runs."""
    signature: Mapping[str, str] = field(default_factory=dict)
    """Settings and versions that the numbers depend on."""

    def scores(self, counts: Mapping[str, float]) -> dict[str, float]:
        """The scores of one item, from its counts so far; the counts of `finish` come last."""
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
    """Extracts the same from answer and references, and counts what the nearest reference gives; on a tie, the one
    trained on.

    `nothing` is the counts of a reference for which nothing was found; by default all zero. With `best_of_each`, every
    count is the highest that any reference gives, instead of all counts coming from the nearest."""
    names = tuple(dict.fromkeys(count for metric in metrics for count in metric.counts))

    def references(row: Row) -> dict[str, Any]:
        readable, reasons = dict[str, Any](), list[NoResult]()
        for text in (row.answer, *row.references):
            try:
                readable[text] = extract(text)
            except NoResult as reason:
                reasons.append(reason)
        if not readable:
            raise reasons[0]
        return readable

    def read(reply: Reply, row: Row) -> ScoredReply:
        found = extract(reply.text)
        counted = {text: compare(found, reference) for text, reference in references(row).items()}
        nearest = max(counted, key=lambda text: [value(metric, [counted[text]]) for metric in metrics])
        counts = counted[nearest]
        if best_of_each:
            counts = {count: max(given[count] for given in counted.values()) for count in names}
        return ScoredReply(extracted=found, counts=counts, reference=nearest)

    def counts_of_nothing(row: Row) -> Mapping[str, float]:
        return dict.fromkeys(names, 0.0) if nothing is None else nothing(next(iter(references(row).values())))

    return Task(name=name, metrics=metrics, read=read, nothing=counts_of_nothing, require=references, **more)


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """The distinct values in their order, without empty ones."""
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def right_answers(row: Row) -> tuple[str, ...]:
    """The right answers, the one trained on first."""
    return distinct((row.answer, *row.references))


def require_right(row: Row) -> None:
    if not right_answers(row):
        raise NoResult("the reference is empty")


def require_wrong(row: Row) -> None:
    require_right(row)
    if not distinct(row.wrong):
        raise NoResult("it has no wrong answers to compare with; preference pairs and TruthfulQA's rows have them")


def require_finite(reply: Reply) -> None:
    """Refuses values that are not finite: they have no order, because weights that have diverged prefer nothing."""
    if not all(math.isfinite(found.logprob) for found in (*reply.right, *reply.wrong)):
        raise NoResult("the model's probabilities are not finite")
