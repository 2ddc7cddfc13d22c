"""Runs the commands of docs/tutorial.md in an empty folder and writes what they print beneath them.

python tools/make_tutorial.py docs/tutorial.md FOLDER [FIRST]

Each block of commands (```sh) that a block of output (```text) follows is run, in order, so that a later one finds what
an earlier one made; the page is written after each. FIRST goes on from that step, in a folder that has the earlier
ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

_STEP = re.compile(r"(```sh\n)(?P<commands>(?:(?!```).)*)(```\n\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)


def steps(text: str) -> list[tuple[str, str]]:
    """Commands with what they printed."""
    return [(found["commands"], found["output"]) for found in _STEP.finditer(text)]


def said(commands: str, folder: Path) -> str:
    """`finefit` is the one beside this Python; a command that fails ends the tutorial."""
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PATH": programs},
        check=True,
    )
    shown = done.stdout.replace(str(folder.resolve()), "/home/you")
    return "".join(f"{line.rstrip()}\n" for line in shown.strip("\n").splitlines())


def with_output(text: str, number: int, output: str) -> str:
    """The page with another output beneath one of its steps."""
    found = list(_STEP.finditer(text))[number]
    return f"{text[: found.start('output')]}{output}{text[found.end('output') :]}"


def main(page: Path, folder: Path, first: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (commands, _) in list(enumerate(steps(page.read_text(encoding="utf-8"))))[first - 1 :]:
        output = said(commands, folder)
        page.write_text(with_output(page.read_text(encoding="utf-8"), number, output), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
