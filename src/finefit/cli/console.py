"""Shared by all verbs: the console, options, and the notice that the user's own code is about to run."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from finefit.spec.pipeline import Pipeline
    from finefit.spec.schema import Spec


def open_console(*, as_json: bool = False) -> "Console":
    """With --json only the document goes to stdout. Text is printed literally, since paths and values may contain
    square brackets and colons."""
    from rich.console import Console

    return Console(stderr=as_json, markup=False, emoji=False, highlight=False)


def set_torch_variables() -> None:
    """For a process that computes itself, before torch is imported: workers are started with them."""
    from finefit.artifacts.processes import chosen_variables

    for name, value in chosen_variables(os.environ, deterministic=False).items():
        os.environ.setdefault(name, value)


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]
_SET = "Override a value of the spec; may be repeated."
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SET)]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
LOOPBACK = "127.0.0.1"
_HOST = "Listen on another address than loopback; viewers then need a token."
Host = Annotated[str, typer.Option(help=_HOST)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]
_USE_TOKEN = "Require a token on loopback too: the value of $FINEFIT_TOKEN, or a new one."
UseToken = Annotated[bool, typer.Option("--token", help=_USE_TOKEN)]
New = Annotated[bool, typer.Option("--new", help="Start another run even if an equal one exists.")]


@contextmanager
def planning(what: str, console: "Console") -> "Iterator[None]":
    """Shows what is being rehearsed inside: on a terminal continuously, otherwise as a line on stderr after a long
    wait."""
    from finefit.artifacts.forecasts import PlanningProgress
    from finefit.plan.client import observed_planning
    from finefit.report.plan import PlanningLine

    line = PlanningLine(what)

    def observe(progress: PlanningProgress) -> None:
        line.note(progress)
        if not console.is_terminal and (words := line.overdue()):
            typer.echo(words, err=True)

    with observed_planning(observe), console.status(line):
        yield


def announce_code(spec: "Spec | Pipeline", base: Path, console: "Console") -> None:
    """Announces the code of custom models, whose paths are relative to `base`."""
    from finefit.spec.pipeline import Pipeline

    announce_models(Pipeline.of(spec).models(), base, console)


def announce_models(models: Iterable[object], base: Path, console: "Console") -> None:
    from finefit.model.resolve_model import code_notices

    for line in code_notices(models, base):
        console.print(line, soft_wrap=True)
