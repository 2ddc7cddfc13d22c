"""Assigns rows to steps, ranks and micro-batches. The order is a pure function of seed and epoch, so a run's position
is its step alone. Packing decides which rows share a flat sequence, so that little of it stays empty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Efficiency

T = TypeVar("T")
Counts = Sequence[int] | NDArray[np.int64]

_ROWS, _TOKENS_PER_ROW = 64, 32
"""Sequences of a pack, or one for each 32 tokens of its capacity if that is more: attention pays up to 128 tokens for
each."""


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The cache holds this epoch and the next, which prefetching needs."""
    # numpy guarantees that RandomState's streams never change; Generator's may
    order = np.random.RandomState([seed, epoch]).permutation(num_rows)
    order.setflags(write=False)
    return order


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """The last step of an epoch may have fewer rows: no row is left out."""
    return math.ceil(num_rows / global_batch)


def rows_of_step(step: int, *, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """Returns the rows of optimizer step `step`, which counts from 0, over all ranks."""
    epoch, within = divmod(step, steps_per_epoch(num_rows, global_batch))
    return list(map(int, epoch_order(num_rows, seed, epoch)[within * global_batch : (within + 1) * global_batch]))


def rows_of_rank(step: int, *, rank: int, num_ranks: int, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """Returns this rank's share of a step's rows. Every row has one rank, and the shares differ by at most one row."""
    return rows_of_step(step, num_rows=num_rows, global_batch=global_batch, seed=seed)[rank::num_ranks]


def part_of_rank(whole: Sequence[T], *, rank: int, num_ranks: int) -> list[tuple[T, bool]]:
    """Returns this rank's pieces of work that all ranks divide in the same way, with a flag that says whether a piece
    counts. All ranks process equally many, because they gather sharded weights together. A rank without a piece repeats
    the last one, which does not count."""
    rounds = math.ceil(len(whole) / num_ranks)
    return [(whole[min(at, len(whole) - 1)], at < len(whole)) for at in range(rank, rounds * num_ranks, num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The limits of a pack, which are those of the rehearsal."""

    tokens: int
    supervised: int
    rows: int
    """Rows per pack; a preference pair is one row."""


def capacity_of(*, micro_batch: int, longest: int, supervised: int, rows_per_step: int, sides: int = 1) -> Capacity:
    """The capacity is that of `micro_batch` rows of `sides` sequences, each with the maximum length and supervised
    tokens."""
    tokens = micro_batch * sides * longest
    most = max(_ROWS, tokens // _TOKENS_PER_ROW) // sides
    rows = max(micro_batch, min(rows_per_step, most))
    return Capacity(tokens=tokens, supervised=micro_batch * sides * supervised, rows=rows)


def num_sides(lengths: NDArray[Any]) -> int:
    """Returns the sequences per row: the lengths of pairs have a column for each side."""
    return 1 if lengths.ndim == 1 else int(lengths.shape[1])


def longest_sides(lengths: NDArray[Any]) -> NDArray[Any]:
    """Returns, for each row, the length that decides its padding."""
    return lengths if lengths.ndim == 1 else lengths.max(axis=1)


def both_sides(counts: NDArray[Any]) -> NDArray[Any]:
    """Returns, for each row, the sum over its sides, which is what it takes of a pack."""
    return counts if counts.ndim == 1 else counts.sum(axis=1)


def best_fit(
    lengths: Counts, supervised: Counts, *, max_tokens: int, max_supervised: int, max_rows: int | None = None
) -> list[list[int]]:
    """Best fit decreasing: the longest rows come first, and each goes into the pack that it fills best. Every row is in
    exactly one pack.

    The cost is O(n log max_tokens), and the result is a pure function of the arguments: rows of equal length keep their
    order."""
    tokens, counts = np.asarray(lengths, dtype=np.int64), np.asarray(supervised, dtype=np.int64)
    if len(tokens) and (tokens.max() > max_tokens or counts.max() > max_supervised):
        row = f"a row of {tokens.max()} tokens, {counts.max()} supervised"
        raise ValueError(f"{row}, is larger than a pack of {max_tokens} and {max_supervised}")
    packs: list[list[int]] = []
    open_packs = _OpenPacks(max_tokens)
    order = np.argsort(-tokens, kind="stable")
    for row, length, count in zip(order.tolist(), tokens[order].tolist(), counts[order].tolist(), strict=True):
        found = open_packs.take(length, count)
        if found is None:
            packs.append([])
            found = (max_tokens, max_supervised, len(packs) - 1)
        tokens_left, supervised_left, pack = found
        packs[pack].append(row)
        if max_rows is None or len(packs[pack]) < max_rows:
            open_packs.give(tokens_left - length, supervised_left - count, pack)
    return packs


class _OpenPacks:
    """Packs by the tokens that they have left. Above those leaves is a tree whose nodes know the most supervised tokens
    that any pack below them has left, so one way down finds the fullest pack that can take a row. Only nodes above a
    pack exist: a pack of a million tokens has no more of them than its rows need."""

    def __init__(self, max_tokens: int) -> None:
        self._width = 1 << max_tokens.bit_length()
        self._most: dict[int, int] = {}
        self._packs: dict[int, list[tuple[int, int]]] = {}

    def take(self, length: int, count: int) -> tuple[int, int, int] | None:
        """(tokens left, supervised left, pack) of the fullest pack with room, which is taken out; else None."""
        most, node = self._most.get, length + self._width
        while most(node, -1) < count:  # up, and to the right, to the first node above a leaf with room
            while node & 1:
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self._width:  # down to that leaf
            node = 2 * node if most(2 * node, -1) >= count else 2 * node + 1
        leaf = node - self._width
        left, pack = heappop(self._packs[leaf])
        self._update(leaf)
        return leaf, -left, pack

    def give(self, tokens_left: int, supervised_left: int, pack: int) -> None:
        heappush(self._packs.setdefault(tokens_left, []), (-supervised_left, pack))
        self._update(tokens_left)

    def _update(self, leaf: int) -> None:
        most, packs = self._most, self._packs[leaf]
        node, value = leaf + self._width, -packs[0][0] if packs else -1
        while node and most.get(node, -1) != value:
            most[node] = value
            value = max(value, most.get(node ^ 1, -1))
            node >>= 1


def efficiency(
    lengths: NDArray[np.int32], supervised: NDArray[np.int32], levers: Levers, *, global_batch: int, seed: int
) -> Efficiency:
    """How much of what is computed is padding, for each layout of the rows of a step."""
    steps = range(min(50, steps_per_epoch(len(lengths), global_batch)))  # enough to estimate it
    rows = [rows_of_step(step, num_rows=len(lengths), global_batch=global_batch, seed=seed) for step in steps]
    in_order = [lengths[step] for step in rows]
    by_length = [step[np.argsort(-longest_sides(step))] for step in in_order]
    own = sum(int(step.sum()) for step in in_order)
    computed, batches = _padded(by_length, levers.micro_batch)
    grouped = own / computed
    if levers.packing:
        capacity = capacity_of(
            micro_batch=levers.micro_batch,
            longest=int(lengths.max()),
            supervised=int(supervised.max()),
            rows_per_step=min(global_batch, len(lengths)),
            sides=num_sides(lengths),
        )
        limits = {"max_tokens": capacity.tokens, "max_supervised": capacity.supervised, "max_rows": capacity.rows}
        packs = [best_fit(both_sides(lengths[step]), both_sides(supervised[step]), **limits) for step in rows]
        computed, batches = own, sum(map(len, packs))
    per_step, unsorted = batches / len(rows), own / _padded(in_order, levers.micro_batch)[0]
    return Efficiency(own=own / computed, batches_per_step=per_step, grouped=grouped, in_order=unsorted)


def _padded(steps: list[NDArray[np.int32]], micro_batch: int) -> tuple[int, int]:
    """The tokens that are computed, and the number of batches."""
    batches = [step[at : at + micro_batch] for step in steps for at in range(0, len(step), micro_batch)]
    return sum(batch.size * int(batch.max()) for batch in batches), len(batches)
