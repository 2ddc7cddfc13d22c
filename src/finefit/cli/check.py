"""`finefit check`: proves what can be known before a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit import api
from finefit.cli.console import AsJson, Runs, Set, announce_code, open_console, planning, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.plan.prepared_data import PreparedData
    from finefit.spec.schema import Spec

_SHOW = "Show the first N training examples as the model will see them."


def check(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file.")],
    overrides: Set = None,
    show: Annotated[int, typer.Option("--show", min=0, metavar="N", help=_SHOW)] = 0,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Prove what can be known before step 1: what happens to every row, that no test row is trained on, that every
    trained tensor gets a gradient, that memory and disk suffice and the schedule makes sense. Every stage is checked as
    far as its inputs exist.

    Exit code 0: no problem was found. 1: at least one was found. 2: at least one is a mistake, such as a spec, model or
    package that is not there.
    """
    from finefit.report.check import check_document, show_findings, show_stage

    console, spec = open_console(as_json=as_json), api.load_spec(target, tuple(overrides or ()))
    announce_code(spec.pipeline, spec.base, console)
    with planning("preparing rows and rehearsing", console):
        found = api.check(spec, runs=runs).found
    if as_json:
        print_json(check_document(found))
    else:
        for name, stage in found.stages.items():
            show_stage(name, stage, console, is_flat=found.is_flat)
            if show and stage.spec is not None and stage.prepared is not None:
                _show_examples(stage.spec, spec.base, stage.prepared, show, console)
        show_findings(found, console)
    if found.has_errors:
        raise typer.Exit(found.refusal.exit_code)


def _show_examples(spec: "Spec", base: Path, prepared: "PreparedData", count: int, console: "Console") -> None:
    from finefit.data.examples import open_examples
    from finefit.data.render import open_renderer
    from finefit.data.shown_rows import shown_rows
    from finefit.model.resolve_model import read_stub
    from finefit.report.check import show_example

    tokenizer = read_stub(spec.model, base).tokenizer
    if tokenizer is None or "train.safetensors" not in prepared.record.files:
        return
    renderer = open_renderer(tokenizer, spec.data.template, template_options=spec.data.template_options)
    rows = open_examples(prepared.path("train.safetensors"))
    for row in shown_rows(rows, renderer.tokenizer, first=0, count=count):
        show_example(row.title, row.pieces, console)
