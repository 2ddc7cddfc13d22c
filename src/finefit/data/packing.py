"""Rows into packs: which rows share a flat sequence, so that as little of it as possible stays empty."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS, _TOKENS_PER_ROW = 64, 32
"""A pack has at most so many sequences, or one for so many tokens of its capacity: each costs the backward of attention up to 128 tokens more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a pack may hold: as much as was rehearsed."""

    tokens: int
    supervised: int
    rows: int
    """Of the order: a preference pair is one row and two sequences."""


def capacity_of(*, micro_batch: int, longest: int, supervised: int, rows_per_step: int, sides: int = 1) -> Capacity:
    """Of `micro_batch` rows, each of `sides` sequences of the longest length with the most supervised tokens that any sequence has."""
    tokens = micro_batch * sides * longest
    most = max(_ROWS, tokens // _TOKENS_PER_ROW) // sides
    return Capacity(
        tokens=tokens, supervised=micro_batch * sides * supervised, rows=max(micro_batch, min(rows_per_step, most))
    )


def num_sides(lengths: NDArray[Any]) -> int:
    """Sequences of each row: those of pairs have a column for each side."""
    return 1 if lengths.ndim == 1 else int(lengths.shape[1])


def longest_sides(lengths: NDArray[Any]) -> NDArray[Any]:
    """Of every row: what it is padded by."""
    return lengths if lengths.ndim == 1 else lengths.max(axis=1)


def both_sides(counts: NDArray[Any]) -> NDArray[Any]:
    """Of every row: what it fills a pack with."""
    return counts if counts.ndim == 1 else counts.sum(axis=1)


def best_fit(
    lengths: Sequence[int] | NDArray[np.int64],
    supervised: Sequence[int] | NDArray[np.int64],
    *,
    max_tokens: int,
    max_supervised: int,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Best fit decreasing: the longest row first, each into the pack that it leaves least room in. Every row is in exactly one pack.

    O(n log max_tokens), and a pure function of its arguments: rows of equal length keep their order."""
    tokens, counts = np.asarray(lengths, dtype=np.int64), np.asarray(supervised, dtype=np.int64)
    if len(tokens) and (tokens.max() > max_tokens or counts.max() > max_supervised):
        raise ValueError(
            f"a row of {tokens.max()} tokens, {counts.max()} supervised, is larger than a pack of {max_tokens} and {max_supervised}"
        )
    packs: list[list[int]] = []
    room = _Room(max_tokens)
    order = np.argsort(-tokens, kind="stable")
    for row, length, count in zip(order.tolist(), tokens[order].tolist(), counts[order].tolist(), strict=True):
        found = room.take(length, count)
        if found is None:
            packs.append([])
            found = (max_tokens, max_supervised, len(packs) - 1)
        tokens_left, supervised_left, pack = found
        packs[pack].append(row)
        if max_rows is None or len(packs[pack]) < max_rows:
            room.give(tokens_left - length, supervised_left - count, pack)
    return packs


def fill(lengths: Sequence[int] | NDArray[np.int64], packs: Sequence[Sequence[int]], *, max_tokens: int) -> float:
    """The share of the packs' capacity that holds tokens."""
    return float(np.sum(lengths)) / (len(packs) * max_tokens)


class _Room:
    """Packs by the tokens that they have left. Over those leaves stands a tree whose nodes know the most supervised tokens that any pack
    below them has left, so the pack with least room of all that hold a row is found on one way down. Only nodes above a pack exist: a pack
    of a million tokens has no more of them than its rows ask for."""

    def __init__(self, max_tokens: int) -> None:
        self._width = 1 << max_tokens.bit_length()
        self._most: dict[int, int] = {}
        self._packs: dict[int, list[tuple[int, int]]] = {}

    def take(self, length: int, count: int) -> tuple[int, int, int] | None:
        """(tokens left, supervised left, pack) of the fullest pack that holds so many, which is taken out; None where none does."""
        leaf = self._first(length, count)
        if leaf is None:
            return None
        left, pack = heappop(self._packs[leaf])
        self._renew(leaf)
        return leaf, -left, pack

    def give(self, tokens_left: int, supervised_left: int, pack: int) -> None:
        heappush(self._packs.setdefault(tokens_left, []), (-supervised_left, pack))
        self._renew(tokens_left)

    def _first(self, start: int, count: int) -> int | None:
        """The first leaf from `start` on whose packs have room for `count` supervised tokens."""
        most, node = self._most.get, start + self._width
        while most(node, -1) < count:  # up, and to the right
            while node & 1:
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self._width:
            node = 2 * node if most(2 * node, -1) >= count else 2 * node + 1
        return node - self._width

    def _renew(self, leaf: int) -> None:
        most, packs = self._most, self._packs[leaf]
        node, value = leaf + self._width, -packs[0][0] if packs else -1
        while node and most.get(node, -1) != value:
            most[node] = value
            value = max(value, most.get(node ^ 1, -1))
            node >>= 1
