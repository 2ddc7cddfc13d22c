"""Finds rows that occur twice: in two splits, or twice in train. Prompts are compared exactly, ignoring case and
punctuation, and approximately; the prompts of earlier answers in a conversation are compared ignoring case and
punctuation.

Similarity is measured on windows of 32 bytes of the normalised prompt. One window in eight is kept, chosen by its own
hash, so that every text keeps the same ones. Short texts that differ in a word stay different: a word changes at least
32 windows, so a text needs some 350 bytes before it stays nearly the same with one word less.

Windows that many prompts share belong to a template, not to content, and are left out. Many means one prompt in 100,
but at least 5 and at most 20, of a sample of train or of a held-out split; prompts that are nearly the same as a whole
count as one, because a few copies are not a template. A template with a short payload makes nearly equal prompts too:
windows in more than 20 prompts, or in at least 5 that are more than a quarter of all, always belong to a template."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finefit.data.fingerprint import CHOSEN_BITS, HALF, Fingerprint, Windows, once
from finefit.data.rows import Row

OverlapKind = Literal["row", "prompt", "normalised", "turn", "near", "contained"]

SAMPLE_ROWS = 2000
"""Number of training rows that suffices to detect templates."""
NEAR = 0.8
"""Two prompts are nearly the same from this share of common windows in all their windows."""
CONTAINED = 0.9
"""A held-out prompt is inside a longer one from this share of its windows that both have."""
MIN_WINDOWS = 16
"""A prompt with fewer windows, about 160 bytes without templates, is only compared as a whole."""

_HOW: dict[OverlapKind, str] = {
    "row": "the same row",
    "prompt": "the same prompt with another answer",
    "normalised": "the same but for case and punctuation",
    "turn": "asks it in an earlier turn",
    "near": "nearly the same",
    "contained": "contains it as a whole",
}
_KINDS = tuple(_HOW)
_NUM_EXAMPLES = 3
_NUM_MINIMA = 32
_MINIMA_FACTORS = np.random.Generator(np.random.PCG64(20)).integers(0, 2**32, _NUM_MINIMA, np.uint32) | np.uint32(1)


def common_windows(fingerprints: Iterable[Fingerprint]) -> Windows:
    """Returns the windows that belong to templates (see above), sorted and unique."""
    by_prompt = {fp.prompt: fp.windows for fp in fingerprints}
    if not by_prompt:
        return np.empty(0, np.uint32)
    prompts = [by_prompt[key] for key in sorted(by_prompt)]  # the result does not depend on the order of the rows
    windows, counts = np.unique(np.concatenate(prompts), return_counts=True)
    many, many_of_all = min(max(len(prompts) // 100, 5), 20), min(max(len(prompts) // 4, 4), 20)
    is_open = (counts >= many) & (counts <= many_of_all)
    is_common = counts > many_of_all
    if is_open.any():  # count the prompts that hold each window; prompts that are nearly the same count as one
        shared = [w[_are_among(w, windows[is_open])] for w in prompts]
        holders = [i for i, w in enumerate(shared) if w.size]
        groups = np.repeat(_groups([prompts[i] for i in holders]), [shared[i].size for i in holders])
        owned = np.unique(np.concatenate(shared).astype(np.uint64) << HALF | groups)
        num_groups = np.diff(np.searchsorted(owned >> HALF, windows[is_open]), append=owned.size)
        is_common[is_open] = num_groups >= many
    return windows[is_common]


def _groups(prompts: Sequence[Windows]) -> NDArray[np.uint64]:
    """Returns for each prompt the first prompt of its group; prompts that are nearly the same are in one group,
    transitively."""
    is_signed, signatures = _signatures(prompts, np.empty(0, np.uint32))
    pairs = np.flatnonzero(is_signed)[_near_pairs(signatures)[0]]
    groups = np.arange(len(prompts), dtype=np.uint64)
    while True:
        merged = groups.copy()
        np.minimum.at(merged, pairs.ravel(), np.repeat(groups[pairs].min(axis=1), 2))
        merged = merged[merged]
        if np.array_equal(merged, groups):
            return groups
        groups = merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    kind: OverlapKind
    split: str
    row: str
    other_split: str
    other: str
    similarity: float = 1.0

    @property
    def how(self) -> str:
        similarity = f" ({self.similarity:.2f})" if self.kind in ("near", "contained") else ""
        return _HOW[self.kind] + similarity


_Match = tuple[int, float, str, str]
"""The index of its kind in `_KINDS`, its distance, and the split and place of the held-out row. The smallest match is
the closest, and ties are ordered by place, so that the order of rows does not matter."""


class OverlapIndex:
    """Holds the held-out rows, against which the rows of other splits are compared as they stream by. `common` comes
    from a sample of training rows; each held-out split adds its own."""

    def __init__(self, common: Windows) -> None:
        self._common = common
        self._held: list[_HeldRow] = []
        self._by_prompt: dict[int, list[int]] = {}
        self._grown: set[str] = set()
        """Splits with rows that are not yet in the table."""
        self._table = _Table.of([], common)

    def add_held(self, split: str, row: Row, fp: Fingerprint) -> None:
        self._by_prompt.setdefault(fp.prompt, []).append(len(self._held))
        self._held.append(_HeldRow(split, row.place, fp))
        self._grown.add(split)

    def find(self, row: Row, fp: Fingerprint, split: str = "train") -> Overlap | None:
        """Returns the closest held-out row of another split."""
        found = min(self._equal(fp, split), default=None) or min(self._near(fp, split), default=None)
        if found is None:
            return None
        rank, distance, held, place = found
        kind, similarity = _KINDS[rank], 1 - distance
        return Overlap(kind=kind, split=split, row=row.place, other_split=held, other=place, similarity=similarity)

    def _equal(self, fp: Fingerprint, split: str) -> Iterator[_Match]:
        for held in self._of_prompt(fp.prompt, split):
            kind = "row" if held.fp.exact == fp.exact else "prompt" if held.fp.asked == fp.asked else "normalised"
            yield _KINDS.index(kind), 0.0, held.split, held.place
        for turn in fp.turns:
            for held in self._of_prompt(turn, split):
                yield _KINDS.index("turn"), 0.0, held.split, held.place

    def _of_prompt(self, prompt: int, split: str) -> Iterator["_HeldRow"]:
        return (held for i in self._by_prompt.get(prompt, ()) if (held := self._held[i]).split != split)

    def _near(self, fp: Fingerprint, split: str) -> Iterator[_Match]:
        if fp.windows.size < MIN_WINDOWS:
            return
        if self._grown - {split}:  # rows of its own split need no table
            splits = {held.split for held in self._held}
            templates = (common_windows(held.fp for held in self._held if held.split == each) for each in splits)
            common = np.unique(np.concatenate([self._common, *templates]))
            self._table = _Table.of([held.fp.windows for held in self._held], common)
            self._grown.clear()
        at = self._table.positions(fp.windows)
        if at.size < NEAR * MIN_WINDOWS:
            return
        num_windows, owners, shared = self._table.shared(fp.windows.size, at)
        num_held = self._table.num_windows[owners]
        jaccard = shared / (num_windows + num_held - shared)
        contained = shared / num_held
        for j in np.flatnonzero((jaccard >= NEAR) | (contained >= CONTAINED)):
            held = self._held[owners[j]]
            if held.split != split:
                kind = "near" if jaccard[j] >= NEAR else "contained"
                similarity = float(jaccard[j] if kind == "near" else contained[j])
                yield _KINDS.index(kind), 1 - similarity, held.split, held.place


class _HeldRow(NamedTuple):
    split: str
    place: str
    fp: Fingerprint


@dataclass(frozen=True, slots=True)
class _Table:
    """Maps windows to the held-out rows that have them: those of `keys[i]` are `owners[starts[i]:starts[i + 1]]`."""

    keys: Windows
    seen: NDArray[np.bool_]
    """Indexed by the upper bits of a window: whether it may be among the keys. Most windows then need no search."""
    is_common: NDArray[np.bool_]
    starts: NDArray[np.uint32]
    owners: NDArray[np.uint32]
    num_windows: NDArray[np.int64]
    """Windows of each held-out row, without the common ones."""

    @classmethod
    def of(cls, held: Sequence[Windows], common: Windows) -> "_Table":
        pairs = np.concatenate([*held, common[:0]]).astype(np.uint64) << HALF
        pairs |= np.repeat(np.arange(len(held), dtype=np.uint64), [w.size for w in held])
        pairs.sort()
        windows, owners = (pairs >> HALF).astype(np.uint32), pairs.astype(np.uint32)
        keys = once(np.concatenate([windows, common]))
        seen = np.zeros(2 ** min(keys.size.bit_length() + 4, 24), np.bool_)
        seen[keys >> _seen_shift(seen)] = True
        starts = np.append(np.searchsorted(windows, keys), windows.size).astype(np.uint32)
        is_common = np.zeros(keys.size, np.bool_)
        is_common[np.searchsorted(keys, common)] = True
        is_content = np.repeat(~is_common, np.diff(starts))
        return cls(keys, seen, is_common, starts, owners, np.bincount(owners[is_content], minlength=len(held)))

    def positions(self, windows: Windows) -> NDArray[np.intp]:
        """Returns the positions of those windows that are among the keys."""
        windows = windows[self.seen.take(windows >> _seen_shift(self.seen))]
        at = np.searchsorted(self.keys, windows)
        return at[self.keys.take(at, mode="clip") == windows] if windows.size else at

    def shared(self, num_windows: int, at: NDArray[np.intp]) -> tuple[int, NDArray[np.intp], NDArray[np.intp]]:
        """Returns how many windows of a row are not common, the held-out rows that share some, and how many they
        share."""
        num_windows -= int(np.count_nonzero(self.is_common[at]))
        at = at[~self.is_common[at]]
        starts, counts = self.starts[at].astype(np.intp), (self.starts[at + 1] - self.starts[at]).astype(np.intp)
        ranges = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        owners, shared = np.unique(self.owners[ranges], return_counts=True)
        enough = self.num_windows[owners] >= MIN_WINDOWS
        return num_windows, owners[enough].astype(np.intp), shared[enough]


def _seen_shift(seen: NDArray[np.bool_]) -> np.uint32:
    return np.uint32(CHOSEN_BITS + 1 - seen.size.bit_length())


class TrainDuplicates:
    """Counts duplicates inside train, with about 110 bytes of memory per row."""

    def __init__(self, common: Windows) -> None:
        self._common = common
        self._sources: dict[str, int] = {}
        self._pending: list[tuple[tuple[int, int, int, int, int, int], Windows]] = []
        self._blocks: list[_RowBlock] = []

    def add(self, row: Row, fp: Fingerprint) -> None:
        source = self._sources.setdefault(row.source, len(self._sources))
        self._pending.append(((fp.exact, fp.asked, fp.prompt, source, row.number, row.part), fp.windows))
        if len(self._pending) == 1024:
            self._store()

    def summary(self) -> tuple[dict[OverlapKind, int], list[Overlap]]:
        """Returns how many rows repeat another, each counted under the first kind that applies, and some examples. The
        number of near duplicates is an estimate."""
        if self._pending:
            self._store()
        if not self._blocks:
            return {}, []
        exact, asked, prompt = (np.concatenate([block.keys[:, i] for block in self._blocks]) for i in range(3))
        kinds: tuple[OverlapKind, ...] = ("row", "prompt", "normalised")
        repeats = dict(zip(kinds, (_repeats(exact), _repeats(asked, exact), _repeats(prompt, asked)), strict=True))
        near, similarity = self._near(prompt)
        closest = np.lexsort((near[:, 1], -similarity))[:_NUM_EXAMPLES]
        examples = [self._example(kind, pair) for kind, pairs in repeats.items() for pair in pairs[:_NUM_EXAMPLES]]
        examples += (self._example("near", near[i], float(similarity[i])) for i in closest)
        return {kind: len(pairs) for kind, pairs in repeats.items()} | {"near": np.unique(near[:, 1]).size}, examples

    def _store(self) -> None:
        entries, windows = zip(*self._pending, strict=True)
        keys = np.array([entry[:3] for entry in entries], np.uint64)
        sources, numbers, parts = (np.array([entry[i] for entry in entries], np.int64) for i in (3, 4, 5))
        start = self._blocks[-1].stop if self._blocks else 0
        signatures = _signatures(windows, self._common)
        block = _RowBlock(start, keys, sources.astype(np.int32), numbers, parts.astype(np.int32), *signatures)
        self._blocks.append(block)
        self._pending.clear()

    def _near(self, prompt: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Returns pairs of rows with different, nearly equal prompts."""
        wanted = np.zeros(prompt.size, np.bool_)
        wanted[np.unique(prompt, return_index=True)[1]] = True
        wanted &= np.concatenate([block.is_signed for block in self._blocks])
        parts = (block.signatures[wanted[block.start : block.stop][block.is_signed]] for block in self._blocks)
        signatures = np.concatenate(list(parts))
        rows = np.flatnonzero(wanted)
        order = np.argsort(prompt[rows])  # sorted by hash, so that the result does not depend on the order of the rows
        pairs, similarity = _near_pairs(signatures[order])
        return rows[order[pairs]], similarity

    def _example(self, kind: OverlapKind, pair: NDArray[np.intp], similarity: float = 1.0) -> Overlap:
        places: list[str] = []
        for index in sorted(pair.tolist()):
            block = self._blocks[bisect_right(self._blocks, index, key=lambda block: block.start) - 1]
            at = index - block.start
            source = next(islice(self._sources, int(block.source[at]), None))
            places.append(Row(source=source, number=int(block.number[at]), part=int(block.part[at])).place)
        other, row = places
        return Overlap(kind=kind, split="train", row=row, other_split="train", other=other, similarity=similarity)


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """Consecutive rows; `start` is the index of the first."""

    start: int
    keys: NDArray[np.uint64]
    source: NDArray[np.int32]
    number: NDArray[np.int64]
    part: NDArray[np.int32]
    is_signed: NDArray[np.bool_]
    signatures: NDArray[np.uint16]
    """Signatures of the signed rows only."""

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)


def _are_among(windows: Windows, ordered: Windows) -> NDArray[np.bool_]:
    if not ordered.size:
        return np.zeros(windows.size, np.bool_)
    is_found: NDArray[np.bool_] = ordered.take(np.searchsorted(ordered, windows), mode="clip") == windows
    return is_found


def _signatures(windows: Sequence[Windows], common: Windows) -> tuple[NDArray[np.bool_], NDArray[np.uint16]]:
    """Computes minima of hashes of a row's windows (MinHash): the share of minima that two rows have in common
    estimates the share of windows that they have in common."""
    content = np.concatenate(windows)
    row_of = np.repeat(np.arange(len(windows)), [w.size for w in windows])
    is_content = ~_are_among(content, common)
    content, row_of = content[is_content], row_of[is_content]
    counts = np.bincount(row_of, minlength=len(windows))
    is_signed = counts >= MIN_WINDOWS
    content = content[is_signed[row_of]]
    signatures = np.empty((int(is_signed.sum()), _NUM_MINIMA), np.uint16)
    if content.size:
        starts = np.cumsum(counts[is_signed]) - counts[is_signed]
        for i, factor in enumerate(_MINIMA_FACTORS):
            minima = np.minimum.reduceat(content * factor, starts)
            signatures[:, i] = minima.astype(np.uint16)  # the lower half: the upper half is small in every minimum
    return is_signed, signatures


def _repeats(keys: NDArray[np.uint64], finer: NDArray[np.uint64] | None = None) -> NDArray[np.intp]:
    """Returns pairs of a row and the next one with the same key, among the first rows of each finer key, in row
    order."""
    rows = np.arange(keys.size) if finer is None else np.unique(finer, return_index=True)[1]
    rows = rows[np.lexsort((rows, keys[rows]))]
    is_same = keys[rows[1:]] == keys[rows[:-1]]
    pairs = np.stack([rows[:-1][is_same], rows[1:][is_same]], axis=1)
    return pairs[np.argsort(pairs[:, 1])]


def _near_pairs(signatures: NDArray[np.uint16]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Finds candidates by equal bands, and compares their whole signatures."""
    neighbours: list[NDArray[np.intp]] = []
    for band in signatures.view(np.uint64).T:  # of 4 minima each
        order = np.argsort(band, kind="stable")
        is_same = band[order[1:]] == band[order[:-1]]
        neighbours.append(np.stack([order[:-1][is_same], order[1:][is_same]], axis=1))
    candidates = np.concatenate(neighbours)
    _, first = np.unique(candidates[:, 0] * len(signatures) + candidates[:, 1], return_index=True)
    pairs = candidates[first]
    equal = np.empty(len(pairs), np.intp)
    for start in range(0, len(pairs), 2**16):
        part = pairs[start : start + 2**16]
        equal[start : start + 2**16] = (signatures[part[:, 0]] == signatures[part[:, 1]]).sum(axis=1)
    is_near = equal >= round(NEAR * _NUM_MINIMA)
    return pairs[is_near], equal[is_near] / _NUM_MINIMA
