"""The change that a demo run made: base against fine-tuned, with answers side by side."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finefit.artifacts.records import EvalItem, EvalResult, StageResult, read_record
from finefit.artifacts.rundir import RunDir
from finefit.report.run import evals_of, evals_table, result_lines

_SHOWN = 3


def show_change(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    base, tuned = evals_of(where)
    for line in result_lines(read_record(where.result, StageResult)):
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
    for at in range(0, base.n, max(1, base.n // _SHOWN))[:_SHOWN]:
        before, after = base.items[at], tuned.items[at]
        table.add_row(Text(_message(before)), _coloured(before), _coloured(after), Text(before.reference))
    return table


def _message(item: EvalItem) -> str:
    return item.prompt


def _coloured(item: EvalItem) -> Text:
    right = all(score == 1.0 for score in item.scores.values())
    return Text(item.answer or "(empty)", style="green" if right else "red")
