"""Items -> one record. All items count; an answer without a result scores zero; every score has its interval and its n."""

from collections.abc import Sequence

from finefit.artifacts.records import EvalItem, EvalResult, Score
from finefit.data.rows import Row
from finefit.data.tasks import NoResult, Task
from finefit.errors import DataError
from finefit.stats.intervals import Interval, bootstrap_mean, wilson


def score_item(task: Task, at: int, row: Row, *, prompt: str, answer: str) -> EvalItem:
    try:
        reference = task.extract(row.answer)
    except NoResult as reason:
        raise DataError(f"{row.place} has a reference that the task {task.name} cannot read: {reason}") from None
    scores, extracted, failure = dict.fromkeys(task.metrics, 0.0), None, None
    try:
        extracted = task.extract(answer)
        scores = task.scores(extracted, reference)
    except NoResult as reason:
        failure = str(reason)
    return EvalItem(item=at, prompt=prompt, reference=row.answer, answer=answer, extracted=extracted, scores=scores, failure=failure)


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
