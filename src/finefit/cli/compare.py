"""`finefit compare`: compares several runs on the same items; the settings that differ come first."""

from pathlib import Path
from typing import Annotated

import typer

from finefit import api
from finefit.cli.console import AsJson, open_console
from finefit.errors import UserError

_RUN = (
    "Run directories, or RUN:CHECKPOINT. One run alone is compared with its base. PIPELINE/STAGE: all models of an "
    "evaluation stage. PIPELINE alone: the comparisons that it has made."
)
_CHECKPOINT = "final, best, base, or a step number, for runs given without one."
_TASK = "One task; by default all tasks that two of the runs were scored on."
_VARIES = "A setting that is meant to differ; may be repeated."
_SHOW = "Items shown of each kind: most gained, most lost, most reworded."
_HTML = "Write a self-contained page with plots (needs the extra `plots`)."


def compare(
    targets: Annotated[list[str], typer.Argument(metavar="RUN", help=_RUN)],
    checkpoint: Annotated[str | None, typer.Option(help=_CHECKPOINT)] = None,
    task: Annotated[str | None, typer.Option(help=_TASK)] = None,
    varies: Annotated[list[str] | None, typer.Option("--varies", metavar="KEY", help=_VARIES)] = None,
    show: Annotated[int, typer.Option(min=0, help=_SHOW)] = 3,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help=_HTML)] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, scores on the same items with intervals, and predicted against measured.

    Examples:

      finefit compare runs/orders-1

      finefit compare runs/orders-1 runs/orders-2 --varies tuning.rank --html orders.html

      finefit compare runs/orders-1:base runs/orders-1:checkpoint-40 runs/orders-2 --markdown table.md

      finefit compare runs/medical-1/sft runs/medical-1/dpo

      finefit compare runs/medical-1/scores
    """
    from finefit.artifacts.atomic import write_text
    from finefit.report.compare import document, terminal_view
    from finefit.report.compare import markdown as markdown_of

    console = open_console(as_json=as_json)
    for path in (html, markdown):
        if path is not None and not path.resolve().parent.is_dir():
            problem = f"{path} cannot be written: there is no folder {path.resolve().parent}"
            raise UserError(problem, "create it first, or give another path")
    comparisons = api.comparisons(targets, checkpoint=checkpoint, task=task, varies=varies or (), show=show)
    if as_json or html is not None or markdown is not None:
        api.only_comparison(targets, comparisons)
    for found in comparisons:
        if html is not None:
            from finefit.report.compare_page import page

            write_text(html, page(found))
            console.print(f"page     {html}", soft_wrap=True)
        if markdown is not None:
            write_text(markdown, markdown_of(found))
            console.print(f"tables   {markdown}", soft_wrap=True)
        if as_json:
            typer.echo(document(found))
        else:
            console.print(terminal_view(found))
