"""Which rows are computed together: the longest first, as many as the room holds, fewer where that was too much.

The longest come first so that what would not fit fails at once, and rows of like length share a batch.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from finefit.artifacts.forecasts import Room
from finefit.errors import Resumable
from finefit.step.shortage import is_shortage

T = TypeVar("T")
Warn = Callable[[str], None]
Ahead = Callable[[Sequence[int], Sequence[int]], None]
"""(the indices of a batch, those behind it): what they need can be got ready."""


def in_batches(
    lengths: Sequence[int],
    room: Room,
    compute: Callable[[list[int]], Sequence[T]],
    *,
    warn: Warn,
    ahead: Ahead = lambda _now, _then: None,
) -> Iterator[tuple[int, T]]:
    """(index, result) of every row. `lengths`: tokens that each takes to its end; `compute` is given the indices of a batch. A batch that runs out of
    memory is cut in half, and so is the room for those after it."""
    waiting = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    while waiting:
        chosen = first_batch(waiting, lengths, room)
        ahead(chosen, waiting[len(chosen) :])
        found = _attempt(compute, chosen)
        if isinstance(found, str):
            room = _narrower(room, len(chosen), lengths[chosen[0]], found)
            _give_back()
            warn(
                f"out of memory with {len(chosen)} rows of up to {lengths[chosen[0]]:,} tokens at once; went on with {len(chosen) // 2}"
            )
            continue
        yield from zip(chosen, found, strict=True)
        waiting = waiting[len(chosen) :]


def first_batch(waiting: Sequence[int], lengths: Sequence[int], room: Room) -> list[int]:
    """The longest of those that wait, and as many behind it as there is room for when all are padded to its length; never none."""
    rows = min(room.rows, room.tokens // max(1, lengths[waiting[0]]))
    return list(waiting[: max(1, rows)])


def _attempt(compute: Callable[[list[int]], Sequence[T]], chosen: list[int]) -> Sequence[T] | str:
    """What it gives, or how it ran out. The words alone leave: with the error would stay all that it was raised from."""
    try:
        return compute(chosen)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return str(error).strip() or type(error).__name__


def _narrower(room: Room, num_rows: int, length: int, words: str) -> Room:
    if num_rows == 1:
        raise Resumable(
            f"a single row of {length:,} tokens, prompt and answer together, does not fit in the memory that is free: {words}",
            "the answers so far are kept: free the card and give the same command again, or evaluate on a larger one, with --device cpu, "
            "with smaller max_new_tokens, or with prompts cut by data.too_long: cut_prompt",
        )
    return replace(room, rows=room.rows // 2, tokens=num_rows // 2 * length)


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
