"""A kill can tear the last line of a journal and nothing else."""

import math
from pathlib import Path

import pytest

from finefit.artifacts.journal import Journal, read_lines, read_steps
from finefit.errors import DiskFull
from tests.faults import PAGE, fill_disk, small_disk


def test_a_journal_torn_at_any_byte_keeps_its_other_lines(tmp_path: Path) -> None:
    """Also within a character of several bytes."""
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        journal.write(step=1, loss=0.5)
        journal.write(event="rejected", note="größer als 日本")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in read_lines(path) if "step" in line] == [1]
        with Journal(path) as journal:
            journal.write(step=2, loss=0.25)
        lines = list(read_lines(path))
        assert (lines[0]["step"], lines[-1]["step"]) == (1, 2)
        assert len(lines) == (3 if cut == len(whole) - 1 else 2)


def test_a_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.5}')
    with Journal(path) as journal:
        journal.write(step=2, loss=0.25)
    assert [line["step"] for line in read_steps(path)] == [1, 2]


def test_losses_survive_the_journal_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [0.1 + 0.2, math.pi, 5e-324, 1.7976931348623157e308]
    with Journal(path) as journal:
        for step, loss in enumerate(losses):
            journal.write(step=step, loss=loss)
    assert [line["loss"] for line in read_steps(path)] == losses


@pytest.mark.parametrize("event", ["resumed", "rolled_back"])
def test_steps_beyond_the_checkpoint_that_a_run_returned_to_are_superseded(tmp_path: Path, event: str) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3, 4):
            journal.write(step=step, loss=float(step))
        journal.write(event=event, step=2)
        journal.write(step=3, loss=30.0)
    assert [(line["step"], line["loss"]) for line in read_steps(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_that_starts_over_supersedes_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.write(step=step, loss=1.0)
        journal.write(event="started", step=0)
        journal.write(step=1, loss=2.0)
        journal.write(event="not_finite", step=2, found="loss nan")
    assert [(line["step"], line["loss"]) for line in read_steps(path)] == [(1, 2.0)]


def test_a_missing_journal_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "metrics.jsonl")) == []
    assert read_steps(tmp_path / "metrics.jsonl") == []


def write_until_full(journal: Journal) -> None:
    for step in range(2, PAGE):
        journal.write(step=step, loss=1.0)


def test_a_journal_on_a_full_disk_names_place_and_bytes_and_goes_on_with_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        path = disk / "metrics.jsonl"
        with Journal(path) as journal:
            journal.write(step=1, loss=1.0)
            fill_disk(disk, leave_pages=0)
            with pytest.raises(DiskFull, match=rf"{path} needs [\d,]+ bytes, 0 are free"):
                write_until_full(journal)
        assert path.stat().st_size % PAGE == 0
        (disk / "filler").unlink()
        before = len(read_steps(path))
        with Journal(path) as journal:
            journal.write(step=PAGE, loss=1.0)
        assert len(read_steps(path)) == before + 1
