"""`--help` answers at once: nothing heavy is imported before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from finefit import __version__
from tests.cli.conftest import process, processor_seconds

VERBS = ("run", "eval", "compare", "report", "review", "watch", "export", "chat", "demo", "recipes", "doctor")
HEAVY = "{'torch', 'transformers', 'datasets', 'peft', 'numpy'}"


def test_help_answers_in_half_a_second(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):
        began = processor_seconds()
        answer = process("--help", cwd=tmp_path)
        seconds.append(processor_seconds() - began)
        assert answer.code == 0
    assert min(seconds) < 0.5


def test_help_names_every_verb_and_every_exit_code(tmp_path: Path) -> None:
    shown = " ".join(process("--help", cwd=tmp_path).out.split())
    for verb in VERBS:
        assert f" {verb} " in shown
    assert (
        "Exit codes: 0 done, 1 a finding, 2 a mistake in spec, data or arguments, 3 interrupted and resumable, "
        "70 an internal error of finefit."
    ) in shown


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    answer = process("--version", cwd=tmp_path)
    assert (answer.code, answer.out) == (0, f"finefit {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["recipes"]])
def test_help_and_recipes_import_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["finefit", *{arguments!r}]
from finefit.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("HEAVY", sorted({HEAVY} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
