"""`finefit check`: proved before it runs."""

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.check_stages import check_stages
from finefit.cli.code import tell_code
from finefit.cli.console import open_console
from finefit.cli.options import AsJson, Runs, Set

if TYPE_CHECKING:
    from finefit.data.examples import Example
    from finefit.data.pairs import Trained
    from finefit.data.render import Renderer
    from finefit.pipeline.data import PreparedData
    from finefit.spec.schema import Spec

_SHOWN_ALIKE = 8

Show = Annotated[
    int,
    typer.Option("--show", min=0, metavar="N", help="Show the first N training examples as the model will see them."),
]


def check(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file.")],
    overrides: Set = None,
    show: Show = 0,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Prove what can be known before step 1: what became of every row, that no test row is trained on, that every trained tensor gets a
    gradient, that memory and disk suffice and the schedule makes sense. Of a spec with stages all of them are examined, each as far as what it
    stands on is there.

    Exit code 0: nothing speaks against the run. 1: something does.
    """
    from finefit.report.check import check_document, show_check
    from finefit.report.ledger import show_ledger
    from finefit.spec.load import load_any
    from finefit.spec.stages import Pipeline

    console = open_console(as_json=as_json)
    spec = load_any(target, tuple(overrides or ()))
    tell_code(spec, target.resolve().parent, console)
    if isinstance(spec, Pipeline):
        return check_stages(target, spec, show=show, runs=runs, as_json=as_json)
    base = target.resolve().parent
    with console.status("preparing rows"):
        prepared = _prepared(spec, base)
    with console.status("rehearsing"):
        from finefit.facts.machine import read_machine
        from finefit.pipeline.forecasting import lengths_of
        from finefit.pipeline.preparation import data_findings, findings_of, foresee
        from finefit.preflight.findings import in_order

        machine = read_machine()
        counted = prepared.record.lengths if prepared else None
        foretold = foresee(spec, base, counted or lengths_of(spec, base), machine)
        findings = findings_of(spec, foretold, machine, base, runs, foretold.total_steps)
        if prepared is not None:
            findings = in_order((*findings, *data_findings(spec, base, prepared)))
        efficiency = prepared.efficiency(spec, foretold.levers) if prepared else None
    if as_json:
        typer.echo(
            json.dumps(check_document(findings, foretold, prepared.record if prepared else None, efficiency), indent=2)
        )
    else:
        if prepared is not None:
            show_ledger(prepared.record, console)
            show_examples(spec, base, prepared, show)
        show_check(findings, foretold, console, efficiency)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
    return None


def _prepared(spec: "Spec", base: Path) -> "PreparedData | None":
    """None where rows or tokenizer are not there; that is a finding, or a model which is only planned."""
    from finefit.model.locate import outline
    from finefit.pipeline.data import missing, prepare_data

    tokenizer = outline(spec.model, base).tokenizer
    return None if tokenizer is None or missing(spec.data, base) else prepare_data(spec, base, tokenizer)


def show_examples(spec: "Spec", base: Path, prepared: "PreparedData", count: int) -> None:
    if not count or "train.safetensors" not in prepared.record.files:
        return
    from finefit.data.render import open_renderer
    from finefit.data.store import open_examples
    from finefit.model.locate import outline
    from finefit.report.check import show_example

    console = open_console()
    tokenizer = outline(spec.model, base).tokenizer
    assert tokenizer is not None  # else nothing was prepared
    renderer = open_renderer(tokenizer, spec.data.template, template_options=spec.data.template_options)
    rows = open_examples(prepared.path("train.safetensors"))
    for number in range(1, min(count, len(rows)) + 1):
        for side, example in _sides(rows[number - 1]).items():
            runs = groupby(zip(example.tokens, example.supervised, strict=True), key=lambda pair: pair[1])
            show_example(
                f"example {number}{side}",
                [(_text(renderer, [token for token, _ in run]), supervised) for supervised, run in runs],
                console,
            )


def _text(renderer: "Renderer", tokens: list[int]) -> str:
    """An image is hundreds of the same token: how many is told, and not each of them."""
    runs = [(token, len(list(run))) for token, run in groupby(tokens)]
    pieces: list[str] = []
    for is_long, part in groupby(runs, key=lambda run: run[1] > _SHOWN_ALIKE):
        if is_long:
            pieces += [f"{_decoded(renderer, [token])} ({count:,} times) " for token, count in part]
        else:
            pieces.append(_decoded(renderer, [token for token, count in part for _ in range(count)]))
    return "".join(pieces)


def _decoded(renderer: "Renderer", tokens: list[int]) -> str:
    return str(renderer.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _sides(row: "Trained") -> "dict[str, Example]":
    """By what they are called."""
    from finefit.data.pairs import Pair

    return {", preferred": row.chosen, ", rejected": row.rejected} if isinstance(row, Pair) else {"": row}
