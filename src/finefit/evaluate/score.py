"""Items -> one record. All items count; one without a result counts as nothing found; every score has its interval and its n."""

import math
from collections.abc import Sequence
from dataclasses import replace

from finefit.artifacts.evaluations import Candidate, DatasetScores, EvalItem, EvalResult, ItemImage, Score
from finefit.data.items import key_of
from finefit.data.rows import Row
from finefit.data.tasks import Likelihood, NoResult, Reading, Reply, Task
from finefit.errors import DataError
from finefit.stats import cautions, interval_of
from finefit.stats.metrics import Metric, table


def score_item(
    task: Task, at: int, row: Row, *, prompt: str, reply: Reply, new_tokens: int | None = None, is_cut: bool = False
) -> EvalItem:
    try:
        task.require(row)
    except NoResult as reason:
        raise DataError(f"{row.place} has a reference that the task {task.name} cannot read: {reason}") from None
    try:
        reading = task.read(reply, row)
    except NoResult as reason:
        reading = Reading(extracted=None, counts=task.nothing(row), failure=str(reason))
    failure = reading.failure
    if failure is not None and is_cut:
        failure += f" (cut at {new_tokens} tokens)"
    return EvalItem(
        item=at,
        key=key_of(row),
        place=row.place,
        dataset=row.dataset,
        prompt=prompt,
        reference=row.answer if reading.reference is None else reading.reference,
        answer=reply.text,
        extracted=reading.extracted,
        counts=dict(reading.counts),
        scores=task.scores(reading.counts),
        failure=failure,
        candidates=_candidates(reply),
        new_tokens=new_tokens,
        is_cut=is_cut,
        images=tuple(ItemImage(name=picture.place, sha256=picture.sha256) for picture in row.pictures),
    )


def _candidates(reply: Reply) -> tuple[Candidate, ...]:
    """None where one of them is not finite, which no record can hold: the item's failure says so then."""
    found = [*((True, one) for one in reply.right), *((False, one) for one in reply.wrong)]
    if not all(math.isfinite(one.logprob) for _, one in found):
        return ()
    return tuple(
        Candidate(text=one.text, is_right=is_right, logprob=one.logprob, tokens=one.tokens) for is_right, one in found
    )


def finished(task: Task, items: Sequence[tuple[Row, EvalItem]]) -> list[EvalItem]:
    """With what the task counts once all items are answered; where no result was found there is nothing to count."""
    if task.finish is None:
        return [item for _, item in items]
    found = [(row, item) for row, item in items if item.failure is None]
    further = task.finish([(row, reply_of(item)) for row, item in found])
    counted = {item.item: item.counts | dict(counts) for (_, item), counts in zip(found, further, strict=True)}
    return [
        replace(item, counts=(counts := counted.get(item.item, item.counts)), scores=task.scores(counts))
        for _, item in items
    ]


def reply_of(item: EvalItem) -> Reply:
    """As the task was given it."""
    right, wrong = (
        tuple(
            Likelihood(text=c.text, logprob=c.logprob, tokens=c.tokens)
            for c in item.candidates
            if c.is_right == is_right
        )
        for is_right in (True, False)
    )
    return Reply(text=item.answer, right=right, wrong=wrong)


def summarise(task: Task, checkpoint: str, items: Sequence[EvalItem], *, available: int, seconds: float) -> EvalResult:
    return EvalResult(
        task=task.name,
        checkpoint=checkpoint,
        n=len(items),
        available=available,
        coverage=_coverage(items),
        metrics=_scores(task, items),
        by_dataset=_by_dataset(task, items),
        definitions=task.metrics,
        signature=dict(task.signature),
        warnings=cautions(len(items)),
        seconds=seconds,
        new_tokens=sum(item.new_tokens or 0 for item in items),
        items=tuple(sorted(items, key=lambda item: item.item)),
    )


def _coverage(items: Sequence[EvalItem]) -> float:
    return sum(item.failure is None for item in items) / len(items)


def _scores(task: Task, items: Sequence[EvalItem]) -> dict[str, Score]:
    return {metric.name: score_of(metric, items) for metric in task.metrics}


def _by_dataset(task: Task, items: Sequence[EvalItem]) -> dict[str, DatasetScores]:
    """Data sets differ in what is hard about them, so that the score of a mixture alone says little."""
    parts: dict[str, list[EvalItem]] = {}
    for item in items:
        parts.setdefault(item.dataset, []).append(item)
    if len(parts) < 2:
        return {}
    return {
        name: DatasetScores(n=len(part), coverage=_coverage(part), metrics=_scores(task, part))
        for name, part in parts.items()
    }


def score_of(metric: Metric, items: Sequence[EvalItem]) -> Score:
    """A rate gets Wilson's interval, anything else the bootstrap's; a single mean says nothing, which is the whole range."""
    found = interval_of(metric, table(metric, [item.counts for item in items]))
    return Score(value=found.value, low=found.low, high=found.high)
