"""Prepared examples on disk: one safetensors file, written as rows stream by and read by memory map, so that neither needs them all in memory."""

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from finefit.data.render import Example

_DTYPES: dict[str, Any] = {"I32": np.int32, "U8": np.uint8, "I64": np.int64}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}


class Examples(Sequence[Example]):
    """The examples of an epoch. One that is seen several times stands in the table as often, its tokens only once."""

    def __init__(self, path: Path) -> None:
        arrays = _map(path)
        self._tokens, self._supervised = arrays["tokens"], arrays["supervised"]
        self._starts = arrays["starts"]
        self.lengths: NDArray[np.int32] = arrays["lengths"]
        self.supervised_counts: NDArray[np.int32] = arrays["supervised_counts"]
        """Of tokens that something stands before: the first of an example is never predicted."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        start = int(self._starts[at])
        end = start + int(self.lengths[at])
        return Example(tuple(self._tokens[start:end].tolist()), tuple(self._supervised[start:end].astype(bool).tolist()))


class ExampleWriter:
    """Appends tokens as they come; `close` says which examples an epoch sees."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts = {name: path.with_name(f".{path.name}.{name}") for name in ("tokens", "supervised")}
        self._files: dict[str, BinaryIO] = {name: part.open("wb") for name, part in self._parts.items()}
        self._lengths: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []
        self.num_examples = 0

    def add(self, tokens: NDArray[np.int32], supervised: NDArray[np.uint8], lengths: NDArray[np.int32]) -> int:
        """Examples of these lengths, one behind the other. Returns how many tokens of them are supervised."""
        self._files["tokens"].write(np.ascontiguousarray(tokens, np.int32).data)
        self._files["supervised"].write(np.ascontiguousarray(supervised, np.uint8).data)
        counts = _supervised_counts(supervised, lengths)
        self._lengths.append(lengths.astype(np.int32))
        self._counts.append(counts)
        self.num_examples += len(lengths)
        return int(counts.sum())

    @property
    def lengths(self) -> NDArray[np.int32]:
        return _joined(self._lengths)

    @property
    def supervised_counts(self) -> NDArray[np.int32]:
        return _joined(self._counts)

    def close(self, table: NDArray[np.int64]) -> None:
        """`table`: the examples of an epoch by number, repeated ones as often as they are seen."""
        for file in self._files.values():
            file.close()
        lengths, counts = self.lengths, self.supervised_counts
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[:-1]
        arrays = {"starts": starts[table], "lengths": lengths[table], "supervised_counts": counts[table]}
        _write(self._path, arrays, {"tokens": (self._parts["tokens"], np.int32), "supervised": (self._parts["supervised"], np.uint8)})
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._parts.values():
            part.unlink(missing_ok=True)

    def __enter__(self) -> "ExampleWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._remove_parts()


def _supervised_counts(supervised: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of each example, without its first token."""
    if not len(lengths):
        return np.zeros(0, np.int32)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[:-1]
    counts: NDArray[np.int32] = np.add.reduceat(supervised, starts, dtype=np.int32) - supervised[starts].astype(np.int32)
    return counts


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _write(path: Path, arrays: dict[str, NDArray[Any]], files: dict[str, tuple[Path, Any]]) -> None:
    """A safetensors file whose large tensors come from files."""
    header: dict[str, Any] = {}
    end = 0
    sizes = {name: array.nbytes for name, array in arrays.items()} | {name: part.stat().st_size for name, (part, _) in files.items()}
    kinds = {name: array.dtype for name, array in arrays.items()} | {name: np.dtype(kind) for name, (_, kind) in files.items()}
    for name in sorted(sizes, key=lambda name: -kinds[name].itemsize):  # wide ones first, so that every tensor is aligned
        begin, end = end, end + sizes[name]
        header[name] = {"dtype": _CODES[kinds[name]], "shape": [sizes[name] // kinds[name].itemsize], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in header:
            if name in arrays:
                file.write(np.ascontiguousarray(arrays[name]).data)
            else:
                with files[name][0].open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 20)


def _map(path: Path) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    whole = np.memmap(path, np.uint8, mode="r")
    begin = 8 + size
    return {
        name: whole[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]].view(_DTYPES[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__"
    }
