"""Rows -> arrays of tokens, chunk by chunk: in this process, or for much data in several."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from finefit.artifacts.launcher import end_with_parent
from finefit.data.budget import Budget
from finefit.data.cells import Fault
from finefit.data.conversations import IMAGE_MARK
from finefit.data.examples import Rendered
from finefit.data.fingerprint import Fingerprint, fingerprint
from finefit.data.looking import Looker, See, eye_of
from finefit.data.pictures import Picture
from finefit.data.read import Reading
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row
from finefit.errors import WorkerDied
from finefit.facts.machine import count_cores
from finefit.spec.rows import Data

Made = TypeVar("Made")

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 4 << 20
"""A row may be a whole book."""
_BYTES_PER_PROCESS = 32 << 20
"""A process of its own takes some seconds to start."""
_IMAGES_FOR_ALL = 1000
"""To be decoded; from so many on every core is worth its start."""
MEND_IMAGES = "mend or replace these images"
_NO_PAIR = "is no preference pair: it has no answer that is rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a chunk of rows became; arrays, for they travel between processes."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    """Of the sequences, one behind the other; the sides of a pair are two of them."""
    examples: list[int]
    """How many each row became; 0 where it cannot be used."""
    sides: int
    """Sequences of an example."""
    cut: list[int]
    problems: dict[int, tuple[str, str]]
    too_long: dict[int, str]
    """Rows that do not fit, and by how much."""
    special: dict[int, tuple[str, ...]]
    fingerprints: list[Fingerprint]
    pictures: list[tuple[Picture, ...]]
    """Of each row."""
    shown: list[list[int]]
    """Of each row's examples, how many of its pictures they show: the first ones."""


Looked = tuple[Picture, ...] | str
"""What the images of a row are, or what is wrong with them."""


class Work:
    """What a process does with rows: it looks at their images, and renders them."""

    def __init__(self, renderer: Renderer, budget: Budget, *, with_system: bool = False, pairs: bool = False) -> None:
        """`pairs`: rows are preference pairs, and both their sides are kept."""
        self._renderer, self._budget, self._with_system, self._pairs = renderer, budget, with_system, pairs
        self._looker = None if renderer.eye is None else Looker(renderer.eye)

    @property
    def sees(self) -> bool:
        return self._looker is not None

    def look(self, rows: Sequence[Row]) -> list[Looked]:
        return [self._looked(row) for row in rows]

    def _looked(self, row: Row) -> Looked:
        if self._looker is None:
            return ()  # a renderer without an eye refuses rows with images
        try:
            return self._looker(row)
        except Fault as fault:
            return str(fault)

    def render(self, rows: Sequence[Row]) -> Piece:
        looked = self.look(rows)
        seen = [
            row if isinstance(found, str) else replace(row, pictures=found)
            for row, found in zip(rows, looked, strict=True)
        ]
        made = iter(
            self._renderer.render(
                [row for row, found in zip(seen, looked, strict=True) if not isinstance(found, str)], self._budget
            )
        )
        rendered = [
            Rendered(problem=found, remedy=MEND_IMAGES)
            if isinstance(found, str)
            else _judged(next(made), pairs=self._pairs)
            for found in looked
        ]
        examples = [example for found in rendered for example in (*found.examples, *found.rejected)]
        return Piece(
            tokens=_flat([e.tokens for e in examples], np.int32),
            supervised=_flat([e.supervised for e in examples], np.uint8),
            lengths=np.array([len(e.tokens) for e in examples], np.int32),
            examples=[len(found.examples) for found in rendered],
            sides=2 if self._pairs else 1,
            cut=[found.cut_tokens for found in rendered],
            problems={
                at: (found.problem, found.remedy)
                for at, found in enumerate(rendered)
                if found.problem and not found.is_too_long
            },
            too_long={at: found.problem for at, found in enumerate(rendered) if found.is_too_long},
            special={at: found for at, row in enumerate(rows) if (found := _special(self._renderer, row))},
            fingerprints=[fingerprint(row, with_system=self._with_system, turns=self._budget.turns) for row in seen],
            pictures=[row.pictures for row in seen],
            shown=[[len(example.images) for example in found.examples] for found in rendered],
        )


def _judged(found: Rendered, *, pairs: bool) -> Rendered:
    """As it is, if it is of the kind that is trained on."""
    if found.problem:
        return found
    if bool(found.rejected) is not pairs:
        return Rendered(
            problem=_NO_PAIR if pairs else "is a preference pair among single answers",
            remedy="put pairs and single answers into two files",
        )
    if not pairs:
        return found
    (chosen,), (rejected,) = found.examples, found.rejected
    if chosen.tokens == rejected.tokens:
        return Rendered(
            problem="has two sides that are the same tokens, so there is nothing to prefer",
            remedy="remove the pair, or mend one side",
        )
    if not any(chosen.supervised[1:]) or not any(rejected.supervised[1:]):
        return Rendered(
            problem="has a side without a token to learn from",
            remedy="give the pair a prompt, and both sides an answer",
        )
    return found


def _flat(parts: Sequence[Sequence[int]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, kind) for part in parts]) if parts else np.zeros(0, kind)


def _special(renderer: Renderer, row: Row) -> tuple[str, ...]:
    texts = [row.text, *(m.content for m in (*row.messages, *row.rejected))]
    texts = [text.replace(IMAGE_MARK, "") for text in texts] if row.images else texts
    return tuple(dict.fromkeys(token for text in texts for token in renderer.special_tokens_in(text)))


def chunked(rows: Iterable[Row], *, max_rows: int, max_characters: int) -> Iterator[list[Row]]:
    """A chunk ends with the row that fills it."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += len(row.text) + sum(len(message.content) for message in (*row.messages, *row.rejected))
        characters += sum(len(image.data) for image in row.images)
        if len(chunk) == max_rows or characters >= max_characters:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def num_processes(readings: Sequence[Reading], asked: Sequence[Reading] = (), *, sees: bool = False) -> int:
    """`readings` are rendered, of `asked` only the images are looked at."""
    if sees and _shows_much((*readings, *asked)):
        return count_cores()
    size = sum(file.path.stat().st_size for reading in readings for file in reading.files)
    return min(count_cores(), 1 + size // _BYTES_PER_PROCESS)


def _shows_much(readings: Iterable[Reading]) -> bool:
    """Images lie in files of their own, so the size of the data says little."""
    rows = islice((row for reading in readings for row in reading.rows()), _IMAGES_FOR_ALL)
    return sum(len(row.images) for row in rows if isinstance(row, Row)) >= _IMAGES_FOR_ALL


_worker: Work | None = None


def _start_worker(parent: int, tokenizer: Path, data: Data, see: See, with_system: bool, pairs: bool) -> None:
    end_with_parent(parent)  # it would wait for more rows for ever: each of them holds both ends of the queue
    global _worker  # a process of the pool has one renderer
    renderer = open_renderer(tokenizer, data.template, template_options=data.template_options, eye=eye_of(see))
    _worker = Work(renderer, _budget(data), with_system=with_system, pairs=pairs)


def _render(rows: Sequence[Row]) -> Piece:
    assert _worker is not None
    return _worker.render(rows)


def _look(rows: Sequence[Row]) -> list[Looked]:
    assert _worker is not None
    return _worker.look(rows)


def _budget(data: Data) -> Budget:
    return Budget(max_tokens=data.max_tokens, too_long=data.too_long, turns=data.turns)


class Pieces:
    """Rows -> pieces, in their order: in this process, or for much data in several, of which each gets a little ahead and no more."""

    def __init__(
        self,
        renderer: Renderer,
        data: Data,
        tokenizer: Path,
        *,
        processes: int,
        see: See,
        with_system: bool,
        pairs: bool = False,
    ) -> None:
        self.with_system = with_system
        self._here = Work(renderer, _budget(data), with_system=with_system, pairs=pairs)
        self._pool: ProcessPoolExecutor | None = None
        self._ahead = 3 * processes
        self.largest_token = 0
        if processes > 1:
            told = (os.getpid(), tokenizer, data, see, with_system, pairs)
            self._pool = ProcessPoolExecutor(
                processes, mp_context=get_context("spawn"), initializer=_start_worker, initargs=told
            )

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], Piece]]:
        for chunk, piece in self._made(iter(rows), self._here.render, _render):
            self.largest_token = max(self.largest_token, int(piece.tokens.max(initial=0)))
            yield chunk, piece

    def looked(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Looked]]:
        if not self._here.sees:
            yield from ((row, ()) for row in rows)
            return
        for chunk, found in self._made(iter(rows), self._here.look, _look):
            yield from zip(chunk, found, strict=True)

    def _made(
        self, rows: Iterator[Row], here: Callable[[Sequence[Row]], Made], there: Callable[[Sequence[Row]], Made]
    ) -> Iterator[tuple[list[Row], Made]]:
        chunks = chunked(rows, max_rows=_CHUNK_ROWS, max_characters=_CHUNK_CHARACTERS)
        if self._pool is None:
            yield from ((chunk, here(chunk)) for chunk in chunks)
            return
        waiting: deque[tuple[list[Row], Future[Made]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, self._pool.submit(there, chunk)))
                if len(waiting) > self._ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            remedy = "look for a lack of host memory (dmesg), close other programs, and give the same command again"
            free = psutil.virtual_memory().available / 2**30
            raise WorkerDied(
                f"a process that prepares rows was killed; {free:.1f} GiB of host memory are free now", remedy
            ) from None

    def __enter__(self) -> "Pieces":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
