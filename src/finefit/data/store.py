"""Prepared examples on disk: one safetensors file, written as rows stream by and read by memory map, so that neither needs them all in memory.

A preference pair is two sequences, the second directly behind the first; lengths and counts then have a column for each side.
Of images there is a table, in which each stands once; an example has the numbers of those that it shows.
"""

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from finefit.data.examples import Example
from finefit.data.pairs import Pair
from finefit.data.pictures import Picture, as_json, from_json

_DTYPES: dict[str, Any] = {"I32": np.int32, "U8": np.uint8, "I64": np.int64}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}


class Examples(Sequence[Example]):
    """The examples of an epoch. One that is seen several times stands in the table as often, its tokens only once."""

    def __init__(self, path: Path) -> None:
        self._arrays = _map(path)
        self.lengths: NDArray[np.int32] = self._arrays["lengths"]
        self.supervised_counts: NDArray[np.int32] = self._arrays["supervised_counts"]
        """Of tokens that something stands before: the first of an example is never predicted."""
        self._pictures = _Pictures(self._arrays, path.parent)
        self.num_values: NDArray[np.int64] = self._pictures.num_values
        """Of what the images of each show."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        return _example(self._arrays, int(self._arrays["starts"][at]), int(self.lengths[at]), self._pictures.of(at))


class ExamplePairs(Sequence[Pair]):
    """The preference pairs of an epoch, in the same way."""

    def __init__(self, path: Path) -> None:
        self._arrays = _map(path)
        self.lengths: NDArray[np.int32] = self._arrays["lengths"]
        """Of the preferred side, and of the other."""
        self.supervised_counts: NDArray[np.int32] = self._arrays["supervised_counts"]
        self._pictures = _Pictures(self._arrays, path.parent)
        self.num_values: NDArray[np.int64] = self._pictures.num_values

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> list[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | list[Pair]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        start, (chosen, rejected) = int(self._arrays["starts"][at]), self.lengths[at].tolist()
        pictures = self._pictures.of(at)
        return Pair(
            _example(self._arrays, start, chosen, pictures), _example(self._arrays, start + chosen, rejected, pictures)
        )

    def distinct(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows that hold every pair once, and for each row the place of its pair among those."""
        _, rows, places = np.unique(self._arrays["starts"], return_index=True, return_inverse=True)
        return rows, places


def open_examples(path: Path) -> Examples | ExamplePairs:
    return ExamplePairs(path) if _map(path)["lengths"].ndim == 2 else Examples(path)


class _Pictures:
    """Of the examples of an epoch; read from the table when asked for."""

    def __init__(self, arrays: dict[str, NDArray[Any]], folder: Path) -> None:
        self._arrays, self._folder = arrays, folder
        self.num_values: NDArray[np.int64] = (
            arrays["num_values"] if "num_values" in arrays else np.zeros(len(arrays["lengths"]), np.int64)
        )

    def of(self, at: int) -> tuple[Picture, ...]:
        if "shown" not in self._arrays:
            return ()
        start, count = int(self._arrays["shown_starts"][at]), int(self._arrays["shown_counts"][at])
        return tuple(self._picture(number) for number in self._arrays["shown"][start : start + count].tolist())

    def _picture(self, number: int) -> Picture:
        start, end = self._arrays["picture_borders"][number : number + 2].tolist()
        return from_json(json.loads(self._arrays["pictures"][start:end].tobytes()), self._folder)


def _example(arrays: dict[str, NDArray[Any]], start: int, length: int, pictures: tuple[Picture, ...]) -> Example:
    tokens, supervised = (arrays[name][start : start + length] for name in ("tokens", "supervised"))
    return Example(tuple(tokens.tolist()), tuple(supervised.astype(bool).tolist()), pictures)


class _PictureTable:
    """The pictures of examples as they come, each distinct one once."""

    def __init__(self) -> None:
        self._numbers: dict[Picture, int] = {}
        self._shown: list[int] = []
        self._counts: list[int] = []
        self._values: list[int] = []

    def add(self, pictures: Sequence[Picture]) -> None:
        self._shown += [self._numbers.setdefault(picture, len(self._numbers)) for picture in pictures]
        self._counts.append(len(pictures))
        self._values.append(sum(picture.num_values for picture in pictures))

    def most(self, chosen: NDArray[np.int64]) -> tuple[int, tuple[Picture, ...]]:
        """What the example shows that shows most of these, and how many values that is."""
        values = np.array(self._values, np.int64)[chosen]
        if not self._numbers or not len(values):
            return 0, ()
        at = int(chosen[int(values.argmax())])
        start, there = sum(self._counts[:at]), list(self._numbers)
        return int(values.max()), tuple(there[number] for number in self._shown[start : start + self._counts[at]])

    def arrays(self, table: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Nothing where no example shows anything."""
        if not self._numbers:
            return {}
        lines = [json.dumps(as_json(picture)).encode() for picture in self._numbers]
        counts = np.array(self._counts, np.int32)
        return {
            "shown": np.array(self._shown, np.int32),
            "shown_starts": _starts(counts)[table],
            "shown_counts": counts[table],
            "num_values": np.array(self._values, np.int64)[table],
            "pictures": np.frombuffer(b"".join(lines), np.uint8),
            "picture_borders": np.cumsum([0, *map(len, lines)], dtype=np.int64),
        }


class ExampleWriter:
    """Appends tokens as they come; `close` says which examples an epoch sees. An example is `sides` sequences, one behind the other."""

    def __init__(self, path: Path, *, sides: int = 1) -> None:
        self._path, self._sides = path, sides
        self._parts = {name: path.with_name(f".{path.name}.{name}") for name in ("tokens", "supervised")}
        self._files: dict[str, BinaryIO] = {name: part.open("wb") for name, part in self._parts.items()}
        self._lengths: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []
        self._pictures = _PictureTable()
        self.num_examples = 0

    def add(
        self,
        tokens: NDArray[np.int32],
        supervised: NDArray[np.uint8],
        lengths: NDArray[np.int32],
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> int:
        """Sequences of these lengths, one behind the other. Returns how many tokens of them are supervised. `pictures`: what each example shows;
        None: nothing."""
        for shown in pictures if pictures is not None else [()] * (len(lengths) // self._sides):
            self._pictures.add(shown)
        self._files["tokens"].write(np.ascontiguousarray(tokens, np.int32).data)
        self._files["supervised"].write(np.ascontiguousarray(supervised, np.uint8).data)
        counts = _supervised_counts(supervised, lengths)
        self._lengths.append(lengths.astype(np.int32))
        self._counts.append(counts)
        self.num_examples += len(lengths) // self._sides
        return int(counts.sum())

    @property
    def lengths(self) -> NDArray[np.int32]:
        """With a column for each side, where there are several."""
        return self._by_side(_joined(self._lengths))

    @property
    def supervised_counts(self) -> NDArray[np.int32]:
        return self._by_side(_joined(self._counts))

    def most_shown(self, table: NDArray[np.int64]) -> tuple[int, tuple[Picture, ...]]:
        """What the example of the table shows that shows most, and how many values that is."""
        return self._pictures.most(table)

    def _by_side(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        return values if self._sides == 1 else values.reshape(-1, self._sides)

    def close(self, table: NDArray[np.int64]) -> None:
        """`table`: the examples of an epoch by number, repeated ones as often as they are seen."""
        for file in self._files.values():
            file.close()
        lengths, counts = self.lengths, self.supervised_counts
        starts = _starts(lengths.reshape(-1))[:: self._sides]
        arrays: dict[str, NDArray[Any]] = {
            "starts": starts[table],
            "lengths": lengths[table],
            "supervised_counts": counts[table],
        }
        arrays |= self._pictures.arrays(table)
        _write(
            self._path,
            arrays,
            {"tokens": (self._parts["tokens"], np.int32), "supervised": (self._parts["supervised"], np.uint8)},
        )
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._parts.values():
            part.unlink(missing_ok=True)

    def __enter__(self) -> "ExampleWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._remove_parts()


def _supervised_counts(supervised: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of each example, without its first token."""
    if not len(lengths):
        return np.zeros(0, np.int32)
    starts = _starts(lengths)
    counts: NDArray[np.int32] = np.add.reduceat(supervised, starts, dtype=np.int32) - supervised[starts].astype(
        np.int32
    )
    return counts


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[:-1]


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _write(path: Path, arrays: dict[str, NDArray[Any]], files: dict[str, tuple[Path, Any]]) -> None:
    """A safetensors file whose large tensors come from files."""
    header: dict[str, Any] = {}
    end = 0
    sizes = {name: array.nbytes for name, array in arrays.items()} | {
        name: part.stat().st_size for name, (part, _) in files.items()
    }
    kinds = {name: array.dtype for name, array in arrays.items()} | {
        name: np.dtype(kind) for name, (_, kind) in files.items()
    }
    for name in sorted(
        sizes, key=lambda name: -kinds[name].itemsize
    ):  # wide ones first, so that every tensor is aligned
        begin, end = end, end + sizes[name]
        shape = list(arrays[name].shape) if name in arrays else [sizes[name] // kinds[name].itemsize]
        header[name] = {"dtype": _CODES[kinds[name]], "shape": shape, "data_offsets": [begin, end]}
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
        name: whole[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        .view(_DTYPES[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
