"""Rows -> arrays of tokens, chunk by chunk: in this process, or for much data in several."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from finefit.data.budget import Budget
from finefit.data.fingerprint import Fingerprint, fingerprint
from finefit.data.read import Reading
from finefit.data.render import Rendered, Renderer, open_renderer
from finefit.data.rows import Row
from finefit.errors import WorkerDied
from finefit.facts.machine import count_cores
from finefit.spec.schema import Data

_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 4 << 20
"""A row may be a whole book."""
_BYTES_PER_PROCESS = 32 << 20
"""A process of its own takes some seconds to start."""
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


def make_piece(renderer: Renderer, budget: Budget, rows: Sequence[Row], *, with_system: bool = False, pairs: bool = False) -> Piece:
    """`pairs`: rows are preference pairs, and both their sides are kept."""
    rendered = [_judged(found, pairs=pairs) for found in renderer.render(rows, budget)]
    examples = [example for found in rendered for example in (*found.examples, *found.rejected)]
    lengths = np.array([len(e.tokens) for e in examples], np.int32)
    return Piece(
        tokens=_flat([e.tokens for e in examples], np.int32),
        supervised=_flat([e.supervised for e in examples], np.uint8),
        lengths=lengths,
        examples=[len(found.examples) for found in rendered],
        sides=2 if pairs else 1,
        cut=[found.cut_tokens for found in rendered],
        problems={at: (found.problem, found.remedy) for at, found in enumerate(rendered) if found.problem and not found.is_too_long},
        too_long={at: found.problem for at, found in enumerate(rendered) if found.is_too_long},
        special={at: found for at, row in enumerate(rows) if (found := _special(renderer, row))},
        fingerprints=[fingerprint(row, with_system=with_system, turns=budget.turns) for row in rows],
    )


def _judged(found: Rendered, *, pairs: bool) -> Rendered:
    """As it is, if it is of the kind that is trained on."""
    if found.problem:
        return found
    if bool(found.rejected) is not pairs:
        return Rendered(
            problem=_NO_PAIR if pairs else "is a preference pair among single answers", remedy="put pairs and single answers into two files"
        )
    if not pairs:
        return found
    (chosen,), (rejected,) = found.examples, found.rejected
    if chosen.tokens == rejected.tokens:
        return Rendered(problem="has two sides that are the same tokens, so there is nothing to prefer", remedy="remove the pair, or mend one side")
    if not any(chosen.supervised[1:]) or not any(rejected.supervised[1:]):
        return Rendered(problem="has a side without a token to learn from", remedy="give the pair a prompt, and both sides an answer")
    return found


def _flat(parts: Sequence[Sequence[int]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, kind) for part in parts]) if parts else np.zeros(0, kind)


def _special(renderer: Renderer, row: Row) -> tuple[str, ...]:
    texts = [row.text, *(m.content for m in (*row.messages, *row.rejected))]
    return tuple(dict.fromkeys(token for text in texts for token in renderer.special_tokens_in(text)))


def chunked(rows: Iterable[Row], *, max_rows: int, max_characters: int) -> Iterator[list[Row]]:
    """A chunk ends with the row that fills it."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += len(row.text) + sum(len(message.content) for message in (*row.messages, *row.rejected))
        if len(chunk) == max_rows or characters >= max_characters:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def num_processes(readings: Iterable[Reading]) -> int:
    size = sum(file.path.stat().st_size for reading in readings for file in reading.files)
    return min(count_cores(), 1 + size // _BYTES_PER_PROCESS)


_worker: Callable[[Sequence[Row]], Piece] | None = None


def _start_worker(tokenizer: Path, data: Data, with_system: bool, pairs: bool) -> None:
    global _worker  # a process of the pool has one renderer
    renderer = open_renderer(tokenizer, data.template, template_options=data.template_options)
    _worker = partial(make_piece, renderer, _budget(data), with_system=with_system, pairs=pairs)


def _work(rows: Sequence[Row]) -> Piece:
    assert _worker is not None
    return _worker(rows)


def _budget(data: Data) -> Budget:
    return Budget(max_tokens=data.max_tokens, too_long=data.too_long, turns=data.turns)


class Pieces:
    """Rows -> pieces, in their order: in this process, or for much data in several, of which each gets a little ahead and no more."""

    def __init__(self, renderer: Renderer, data: Data, tokenizer: Path, *, processes: int, with_system: bool, pairs: bool = False) -> None:
        self.with_system = with_system
        self._here = partial(make_piece, renderer, _budget(data), with_system=with_system, pairs=pairs)
        self._pool: ProcessPoolExecutor | None = None
        self._ahead = 3 * processes
        self.largest_token = 0
        if processes > 1:
            self._pool = ProcessPoolExecutor(
                processes, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(tokenizer, data, with_system, pairs)
            )

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], Piece]]:
        for chunk, piece in self._made(iter(rows)):
            self.largest_token = max(self.largest_token, int(piece.tokens.max(initial=0)))
            yield chunk, piece

    def _made(self, rows: Iterator[Row]) -> Iterator[tuple[list[Row], Piece]]:
        chunks = chunked(rows, max_rows=_CHUNK_ROWS, max_characters=_CHUNK_CHARACTERS)
        if self._pool is None:
            yield from ((chunk, self._here(chunk)) for chunk in chunks)
            return
        waiting: deque[tuple[list[Row], Future[Piece]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, self._pool.submit(_work, chunk)))
                if len(waiting) > self._ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            remedy = "look for a lack of host memory (dmesg), close other programs, and give the same command again"
            free = psutil.virtual_memory().available / 2**30
            raise WorkerDied(f"a process that prepares rows was killed; {free:.1f} GiB of host memory are free now", remedy) from None

    def __enter__(self) -> "Pieces":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
