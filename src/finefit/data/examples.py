"""Examples: rows as tokens, in memory and on disk. On disk they are one safetensors file, written as rows stream by and
read by memory map, so that neither step needs all rows in memory.

A preference pair is two sequences, the second directly after the first; lengths and counts then have a column for each
side. Each distinct image is stored once in a table, and an example stores the indices of its images."""

import json
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from finefit.data.rows import ImageRef

Arrays = dict[str, NDArray[Any]]

_DTYPES: dict[str, Any] = {"I32": np.int32, "U8": np.uint8, "I64": np.int64}
_STREAMED: dict[str, Any] = {"tokens": np.int32, "supervised": np.uint8}
"""Arrays that are too large for memory, so they are first written to files of their own."""
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Example:
    """A row as the model sees it; it ends with the end token of an answer."""

    tokens: tuple[int, ...]
    """Token ids, including image tokens."""
    supervised: tuple[bool, ...]
    images: tuple[ImageRef, ...] = ()
    """Images in the order of their tokens."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the first of which is preferred. A pair counts as one row."""

    chosen: Example
    rejected: Example
    reference: tuple[float, float] | None = None
    """Summed log-probabilities of both sides under the starting weights, if they are computed beforehand."""


TrainRow = Example | Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """The result of rendering a row. The row can be used if it has examples."""

    examples: tuple[Example, ...] = ()
    """A row has several examples if the template rewrites earlier answers when another turn follows, or if plain text
    is long."""
    rejected: tuple[Example, ...] = ()
    cut_tokens: int = 0
    problem: str = ""
    remedy: str = ""
    is_too_long: bool = False
    num_tokens: int = 0
    """Length of the longest example before anything was cut."""


RowT = TypeVar("RowT", Example, Pair)


class _StoredRows(Sequence[RowT]):
    """The rows of an epoch. A row that is seen several times is listed that often in the table; its tokens are stored
    once."""

    def __init__(self, path: Path) -> None:
        self._arrays, self._folder = _map(path), path.parent
        self.lengths: NDArray[np.int32] = self._arrays["lengths"]
        self.supervised_counts: NDArray[np.int32] = self._arrays["supervised_counts"]
        """Counts exclude the first token of an example, which nothing predicts."""
        no_images = np.zeros(len(self.lengths), np.int64)
        self.num_values: NDArray[np.int64] = self._arrays.get("num_values", no_images)
        """Number of values in the pixels of each row's images."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> RowT: ...
    @overload
    def __getitem__(self, at: slice) -> list[RowT]: ...
    def __getitem__(self, at: int | slice) -> RowT | list[RowT]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        return self._row(int(self._arrays["starts"][at]), self.lengths[at], self._images(at))

    @abstractmethod
    def _row(self, start: int, length: NDArray[np.int32], images: tuple[ImageRef, ...]) -> RowT: ...

    def _example(self, start: int, length: int, images: tuple[ImageRef, ...]) -> Example:
        tokens, supervised = (self._arrays[name][start : start + length] for name in ("tokens", "supervised"))
        return Example(tuple(tokens.tolist()), tuple(supervised.astype(bool).tolist()), images)

    def _images(self, at: int) -> tuple[ImageRef, ...]:
        arrays = self._arrays
        if "image_numbers" not in arrays:
            return ()
        start, count = int(arrays["image_starts"][at]), int(arrays["image_counts"][at])
        borders = (arrays["image_borders"][n : n + 2].tolist() for n in arrays["image_numbers"][start : start + count])
        lines = (json.loads(arrays["images"][begin:end].tobytes()) for begin, end in borders)
        return tuple(ImageRef.from_json(line, self._folder) for line in lines)


class Examples(_StoredRows[Example]):
    def _row(self, start: int, length: NDArray[np.int32], images: tuple[ImageRef, ...]) -> Example:
        return self._example(start, int(length), images)


class ExamplePairs(_StoredRows[Pair]):
    """Lengths and counts have one column for the preferred side and one for the rejected side."""

    def _row(self, start: int, length: NDArray[np.int32], images: tuple[ImageRef, ...]) -> Pair:
        chosen, rejected = length.tolist()
        return Pair(self._example(start, chosen, images), self._example(start + chosen, rejected, images))

    def distinct(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Returns the indices of rows that cover every pair once, and for each row the position of its pair among
        them."""
        _, rows, places = np.unique(self._arrays["starts"], return_index=True, return_inverse=True)
        return rows, places


def open_examples(path: Path) -> Examples | ExamplePairs:
    return ExamplePairs(path) if _map(path)["lengths"].ndim == 2 else Examples(path)


class _ImageTable:
    """Collects the images of examples as they are added; each distinct image is stored once."""

    def __init__(self) -> None:
        self._numbers: dict[ImageRef, int] = {}
        self._of_examples: list[int] = []
        self._counts: list[int] = []
        self._values: list[int] = []

    def add(self, images: Sequence[ImageRef]) -> None:
        self._of_examples += [self._numbers.setdefault(ref, len(self._numbers)) for ref in images]
        self._counts.append(len(images))
        self._values.append(sum(ref.num_values for ref in images))

    def most_pixels(self, chosen: NDArray[np.int64]) -> tuple[int, tuple[ImageRef, ...]]:
        """Returns the pixel values and the images of the chosen example with the most pixels."""
        values = np.array(self._values, np.int64)[chosen]
        if not self._numbers or not len(values):
            return 0, ()
        at = int(chosen[int(values.argmax())])
        start, images = sum(self._counts[:at]), list(self._numbers)
        return int(values.max()), tuple(images[n] for n in self._of_examples[start : start + self._counts[at]])

    def arrays(self, table: NDArray[np.int64]) -> Arrays:
        """Returns no arrays if no example has an image."""
        if not self._numbers:
            return {}
        lines = [json.dumps(ref.to_json()).encode() for ref in self._numbers]
        counts = np.array(self._counts, np.int32)
        return {
            "image_numbers": np.array(self._of_examples, np.int32),
            "image_starts": _starts(counts)[table],
            "image_counts": counts[table],
            "num_values": np.array(self._values, np.int64)[table],
            "images": np.frombuffer(b"".join(lines), np.uint8),
            "image_borders": np.cumsum([0, *map(len, lines)], dtype=np.int64),
        }


class ExampleWriter:
    """Appends tokens as they arrive; `close` says which examples an epoch sees. Each example is `sides` consecutive
    sequences."""

    def __init__(self, path: Path, *, sides: int = 1) -> None:
        self._path, self._sides = path, sides
        self._parts = {name: path.with_name(f".{path.name}.{name}") for name in _STREAMED}
        self._files: dict[str, BinaryIO] = {name: part.open("wb") for name, part in self._parts.items()}
        self._lengths: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []
        self.images = _ImageTable()
        self.num_examples = 0

    def add(
        self,
        tokens: NDArray[np.int32],
        supervised: NDArray[np.uint8],
        lengths: NDArray[np.int32],
        images: Sequence[Sequence[ImageRef]] | None = None,
    ) -> int:
        """Adds sequences of these lengths, with the images of each example. Returns how many tokens are supervised."""
        for of_example in images if images is not None else [()] * (len(lengths) // self._sides):
            self.images.add(of_example)
        for name, values in (("tokens", tokens), ("supervised", supervised)):
            self._files[name].write(np.ascontiguousarray(values, _STREAMED[name]).data)
        counts = np.zeros(0, np.int32)
        if len(lengths):  # nothing predicts the first token of a sequence
            starts = _starts(lengths)
            counts = np.add.reduceat(supervised, starts, dtype=np.int32) - supervised[starts].astype(np.int32)
        self._lengths.append(lengths.astype(np.int32))
        self._counts.append(counts)
        self.num_examples += len(lengths) // self._sides
        return int(counts.sum())

    @property
    def lengths(self) -> NDArray[np.int32]:
        """With several sides, the array has a column for each."""
        return _by_side(self._lengths, self._sides)

    @property
    def supervised_counts(self) -> NDArray[np.int32]:
        return _by_side(self._counts, self._sides)

    def close(self, table: NDArray[np.int64]) -> None:
        """`table`: the indices of an epoch's examples; a repeated example is listed as often as it is seen."""
        for file in self._files.values():
            file.close()
        lengths, counts = self.lengths, self.supervised_counts
        starts = _starts(lengths.reshape(-1))[:: self._sides]
        arrays: Arrays = {"starts": starts[table], "lengths": lengths[table], "supervised_counts": counts[table]}
        arrays |= self.images.arrays(table)
        arrays |= {name: np.memmap(self._parts[name], kind, mode="r") for name, kind in _STREAMED.items()}
        _write(self._path, arrays)

    def __enter__(self) -> "ExampleWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        for part in self._parts.values():
            part.unlink(missing_ok=True)


def _by_side(parts: list[NDArray[np.int32]], sides: int) -> NDArray[np.int32]:
    values = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return values if sides == 1 else values.reshape(-1, sides)


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[:-1]


def _write(path: Path, arrays: Arrays) -> None:
    """Writes a safetensors file."""
    header: dict[str, Any] = {}
    end = 0
    wide_first = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # so every tensor is aligned
    for name in wide_first:
        begin, end = end, end + arrays[name].nbytes
        kind, shape = _CODES[arrays[name].dtype], list(arrays[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in wide_first:
            file.write(np.ascontiguousarray(arrays[name]).data)


def _map(path: Path) -> Arrays:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    whole, arrays = np.memmap(path, np.uint8, mode="r")[8 + size :], Arrays()
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            arrays[name] = whole[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays
