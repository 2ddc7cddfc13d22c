"""`finefit check`: proved before it runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from finefit.cli.console import open_console
from finefit.cli.options import AsJson, Runs, Set


def check(
    target: Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file.")],
    overrides: Set = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Prove what can be known before step 1: every trained tensor gets a gradient, memory and disk suffice, the schedule makes sense.

    Exit code 0: nothing speaks against the run. 1: something does.
    """
    from finefit.report.check import check_document, show_check
    from finefit.spec.load import load_spec

    console = open_console(as_json=as_json)
    spec = load_spec(target, tuple(overrides or ()))
    with console.status("rehearsing"):
        from finefit.facts.machine import read_machine
        from finefit.pipeline.preparation import findings_of, foresee

        machine = read_machine()
        foretold = foresee(spec, target.resolve().parent, None, machine)
        findings = findings_of(spec, foretold, machine, target.resolve().parent, runs, foretold.total_steps)
    if as_json:
        typer.echo(json.dumps(check_document(findings, foretold), indent=2))
    else:
        show_check(findings, foretold, console)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
