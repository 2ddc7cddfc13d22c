"""`finefit check` of a spec with stages: what can be known of all of them before the first begins."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from finefit.cli.console import open_console

if TYPE_CHECKING:
    from finefit.spec.stages import Pipeline


def check_stages(target: Path, pipeline: "Pipeline", *, show: int, runs: Path, as_json: bool) -> None:
    from finefit.pipeline.examined import examine_pipeline
    from finefit.report.check_stages import check_document, show_findings, show_stage

    console = open_console(as_json=as_json)
    base = target.resolve().parent
    with console.status("examining every stage"):
        found = examine_pipeline(pipeline, base, runs)
    if as_json:
        typer.echo(json.dumps(check_document(found), indent=2))
    else:
        for name, stage in found.stages.items():
            show_stage(name, stage, console)
            if stage.spec is not None and stage.prepared is not None:
                from finefit.cli.check import show_examples

                show_examples(stage.spec, base, stage.prepared, show)
        show_findings(found, console)
    if any(finding.level == "error" for _, finding in found.findings):
        raise typer.Exit(1)
