"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec; may be repeated.")
]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
New = Annotated[bool, typer.Option("--new", help="Start another run even where an equal one exists.")]
