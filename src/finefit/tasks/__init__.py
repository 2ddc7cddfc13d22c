"""What an answer is worth: every task that a spec can name, made by `make_task`; and rows as `data.task` builds
them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from finefit.data.rows import BadRow, Row, as_item, text_key
from finefit.spec import tasks as kinds
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import AmrForm, Form, Perplexity, Rouge
from finefit.tasks.amr import amr_task, build_row
from finefit.tasks.custom import custom_builder, custom_task
from finefit.tasks.judge_marks import with_judge
from finefit.tasks.likelihood import hallucination, perplexity
from finefit.tasks.short_answer import anls, exact_match, json_match, relaxed_accuracy, vqa_accuracy
from finefit.tasks.task import Likelihood, NoResult, Reply, ScoredReply, Task

__all__ = ["Likelihood", "NoResult", "Reply", "ScoredReply", "Task", "make_task", "row_builder"]

RowBuilder = Callable[[Row], Row | BadRow]


def make_task(
    evaluation: Evaluation, *, form: Form | None = None, base: Path | None = None, run: Path | None = None
) -> Task:
    """`form`: what the rows were built with, `data.task`. `base`: where the path of a user's own file starts; the paths
    of models start in `run` where it is given."""
    task = _named(evaluation, form, base, run or base)
    task = task if isinstance(evaluation.task, Perplexity) else _without_plain_text(task)
    return task if evaluation.judge is None else with_judge(task, evaluation.judge)


def _named(evaluation: Evaluation, form: Form | None, base: Path | None, models: Path | None) -> Task:
    """Modules that take a second or more to import (nltk, torch) are imported only for the tasks that need them."""
    name, task = evaluation.label, evaluation.task
    match task:
        case kinds.ExactMatch():
            return exact_match(name)
        case kinds.JsonMatch():
            return json_match(name)
        case kinds.RelaxedAccuracy():
            return relaxed_accuracy(name, task)
        case kinds.Anls():
            return anls(name, task)
        case kinds.VqaAccuracy():
            return vqa_accuracy(name)
        case kinds.Amr():
            return amr_task(name, task, form=form if isinstance(form, AmrForm) else None)
        case kinds.Rouge() | kinds.QmSum() | kinds.Bleu() | kinds.Chrf():
            from finefit.tasks.text_overlap import overlap_task

            return overlap_task(name, Rouge(kind="rouge") if isinstance(task, kinds.QmSum) else task)
        case kinds.TruthfulQa():
            from finefit.tasks.truthfulqa import truthfulqa

            return truthfulqa(name, task, models)
        case kinds.Summary():
            from finefit.tasks.summary import summary

            return summary(name, task, models)
        case kinds.Hallucination():
            return hallucination(name)
        case kinds.Perplexity():
            return perplexity(name, task)
        case kinds.CustomTask():
            return custom_task(name, task, base)
        case _:
            raise NotImplementedError(task.kind)


def _without_plain_text(task: Task) -> Task:
    """Only perplexity takes plain text, which has no prompt."""

    def require(row: Row) -> None:
        if row.kind == "text":
            raise NoResult(
                "it is plain text without a prompt; evaluate perplexity, or use rows with a prompt and an answer"
            )
        task.require(row)

    return replace(task, require=require)


def row_builder(form: Form | None, *, base: Path) -> RowBuilder | None:
    """Builds prompt and answer from a row as it was read; None without a form. A row that cannot be built becomes a
    BadRow. A built row keeps the key of the item that it was read as."""
    if form is None:
        return None
    build = partial(build_row, form) if isinstance(form, AmrForm) else custom_builder(form, base)

    def built(row: Row) -> Row | BadRow:
        try:
            return replace(build(row), key=text_key(as_item(row)))
        except NoResult as reason:
            return BadRow(row.source, row.number, str(reason), row.part)

    return built
