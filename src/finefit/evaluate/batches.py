"""Batches of prompts: the longest first, as many as the planned limit allows, fewer after running out of memory.

The longest come first so that what does not fit fails at once and rows of similar length share a batch. Meanwhile other
processes decode the images of the next batches.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.data.columns import RecordError
from finefit.data.image_check import ProcessorFactory, image_input, image_processor_of, read_unchanged
from finefit.data.render import Renderer
from finefit.data.rows import ImageRef, Row
from finefit.errors import DataError, Resumable, is_out_of_memory
from finefit.evaluate.decoding import ChooseTokens, causal_of, decode, likeliest
from finefit.model.attention import turns_by_longest
from finefit.objective.batch import Extra
from finefit.vision.family import ImageGeometry, ImageInput, ImageProcessor

T = TypeVar("T")
Warn = Callable[[str], None]
Ahead = Callable[[Sequence[int], Sequence[int]], None]
"""Called with (indices of a batch, indices after it); prepares what they need."""
Submit = Callable[..., "Future[Any]"]
"""(function, *arguments) -> its result, such as `BatchWorkers.submit`."""
ImageRefs = Sequence[Sequence[ImageRef]]
"""The images of each row."""
_VALUES_AHEAD: Final = 1 << 28  # pixel values that may wait for their batch: 1 GiB
_READERS, _NUM_SHOWN = 8, 5
_READS_PADDING = ("git", "rwkv", "xlstm")
"""Model types that read the padding of a shorter prompt, whatever its attention mask says."""


def in_batches(
    lengths: Sequence[int],
    batch_limit: EvalBatchLimit,
    compute: Callable[[list[int]], Sequence[T]],
    *,
    warn: Warn,
    ahead: Ahead = lambda _now, _then: None,
) -> Iterator[tuple[int, T]]:
    """(index, result) of every row. `lengths` are the rows' final tokens, prompt and answer. `compute` gets the indices
    of a batch: the longest waiting row, and as many after it as fit when padded. If a batch runs out of memory, it and
    all later ones are halved."""
    waiting = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    while waiting:
        length = lengths[waiting[0]]
        chosen = waiting[: max(1, min(batch_limit.rows, batch_limit.tokens // max(1, length)))]
        ahead(chosen, waiting[len(chosen) :])
        found = _attempt(compute, chosen)
        if not isinstance(found, str):
            yield from zip(chosen, found, strict=True)
            waiting = waiting[len(chosen) :]
            continue
        num_rows = len(chosen)
        if num_rows == 1:
            row = f"a single row of {length:,} tokens, prompt and answer together,"
            again = "the answers so far are kept: free the card and give the same command again, or evaluate on a"
            fewer = "with smaller max_new_tokens, or with prompts cut by data.too_long: cut_prompt"
            remedy = f"{again} larger card, with --device cpu, {fewer}"
            raise Resumable(f"{row} does not fit in the free memory: {found}", remedy)
        batch_limit = replace(batch_limit, rows=batch_limit.rows // 2, tokens=num_rows // 2 * length)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warn(f"out of memory with {num_rows} rows of up to {length:,} tokens at once; continued with {num_rows // 2}")


def _attempt(compute: Callable[[list[int]], Sequence[T]], chosen: list[int]) -> Sequence[T] | str:
    """The results, or the message of an out-of-memory error. The error itself would keep its frames' tensors alive."""
    try:
        return compute(chosen)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error).strip() or type(error).__name__


def limit_for(model: nn.Module, lengths: Sequence[int], batch_limit: EvalBatchLimit) -> EvalBatchLimit:
    """Limits batches to one row if a row would change the others beside it."""
    config = causal_of(model).config
    is_changing = config.model_type in _READS_PADDING or turns_by_longest(config, max(lengths, default=0))
    return replace(batch_limit, rows=1) if is_changing else batch_limit


class ImagePrefetch:
    """Decodes each image once while it is needed, however many rows show it."""

    def __init__(self, processor_factory: ProcessorFactory, submit: Submit, *, most_ahead: int = _VALUES_AHEAD) -> None:
        self._factory, self._submit, self._most_ahead = processor_factory, submit, most_ahead
        self._coming: dict[ImageRef, Future[ImageInput]] = {}

    @property
    def geometry(self) -> ImageGeometry:
        return _processor(self._factory).geometry

    def ahead(self, now: Iterable[ImageRef], then: Iterable[ImageRef]) -> None:
        """Starts to decode all images of `now`, and those of `then` up to the limit of waiting images. Others are
        dropped."""
        wanted, total = dict.fromkeys(now), 0
        for ref in then:
            total += ref.num_values
            if total > self._most_ahead:
                break
            wanted[ref] = None
        self._coming = {ref: self._future(ref) for ref in wanted}

    def load(self, ref: ImageRef) -> ImageInput:
        return self._future(ref).result()

    def _future(self, ref: ImageRef) -> "Future[ImageInput]":
        return self._coming.get(ref) or self._submit(_image_input, self._factory, ref)


def _image_input(processor_factory: ProcessorFactory, ref: ImageRef) -> ImageInput:
    return image_input(_processor(processor_factory), ref)


def _processor(processor_factory: ProcessorFactory) -> ImageProcessor:
    image_processor = image_processor_of(processor_factory)
    assert image_processor is not None, "only vision-language models have images to prefetch"
    return image_processor


def prefetching(images: ImagePrefetch | None, image_refs: ImageRefs) -> Ahead:
    def ahead(now: Sequence[int], then: Sequence[int]) -> None:
        if images is not None:
            images.ahead(*(chain.from_iterable(image_refs[at] for at in indices) for indices in (now, then)))

    return ahead


def require_images(rows: Sequence[Row]) -> None:
    """Verifies, before a model is loaded, that every image is what it was when its row was prepared. Reports all
    faults."""
    first: dict[ImageRef, str] = {}
    for row in rows:
        first |= {ref: row.place for ref in row.image_refs if ref not in first}

    def fault_of(ref: ImageRef) -> str | None:
        try:
            read_unchanged(ref)
        except RecordError as fault:
            return f"{first[ref]}: its image {fault}"
        return None

    with ThreadPoolExecutor(_READERS) as readers:
        faults = [fault for fault in readers.map(fault_of, first) if fault]
    if faults:
        more = f"\nand {len(faults) - _NUM_SHOWN} more" if len(faults) > _NUM_SHOWN else ""
        remedy = "put the images back as they were, or prepare the rows anew: start again with --new"
        raise DataError("\n".join(faults[:_NUM_SHOWN]) + more, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    new_tokens: int | None
    """Includes the stop token; None if a server does not count them."""
    is_cut: bool
    """Whether the answer reached max_new_tokens before its end."""


def answers(
    model: nn.Module,
    renderer: Renderer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_limit: EvalBatchLimit,
    device: str,
    warn: Warn,
    choose: Callable[[Sequence[int]], ChooseTokens] = lambda _: likeliest,
    images: ImagePrefetch | None = None,
    image_refs: ImageRefs = (),
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every prompt. Other prompts in the batch change an answer only by the rounding of kernels.
    `choose` selects the tokens of a batch from the indices of its prompts. `images` goes with the `image_refs` of all
    prompts."""
    lengths, stops = [len(prompt) + max_new_tokens for prompt in prompts], renderer.stop_tokens

    def compute(chosen: list[int]) -> list[Answer]:
        def make_images(input_ids_BT: NDArray[np.int64], lengths: Sequence[int]) -> Extra:
            assert images is not None
            shown = [[images.load(ref) for ref in image_refs[at]] for at in chosen]
            return images.geometry.extra(input_ids_BT, lengths, shown)

        written = decode(
            model,
            [prompts[at] for at in chosen],
            max_new_tokens=max_new_tokens,
            stops=stops,
            pad=renderer.pad,
            device=device,
            choose=choose(chosen),
            make_images=None if images is None else make_images,
        )
        return [
            Answer(text=renderer.decode_answer(tokens), new_tokens=len(tokens), is_cut=tokens[-1] not in stops)
            for tokens in written
        ]

    limit = limit_for(model, lengths, batch_limit)
    return in_batches(lengths, limit, compute, warn=warn, ahead=prefetching(images, image_refs))
