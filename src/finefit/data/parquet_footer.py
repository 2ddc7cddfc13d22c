"""What a Parquet file says of its row groups. It is read here, since pyarrow ends the process on some damaged footers
when it is asked about a column: a footer is a value of Thrift's compact protocol."""

import struct
from dataclasses import dataclass
from typing import IO, Any, Final

_MAX_BYTES: Final = 64 << 20
_MAX_DEPTH: Final = 32
_WIDTHS: Final = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8, 6: 4}
"""Bytes of a value by the number of its type: a truth value, integers and floats; of a text, those of its place."""
_FIXED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    num_rows: int
    num_bytes: int
    """That its columns unpack to, as long as repeated texts are kept once. A run of equal numbers takes no bytes of its
    page, so that numbers count as they are in memory."""


def row_groups(file: IO[bytes]) -> list[RowGroup]:
    """Whatever is wrong is a ValueError."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    length, mark = struct.unpack("<I4s", file.read(8).rjust(8, b"\0"))
    if mark != b"PAR1" or length > min(_MAX_BYTES, size):
        raise ValueError(f"its footer would have {length:,} bytes")
    file.seek(max(0, size - 8 - length))
    try:
        footer = _Thrift(file.read(length)).struct(0)
        leaves = [element for element in footer[2] if 1 in element]  # the schema: its inner nodes have no type
        return [_row_group(group, leaves) for group in footer[4]]
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"its footer is damaged ({type(error).__name__})") from None


def _row_group(group: Any, leaves: Any) -> RowGroup:
    chunks = [chunk[3] for chunk in group[1]]
    if len(chunks) != len(leaves):
        raise ValueError(f"a row group has {len(chunks)} columns, and the schema {len(leaves)}")
    widths = [leaf[2] if leaf[1] == _FIXED else _WIDTHS[leaf[1]] for leaf in leaves]
    sizes = [max(chunk[6], chunk[5] * width) for chunk, width in zip(chunks, widths, strict=True)]
    return RowGroup(num_rows=max(0, group[3]), num_bytes=sum(max(0, size) for size in sizes))


class _Thrift:
    """Decodes structs to the values of their fields by number."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            if (shift := shift + 7) > 63:
                raise ValueError("its footer has a number without an end")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise ValueError("its footer is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) & 0x0F:
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 0x0F, depth + 1)
        return fields

    def _value(self, kind: int, depth: int, *, in_list: bool = False) -> Any:
        match kind:
            case 1 | 2:
                return self._byte() == 1 if in_list else kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._integer()
            case 7:
                self._at += 8
                return None
            case 8:
                size = self._varint()
                self._at += size
                return None
            case 9 | 10:
                head = self._byte()
                size = head >> 4 if head >> 4 < 15 else self._varint()
                return [self._value(head & 0x0F, depth + 1, in_list=True) for _ in range(self._bounded(size))]
            case 12:
                return self.struct(depth + 1)
            case _:
                raise ValueError("its footer has a field of an unknown type")

    def _bounded(self, size: int) -> int:
        if size > len(self._data) - self._at:
            raise ValueError("its footer has a list without an end")
        return size
