"""The change that a demo run made: base against fine-tuned, with answers side by side."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finefit.artifacts.records import EvalItem, EvalResult, Stage, StageResult, read_record
from finefit.artifacts.rundir import RunDir
from finefit.report.run import evals_of, evals_table, result_lines

_SHOWN = 3


def show_change(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    result = read_record(where.result, StageResult)
    task = read_record(where.stage, Stage).evaluate[0].task
    scored = {r.checkpoint: r for r in evals_of(where) if r.task == task}  # `finefit eval` may have scored more
    base, tuned = scored["base"], scored[str(result.checkpoint)]
    for line in result_lines(result):
        console.print(line, highlight=False)
    console.print(evals_table([base, tuned], names={tuned.checkpoint: "fine-tuned"}))
    console.print(_answers(base, tuned))
    console.print(
        f"run      {run.path}\nmodel    {where.checkpoints / 'final'}\nnext     finefit recipes demo --to my-demo, put your own rows into it, "
        "and finefit run my-demo/spec.yaml",
        highlight=False,
        soft_wrap=True,
    )


def _answers(base: EvalResult, tuned: EvalResult) -> Table:
    """Evenly spaced items, not chosen by how well they went."""
    table = Table(title="answers side by side", title_justify="left", show_lines=True)
    for column in ("message", "base", "fine-tuned", "reference"):
        table.add_column(column, overflow="fold", ratio=1)
    tuned_items = {item.item: item for item in tuned.items}
    both = [(item, tuned_items[item.item]) for item in base.items if item.item in tuned_items]
    for before, after in both[:: max(1, len(both) // _SHOWN)][:_SHOWN]:
        table.add_row(Text(_message(before)), _coloured(before), _coloured(after), Text(before.reference))
    return table


def _message(item: EvalItem) -> str:
    return item.prompt


def _coloured(item: EvalItem) -> Text:
    right = all(score == 1.0 for score in item.scores.values())
    return Text(item.answer or "(empty)", style="green" if right else "red")
