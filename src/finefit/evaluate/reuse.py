"""Greedy answers depend on the model, the prompt and the decoding, not on the task that scores them. Another task over
the same rows can therefore score answers that one task generated, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.records import read_or_none
from finefit.artifacts.rundir import EvalPaths, StageDir
from finefit.artifacts.stage_records import EvalItem, EvalRequest
from finefit.data.rows import Row
from finefit.evaluate.score import score_item
from finefit.spec.tasks import LmEval
from finefit.tasks import Reply, Task

_ITEM = TypeAdapter(EvalItem)


def answered(paths: EvalPaths) -> dict[int, EvalItem]:
    """The items written so far, by any process."""
    found = (item for path in paths.answered() for item in read_lines(path, EvalItem))
    return {item.item: item for item in found}


def answers_of_other_tasks(where: StageDir, request: EvalRequest) -> dict[int, EvalItem]:
    """Reusable items by number, with `taken_from` set."""
    found: dict[int, EvalItem] = {}
    for paths in where.evaluations():
        if paths.checkpoint != request.checkpoint or paths.folder.name == request.evaluation.label:
            continue
        other = read_or_none(paths.request, EvalRequest)
        if other is not None and _answers_alike(other, request):
            label = other.evaluation.label
            generated = (item for item in answered(paths).values() if item.new_tokens is not None)
            found |= {one.item: replace(one, taken_from=one.taken_from or label) for one in generated}
    return found


def needs_only_answers(task: Task, rows: Sequence[Row]) -> bool:
    return task.generates and not any(any(task.candidates(row)) for row in rows)


def _answers_alike(one: EvalRequest, other: EvalRequest) -> bool:
    """Whether both requests have the same model, rows, template, precision and decoding settings."""
    brings_own_rows = isinstance(one.evaluation.task, LmEval)
    settings = ((asked.subject, asked.evaluation.max_new_tokens, asked.made_with) for asked in (one, other))
    return not brings_own_rows and next(settings) == next(settings)


def write_taken(
    where: StageDir, paths: EvalPaths, task: Task, rows: Sequence[Row], taken: Mapping[int, EvalItem]
) -> None:
    """Scores them as items of this task, next to those that it has answered itself."""
    own = answered(paths)
    with Journal(paths.items) as items:
        for at in sorted(taken.keys() - own.keys()):
            one, row = taken[at], rows[at]
            reply, new_tokens = Reply(text=one.answer), one.new_tokens
            item = score_item(task, at, row, prompt=one.prompt, reply=reply, new_tokens=new_tokens, is_cut=one.is_cut)
            items.write(**_ITEM.dump_python(replace(item, taken_from=one.taken_from), mode="json"))
    sources = {one.taken_from for one in taken.values() if one.taken_from is not None}
    with Journal(paths.warnings) as warnings:  # what was said of the answers holds for them here, too
        for source in sorted(sources):
            for line in read_lines(where.evaluation(source, paths.checkpoint).warnings):
                warnings.write(**line)
