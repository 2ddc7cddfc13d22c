"""What an answer is worth: every task that a spec can name, made by `make_task`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from finefit.data.rows import Row
from finefit.data.tasks.amr import amr_task, build_row
from finefit.data.tasks.judged import with_judge
from finefit.data.tasks.likely import hallucination, perplexity
from finefit.data.tasks.match import exact_match, json_match
from finefit.data.tasks.own import own_form, own_task
from finefit.data.tasks.relaxed import relaxed_accuracy
from finefit.data.tasks.task import Likelihood, NoResult, Reading, Reply, Task
from finefit.data.tasks.vqa import vqa_accuracy
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import (
    Amr,
    AmrForm,
    Anls,
    Bleu,
    Chrf,
    ExactMatch,
    Form,
    Hallucination,
    JsonMatch,
    OwnTask,
    Perplexity,
    QmSum,
    RelaxedAccuracy,
    Rouge,
    Summary,
    TruthfulQa,
    VqaAccuracy,
)

__all__ = ["Likelihood", "NoResult", "Reading", "Reply", "Task", "make_build", "make_task"]


def make_task(
    evaluation: Evaluation, *, form: Form | None = None, base: Path | None = None, run: Path | None = None
) -> Task:
    """`form`: what the rows were built with, `data.task`. `base`: the folder that a file of the user's own is relative to, and models too,
    where `run` is not given: in a run they are relative to its directory."""
    task = _named(evaluation, form, base, run or base)
    task = task if isinstance(evaluation.task, Perplexity) else _of_questions(task)
    return task if evaluation.judge is None else with_judge(task, evaluation.judge)


def _named(evaluation: Evaluation, form: Form | None, base: Path | None, models: Path | None) -> Task:
    """Packages that take a second to import are imported by the task that needs them."""
    name, task = evaluation.label, evaluation.task
    match task:
        case ExactMatch():
            return exact_match(name)
        case JsonMatch():
            return json_match(name)
        case RelaxedAccuracy():
            return relaxed_accuracy(name, task)
        case Anls():
            from finefit.data.tasks.anls import anls

            return anls(name, task)
        case VqaAccuracy():
            return vqa_accuracy(name)
        case Amr():
            return amr_task(name, task, form=form if isinstance(form, AmrForm) else None)
        case Rouge() | QmSum():
            from finefit.data.tasks.rouge import rouge

            return rouge(name, task if isinstance(task, Rouge) else Rouge(kind="rouge"))
        case Bleu() | Chrf():
            from finefit.data.tasks.bleu import bleu, chrf

            return bleu(name, task) if isinstance(task, Bleu) else chrf(name, task)
        case TruthfulQa():
            from finefit.data.tasks.truthful import truthfulqa

            return truthfulqa(name, task, models)
        case Summary():
            from finefit.data.tasks.summary import summary

            return summary(name, task, models)
        case Hallucination():
            return hallucination(name)
        case Perplexity():
            return perplexity(name, task)
        case OwnTask():
            return own_task(name, task, base)
        case _:
            raise NotImplementedError(task.kind)


def _of_questions(task: Task) -> Task:
    """Plain text asks nothing: only perplexity takes it."""

    def require(row: Row) -> None:
        if row.kind == "text":
            raise NoResult(
                "it is plain text, which asks nothing that could be answered; evaluate perplexity, or take rows with a prompt and an answer"
            )
        task.require(row)

    return replace(task, require=require)


def make_build(form: Form, *, base: Path) -> Callable[[Row], Row]:
    """Prompt and answer from a row as it was read; raises NoResult where a row cannot be built."""
    match form:
        case AmrForm():
            return partial(build_row, form)
        case OwnTask():
            return own_form(form, base)
