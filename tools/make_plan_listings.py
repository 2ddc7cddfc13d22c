"""What `finefit plan` says in the documents: python tools/make_plan_listings.py README.md docs/memory.md [PART]

Above each listing stands the command that makes it, in a comment; PART takes those alone that have it. Run in the
project's folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

_LISTING = re.compile(r"(<!-- finefit (plan .+?) -->\n```\n)(.*?)(```\n)", re.DOTALL)


def listings(text: str) -> dict[str, str]:
    """By command."""
    return {found[2]: found[3] for found in _LISTING.finditer(text)}


def said(command: str) -> str:
    """A plan that does not fit ends with an exit code of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "finefit", *shlex.split(command)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())


def renewed(text: str, part: str = "") -> str:
    return _LISTING.sub(lambda found: found[1] + said(found[2]) + found[4] if part in found[2] else found[0], text)


def main(*given: str) -> None:
    files = [Path(name) for name in given if name.endswith(".md")]
    part = "".join(name for name in given if not name.endswith(".md"))
    for file in files:
        file.write_text(renewed(file.read_text(encoding="utf-8"), part), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
