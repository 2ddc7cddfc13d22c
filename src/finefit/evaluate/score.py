"""Items -> one record. All items count; an answer without a result scores zero; every score has its interval and its n."""

from collections.abc import Sequence
from typing import Any

from finefit.artifacts.records import EvalItem, EvalResult, Score
from finefit.data.rows import Row
from finefit.data.tasks import NoResult, Task
from finefit.errors import DataError
from finefit.stats.intervals import Interval, bootstrap_mean, wilson


def score_item(task: Task, at: int, row: Row, *, prompt: str, answer: str) -> EvalItem:
    """Against the reference that the answer comes nearest to, by the task's metrics in their order; of equals, the one trained on."""
    wanted = _references(task, row)
    reference, scores, extracted, failure = next(iter(wanted)), dict.fromkeys(task.metrics, 0.0), None, None
    try:
        extracted = task.extract(answer)
        scored = {text: task.scores(extracted, result) for text, result in wanted.items()}
        reference = max(scored, key=lambda text: [scored[text][name] for name in task.metrics])
        scores = scored[reference]
    except NoResult as reason:
        failure = str(reason)
    return EvalItem(item=at, prompt=prompt, reference=reference, answer=answer, extracted=extracted, scores=scores, failure=failure)


def _references(task: Task, row: Row) -> dict[str, Any]:
    """What the task reads in each answer that counts as right, first in the one trained on; those without a result are passed over."""
    read: dict[str, Any] = {}
    unread: list[NoResult] = []
    for text in (row.answer, *row.references):
        try:
            read[text] = task.extract(text)
        except NoResult as reason:
            unread.append(reason)
    if not read:
        raise DataError(f"{row.place} has a reference that the task {task.name} cannot read: {unread[0]}")
    return read


def summarise(task: Task, checkpoint: str, items: Sequence[EvalItem], *, seconds: float) -> EvalResult:
    return EvalResult(
        task=task.name,
        checkpoint=checkpoint,
        n=len(items),
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={name: _score([item.scores[name] for item in items]) for name in task.metrics},
        seconds=seconds,
        items=tuple(sorted(items, key=lambda item: item.item)),
    )


def _score(values: Sequence[float]) -> Score:
    """A rate gets Wilson's interval, a mean the bootstrap's; a single mean says nothing, which is the whole range from 0 to 1."""
    interval: Interval = wilson(int(sum(values)), len(values)) if set(values) <= {0.0, 1.0} else bootstrap_mean(values)
    return Score(value=interval.value, low=max(0.0, interval.low), high=min(1.0, interval.high))
