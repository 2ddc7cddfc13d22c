"""Every task that a spec can name."""

from dataclasses import replace
from pathlib import Path

from finefit.data.rows import Row
from finefit.spec import tasks as kinds
from finefit.spec.schema import Evaluation
from finefit.tasks import NoResult, Task
from finefit.tasks.amr import amr_task
from finefit.tasks.custom import custom_task
from finefit.tasks.judge_marks import with_judge
from finefit.tasks.likelihood import hallucination, perplexity, truthfulqa
from finefit.tasks.short_answer import anls, exact_match, json_match, relaxed_accuracy, vqa_accuracy
from finefit.tasks.summary import summary
from finefit.tasks.text_overlap import bleu, chrf, rouge


def make_task(
    evaluation: Evaluation, *, form: kinds.Form | None = None, base: Path | None = None, run: Path | None = None
) -> Task:
    """`form` is how the rows were built, `data.task`. `base` is the folder that the path of a user's own file is
    relative to. The paths of models are relative to `run` if it is given."""
    name, settings, models = evaluation.label, evaluation.task, run or base
    match settings:
        case kinds.ExactMatch():
            task = exact_match(name)
        case kinds.JsonMatch():
            task = json_match(name)
        case kinds.RelaxedAccuracy():
            task = relaxed_accuracy(name, settings)
        case kinds.Anls():
            task = anls(name, settings)
        case kinds.VqaAccuracy():
            task = vqa_accuracy(name)
        case kinds.Amr():
            task = amr_task(name, settings, form=form if isinstance(form, kinds.AmrForm) else None)
        case kinds.Rouge():
            task = rouge(name, settings)
        case kinds.QmSum():
            task = rouge(name, kinds.Rouge(kind="rouge"))
        case kinds.Bleu():
            task = bleu(name, settings)
        case kinds.Chrf():
            task = chrf(name, settings)
        case kinds.TruthfulQa():
            task = truthfulqa(name, settings, models)
        case kinds.Summary():
            task = summary(name, settings, models)
        case kinds.Hallucination():
            task = hallucination(name)
        case kinds.Perplexity():
            task = perplexity(name, settings)
        case kinds.CustomTask():
            task = custom_task(name, settings, base)
        case _:
            raise NotImplementedError(settings.kind)

    def require(row: Row) -> None:
        if row.kind == "text" and not isinstance(settings, kinds.Perplexity):
            remedy = "evaluate perplexity, or use rows with a prompt and an answer"
            raise NoResult(f"it is plain text without a prompt; {remedy}")
        task.require(row)

    checked = replace(task, require=require)
    return checked if evaluation.judge is None else with_judge(checked, evaluation.judge)
