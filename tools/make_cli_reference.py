"""The page of the command line, written from the commands themselves: python tools/make_cli_reference.py [FILE]"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from finefit.cli import app

HEAD = """# The command line
Written from the commands themselves when this site is built; `finefit VERB --help` prints the same. Exit codes: {codes}
Completion of verbs and options is installed by `finefit --install-completion`.

| verb | |
|---|---|
"""


def commands() -> dict[str, Any]:
    """By name, as typer builds them."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = group.commands
    return found


def context(name: str, words: tuple[str, ...] | None = None) -> Any:
    """Of one verb, with its words parsed; nothing is called."""
    return commands()[name].make_context(f"finefit {name}", list(words or ()), resilient_parsing=words is None)


def reference() -> str:
    codes = str(app.info.epilog).removeprefix("Exit codes: ")
    table = "".join(f"| [`{name}`](#finefit-{name}) | {_first(command)} |\n" for name, command in commands().items())
    return HEAD.format(codes=codes) + table + "".join(map(_section, commands()))


def _first(command: Any) -> str:
    """The first sentence."""
    return " ".join(command.help.split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."


def _section(name: str) -> str:
    command, ctx = commands()[name], context(name)
    about, _, examples = command.help.partition("Examples:")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    usage = command.get_usage(ctx).removeprefix("Usage: ")
    shown = "\n".join(f"```sh\n{line}\n```\n" for line in ("\n".join(lines),) if line)
    options = "".join(f"| `{words}` | {text} |\n" for words, text in _options(command, ctx))
    return f"\n## finefit {name}\n`{usage}`\n\n{about.strip()}\n\n{shown}\n| | |\n|---|---|\n{options}"


def _options(command: Any, ctx: Any) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(ctx):
        words, text = parameter.get_help_record(ctx)
        yield words.replace("|", "\\|"), " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
