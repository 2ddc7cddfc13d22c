"""A row as the model sees it: what is supervised stands out, with colours and without."""

import io

import pytest
from rich.console import Console

from finefit.report.check import show_example

PIECES = [("<|user|>[bold]hi:smile:<|end|>\n<|assistant|>", False), ("yes<|end|>", True), ("\n", False), ("no", True)]
PLAIN = "".join(piece for piece, _ in PIECES)


def _shown(console: Console) -> str:
    show_example("example 3", PIECES, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_colours_marks_stand_around_what_is_supervised() -> None:
    shown = _shown(Console(file=io.StringIO(), width=20))
    assert shown == "example 3\n<|user|>[bold]hi:smile:<|end|>\n<|assistant|>⟦yes<|end|>⟧\n⟦no⟧\n\n"


def test_with_colours_the_text_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = _shown(Console(file=io.StringIO(), width=20, force_terminal=True, color_system="standard"))
    assert "\x1b[1;32myes<|end|>\x1b[0m" in shown
    assert "\x1b[1;32mno\x1b[0m" in shown
    assert "⟦" not in shown
    bare = "".join(part.split("m", 1)[1] if at else part for at, part in enumerate(shown.split("\x1b[")))
    assert bare == f"example 3\n{PLAIN}\n\n"
