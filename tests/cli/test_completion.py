"""Shell completion, in the shell that asks for it."""

import os
import subprocess
import sys
from pathlib import Path

from finefit.cli import app

BIN = Path(sys.executable).parent
VERBS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
OFFERED = {
    "finefit ''": VERBS,
    "finefit re": {"review", "report", "recipes"},
    "finefit plan --appl": {"--apply"},
}
OFFER = """offer() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _finefit_completion finefit; echo "${COMPREPLY[@]}"
}"""


def _bash(script: str, home: Path) -> str:
    """`true` keeps bash from becoming finefit, which looks for the shell among its parents."""
    variables = os.environ | {"HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\ntrue"], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_bash_completes_verbs_and_options(tmp_path: Path) -> None:
    asked = "\n".join(f"offer {words}" for words in OFFERED)
    lines = _bash(f"source <(finefit --show-completion)\n{OFFER}\n{asked}", tmp_path).splitlines()
    assert dict(zip(OFFERED, (set(line.split()) for line in lines), strict=True)) == OFFERED


def test_completion_installs_itself_for_the_shell_that_asks(tmp_path: Path) -> None:
    _bash("finefit --install-completion", tmp_path)
    (written,) = (tmp_path / ".bash_completions").iterdir()
    assert "complete -o default -F _finefit_completion finefit" in written.read_text()
    assert str(written) in (tmp_path / ".bashrc").read_text()
