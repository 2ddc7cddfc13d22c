"""`finefit compare`: several runs on the same items, with what they differ in named first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson
from finefit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.compare.records import Comparison

_RUN = (
    "Run directories, or RUN:CHECKPOINT; one alone is its base and its end. PIPELINE/STAGE: of an evaluation all its models; "
    "PIPELINE alone is what it has compared."
)
_HTML = "Write one page with plots that needs nothing else."


def compare(
    targets: Annotated[list[str], typer.Argument(metavar="RUN", help=_RUN)],
    checkpoint: Annotated[
        str | None, typer.Option(help="final, best, base, or a step number, for runs that name none.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="One task; by default all that two of the runs were scored on.")
    ] = None,
    varies: Annotated[
        list[str] | None,
        typer.Option("--varies", metavar="KEY", help="A setting that is meant to differ; may be repeated."),
    ] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Items shown of each kind: most gained, most lost, most reworded.")
    ] = 3,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help=_HTML)] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables for a paper.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, the same items paired, differences with intervals, and what was foretold.

    Examples:

      finefit compare runs/orders-1

      finefit compare runs/orders-1 runs/orders-2 --varies tuning.rank --html orders.html

      finefit compare runs/orders-1:base runs/orders-1:checkpoint-40 runs/orders-2 --markdown table.md

      finefit compare runs/medical-1/sft runs/medical-1/dpo

      finefit compare runs/medical-1/scores
    """
    console = open_console(as_json=as_json)
    for path in (html, markdown):
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(
                f"{path} cannot be written: there is no folder {path.resolve().parent}",
                "make it first, or name another place",
            )
    is_for_one = as_json or html is not None or markdown is not None
    for found in _found(
        targets, checkpoint=checkpoint, task=task, varies=tuple(varies or ()), show=show, is_for_one=is_for_one
    ):
        _show(found, console, html, markdown, as_json=as_json)


def _found(
    targets: list[str],
    *,
    checkpoint: str | None,
    task: str | None,
    varies: tuple[str, ...],
    show: int,
    is_for_one: bool,
) -> "tuple[Comparison, ...]":
    """What a pipeline has compared is shown as it is; anything else is compared now. `is_for_one`: several would not go where it is written."""
    from finefit.compare.comparing import compare as made
    from finefit.compare.targets import kept, widened

    before = () if checkpoint or task or varies else kept(targets)
    if len(before) > 1 and is_for_one:
        raise UserError(
            f"{targets[0]} has {len(before)} comparisons, and one can be written",
            f"name one of its stages that compare: {targets[0]}/STAGE",
        )
    return before or (made(widened(targets), checkpoint=checkpoint, task=task, declared=varies, show=show),)


def _show(found: "Comparison", console: "Console", html: Path | None, markdown: Path | None, *, as_json: bool) -> None:
    from finefit.report.compare import comparison_view
    from finefit.report.compare_document import document

    if html is not None:
        from finefit.report.compare_page import page

        _write(html, page(found))
        console.print(f"page     {html}", soft_wrap=True)
    if markdown is not None:
        from finefit.report.compare_markdown import markdown as tables

        _write(markdown, tables(found))
        console.print(f"tables   {markdown}", soft_wrap=True)
    if as_json:
        typer.echo(document(found))
    else:
        console.print(comparison_view(found))


def _write(path: Path, text: str) -> None:
    from finefit.artifacts.atomic import write_text

    write_text(path, text)
