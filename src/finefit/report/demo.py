"""The change that a demo run made: base against fine-tuned, with answers side by side."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finefit.artifacts.evaluations import EvalItem, EvalResult
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.trainings import Stage, StageResult
from finefit.data.items import read_items
from finefit.report.run import evals_table, result_lines

_SHOWN = 3
_LONGEST = 240


def show_change(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    result, evaluation = read_record(where.result, StageResult), read_record(where.stage, Stage).evaluate[0]
    base, tuned = (
        read_record(where.evaluation(evaluation.label, checkpoint, evaluation.limit).result, EvalResult)
        for checkpoint in ("base", str(result.checkpoint))
    )
    for line in result_lines(result):
        console.print(line)
    console.print(evals_table([base, tuned], names={tuned.checkpoint: "fine-tuned"}))
    messages = [row.prompt[-1].content for row in read_items(where.prepared("test.jsonl"))]
    for before, after in list(zip(base.items, tuned.items, strict=True))[:: max(1, base.n // _SHOWN)][
        :_SHOWN
    ]:  # evenly spaced, not chosen
        console.print(_side_by_side(messages[before.item], before, after))
    console.print(f"run      {run.path}\nmodel    {where.checkpoints / 'final'}", soft_wrap=True)
    console.print(
        "next     finefit recipes demo --to my-demo   (then put your own rows in, and: finefit run my-demo/spec.yaml)",
        soft_wrap=True,
    )


def _side_by_side(message: str, before: EvalItem, after: EvalItem) -> Table:
    table = Table(
        title=Text(message),
        title_justify="left",
        caption=Text(f"reference: {before.reference}"),
        caption_justify="left",
        expand=True,
    )
    for column in ("base", "fine-tuned"):
        table.add_column(column, overflow="fold", ratio=1)
    table.add_row(_coloured(before), _coloured(after))
    return table


def _coloured(item: EvalItem) -> Text:
    right = all(score == 1.0 for score in item.scores.values())
    answer = " ".join(item.answer.split()) or "(empty)"
    return Text(answer if len(answer) <= _LONGEST else f"{answer[:_LONGEST]} ...", style="green" if right else "red")
