import csv
import gzip
import json
import os
import random
import zipfile
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.data import json_records
from finefit.data.columns import RecordError
from finefit.data.files import MAX_RECORD, DataFile, UnreadableFile, find_files
from finefit.data.images import decode
from finefit.data.records import DataRecord, Unit, is_amr, read_records
from finefit.data.rows import BadRow, Image
from finefit.errors import DataError
from tests.memory import peak_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
GOOD = {"prompt": "2+2", "completion": "4"}
LINE = json.dumps(GOOD)


def _file(folder: Path, name: str, content: str | bytes) -> DataFile:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (file,) = find_files(name, folder, split="train")
    return file


def _read(folder: Path, name: str, content: str | bytes, unit: Unit | None = None) -> list[DataRecord | BadRow]:
    return list(read_records(_file(folder, name, content), unit=unit))


def _values(folder: Path, name: str, content: str | bytes, unit: Unit | None = None) -> list[dict[str, Any]]:
    found = _read(folder, name, content, unit)
    assert [row for row in found if isinstance(row, BadRow)] == []
    return [row.value for row in found if isinstance(row, DataRecord)]


def _reasons(folder: Path, name: str, content: str | bytes) -> dict[int, str]:
    return {row.number: row.reason for row in _read(folder, name, content) if isinstance(row, BadRow)}


def _fault(folder: Path, name: str, content: str | bytes, unit: Unit | None = None) -> str:
    with pytest.raises(DataError) as caught:
        _read(folder, name, content, unit)
    assert caught.value.remedy
    return caught.value.problem


# JSON lines


def test_byte_order_mark_crlf_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    found = _read(tmp_path, "rows.jsonl", b"\xef\xbb\xbf" + f"{LINE}\r\n\r\n{LINE}\r\n  \n".encode())
    assert found == [DataRecord("rows.jsonl", 1, GOOD), DataRecord("rows.jsonl", 3, GOOD)]


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    value = {"text": "a\u2028b\u2029c\x85d\x7fe"}
    assert _values(tmp_path, "rows.jsonl", json.dumps(value, ensure_ascii=False)) == [value]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "is a list, not an object"),
        ("null", "is null, not an object"),
        ("1.5", "is a number, not an object"),
        ("true", "is a truth value, not an object"),
        ('"x"', "is a string, not an object"),
        ('{"a": tru}', "is not JSON: Expecting value at column 7"),
        ('{"a": "b\tc"}', "is not JSON: Invalid control character at column 9"),
        ('{"a": "b', "is not JSON: Unterminated string at column 7"),
        (f"{LINE} {LINE}", f"is not JSON: more follows at column {len(LINE) + 1}"),
        ('{"a": ' + "[" * 100_000, "is not JSON: it is nested too deep: at most about 1,000 levels are read"),
        ('{"a": {"b": ["\\ud83d"]}}', "a holds half a character, \\ud83d, which no tokenizer takes"),
        ('{"\\uDC00": 1}', "\\udc00 holds half a character, \\udc00, which no tokenizer takes"),
    ],
)
def test_a_line_that_is_no_record_is_told_and_reading_goes_on(tmp_path: Path, line: str, reason: str) -> None:
    found = _read(tmp_path, "rows.jsonl", f"{LINE}\n{line}\n{LINE}\n")
    assert found == [
        DataRecord("rows.jsonl", 1, GOOD),
        BadRow("rows.jsonl", 2, reason),
        DataRecord("rows.jsonl", 3, GOOD),
    ]


def test_a_line_is_named_as_editors_name_it_and_any_other_record_by_its_number(tmp_path: Path) -> None:
    lines, array = f"{LINE}\n\n{LINE}\n", f"[{LINE}, {LINE}]"
    cases = {
        "rows.jsonl": (lines, "rows.jsonl:3"),
        "rows.json": (array, "record 2 of rows.json"),
        "lines.json": (lines, "record 2 of lines.json"),
        "rows.csv": ("text\n\na\nb\n", "record 2 of rows.csv"),
    }
    for name, (content, place) in cases.items():
        second = _read(tmp_path, name, content)[1]
        assert second.place == place


def test_a_number_beyond_reading_is_told(tmp_path: Path) -> None:
    assert "Exceeds the limit" in _reasons(tmp_path, "rows.jsonl", '{"a": ' + "1" * 5_000 + "}")[1]


def test_whole_characters_written_as_escapes_are_taken(tmp_path: Path) -> None:
    value = {"text": "\U0001f600 한국어 \\ud83d"}
    assert _values(tmp_path, "rows.jsonl", json.dumps(value)) == [value]


@pytest.mark.parametrize("end", range(len(LINE) + 2, len(LINE) + 15))
def test_a_last_line_that_was_cut_off_anywhere_is_told_as_such(tmp_path: Path, end: int) -> None:
    content = f'{LINE}\n{{"prompt": "€€"}}\n'.encode()[:end]
    reason = _reasons(tmp_path, "rows.jsonl", content)[2]
    assert "is not JSON: " in reason
    assert reason.endswith("it is the last line and has no line break: the file may be cut off")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_bytes_that_are_not_utf_8_are_named_with_their_place(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.data.files._CHUNK", 5)
    content = b'{"prompt": "caf\xe9", "completion": "x"}\n'
    assert _fault(tmp_path, name, content, "line") == f"{name} is not UTF-8: byte 15 is 0xe9"


def test_a_bad_byte_is_counted_right_where_a_chunk_ends_within_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.data.files._CHUNK", 5)
    assert _fault(tmp_path, "rows.jsonl", b'{"\xc3\xa9\xe2\x82"}\n') == "rows.jsonl is not UTF-8: byte 4 is 0xe2"


TEXT_FILES = ("rows.jsonl", "rows.json", "rows.csv", "rows.txt")
EMPTY = [(name, text) for name in TEXT_FILES for text in ("\n\n", "\ufeff", " \r\n")]


@pytest.mark.parametrize(("name", "content"), [*EMPTY, ("rows.jsonl", ""), ("rows.parquet", ""), ("rows.arrow", "")])
def test_a_file_without_content_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    assert _fault(tmp_path, name, content) == f"{name} holds no rows"


def test_a_file_that_went_away_is_an_error(tmp_path: Path) -> None:
    file = _file(tmp_path, "rows.jsonl", LINE)
    file.path.unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read: .*No such file"):
        list(read_records(file))


# JSON documents


@pytest.mark.parametrize("content", [f"{LINE}\n{LINE}\n", f"[{LINE},\n{LINE}]", f" [\n{LINE}\n ,{LINE} ]\n"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.json.gz"])
def test_the_content_tells_lines_from_an_array_not_the_extension(tmp_path: Path, name: str, content: str) -> None:
    data = gzip.compress(content.encode()) if name.endswith(".gz") else content
    assert _values(tmp_path, name, data) == [GOOD, GOOD]


def test_arrays_line_by_line_are_lines_that_are_no_objects(tmp_path: Path) -> None:
    assert set(_reasons(tmp_path, "rows.json", "[1]\n[2]\n")) == {1, 2}


@pytest.mark.parametrize("content", ['{\n"a": 1}\n{\n"a": 2}', "[\n{}]\n[\n{}]"])
def test_values_that_follow_one_another_without_being_lines_are_refused(tmp_path: Path, content: str) -> None:
    assert _fault(tmp_path, "rows.json", content) == "rows.json holds several JSON values that are not one per line"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"7": {"q": "a"}, "8": {"q": "b", "id": "own"}}, [{"id": "7", "q": "a"}, {"q": "b", "id": "own"}]),
        ({"version": "1", "info": {}, "tags": ["x"], "data": [{"q": "a"}, {"q": "b"}]}, [{"q": "a"}, {"q": "b"}]),
        ({"query": "a", "answer": "b"}, None),
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"id": 1, "dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, None),
        ({"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}, None),
        ({"first": {"role": "user", "content": "a"}, "second": {"role": "assistant", "content": "b"}}, None),
        ({"context": "a", "qas": [{"question": "b"}]}, None),
        ({"article": "a", "qas": [{"question": "b", "answer": "c"}]}, None),
        ({"title": "t", "Passage": ["a", "b"], "qas": [{"question": "b", "answer": "c"}]}, None),
        ({"topics": [{"a": 1}], "queries": [{"b": 2}]}, None),
        ({}, None),
    ],
)
def test_an_object_holds_records_by_id_or_in_its_one_list_or_is_one(
    tmp_path: Path, document: dict[str, Any], expected: list[Any] | None
) -> None:
    assert _values(tmp_path, "rows.json", json.dumps(document, indent=1)) == (
        [document] if expected is None else expected
    )


def test_an_id_that_stands_twice_is_refused_because_a_record_would_be_lost(tmp_path: Path) -> None:
    problem = _fault(tmp_path, "rows.json", '{"1": {"q": "a"}, "1": {"q": "b"}}')
    assert problem == "rows.json cannot be read: it has 1 twice, and one value would be lost"


@pytest.mark.parametrize("depth", range(900, 1000, 9))
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_record_of_any_depth_is_read_or_told(tmp_path: Path, name: str, depth: int) -> None:
    file = _file(tmp_path, name, '{"\\ud800":' * depth + "1" + "}" * depth)
    outcome = _outcome(file, None)
    assert outcome == [1] or (isinstance(outcome, DataError) and "nested too deep" in outcome.problem)


def test_entries_that_are_no_objects_are_told(tmp_path: Path) -> None:
    assert set(_reasons(tmp_path, "rows.json", f'[{LINE}, 5, "x"]')) == {2, 3}
    assert set(_reasons(tmp_path, "rows.json", "5")) == {1}


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (f"[{LINE}, {LINE}", "on after row 2", "it is JSON without an end"),
        (f"[{LINE}, {LINE[:-3]}", "on after row 1", "it is JSON without an end"),
        (f"[{LINE},", "on after row 1", "it is JSON without an end"),
        (f"[{LINE} {LINE}]", "on after row 1", f"it is not JSON at character {len(LINE) + 2}: neither a comma nor ]"),
        ('[{"a": x}]', "cannot be read:", "it is not JSON at character 7: Expecting value"),
        ('{"a": 1', "cannot be read:", "it is JSON without an end"),
        ("[" + '{"a":' * 100_000, "cannot be read:", "it is not JSON at character 1: it is nested too deep"),
    ],
)
def test_broken_json_is_told_with_the_last_row_before_it(tmp_path: Path, content: str, place: str, reason: str) -> None:
    problem = _fault(tmp_path, "rows.json", content)
    assert place in problem
    assert reason in problem


def test_a_fault_early_in_a_long_array_is_found_without_reading_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "_CHUNK", 100)
    file = _file(tmp_path, "rows.json", "[{'a': 1}," + f"{LINE}," * 5_000 + "{}]")
    with file.path.open(encoding="utf-8") as handle:
        stream = json_records.JsonStream(handle)
        assert stream.peek() == "["
        stream.skip()
        with pytest.raises(UnreadableFile):
            stream.value()
        assert len(stream._buffer) <= 100


# CSV


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_the_header_tells_the_delimiter(tmp_path: Path, delimiter: str) -> None:
    content = f'\ufeffq{delimiter}a\r\n\r\n"x\ny"{delimiter}"say ""z"""\r\n'
    assert _values(tmp_path, "rows.csv", content) == [{"q": "x\ny", "a": 'say "z"'}]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_quoted_names_may_hold_line_breaks_and_other_delimiters(tmp_path: Path, delimiter: str) -> None:
    assert _values(tmp_path, "rows.csv", f'"q,;\t\nq"{delimiter}"a;,\t"\n1{delimiter}2\n') == [
        {"q,;\t\nq": "1", "a;,\t": "2"}
    ]


def test_a_tsv_file_is_split_at_tabs_whatever_its_header_holds(tmp_path: Path) -> None:
    assert _values(tmp_path, "rows.tsv", "a,b,c\td\n1\t2\n") == [{"a,b,c": "1", "d": "2"}]


def test_csv_rows_with_other_columns_or_bad_quotes_are_told_and_reading_goes_on(tmp_path: Path) -> None:
    found = _read(tmp_path, "rows.csv", 'q,a\n1,2\n1\n1,2,3\n"x"y,2\n3,\n')
    assert [row.number for row in found] == [1, 2, 3, 4, 5]
    assert [row.reason for row in found if isinstance(row, BadRow)] == [
        "has 1 columns, the header has 2",
        "has 3 columns, the header has 2",
        "is not CSV: ',' expected after '\"'",
    ]
    assert found[4] == DataRecord("rows.csv", 5, {"q": "3", "a": ""})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("q,q\n1,2\n", "rows.csv cannot be read: it has q twice, and one value would be lost"),
        (",q\n0,1\n", "rows.csv has no name for column 1 of 2"),
        ('q,a\n1,2\n3,"4\n5,6\n', "rows.csv cannot be read on after row 1: a quote is opened there and never closed"),
        ('"q"x,a\n1,2\n', "rows.csv has a header that is not CSV: ',' expected after '\"'"),
    ],
)
def test_a_csv_file_that_would_lose_values_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    assert _fault(tmp_path, "rows.csv", content) == problem


def test_a_long_field_is_no_error_and_a_header_alone_is_no_record(tmp_path: Path) -> None:
    assert _values(tmp_path, "rows.csv", f"q\n{'x' * 200_000}\n") == [{"q": "x" * 200_000}]
    assert _values(tmp_path, "rows.csv", "q,a\n") == []


# Parquet and Arrow


def _write_parquet(path: Path, table: Any) -> None:
    pq.write_table(table, path)


def _write_stream(path: Path, table: Any) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def _write_arrow_file(path: Path, table: Any) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


TABLES = pytest.mark.parametrize(
    ("name", "write"),
    [("rows.parquet", _write_parquet), ("rows.arrow", _write_stream), ("rows.arrow", _write_arrow_file)],
)


@TABLES
def test_tables_of_many_batches_come_out_as_plain_python(
    tmp_path: Path, name: str, write: Callable[[Path, Any], None]
) -> None:
    rows = [
        {
            "n": at,
            "image": {"bytes": b"\x89PNG", "path": None},
            "tags": ["a", "b"],
            "day": date(2024, 1, 1),
            "x": Decimal("1.5"),
        }
        for at in range(1000)
    ]
    write(tmp_path / name, pa.Table.from_pylist(rows))
    (file,) = find_files(name, tmp_path, split="train")
    assert list(read_records(file)) == [DataRecord(name, at + 1, row) for at, row in enumerate(rows)]


@TABLES
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str, write: Callable[[Path, Any], None]) -> None:
    write(tmp_path / name, pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    with pytest.raises(DataError, match=f"{name} cannot be read: it has a twice"):
        list(read_records(find_files(name, tmp_path, split="train")[0]))


@TABLES
def test_a_value_that_python_cannot_hold_costs_its_own_row_only(
    tmp_path: Path, name: str, write: Callable[[Path, Any], None]
) -> None:
    write(tmp_path / name, pa.table({"t": pa.array([0, 10**15, 60], pa.timestamp("s"))}))
    found = list(read_records(find_files(name, tmp_path, split="train")[0]))
    assert [type(row) for row in found] == [DataRecord, BadRow, DataRecord]
    assert [row.number for row in found] == [1, 2, 3]


@TABLES
def test_a_table_cut_in_half_is_an_error_with_its_place(
    tmp_path: Path, name: str, write: Callable[[Path, Any], None]
) -> None:
    write(tmp_path / name, pa.table({"a": [str(at) for at in range(10_000)]}))
    whole = (tmp_path / name).read_bytes()
    assert f"it is not a whole {name.removeprefix('rows.')} file" in _fault(tmp_path, name, whole[: len(whole) // 2])


def test_a_table_without_rows_gives_no_records(tmp_path: Path) -> None:
    _write_parquet(tmp_path / "rows.parquet", pa.table({"a": pa.array([], pa.string())}))
    assert list(read_records(find_files("rows.parquet", tmp_path, split="train")[0])) == []


# Text and AMR


def test_plain_text_without_a_unit_lists_the_three_with_their_counts(tmp_path: Path) -> None:
    text = "a\nb\n\nc\n \t\n\nd"
    assert (
        _fault(tmp_path, "rows.txt", text)
        == "rows.txt is plain text: 4 records by line, 3 by paragraph, 1 as a document"
    )


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", [(1, " a"), (2, "b"), (4, "c\u2028c"), (7, "d")]),
        ("paragraph", [(1, " a\nb"), (2, "c\u2028c"), (3, "d")]),
        ("document", [(1, " a\nb\n\nc\u2028c\n \t\n\nd")]),
    ],
)
def test_a_unit_says_what_a_record_of_text_is(tmp_path: Path, unit: Unit, expected: list[tuple[int, str]]) -> None:
    found = _read(tmp_path, "rows.txt", "\ufeff a\r\nb\n\nc\u2028c\n \t\n\nd\n", unit)
    assert [(row.number, row.value["text"]) for row in found if isinstance(row, DataRecord)] == expected


GRAPH = "(d / dog\n    :mod (b / big))"


def test_amr_blocks_become_sentence_graph_and_metadata(tmp_path: Path) -> None:
    text = (
        "# AMR release; made by hand\n\n# ::id x.1 ::date 2020 ::note\n# ::snt A dog :: big.\n# a "
        f"remark\n{GRAPH}\n\t\n#::snt Two dogs\r\n{GRAPH}\n"
    )
    file = _file(tmp_path, "rows.txt", text)
    assert is_amr(file)
    assert list(read_records(file)) == [
        DataRecord("rows.txt", 1, {"id": "x.1", "date": "2020", "note": "", "snt": "A dog :: big.", "amr": GRAPH}),
        DataRecord("rows.txt", 2, {"snt": "Two dogs", "amr": GRAPH}),
    ]


def test_a_missing_blank_line_between_graphs_loses_none(tmp_path: Path) -> None:
    text = f"# ::snt a\n{GRAPH}\n# a remark\n# ::id 2\n# ::snt b\n{GRAPH}\n"
    assert _values(tmp_path, "rows.amr", text) == [{"snt": "a", "amr": GRAPH}, {"id": "2", "snt": "b", "amr": GRAPH}]


def test_metadata_that_stands_twice_keeps_both_values(tmp_path: Path) -> None:
    text = f"# ::id 1 ::date may\n# ::alignments 0-1 ::date june\n# ::snt a\n{GRAPH}\n"
    assert _values(tmp_path, "rows.amr", text) == [
        {"id": "1", "date": "may\njune", "alignments": "0-1", "snt": "a", "amr": GRAPH}
    ]


def test_amr_blocks_that_lack_a_part_are_told(tmp_path: Path) -> None:
    blocks = [
        "# ::snt a\n" + GRAPH,
        "# ::snt b",
        GRAPH,
        "# ::snt\n" + GRAPH,
        "# ::snt c\n# ::snt d\n" + GRAPH,
        "# ::amr e\n# ::snt f\n" + GRAPH,
    ]
    assert _reasons(tmp_path, "rows.amr", "\n\n".join(blocks)) == {
        2: "has a ::snt line but no graph",
        3: "has a graph but no sentence in a ::snt line",
        4: "has a graph but no sentence in a ::snt line",
        5: "has one graph below 2 ::snt lines",
        6: "has metadata named ::amr, which is the field of the graph",
    }


def test_a_unit_that_is_named_wins_over_amr(tmp_path: Path) -> None:
    assert len(_values(tmp_path, "rows.amr", f"# ::snt a\n{GRAPH}\n", "line")) == 3


# gzip


def test_gzip_that_breaks_off_is_told_with_the_last_row_before_it(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"n": at, "x": random.Random(at).random()}) + "\n" for at in range(20_000))
    packed = gzip.compress(lines.encode())
    problem = _fault(tmp_path, "rows.jsonl.gz", packed[: len(packed) // 2])
    assert problem.startswith("rows.jsonl.gz cannot be read on after row ")
    assert "it is not a whole gzip file" in problem
    assert "it is not a whole gzip file" in _fault(tmp_path, "rows.jsonl.gz", LINE)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, -6)])
def test_damaged_gzip_whose_content_is_not_utf_8_is_told_as_gzip(tmp_path: Path, cut: slice) -> None:
    for content in (b"\xff\n", b'{"a": "\xff"}\n', b"[\xff"):
        for name in ("rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.txt.gz"):
            assert "it is not a whole gzip file" in _fault(tmp_path, name, gzip.compress(content * 9)[cut], "line")
    wrong_sum = gzip.compress(b"\xff\n")[:-8] + bytes(4) + gzip.compress(b"\xff\n")[-4:]
    assert "it is not a whole gzip file" in _fault(tmp_path, "rows.jsonl.gz", wrong_sum)


BOMB = gzip.compress(b"[" + (b" " * ((1 << 20) - 1) + b"\n") * 65, compresslevel=1)
UNCLOSED = 'prompt,answer\na,"' + ("0" * 999_999 + "\n") * 34


@pytest.mark.parametrize("name", ["rows.json.gz", "rows.jsonl.gz", "rows.csv.gz", "rows.txt.gz"])
def test_gzip_that_unpacks_to_more_than_any_data_is_refused_with_its_sizes(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        _read(tmp_path, name, BOMB, "document")
    assert f"its {len(BOMB):,} bytes unpack to " in caught.value.problem
    assert "at most 100 times the size is read" in caught.value.problem
    assert "gunzip" in caught.value.remedy


def test_parquet_that_unpacks_to_more_than_any_data_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["0" * (1 << 20)] * 65})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd", use_dictionary=False)
    problem = _fault(tmp_path, "rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    assert "at most 100 times the size is read" in problem


@pytest.mark.parametrize(
    ("name", "start", "reason"),
    [
        ("rows.jsonl", LINE + "\n", "after row 1: a line is longer than 33,554,432 characters"),
        ("rows.json", f'[{LINE}, "', "after row 1: a JSON value is longer than 33,554,432 characters"),
        ("rows.csv", "prompt,answer\na,b\n", "after row 1: a line is longer than 33,554,432 characters"),
        ("rows.txt", "a\n", "after row 1: a line is longer than 33,554,432 characters"),
        ("quote.csv", UNCLOSED, "a row is longer than 33,554,432 characters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_record_that_would_fill_the_memory_is_refused_with_the_limit(
    tmp_path: Path, name: str, start: str, reason: str
) -> None:
    assert reason in _fault(tmp_path, name, start + "0" * (MAX_RECORD + (2 << 20)), "line")


# Laws

TEXT = st.text(max_size=12) | st.sampled_from(["", '"', "\n", "\r\n", ",", "\\", "\u2028", "\ufeff", "'\t'"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
VALUES = st.lists(st.dictionaries(TEXT, JSON, max_size=4), min_size=1, max_size=6)
STRINGS = st.lists(TEXT.filter(str.strip), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.lists(st.fixed_dictionaries(dict.fromkeys(names, TEXT)), min_size=1, max_size=6)
)


@settings(max_examples=50)
@given(values=VALUES, ensure_ascii=st.booleans(), gz=st.booleans())
def test_json_lines_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], ensure_ascii: bool, gz: bool
) -> None:
    content = "".join(json.dumps(value, ensure_ascii=ensure_ascii) + "\n" for value in values).encode()
    name, data = ("law.jsonl.gz", gzip.compress(content)) if gz else ("law.jsonl", content)
    assert _values(tmp_path_factory.getbasetemp(), name, data) == values


@settings(max_examples=50)
@given(
    values=VALUES,
    others=st.lists(JSON, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 20]),
    chunk=st.integers(1, 40),
)
def test_an_array_gives_back_what_was_written_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[Any],
    others: list[Any],
    ensure_ascii: bool,
    indent: int | None,
    chunk: int,
) -> None:
    written = [*values, *others, -1234567, 0.5, 1e300, 1e-300]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_records, "_CHUNK", chunk)
        found = _read(
            tmp_path_factory.getbasetemp(), "law.json", json.dumps(written, ensure_ascii=ensure_ascii, indent=indent)
        )
    assert [row.number for row in found] == list(range(1, len(written) + 1))
    assert [row.value for row in found if isinstance(row, DataRecord)] == [
        value for value in written if isinstance(value, dict)
    ]


@settings(max_examples=50)
@given(
    values=STRINGS, delimiter=st.sampled_from([",", "\t", ";"]), end=st.sampled_from(["\n", "\r\n"]), gz=st.booleans()
)
def test_csv_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, str]], delimiter: str, end: str, gz: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / ("law.tsv" if delimiter == "\t" else "law.csv")
    with path.open("w", newline="", encoding="utf-8") as handle:
        rows = csv.DictWriter(
            handle, [*values[0], "last"], delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL
        )
        rows.writeheader()
        rows.writerows({**value, "last": "x"} for value in values)
    content = path.read_bytes()
    name, data = (f"{path.name}.gz", gzip.compress(content)) if gz else (path.name, content)
    assert _values(path.parent, name, data) == [{**value, "last": "x"} for value in values]


def _samples(folder: Path) -> dict[str, bytes]:
    table = pa.Table.from_pylist(
        [{"q": f"what is {at}?", "a": [at, at], "image": {"bytes": b"x" * at, "path": "p"}} for at in range(40)]
    )
    for name, write in (("s.parquet", _write_parquet), ("s.arrow", _write_stream), ("f.arrow", _write_arrow_file)):
        write(folder / name, table)
    lines = "".join(json.dumps({"q": f"“{at}”", "a": [at, {"x": None}]}) + "\n" for at in range(20)).encode()
    texts = {
        "s.jsonl": lines,
        "s.json": b"[" + b",".join(lines.splitlines()) + b"]",
        "o.json": json.dumps({"data": [{"q": "x"}, {"q": "y"}], "version": "1"}).encode(),
        "s.csv": b'q,a\n1,"2\n2"\n3,"4""4"\n' * 5,
        "s.tsv": b"q\ta\n1\t2\n",
        "s.amr": f"# ::id 1 ::x y\n# ::snt a “dog”\n{GRAPH}\n\n".encode() * 5,
        "s.jsonl.gz": gzip.compress(lines),
    }
    return texts | {name: (folder / name).read_bytes() for name in ("s.parquet", "s.arrow", "f.arrow")}


def _mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                del data[at : at + rng.randrange(1, 20)]
            case 1:
                data[at:at] = rng.choice(
                    [b'"', b"\n", b"{", b"]", b"\x00", b"\\ud800", b"\xff\xfe", b"\xe2\x80", b",", rng.randbytes(5)]
                )
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case _:
                del data[at:]
    return bytes(data)


def _outcome(file: DataFile, unit: Unit | None) -> list[int] | DataError:
    try:
        return [row.number for row in read_records(file, unit=unit)]
    except DataError as error:
        return error


NUM_FUZZED = int(os.environ.get("FINEFIT_FUZZ", "300"))


def read_mutated(folder: Path, count: int) -> None:
    """Whatever a file holds, records or a DataError come out."""
    rng, samples, num_faults, num_repacked = random.Random(7), _samples(folder), 0, 0
    for name, content in samples.items():
        assert all(isinstance(row, DataRecord) for row in _read(folder, name, content)), name
    for _, name in zip(range(count), cycle(samples), strict=False):
        data = rng.randbytes(rng.randrange(60)) if rng.random() < 0.1 else _mutated(samples[name], rng)
        if name.endswith(".gz") and rng.random() < 0.5:  # a whole gzip file of damaged rows
            data = gzip.compress(_mutated(gzip.decompress(samples[name]), rng), 1)
            num_repacked += 1
        outcome = _outcome(_file(folder, name, data), rng.choice([None, "line", "paragraph", "document"]))
        if isinstance(outcome, DataError):
            assert outcome.problem.startswith(name)
            assert outcome.remedy
            num_faults += 1
        else:
            assert outcome == sorted(set(outcome))
    assert num_faults > count / 4
    assert num_repacked > count / 50


@pytest.mark.parametrize("count", [NUM_FUZZED, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files_and_noise_never_raise_anything_but_a_data_error_or_take_a_gibibyte(
    tmp_path: Path, count: int
) -> None:
    setup = "from tests.data.test_records import read_mutated"
    assert peak_of("read_mutated(Path(sys.argv[1]), int(sys.argv[2]))", tmp_path, count, setup=setup) < 1 << 30


def decode_mutated(tmp_path: Path, count: int) -> None:
    rng = random.Random(8)
    pixels = PIL.Image.effect_noise((24, 24), 90)
    for form in ("png", "jpg", "gif", "webp", "bmp", "tiff"):
        pixels.convert("RGB").save(tmp_path / f"whole.{form}")
    images = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    packed = {}
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "images.zip", "w", method) as archive:
            archive.writestr("whole.png", images["whole.png"])
        packed[method] = (tmp_path / "images.zip").read_bytes()
    num_faults = 0
    for at in range(count):
        if at % 2:
            image = Image(data=_mutated(images[rng.choice(list(images))], rng))
        else:
            path = tmp_path / f"{at}.zip"
            path.write_bytes(_mutated(packed[rng.choice(list(packed))], rng))
            image = Image(path="whole.png", root=str(path))
        try:
            assert decode(image).mode == "RGB"
        except RecordError:
            num_faults += 1
        if image.path:
            path.unlink()
    assert 0 < num_faults < count


@pytest.mark.parametrize("count", [NUM_FUZZED, pytest.param(20_000, marks=pytest.mark.slow)])
def test_images_from_mutated_files_and_zips_are_read_or_refused(tmp_path: Path, count: int) -> None:
    setup = "from tests.data.test_records import decode_mutated"
    assert peak_of("decode_mutated(Path(sys.argv[1]), int(sys.argv[2]))", tmp_path, count, setup=setup) < 1 << 30
