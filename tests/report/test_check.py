"""A row as the model sees it: what is supervised stands out, with colours and without."""

import io
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from finefit.artifacts.atomic import Journal
from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Preparation, SourceLedger
from finefit.report.check import ledger_document, ledger_lines, show_example, show_ledger

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


# What became of the rows, in words and as a document.

TRAIN = SourceLedger(
    split="train",
    source="rows.csv",
    shape="question and answer",
    mapping={"prompt": "question", "answer": "reply"},
    records=1000,
    read=1200,
    used=1190,
    cut=3,
    cut_tokens=450,
    dropped={"too long": 8, "unusable": 2},
    examples=1195,
    repeated=1195,
    tokens=12345,
    supervised_tokens=4938,
)
TEST = replace(
    TRAIN,
    split="test",
    records=1,
    read=1,
    used=1,
    cut=0,
    cut_tokens=0,
    dropped={},
    examples=0,
    repeated=0,
    tokens=77,
    supervised_tokens=0,
)
FOUND = Preparation(
    sources=(TRAIN, TEST),
    problems=(),
    notes=(),
    lengths=Lengths(num_rows=2390, longest=99, mean=10.0, supervised=50, mean_supervised=4.0, source="counted"),
    template_sha256="",
    largest_token=9,
    pad_is_end=False,
    files={},
)
COUNTS = (
    "1,000 records; 1,200 rows; 1,190 used (3 cut, 450 tokens of their prompts lost); 10 dropped (too long 8, "
    "unusable 2); "
    "1,195 sequences; 1,195 repeated by weight"
)


def test_a_source_is_told_with_its_mapping_counts_and_tokens() -> None:
    shown = io.StringIO()
    show_ledger(FOUND, Console(file=shown, width=40, highlight=False))
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == [
        "train       rows.csv",
        "            read as question and answer: prompt = question, answer = reply",
        f"            {COUNTS}",
        "            12,345 tokens, 4,938 supervised (40%)",
        "test        rows.csv",
        "            read as question and answer: prompt = question, answer = reply",
        "            1 record; 1 used",
        "            77 tokens of prompts",
    ]


def test_the_ledger_of_a_run_has_one_line_for_each_source(run: RunDir) -> None:
    where = stage_of(run)
    with Journal(where.ledger) as ledger:
        ledger.write(**asdict(TRAIN))
        ledger.write(split="train", source="rows.csv", row=4, part=0, what="dropped", reason="too long: 99 tokens")
    assert ledger_lines(where) == [
        "train train.jsonl: 22 records; 22 used; 1,453 tokens, 605 supervised (42%)",
        "validation validation.jsonl: 4 records; 4 used; 228 tokens, 114 supervised (50%)",
        "test test.jsonl: 5 records; 5 used; 167 tokens of prompts",
        f"train rows.csv: {COUNTS}; 12,345 tokens, 4,938 supervised (40%)",
    ]


def test_the_document_has_the_sums_and_every_source() -> None:
    document = ledger_document(FOUND)
    first, second = document.pop("sources")
    assert document == {
        "records": 1001,
        "read": 1201,
        "used": 1191,
        "cut": 3,
        "cut_tokens": 450,
        "examples": 1195,
        "repeated": 1195,
        "tokens": 12422,
        "supervised_tokens": 4938,
        "images": 0,
        "dropped": {"too long": 8, "unusable": 2},
    }
    assert first == asdict(TRAIN)
    assert second == asdict(TEST)
