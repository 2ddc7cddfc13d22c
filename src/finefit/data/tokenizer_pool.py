"""Tokenises rows chunk by chunk, in this process or, if there is much data, in several."""

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

from finefit.artifacts.processes import end_with_parent
from finefit.data.columns import RecordError
from finefit.data.encode import Budget
from finefit.data.examples import RenderedRow
from finefit.data.fingerprint import Fingerprint, fingerprint
from finefit.data.image_check import ImageChecker, ProcessorFactory, image_processor_of
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import IMAGE_PLACEHOLDER, ImageRef, Row
from finefit.data.sources import SourceReader
from finefit.errors import WorkerDied
from finefit.facts.machine import count_cores
from finefit.spec.data import Data

Made = TypeVar("Made")
CheckedImages = tuple[ImageRef, ...] | str
"""The images of a row, or a description of what is wrong with them."""

FIX_IMAGES = "fix or replace these images"
_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 4 << 20
"""Limits a chunk by size, because a row may be a whole book."""
_BYTES_PER_PROCESS = 32 << 20
"""Data per extra process; starting one takes seconds."""
_IMAGES_FOR_ALL = 1000
"""With at least this many images to decode, it pays to start a process on every core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChunk:
    """The rendered rows of a chunk, as arrays, because they are sent between processes."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    """Lengths of the sequences, in order; the two sides of a pair are two sequences."""
    examples: list[int]
    """The number of examples of each row; 0 if it cannot be used."""
    sides: int
    """Sequences per example."""
    cut: list[int]
    problems: dict[int, tuple[str, str]]
    too_long: dict[int, str]
    """Rows that do not fit, with the excess."""
    special: dict[int, tuple[str, ...]]
    fingerprints: list[Fingerprint]
    image_refs: list[tuple[ImageRef, ...]]
    num_images: list[list[int]]
    """For each example of each row: how many of the row's images it has, counted from the first."""


class ChunkRenderer:
    def __init__(self, renderer: Renderer, budget: Budget, *, with_system: bool = False, pairs: bool = False) -> None:
        """`pairs`: rows are preference pairs, and both sides are kept."""
        self._renderer, self._budget, self._with_system, self._pairs = renderer, budget, with_system, pairs
        self.has_vision = renderer.image_processor is not None
        self._checker = None if renderer.image_processor is None else ImageChecker(renderer.image_processor)

    def check_images(self, rows: Sequence[Row]) -> list[CheckedImages]:
        found: list[CheckedImages] = []
        for row in rows:
            try:  # a renderer without an image processor rejects rows with images
                found.append(() if self._checker is None else self._checker(row))
            except RecordError as error:
                found.append(str(error))
        return found

    def render(self, rows: Sequence[Row]) -> RenderedChunk:
        checked = self.check_images(rows)
        faults = {at: RenderedRow(problem=f, remedy=FIX_IMAGES) for at, f in enumerate(checked) if isinstance(f, str)}
        both = zip(rows, checked, strict=True)
        seen = [row if isinstance(found, str) else replace(row, image_refs=found) for row, found in both]
        made = iter(self._renderer.render([row for at, row in enumerate(seen) if at not in faults], self._budget))
        rendered = [faults.get(at) or _of_kind(next(made), pairs=self._pairs) for at in range(len(rows))]
        examples = [example for found in rendered for example in (*found.examples, *found.rejected)]
        numbered = list(enumerate(rendered))
        return RenderedChunk(
            tokens=_flat([e.tokens for e in examples], np.int32),
            supervised=_flat([e.supervised for e in examples], np.uint8),
            lengths=np.array([len(e.tokens) for e in examples], np.int32),
            examples=[len(found.examples) for found in rendered],
            sides=2 if self._pairs else 1,
            cut=[found.cut_tokens for found in rendered],
            problems={at: (r.problem, r.remedy) for at, r in numbered if r.problem and not r.is_too_long},
            too_long={at: found.problem for at, found in numbered if found.is_too_long},
            special={at: found for at, row in enumerate(rows) if (found := self._special_tokens(row))},
            fingerprints=[fingerprint(row, with_system=self._with_system, turns=self._budget.turns) for row in seen],
            image_refs=[row.image_refs for row in seen],
            num_images=[[len(example.images) for example in found.examples] for found in rendered],
        )

    def _special_tokens(self, row: Row) -> tuple[str, ...]:
        texts = [row.text, *(m.content for m in (*row.messages, *row.rejected))]
        texts = [text.replace(IMAGE_PLACEHOLDER, "") for text in texts] if row.images else texts
        return tuple(dict.fromkeys(token for text in texts for token in self._renderer.special_tokens_in(text)))


def _of_kind(found: RenderedRow, *, pairs: bool) -> RenderedRow:
    """Returns the row, or the reason why it is not of the kind that is trained on."""
    if found.problem:
        return found
    if bool(found.rejected) is not pairs:
        problem = "is not a preference pair: it has no rejected answer"
        problem = problem if pairs else "is a preference pair among single answers"
        return RenderedRow(problem=problem, remedy="put pairs and single answers into two files")
    if not pairs:
        return found
    (chosen,), (rejected,) = found.examples, found.rejected
    if chosen.tokens == rejected.tokens:
        problem = "has two sides with the same tokens, so there is nothing to prefer"
        return RenderedRow(problem=problem, remedy="remove the pair, or fix one side")
    if not any(chosen.supervised[1:]) or not any(rejected.supervised[1:]):
        remedy = "give the pair a prompt, and both sides an answer"
        return RenderedRow(problem="has a side without supervised tokens", remedy=remedy)
    return found


def _flat(parts: Sequence[Sequence[int]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, kind) for part in parts]) if parts else np.zeros(0, kind)


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


def num_processes(
    readers: Sequence[SourceReader], checked: Sequence[SourceReader] = (), *, has_vision: bool = False
) -> int:
    """The rows of `readers` are rendered; for the rows of `checked` only the images are checked."""
    if has_vision:  # images are in separate files, so the size of the data says little
        rows = islice((row for reader in (*readers, *checked) for row in reader.rows()), _IMAGES_FOR_ALL)
        if sum(len(row.images) for row in rows if isinstance(row, Row)) >= _IMAGES_FOR_ALL:
            return count_cores()
    size = sum(file.path.stat().st_size for reader in readers for file in reader.files)
    return min(count_cores(), 1 + size // _BYTES_PER_PROCESS)


_worker: ChunkRenderer | None = None


def _start_worker(
    parent: int, tokenizer: Path, data: Data, processor_factory: ProcessorFactory, with_system: bool, pairs: bool
) -> None:
    end_with_parent(parent)  # otherwise it would wait forever, because each worker holds both ends of the queue
    global _worker  # each pool process has one renderer
    processor, options = image_processor_of(processor_factory), data.template_options
    renderer = open_renderer(tokenizer, data.template, template_options=options, image_processor=processor)
    _worker = ChunkRenderer(renderer, _budget(data), with_system=with_system, pairs=pairs)


def _in_worker(work: Callable[[ChunkRenderer, Sequence[Row]], Made], rows: Sequence[Row]) -> Made:
    assert _worker is not None
    return work(_worker, rows)


def _budget(data: Data) -> Budget:
    return Budget(max_tokens=data.max_tokens, too_long=data.too_long, turns=data.turns)


class TokenizerPool:
    """Renders rows to chunks, in order. With several processes each works only a little ahead."""

    def __init__(
        self,
        renderer: Renderer,
        data: Data,
        tokenizer: Path,
        processor_factory: ProcessorFactory,
        *,
        processes: int,
        with_system: bool,
        pairs: bool = False,
    ) -> None:
        self._here = ChunkRenderer(renderer, _budget(data), with_system=with_system, pairs=pairs)
        self._pool: ProcessPoolExecutor | None = None
        self.with_system, self._ahead, self.largest_token = with_system, 3 * processes, 0
        if processes > 1:
            arguments = (os.getpid(), tokenizer, data, processor_factory, with_system, pairs)
            self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, arguments)

    def render(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], RenderedChunk]]:
        for rows_, chunk in self._in_chunks(rows, ChunkRenderer.render):
            self.largest_token = max(self.largest_token, int(chunk.tokens.max(initial=0)))
            yield rows_, chunk

    def check_images(self, rows: Iterable[Row]) -> Iterator[tuple[Row, CheckedImages]]:
        if not self._here.has_vision:
            yield from ((row, ()) for row in rows)
            return
        for chunk, found in self._in_chunks(rows, ChunkRenderer.check_images):
            yield from zip(chunk, found, strict=True)

    def _in_chunks(
        self, rows: Iterable[Row], work: Callable[[ChunkRenderer, Sequence[Row]], Made]
    ) -> Iterator[tuple[list[Row], Made]]:
        chunks = chunked(rows, max_rows=_CHUNK_ROWS, max_characters=_CHUNK_CHARACTERS)
        if self._pool is None:
            yield from ((chunk, work(self._here, chunk)) for chunk in chunks)
            return
        waiting: deque[tuple[list[Row], Future[Made]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, self._pool.submit(_in_worker, work, chunk)))
                if len(waiting) > self._ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            free = psutil.virtual_memory().available / 2**30
            raise WorkerDied(
                f"a process that prepares rows was killed; {free:.1f} GiB of host memory are free now",
                "look for a lack of host memory (dmesg), close other programs, and give the same command again",
            ) from None

    def __enter__(self) -> "TokenizerPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
