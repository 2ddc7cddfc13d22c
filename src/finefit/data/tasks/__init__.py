"""What an answer is worth: every task that a spec can name, made by `make_task`."""

from pathlib import Path

from finefit.data.tasks.match import exact_match, json_match
from finefit.data.tasks.task import Likelihood, NoResult, Reading, Reply, Task
from finefit.spec.schema import Evaluation, ExactMatch, Form, JsonMatch

__all__ = ["Likelihood", "NoResult", "Reading", "Reply", "Task", "make_task"]


def make_task(evaluation: Evaluation, *, form: Form | None = None, base: Path | None = None) -> Task:  # noqa: ARG001
    """`form`: what the rows were built with, `data.task`. `base`: the folder that a file of the user's own is relative to."""
    match evaluation.task:
        case ExactMatch():
            return exact_match(evaluation.label)
        case JsonMatch():
            return json_match(evaluation.label)
        case _:
            raise NotImplementedError(evaluation.task.kind)
