"""Turns items into one record. An item without a result counts as nothing found; every score has an interval and n."""

import math
from collections.abc import Sequence
from dataclasses import replace

from finefit import __version__
from finefit.artifacts.stage_records import CandidateAnswer, DatasetScores, EvalItem, EvalResult, ItemImage, Score
from finefit.data.rows import Row, key_of
from finefit.errors import DataError
from finefit.facts.machine import read_version
from finefit.stats.metrics import Metric, cautions, interval_of, table
from finefit.tasks import Likelihood, NoResult, Reply, ScoredReply, Task


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
        reading = ScoredReply(extracted=None, counts=task.nothing(row), failure=str(reason))
    failure = reading.failure
    if failure is not None and is_cut:
        failure += f" (cut at {new_tokens} tokens)"
    candidates = tuple(
        CandidateAnswer(text=one.text, is_right=is_right, logprob=one.logprob, tokens=one.tokens)
        for is_right, side in ((True, reply.right), (False, reply.wrong))
        for one in side
    )
    # a record cannot hold a likelihood that is not finite: the item's failure says so
    is_storable = all(math.isfinite(one.logprob) for one in candidates)
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
        candidates=candidates if is_storable else (),
        new_tokens=new_tokens,
        is_cut=is_cut,
        images=tuple(ItemImage(name=image.place, sha256=image.sha256) for image in row.image_refs),
    )


def finished(task: Task, items: Sequence[tuple[Row, EvalItem]]) -> list[EvalItem]:
    """The items with the counts of `Task.finish`, for those that have a result."""
    if task.finish is None:
        return [item for _, item in items]
    found = [(row, item) for row, item in items if item.failure is None]
    further = task.finish([(row, _reply_of(item)) for row, item in found])
    counted = {item.item: item.counts | dict(counts) for (_, item), counts in zip(found, further, strict=True)}
    with_counts = [(item, counted.get(item.item, item.counts)) for _, item in items]
    return [replace(item, counts=counts, scores=task.scores(counts)) for item, counts in with_counts]


def _reply_of(item: EvalItem) -> Reply:
    """The reply that the item was scored on."""
    sides: dict[bool, list[Likelihood]] = {True: [], False: []}
    for found in item.candidates:
        sides[found.is_right].append(Likelihood(text=found.text, logprob=found.logprob, tokens=found.tokens))
    return Reply(text=item.answer, right=tuple(sides[True]), wrong=tuple(sides[False]))


def summarise(task: Task, checkpoint: str, items: Sequence[EvalItem], *, available: int, seconds: float) -> EvalResult:
    parts: dict[str, list[EvalItem]] = {}
    for item in items:
        parts.setdefault(item.dataset, []).append(item)
    whole = _dataset_scores(task, items)
    return EvalResult(
        task=task.name,
        checkpoint=checkpoint,
        n=whole.n,
        available=available,
        coverage=whole.coverage,
        metrics=whole.metrics,
        # data sets differ in difficulty, so the score of a mixture alone says little
        by_dataset={name: _dataset_scores(task, part) for name, part in parts.items()} if len(parts) > 1 else {},
        definitions=task.metrics,
        signature=dict(task.signature),
        warnings=cautions(len(items)),
        seconds=seconds,
        new_tokens=sum(item.new_tokens or 0 for item in items),
        items=tuple(sorted(items, key=lambda item: item.item)),
    )


def _dataset_scores(task: Task, items: Sequence[EvalItem]) -> DatasetScores:
    return DatasetScores(
        n=len(items),
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={metric.name: score_of(metric, items) for metric in task.metrics},
    )


def score_of(metric: Metric, items: Sequence[EvalItem]) -> Score:
    """Wilson's interval for a rate, the bootstrap's for anything else; a single item gets the whole range."""
    found = interval_of(metric, table(metric, [item.counts for item in items]))
    return Score(value=found.value, low=found.low, high=found.high)


def made_with() -> dict[str, str]:
    """The versions that an answer depends on: answers of different versions are not mixed in one record."""
    return {"finefit": __version__} | {name: str(read_version(name)) for name in ("torch", "transformers", "peft")}
