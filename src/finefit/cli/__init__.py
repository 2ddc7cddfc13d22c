"""The command line: one file per verb. Heavy packages are imported inside the commands, so that `--help` is fast."""

import errno
import json
import logging
import sys
import traceback
from typing import Annotated

import typer

from finefit import __version__
from finefit.cli import chat, check, compare, doctor, evaluate, export, init, plan, recipes, report, review, run, watch
from finefit.errors import FinefitError

USAGE = 2
INTERRUPTED = 3
FAULT = 70
_CTRL_C = 130  # typer's own code for it
_PATH_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path that can be written to",
}
"""Of failures that are about a path, wherever it is met."""

app = typer.Typer(
    name="finefit",
    help="Fine-tuning of language models that fits your card, first time.",
    epilog=(
        "Exit codes: 0 done, 1 a finding, 2 a mistake in spec, data or arguments, 3 interrupted and resumable, 70 "
        "an internal error of finefit."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"finefit {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    pass


app.command()(init.init)
app.command()(plan.plan)
app.command()(check.check)
app.command()(run.run)
app.command(name="eval")(evaluate.evaluate)
app.command()(export.export)
app.command()(compare.compare)
app.command()(report.report)
app.command()(review.review)
app.command()(watch.watch)
app.command()(chat.chat)
app.command()(recipes.demo)
app.command()(recipes.recipes)
app.command()(doctor.doctor)


def main() -> None:
    # before peft imports it: it logs which kernels it looks for on the hub
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        app()
    except FinefitError as error:
        _report(type(error).__name__, error.problem, error.remedy, error.exit_code)
    except SystemExit as end:  # typer ends the process itself, also after a wrong argument
        if end.code == _CTRL_C:
            _report("Interrupted", "interrupted", "give the same command again", INTERRUPTED)
        if end.code == USAGE:
            _document("UsageError", str(end.__context__), "see --help", USAGE)
        raise
    except Exception as error:  # noqa: BLE001 the boundary to the user: an unexpected error is our fault
        if isinstance(error, OSError) and error.filename and (remedy := _PATH_REMEDIES.get(error.errno or 0)):
            _report(type(error).__name__, f"{error.filename}: {error.strerror}", remedy, USAGE)
        traceback.print_exc()
        _report(type(error).__name__, f"a fault of finefit: {error}", "please report it with the lines above", FAULT)


def _report(kind: str, problem: str, remedy: str, exit_code: int) -> None:
    _document(kind, problem, remedy, exit_code)
    typer.echo(f"error: {problem}" + (f"\n{remedy}" if remedy else ""), err=True)
    sys.exit(exit_code)


def _document(kind: str, problem: str, remedy: str, exit_code: int) -> None:
    if "--json" in sys.argv:
        failure = {"kind": kind, "problem": problem, "remedy": remedy, "exit_code": exit_code}
        typer.echo(json.dumps({"error": failure}, indent=2))
