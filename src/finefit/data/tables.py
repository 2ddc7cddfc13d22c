"""Records of tables: Parquet, and Arrow in its file form or in its stream form, which `datasets` writes.

A few bytes of a table may stand for any number of values: pages and buffers are compressed, and a dictionary holds a
value once that many rows have. So its sizes are checked as they are declared, before anything is unpacked; repeated
values are kept as a dictionary; and as many rows become Python at a time as take little memory."""

import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from finefit import bounded
from finefit.data import files
from finefit.data.columns import Value
from finefit.data.files import DataFile, Numbered, UnreadableFile
from finefit.data.parquet_footer import row_groups

_BATCH = 256
"""Rows of a table that are read at a time; rows may hold images."""
_BATCH_BYTES: Final = 64 << 20
"""Of rows that are Python at a time, unless a single one has more."""
MAX_ROW_BYTES: Final = bounded.MAX_PARSED_BYTES
MAX_PACKED_BATCH: Final = 1 << 30
"""Bytes that a record batch of Arrow may unpack to: it is in memory as a whole."""
_VALUE_BYTES: Final = 60
"""Of a value in Python, at least."""


def read_table(file: DataFile) -> Numbered:
    if not file.path.stat().st_size:
        raise files.holds_no_rows(file)
    try:
        parts = _parquet_parts(file) if file.format == "parquet" else _arrow_parts(file)
        yield from enumerate(chain.from_iterable(map(_python_rows, parts)), start=1)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise UnreadableFile(f"it is not a whole {file.format} file: {error}", "fetch the file again") from None


def _parquet_parts(file: DataFile) -> Iterator[Any]:
    with bounded.open_binary(file.path) as handle:
        groups = row_groups(handle)
        _require_expansion(file, sum(group.num_bytes for group in groups))
        with pq.ParquetFile(handle, pre_buffer=False) as table:
            plain = table.schema_arrow
            files.require_distinct(plain.names)
            leaves = [table.schema.column(at) for at in range(table.metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    options = {"pre_buffer": False, "buffer_size": 1 << 20, "read_dictionary": texts}
    with bounded.open_binary(file.path) as handle, pq.ParquetFile(handle, **options) as table:
        for at, group in enumerate(groups):
            num_rows = min(_BATCH, _BATCH_BYTES * group.num_rows // max(1, group.num_bytes))
            for batch in table.iter_batches(batch_size=max(1, num_rows), row_groups=[at]):
                yield from (_with_texts(part, plain) for part in _small_parts(batch))


def _with_texts(part: Any, plain: Any) -> Any:
    """With texts in place of dictionaries, in which pyarrow is slow to look values up."""
    try:
        return part.cast(plain)
    except pa.ArrowNotImplementedError:  # to the views that some writers store
        return part


def _arrow_parts(file: DataFile) -> Iterator[Any]:
    with bounded.open_binary(file.path) as handle:
        start = 8 if handle.read(6) == b"ARROW1" else 0  # the file form is a stream between a mark and an index
    _require_unpackable(file, start)
    with pa.memory_map(str(file.path)) as source:
        source.seek(start)
        table = pa.ipc.open_stream(source)
        files.require_distinct(table.schema.names)
        for batch in table:
            batch.validate(full=True)  # nothing else keeps broken offsets from being read beyond the file's end
            slices = (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))
            yield from chain.from_iterable(map(_small_parts, slices))


def _require_unpackable(file: DataFile, start: int) -> None:
    """By what each buffer says of itself, before any is unpacked."""
    total = 0
    with pa.memory_map(str(file.path)) as source:
        source.seek(start)
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type not in ("record batch", "dictionary"):
                continue
            num_rows, unpacked = _unpacked_bytes(message)
            total += max(num_rows, len(message.body), unpacked)
            _require_expansion(file, total)
            if unpacked > MAX_PACKED_BATCH:
                reason = f"a batch of {num_rows:,} rows unpacks to {unpacked:,} bytes"
                reason += f", and is in memory as a whole; at most {MAX_PACKED_BATCH:,} are read"
                raise UnreadableFile(reason, "write it in smaller record batches, or without compression")


def _unpacked_bytes(message: Any) -> tuple[int, int]:
    """Rows of a batch, and the bytes that its compressed buffers say they unpack to. Arrow describes a batch in the
    format of flatbuffers: a table holds offsets to its fields, and a vector begins with its length. In a message the
    third field is the batch (of a dictionary its second); a batch has its rows, nodes, buffers and compression."""
    meta, body = memoryview(message.metadata), memoryview(message.body)

    def field(table: int, number: int) -> int:
        """Where the field is, 0 if it is absent."""
        entries = table - struct.unpack_from("<i", meta, table)[0]
        place = 4 + 2 * number
        known = struct.unpack_from("<H", meta, entries)[0]
        offset = struct.unpack_from("<H", meta, entries + place)[0] if place < known else 0
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return int(place + struct.unpack_from("<I", meta, place)[0])

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    length, buffers = field(batch, 0), field(batch, 2)
    num_rows = struct.unpack_from("<q", meta, length)[0] if length else 0
    if not (buffers and field(batch, 3)):
        return num_rows, 0
    vector, unpacked = follow(buffers), 0
    for at in range(struct.unpack_from("<I", meta, vector)[0]):
        offset, size = struct.unpack_from("<qq", meta, vector + 4 + 16 * at)
        if size >= 8:
            says = struct.unpack_from("<q", body, offset)[0]  # -1: it is not compressed after all
            unpacked += says if says >= 0 else size
    return num_rows, unpacked


def _require_expansion(file: DataFile, num_bytes: int) -> None:
    files.require_expansion(num_bytes, file.path.stat().st_size, "write them without compression")


def _python_rows(batch: Any) -> list[Value | str]:
    """Rows as plain Python; for one that Python cannot hold, such as a date in the year 20000, the reason."""
    try:
        rows: list[Value | str] = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [f"has a value that Python cannot hold: {error}"]
        return [_python_rows(batch.slice(at, 1))[0] for at in range(batch.num_rows)]
    return rows


def _small_parts(batch: Any) -> Iterator[Any]:
    """Parts of a batch that take little memory as Python, or have one row."""
    num_bytes = sum(map(_python_bytes, batch.columns))
    if num_bytes <= _BATCH_BYTES:
        yield batch
    elif batch.num_rows == 1:
        if num_bytes > MAX_ROW_BYTES:
            reason = (
                f"a row takes about {num_bytes >> 20:,} MiB of memory, and at most {MAX_ROW_BYTES >> 20:,} are read"
            )
            raise UnreadableFile(reason, "split it into shorter records")
        yield batch
    else:
        half = batch.num_rows // 2
        yield from _small_parts(batch.slice(0, half))
        yield from _small_parts(batch.slice(half))


def _python_bytes(array: Any) -> int:
    """About what the values of an array take in Python, without making them."""
    kind, types, own = array.type, pa.types, _VALUE_BYTES * len(array)
    if types.is_dictionary(kind):
        each = _text_bytes(array.dictionary)
        return own if each is None else own + _sum(pc.take(each, array.indices))
    if types.is_struct(kind):
        return own + own * int(kind.num_fields) + sum(map(_python_bytes, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return own + _python_bytes(array.flatten())
    if types.is_map(kind):
        first, *_, last = array.offsets.to_pylist() * 2
        return own + sum(_python_bytes(part.slice(first, last - first)) for part in (array.keys, array.items))
    if types.is_nested(kind) or types.is_run_end_encoded(kind):  # whatever else may show a value several times
        return own + len(array) * int(array.nbytes)
    each = _text_bytes(array)
    return own if each is None else own + _sum(each)


def _text_bytes(array: Any) -> Any:
    """Of each value; None where it is neither text nor bytes."""
    kind, types = array.type, pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):  # 16 bytes for a value, its length first
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)
        return pa.array(views[array.offset : array.offset + len(array), 0])
    is_text = (
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
    return pc.binary_length(array) if is_text else None


def _sum(values: Any) -> int:
    return int(pc.sum(pc.cast(values, pa.int64())).as_py() or 0)
