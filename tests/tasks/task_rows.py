"""Rows and replies that tests of tasks are made of."""

from collections.abc import Mapping, Sequence

from finefit.data.rows import Message, Row
from finefit.stats.metrics import value
from finefit.tasks import Likelihood, NoResult, Reply, Task


def make_row(answer: str, *others: str, prompt: str = "question", wrong: tuple[str, ...] = ()) -> Row:
    messages = (Message("user", prompt), Message("assistant", answer))
    return Row(
        source="t.jsonl", number=1, messages=messages, references=(answer, *others) if others else (), wrong=wrong
    )


def make_likelihood(logprob: float, tokens: int = 1, text: str = "x") -> Likelihood:
    return Likelihood(text=text, logprob=logprob, tokens=tokens)


def counts_of(task: Task, row: Row, reply: Reply) -> Mapping[str, float]:
    """As an evaluation counts: an item without a result counts as nothing found."""
    try:
        return task.read(reply, row).counts
    except NoResult:
        return task.nothing(row)


def metrics_of(task: Task, rows: Sequence[Row], answers: Sequence[str]) -> dict[str, float]:
    counts = [counts_of(task, row, Reply(text=answer)) for row, answer in zip(rows, answers, strict=True)]
    return {metric.name: value(metric, counts) for metric in task.metrics}
