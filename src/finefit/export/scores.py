"""The run's own task, scored on the greedy answers of a probe: of the trained model and of its export."""

from collections.abc import Sequence

from finefit.artifacts.export_records import TaskScore
from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import Stage
from finefit.data.rows import Row, is_asked
from finefit.evaluate.score import score_item
from finefit.export.outputs import Outputs
from finefit.export.subject import ExportSubject, PromptItem
from finefit.spec import tasks as kinds
from finefit.spec.schema import Evaluation
from finefit.stats.intervals import Interval
from finefit.stats.metrics import interval_of, table
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task

_SCORED = (
    *(kinds.ExactMatch, kinds.JsonMatch, kinds.RelaxedAccuracy, kinds.Anls, kinds.Rouge, kinds.QmSum),
    *(kinds.Bleu, kinds.Chrf, kinds.Amr),
)
"""Tasks that read an answer, and need neither another model nor a user's own code."""


def scored_evaluation(subject: ExportSubject) -> Evaluation | None:
    """The first of the run's evaluations that a greedy answer decides."""
    stage = None if subject.where is None else read_record(subject.where.stage, Stage)
    named = () if stage is None else stage.evaluate
    return next(
        (one for one in named if isinstance(one.task, _SCORED) and one.judge is None and one.server is None), None
    )


def task_score(
    subject: ExportSubject, items: Sequence[PromptItem], trained: Outputs, exported: Outputs
) -> TaskScore | None:
    evaluation = scored_evaluation(subject)
    if evaluation is None or subject.where is None:
        return None
    stage = read_record(subject.where.stage, Stage)
    task = make_task(evaluation, form=stage.form, base=subject.where.run, run=subject.where.run)
    asked = [(at, item.row) for at, item in enumerate(items) if item.row and is_asked(item.row, evaluation.sources)]
    asked = [(at, row) for at, row in asked if _is_readable(task, row)]
    if not asked:
        return None
    metric = task.metrics[0]
    return TaskScore(
        task=evaluation.label,
        metric=metric.name,
        trained=_interval(subject, task, asked, trained),
        exported=_interval(subject, task, asked, exported),
    )


def _is_readable(task: Task, row: Row) -> bool:
    try:
        task.require(row)
    except NoResult:
        return False
    return True


def _interval(subject: ExportSubject, task: Task, asked: Sequence[tuple[int, Row]], said: Outputs) -> Interval:
    counts = []
    for at, row in asked:
        text = subject.renderer.decode_answer(said.greedy[at]) if said.greedy[at] else ""
        counts.append(score_item(task, at, row, prompt="", reply=Reply(text=text)).counts)
    return interval_of(task.metrics[0], table(task.metrics[0], counts))


def beyond_score(score: TaskScore) -> tuple[str, ...]:
    """What is worse than the interval of the trained model's own score, on the same items."""
    if score.exported.value >= score.trained.low:
        return ()
    here, low = f"{score.exported.value:.3g}", f"{score.trained.low:.3g}"
    return (f"it scores {here} in {score.task}, below {low}, where the trained model's interval begins",)
