"""Which rows of a source take part, which are held out, and how often each is seen: seeded, and decided before anything is rendered."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finefit.data.fingerprint import held_share, prompt_key
from finefit.data.read import Reading
from finefit.data.rows import Row
from finefit.errors import DataError
from finefit.spec.rows import Data

Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a source take part, by their place among its usable rows."""

    taken: NDArray[np.bool_] | None = None
    """None for all."""
    elsewhere: NDArray[np.bool_] | None = None
    """Rows of another split, which are not counted in this one."""
    reason: str = ""
    """Of rows that are neither."""

    def require(self, ordinal: int, source: str) -> None:
        """A file that grows while it is read has rows that nothing was decided about."""
        if any(mask is not None and ordinal >= len(mask) for mask in (self.taken, self.elsewhere)):
            raise DataError(
                f"{source} has changed while it was read", "give the command again when nothing writes to it"
            )


def choices(
    data: Data, readings: Sequence[Reading], seed: int, *, with_system: bool
) -> list[tuple[Choice | None, Choice]]:
    """For every training source what is held for validation, and what is trained on."""
    chosen = [
        sampled(reading, source.weight, source.limit, seed)
        for source, reading in zip(data.train, readings, strict=True)
    ]
    share = data.validation.share if data.validation else None
    if share is None:
        return [(None, choice) for choice in chosen]
    keys = [_keys(reading, with_system=with_system) for reading in readings]
    sizes = [len(prompts) for prompts, _ in keys]
    taken = np.concatenate(
        [
            np.ones(size, bool) if choice.taken is None else choice.taken
            for choice, size in zip(chosen, sizes, strict=True)
        ]
    )
    offsets = np.cumsum(
        [0, *(int(records.max(initial=0)) + 1 for _, records in keys)]
    )  # records of different sources are different
    records = np.concatenate([records + np.uint64(offset) for (_, records), offset in zip(keys, offsets, strict=False)])
    held = np.zeros(len(taken), bool)
    held[taken] = held_share(
        together(np.concatenate([prompts for prompts, _ in keys])[taken], records[taken]), share, seed
    )
    parts = np.split(held, np.cumsum(sizes)[:-1])
    return [
        (Choice(taken=part, elsewhere=~part), Choice(taken=choice.taken, elsewhere=part, reason=choice.reason))
        for part, choice in zip(parts, chosen, strict=True)
    ]


def sampled(reading: Reading, weight: float, limit: int | None, seed: int) -> Choice:
    if weight >= 1 and limit is None:
        return Choice()
    total = sum(isinstance(row, Row) for row in reading.rows())
    by_weight = max(1, round(total * weight)) if weight < 1 else total
    count = min(by_weight, limit or total, total)
    taken = np.zeros(total, bool)
    taken[np.random.RandomState(seed).permutation(total)[:count]] = True
    return Choice(
        taken=taken, reason="left out by limit" if limit is not None and limit <= by_weight else "left out by weight"
    )


def _keys(reading: Reading, *, with_system: bool) -> tuple[Keys, Keys]:
    """Of every row its prompt's key, and its record's place among the records."""
    prompts: list[int] = []
    records: list[int] = []
    last, number = None, 0
    for row in reading.rows():
        if isinstance(row, Row):
            number += (row.source, row.number) != last
            last = (row.source, row.number)
            prompts.append(prompt_key(row, with_system=with_system))
            records.append(number)
    return np.array(prompts, np.uint64), np.array(records, np.uint64)


def together(prompts: Keys, records: Keys) -> Keys:
    """A key for each group of rows that share a prompt or a record, directly or through others: the least of their prompts' keys."""
    groups = [np.unique(keys, return_inverse=True)[1] for keys in (records, prompts)]
    keys, before = prompts, None
    while before is None or (keys != before).any():
        before = keys
        for group in groups:
            least = np.full(group.max(initial=0) + 1, np.iinfo(np.uint64).max, np.uint64)
            np.minimum.at(least, group, keys)
            keys = least[group]
    return keys


def weighted(begin: int, end: int, weight: float, seed: int) -> NDArray[np.int64]:
    """Each example as often as it is seen in an epoch; of a broken weight's rest a seeded part."""
    numbers = np.arange(begin, end)
    if weight <= 1:
        return numbers
    times, rest = divmod(weight, 1)
    more = np.random.RandomState(seed).permutation(numbers)[: round(rest * len(numbers))]
    return np.concatenate([np.tile(numbers, int(times)), np.sort(more)])
