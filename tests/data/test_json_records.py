"""JSON files of any size are read a record at a time; one record that would fill the memory is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from finefit.data.files import MAX_RECORD, find_files
from finefit.data.records import DataRecord, read_records
from finefit.errors import DataError
from tests.data.test_tables import READ, REFUSED, SETUP
from tests.memory import peak_of

MIB = 1 << 20
ROW = json.dumps({"q": "what is it?", "a": ["x"] * 8, "text_of_it": "y" * 900})


def _records(folder: Path, name: str) -> list[Any]:
    (file,) = find_files(name, folder, split="train")
    return [row.value if isinstance(row, DataRecord) else row.reason for row in read_records(file)]


@pytest.mark.parametrize("form", ["an array", "a list in an object", "by id"])
def test_a_document_larger_than_any_record_is_streamed(tmp_path: Path, form: str) -> None:
    path, count = tmp_path / "rows.json", 2 * MAX_RECORD // len(ROW)
    head, tail, names = {
        "an array": ("[", "]", False),
        "a list in an object": ('{"version": "1", "data": [', "]}", False),
        "by id": ("{", "}", True),
    }[form]
    with path.open("w") as file:
        file.write(head + (f'"first": {ROW}' if names else ROW))
        file.writelines(f',\n"{at}": {ROW}' if names else f",\n{ROW}" for at in range(1, count))
        file.write(tail)
    assert path.stat().st_size > MAX_RECORD
    assert peak_of(READ, path, count, setup=SETUP) < 150 * MIB


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", '{"a": [' + "[]," * (8 * MIB) + "[]]}", "a line is too large: its values would take about"),
        ("rows.json", "[[" + "[]," * (8 * MIB) + "[]]]", "a JSON value is too large: its values would take about"),
        ("rows.json", '{"a": [[' + "[]," * (8 * MIB) + "[]]]}", "a JSON value is too large"),
        ("rows.csv", "a,b\n" + "," * (2 * MIB), "a row is longer than"),
    ],
    ids=["line", "array", "document", "csv"],
)
def test_a_record_of_many_small_values_is_refused_before_they_are_made(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    assert peak_of(REFUSED, tmp_path / name, reason, setup=SETUP) < 700 * MIB


def test_the_longest_record_of_the_densest_values_takes_little_more_than_a_gibibyte(tmp_path: Path) -> None:
    """Wide characters, and as many small lists as are let through."""
    lists = (500 * MIB) // 150
    content = '{"a": "' + "\U0001f600" * (5 * MIB) + '", "b": [' + "[]," * (lists - 9) + "[]]}\n"
    assert len(content.encode()) < MAX_RECORD
    (tmp_path / "rows.jsonl").write_text(content)
    assert peak_of(READ, tmp_path / "rows.jsonl", 1, setup=SETUP) < 1200 * MIB


@pytest.mark.parametrize(
    "content",
    [
        '{"a": {"q": "1"}, "a": {"q": "2"}}',
        '{"data": [{"q": "1", "q": "2"}]}',
        '{"x": {"q": {"r": "1", "r": "2"}}}',
        '{"a" {"q": "1"}}',
        '{"a": {"q": "1"},}',
        "{1: 2}",
        '{"a": [{"q": "1"} {"q": "2"}]}',
        '{"a": {"q": "1"}',
    ],
)
def test_a_fault_anywhere_in_an_object_is_found_before_its_first_record_is_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=r"rows\.json cannot be read: "):
        _records(tmp_path, "rows.json")


def test_a_name_of_half_a_character_costs_its_own_record_only(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"\\ud800": {"q": "a"}, "b": {"q": "b"}}')
    first, second = _records(tmp_path, "rows.json")
    assert "half a character" in first
    assert second == {"id": "b", "q": "b"}


@pytest.mark.parametrize("content", ['{"a": 1}\n{"a": 2}\n', '{"a": 1} {"a": 2}\n', '\n{"a": 1}\n\n[2]'])
def test_values_that_follow_the_first_line_make_a_file_of_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    assert len(_records(tmp_path, "rows.json")) == sum(bool(line.strip()) for line in content.splitlines())
