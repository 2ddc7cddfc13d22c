"""Whatever lies in a record's place, a reader ends with the file, the reason and the remedy, at once and in little
memory."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from finefit.artifacts.atomic import Journal, read_lines, read_steps, write_text
from finefit.artifacts.processes import holder_of, run_lock
from finefit.artifacts.reading import (
    MAX_LINE_BYTES,
    MAX_RECORD_BYTES,
    parse_object,
    read_document,
    read_text,
    require_regular_files,
)
from finefit.artifacts.records import Check, Run, read_if_there, read_record, write_record
from finefit.artifacts.stage_records import EvalItem
from finefit.errors import OtherVersion, RunError

DEEP = b'{"a":' * 100_000
Spoil = Callable[[Path], object]


def _link_outside(path: Path) -> None:
    other = path.with_name("other.json")
    write_record(other, Check(findings=()))
    path.symlink_to(other)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_RECORD_BYTES + 1)


PLACES: dict[str, tuple[Spoil, str]] = {
    "nothing": (lambda _: None, "is missing"),
    "a folder": (Path.mkdir, "is a folder, and a file should be there"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "is a link to record.json"),
    "a link to another record": (_link_outside, "is a link to /"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero"),
    "a pipe": (os.mkfifo, "is a pipe, and a file should be there"),
}
TEXTS: dict[str, tuple[Spoil, str]] = {
    "no bytes": (Path.touch, "EOF while parsing"),
    "another encoding": (lambda path: path.write_bytes(b'{"version": 1, "x": "\xe9"}'), "invalid unicode"),
    "a deep nesting": (lambda path: path.write_bytes(DEEP), "recursion limit exceeded"),
    "a huge file": (_sparse, "it has 67,108,865 bytes"),
    "a list": (lambda path: path.write_bytes(b"[1]"), ""),
}


@pytest.mark.parametrize("place", PLACES | TEXTS)
def test_a_record_that_cannot_be_ours_is_named_with_the_reason_and_the_remedy(tmp_path: Path, place: str) -> None:
    path, (spoil, words) = tmp_path / "record.json", (PLACES | TEXTS)[place]
    spoil(path)
    for read in (lambda: read_record(path, Check), lambda: read_document(path)):
        with pytest.raises(RunError) as caught:
            read()
        assert str(path) in caught.value.problem
        assert words in caught.value.problem
        assert "start again with --new" in caught.value.remedy


@pytest.mark.parametrize("place", [place for place in PLACES if place != "nothing"])
def test_a_journal_a_lock_and_an_optional_record_are_neither_read_nor_written_in_another_place(
    tmp_path: Path, place: str
) -> None:
    path, (spoil, words) = tmp_path / "record.json", PLACES[place]
    spoil(path)
    uses: tuple[Callable[[], object], ...] = (
        lambda: list(read_lines(path)),
        lambda: Journal(path),
        lambda: run_lock(path).__enter__(),
        lambda: holder_of(path),
        lambda: read_if_there(path, Check),
    )
    for use in uses:
        with pytest.raises(RunError) as caught:
            use()
        assert words in caught.value.problem


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("nothing", "a folder")])
def test_a_folder_that_is_copied_later_holds_nothing_but_files(tmp_path: Path, place: str) -> None:
    path, (spoil, words) = tmp_path / "tokenizer" / "record.json", PLACES[place]
    path.parent.mkdir()
    require_regular_files(tmp_path)
    spoil(path)
    with pytest.raises(RunError, match=re.escape(words)):
        require_regular_files(tmp_path)


def test_a_missing_journal_has_no_lines_and_a_missing_optional_record_is_none(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "gone.jsonl")) == []
    assert read_if_there(tmp_path / "gone.json", Check) is None


def test_text_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RunError, match=r"spec\.yaml is damaged: byte 0xe9 at 9 is not UTF-8 text"):
        read_text(tmp_path / "spec.yaml")


def test_a_file_is_not_written_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunError, match=r"run\.json is a folder, and a file is to be written there"):
        write_text(tmp_path / "run.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_newer_record_is_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"version": 9, "name": "tiny"}')
    with pytest.raises(OtherVersion, match="of version 9, and this finefit reads version 2"):
        read_record(tmp_path / "run.json", Run)


def test_every_cut_of_a_line_is_torn_and_skipped() -> None:
    line = '{"step": 12, "loss": -1.5e-3, "x": [true, null, "a\\u00e9é\\n", NaN], "n": {"k": "v"}}'.encode()
    assert parse_object(line + b"\n") is not None
    assert all(parse_object(line[:end]) is None for end in range(len(line)))
    assert parse_object(line[:40] + b"\0" * 100) is None  # a power failure


LINES = {
    "a flipped byte": (b'{"step": 1x, "loss": 1.0}', "expected `,` or `}`"),
    "another encoding": (b'{"step": 1, "x": "\xe9"}', "invalid unicode"),
    "a deep nesting": (DEEP, "recursion limit exceeded"),
    "not an object": (b"[1, 2]", "holds a list, not an object"),
    "without its step": (b'{"loss": 1.0}', "step: Field required"),
    "a loss in words": (b'{"step": 1, "loss": "low"}', "loss: Input should be a valid number"),
    "a rewind without its step": (b'{"event": "resumed"}', "step: Field required"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_damaged_line_of_the_metrics_is_named_by_its_number(tmp_path: Path, kind: str) -> None:
    path, (line, words) = tmp_path / "metrics.jsonl", LINES[kind]
    path.write_bytes(b'{"event": "started", "step": 0}\n' + line + b'\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(RunError) as caught:
        read_steps(path)
    assert f"line 2 of {path} is damaged" in caught.value.problem
    assert words in caught.value.problem
    assert "delete that line" in caught.value.remedy


def test_an_answer_without_its_keys_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"item": 0}\n')
    with pytest.raises(RunError, match=r"line 1 of .*items\.jsonl is damaged: .*Field required"):
        list(read_lines(tmp_path / "items.jsonl", EvalItem))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(RunError, match=f"more than {MAX_LINE_BYTES:,} bytes"):
        list(read_lines(path))
