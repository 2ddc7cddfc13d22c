"""Tables -> records: CSV, and Parquet and Arrow batch by batch."""

import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice
from typing import Any

from finefit.data.content import Broken, Numbered, Value, holds_no_rows, open_text, require_distinct
from finefit.data.files import DataFile
from finefit.errors import DataError

_HEADER_LINES = 100
"""More than the line breaks inside the column names of any CSV file."""
_BATCH = 256
"""Rows of a table that are plain Python at a time; rows may hold images."""
_BUFFER = 1 << 20
"""Bytes of a Parquet column that are read at a time."""


def read_csv(file: DataFile) -> Numbered:
    csv.field_size_limit(sys.maxsize)
    delimiter = _delimiter(file)
    with open_text(file, newline="") as handle:
        rows = _csv_rows(_from_header(handle), delimiter)
        header = next(rows, None)
        if header is None:
            raise holds_no_rows(file)
        if isinstance(header, str):
            raise DataError(f"{file.name} has a header that is no CSV: {header}", "mend its quotes")
        _require_names(file, header)
        for number, row in enumerate(rows, start=1):
            if isinstance(row, str):
                yield number, f"is no CSV: {row}"
            elif len(row) != len(header):
                yield number, f"has {len(row)} columns, the header has {len(header)}"
            else:
                yield number, dict(zip(header, row, strict=True))


def _from_header(lines: Iterable[str]) -> Iterator[str]:
    return dropwhile(lambda line: not line.strip(), lines)


def _delimiter(file: DataFile) -> str:
    """The one that gives the header the most columns."""
    if ".tsv" in file.path.name.lower():
        return "\t"
    with open_text(file, newline="") as handle:
        head = list(islice(_from_header(handle), _HEADER_LINES))
    return max(",\t;", key=lambda delimiter: _num_columns(head, delimiter))


def _num_columns(lines: list[str], delimiter: str) -> int:
    try:
        return len(next(csv.reader(lines, delimiter=delimiter, strict=True), []))
    except csv.Error:
        return 0


def _csv_rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str] | str]:
    """Rows, or what is wrong with one."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise Broken(
                    "a quote is opened there and never closed", "close it, or bring the file again if it was cut off"
                ) from None
            yield str(error)
        else:
            if row:
                yield row


def _require_names(file: DataFile, header: list[str]) -> None:
    if not all(name.strip() for name in header):
        at = next(at for at, name in enumerate(header, start=1) if not name.strip())
        raise DataError(
            f"{file.name} has no name for column {at} of {len(header)}",
            "name it in the first line; pandas leaves its index out with index=False",
        )
    require_distinct(header)


def read_table(file: DataFile) -> Numbered:
    if not file.path.stat().st_size:
        raise holds_no_rows(file)
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(
            f"{file.name} needs pyarrow, which is not installed", "install pyarrow, or convert the file to JSONL"
        ) from None
    try:
        number = 0
        for batch in _parquet_batches(file) if file.format == "parquet" else _arrow_batches(file):
            for value in _plain_rows(batch):
                number += 1
                yield number, value
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Broken(f"it is no whole {file.format} file: {error}", "bring the file again") from None


def _parquet_batches(file: DataFile) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=_BUFFER) as table:
        require_distinct(table.schema_arrow.names)
        yield from table.iter_batches(batch_size=_BATCH)


def _arrow_batches(file: DataFile) -> Iterator[Any]:
    """Of the file form or of the stream form, which `datasets` writes."""
    import pyarrow as pa

    with file.path.open("rb") as handle:
        is_stream = handle.read(6) != b"ARROW1"
    with pa.memory_map(str(file.path)) as source:
        table = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
        require_distinct(table.schema.names)
        yield from _sliced(table if is_stream else (table.get_batch(at) for at in range(table.num_record_batches)))


def _sliced(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        batch.validate(full=True)  # nothing else keeps broken offsets from being read beyond the file's end
        yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def _plain_rows(batch: Any) -> list[Value | str]:
    """Rows as plain Python; in the place of one that Python cannot hold, such as a date in the year 20000, the reason."""
    try:
        rows: list[Value | str] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [f"has a value that Python cannot hold: {error}"]
        return [_plain_rows(batch.slice(at, 1))[0] for at in range(batch.num_rows)]
    return rows
