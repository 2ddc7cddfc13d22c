"""A few bytes of a table may stand for any number of values: they are read a few at a time, or refused."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finefit.data.files import find_files
from finefit.data.parquet_footer import row_groups
from finefit.data.records import DataRecord, read_records
from finefit.errors import DataError
from tests.memory import peak_of

GIB, TEXT = 1 << 30, "x" * 10_000_000
SETUP = """
from finefit.data.files import find_files
from finefit.data.records import read_records
from finefit.errors import DataError
import pyarrow.parquet
"""
READ = """
place = Path(sys.argv[1])
rows = sum(1 for row in read_records(find_files(place.name, place.parent, split="train")[0]))
assert rows == int(sys.argv[2]), rows
"""
REFUSED = """
place = Path(sys.argv[1])
try:
    sum(1 for row in read_records(find_files(place.name, place.parent, split="train")[0]))
except DataError as error:
    assert sys.argv[2] in error.problem, error
else:
    raise AssertionError("it was read")
"""


def _write_stream(path: Path, table: Any, **options: Any) -> None:
    with pa.ipc.new_stream(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)


def _repeated(kind: str, times: int) -> Any:
    """A table of few bytes: its one text is in every row, alone, in a list or in messages."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), [TEXT])
    if kind == "text":
        return pa.table({"text": text})
    if kind == "list":
        offsets = pa.array(range(0, times + 1, 2), pa.int32())
        return pa.table({"texts": pa.ListArray.from_arrays(offsets, text)})
    message = pa.StructArray.from_arrays([text], ["content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(range(0, times + 1, 2), pa.int32()), message)})


@pytest.mark.parametrize("kind", ["text", "list", "messages"])
def test_parquet_rows_that_share_a_value_are_not_all_in_memory(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / "rows.parquet", 300 if kind == "text" else 150
    pq.write_table(_repeated(kind, 300), path, compression="zstd", dictionary_pagesize_limit=GIB)
    assert path.stat().st_size < 10_000
    assert peak_of(READ, path, rows, setup=SETUP) < GIB // 2  # all of them take 3 GB


def test_arrow_rows_that_share_a_value_are_not_all_in_memory(tmp_path: Path) -> None:
    _write_stream(tmp_path / "rows.arrow", _repeated("text", 300))
    assert peak_of(READ, tmp_path / "rows.arrow", 300, setup=SETUP) < GIB // 2


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_arrow_is_refused_by_what_its_buffers_say_before_one_is_unpacked(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "rows.arrow"
    _write_stream(path, pa.table({"text": ["0" * (400 << 20)]}), compression=compression)
    assert peak_of(REFUSED, path, "unpack to 419,43", setup=SETUP) < 100 << 20


def test_a_run_of_numbers_counts_as_it_is_in_memory(tmp_path: Path) -> None:
    numbers = pa.ListArray.from_arrays(pa.array([0, 40_000_000], pa.int32()), pa.nulls(40_000_000, pa.int64()))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"numbers": numbers}), path)
    assert path.stat().st_size < 10_000
    assert peak_of(REFUSED, path, "unpack to 320,000,000", setup=SETUP) < 100 << 20


def test_a_row_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    offsets = pa.array([0, 300], pa.int32())
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), [TEXT])
    path = tmp_path / "rows.parquet"
    table = pa.table({"texts": pa.ListArray.from_arrays(offsets, text)})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=GIB)
    assert peak_of(REFUSED, path, "a row takes about 2,8", setup=SETUP) < GIB // 2


VALUES: tuple[tuple[Any, Any], ...] = (
    (["a", None, "", "a"], pa.string()),
    (["a", None, "", "a"], pa.large_string()),
    (["a", None, "", "a"], pa.string_view()),
    ([b"a", None, b"", b"a"], pa.binary()),
    ([["a"], None, [], ["a", None]], pa.list_(pa.string())),
    ([["a"], None, [], ["a", None]], pa.large_list(pa.large_string())),
    ([[("k", "v")], None, [], [("k", None)]], pa.map_(pa.string(), pa.string())),
    (
        [{"a": "x", "b": 1}, None, {"a": None, "b": None}, {"a": "x", "b": 2}],
        pa.struct({"a": pa.string(), "b": pa.int8()}),
    ),
    ([1, None, 2, 1], pa.int64()),
    ([True, None, False, True], pa.bool_()),
)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(("values", "kind"), VALUES, ids=lambda value: str(value)[:20])
def test_values_of_every_kind_come_out_as_they_were_written(
    tmp_path: Path, ending: str, values: list[Any], kind: Any
) -> None:
    path, table = tmp_path / f"rows.{ending}", pa.table({"x": pa.array(values, kind)})
    pq.write_table(table, path) if ending == "parquet" else _write_stream(path, table, compression="zstd")
    (file,) = find_files(path.name, tmp_path, split="train")
    assert [row.value["x"] for row in read_records(file) if isinstance(row, DataRecord)] == table["x"].to_pylist()


def test_a_footer_says_what_pyarrow_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"n": at, "t": ["a"] * (at % 3), "i": {"bytes": bytes(at), "path": None}} for at in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    meta = pq.ParquetFile(path).metadata
    with path.open("rb") as file:
        groups = row_groups(file)
    assert [group.num_rows for group in groups] == [300, 300, 300, 100]
    for at, group in enumerate(groups):
        assert group.num_bytes >= meta.row_group(at).total_byte_size


def test_a_damaged_footer_is_an_error(tmp_path: Path) -> None:
    """pyarrow 26 ends the process when it is asked about a column of some such files."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path)
    whole = path.read_bytes()
    for at in range(len(whole) - 400, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        with suppress(DataError):  # a flipped bit may leave it whole
            list(read_records(find_files(path.name, tmp_path, split="train")[0]))
