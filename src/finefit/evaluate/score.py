"""Items -> one record. All items count; one without a result counts as nothing found; every score has its interval and its n."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from finefit.artifacts.records import Candidate, EvalItem, EvalResult, Score
from finefit.data.rows import Row
from finefit.data.tasks import NoResult, Reply, Task
from finefit.errors import DataError
from finefit.stats.intervals import Interval, bootstrap_mean, wilson
from finefit.stats.metrics import Metric, combined, table


def score_item(task: Task, at: int, row: Row, *, prompt: str, reply: Reply, new_tokens: int | None = None, is_cut: bool = False) -> EvalItem:
    try:
        task.require(row)
    except NoResult as reason:
        raise DataError(f"{row.place} has a reference that the task {task.name} cannot read: {reason}") from None
    extracted, counts, reference, failure = None, task.nothing(row), None, None
    try:
        reading = task.read(reply, row)
        extracted, counts, reference = reading.extracted, reading.counts, reading.reference
    except NoResult as reason:
        failure = f"{reason} (cut at {new_tokens} tokens)" if is_cut else str(reason)
    return EvalItem(
        item=at,
        key=key_of(row),
        place=row.place,
        prompt=prompt,
        reference=row.answer if reference is None else reference,
        answer=reply.text,
        extracted=extracted,
        counts=dict(counts),
        scores=task.scores(counts),
        failure=failure,
        candidates=tuple(
            Candidate(text=found.text, is_right=is_right, logprob=found.logprob, tokens=found.tokens)
            for is_right, found in [*((True, one) for one in reply.right), *((False, one) for one in reply.wrong)]
        ),
        new_tokens=new_tokens,
        is_cut=is_cut,
    )


def key_of(row: Row) -> str:
    """The same item has the same key in every run: what is asked, and what is right."""
    content = json.dumps([[asdict(message) for message in row.prompt], row.tools, row.answer, sorted(row.references), sorted(row.wrong)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def summarise(task: Task, checkpoint: str, items: Sequence[EvalItem], *, available: int, seconds: float) -> EvalResult:
    return EvalResult(
        task=task.name,
        checkpoint=checkpoint,
        n=len(items),
        available=available,
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={metric.name: score_of(metric, items) for metric in task.metrics},
        definitions=task.metrics,
        signature=dict(task.signature),
        seconds=seconds,
        new_tokens=sum(item.new_tokens or 0 for item in items),
        items=tuple(sorted(items, key=lambda item: item.item)),
    )


def score_of(metric: Metric, items: Sequence[EvalItem]) -> Score:
    """A rate gets Wilson's interval, anything else the bootstrap's; a single mean says nothing, which is the whole range from 0 to 1."""
    values = table(metric, [item.counts for item in items])
    if metric.aggregate == "rate":
        interval: Interval = wilson(int(values.sum()), len(values))
    else:
        interval = bootstrap_mean(values[:, 0].tolist())
    return Score(value=float(combined(metric, values.sum(axis=0), len(values))), low=max(0.0, interval.low), high=_at_most(metric, interval.high))


def _at_most(metric: Metric, high: float) -> float:
    return min({"share": 1.0, "points": 100.0, "number": math.inf}[metric.unit], high)
