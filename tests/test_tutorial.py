"""What the tutorial shows is what its commands print."""

from pathlib import Path

import pytest

from tools.make_tutorial import said, steps

STEPS = steps((Path(__file__).resolve().parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8"))
AT_ONCE = 2
"""Steps that print the same everywhere: the rows, and the spec."""


def test_the_rows_and_the_spec_of_the_tutorial_are_those_that_its_commands_print(tmp_path: Path) -> None:
    for commands, output in STEPS[:AT_ONCE]:
        assert said(commands, tmp_path) == output


@pytest.mark.twin
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_every_command_of_the_tutorial_ends_well(tmp_path: Path) -> None:
    for commands, output in STEPS:
        assert bool(said(commands, tmp_path)) == bool(output)
