"""The starting model's log-probabilities of all pairs, computed once before the first step and kept in the stage directory.

The file names by a key what its numbers stand on, and holds NaN for pairs that are not done yet: a computation that was stopped goes on. The cut into
micro-batches does not depend on where it was stopped, so neither do the numbers.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from finefit.artifacts.atomic import full_disk_named, sync_file, sync_folder
from finefit.artifacts.journal import Journal
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage
from finefit.data.collate import Collator, grouped
from finefit.data.order import part_of_rank
from finefit.data.pairs import Pair, Trained
from finefit.data.store import ExamplePairs
from finefit.data.workers import Workers
from finefit.errors import FindingError, Interrupted
from finefit.facts.files import read_file
from finefit.model.adapter_files import WEIGHTS
from finefit.model.load import starting_adapter
from finefit.objective.batch import Batch, Forward
from finefit.objective.dpo import paired_of, sequence_sums
from finefit.step.objective import is_cached, still
from finefit.train.batches import collating, made, on_device
from finefit.train.ranks import Ranks
from finefit.train.stopping import StopRequest

log = logging.getLogger("finefit")

_SAVE_SECONDS = 60.0
_TOLD_SECONDS = 10.0

Values = dict[str, NDArray[np.float32]]
"""By file: a row for each distinct pair, a column for each side."""


class Referenced(Sequence[Pair]):
    """Pairs that bring the starting model's log-probabilities with them."""

    def __init__(self, pairs: ExamplePairs, values: NDArray[np.float32]) -> None:
        self._pairs, self._values = pairs, values[pairs.distinct()[1]]
        self.lengths, self.supervised_counts, self.num_values = pairs.lengths, pairs.supervised_counts, pairs.num_values

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> list[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | list[Pair]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        chosen, rejected = self._values[at].tolist()
        return replace(self._pairs[at], reference=(chosen, rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A model that no step has changed yet, and what is around it."""

    where: StageDir
    stage: Stage
    model: nn.Module
    forward: Forward
    collator: Collator
    workers: Workers
    ranks: Ranks
    stop: StopRequest
    metrics: Journal


def with_reference(start: Start, rows: Mapping[str, Sequence[Trained]]) -> dict[str, Sequence[Trained]]:
    """By the names of their files. As they are, where no reference is kept. To be called before a checkpoint is restored: a file that is gone is made
    anew, and always from the starting weights."""
    pairs = {name: found for name, found in rows.items() if isinstance(found, ExamplePairs)}
    if not is_cached(start.stage.objective, start.stage.tuning):
        return dict(rows)
    key, values = _key(start), _nothing_yet(pairs)
    if (kept := _read(start.where.reference, key, values)) is not None:
        values = kept
    start.ranks.barrier()  # nobody writes before all have read
    work = _Work(start, key, values)
    work.finish(pairs)
    return {name: Referenced(found, values[name]) for name, found in pairs.items()}


class _Work:
    def __init__(self, start: Start, key: str, values: Values) -> None:
        self._start, self._key, self._values = start, key, values
        self._saved = self._told = time.monotonic()

    def finish(self, pairs: Mapping[str, ExamplePairs]) -> None:
        if not self._missing():
            return
        for name, found in pairs.items():
            self._file(name, found)
        self._save()
        self._tell()

    def _file(self, name: str, pairs: ExamplePairs) -> None:
        start, values = self._start, self._values[name]
        rows = pairs.distinct()[0]
        groups = [g for g in grouped(pairs.lengths[rows], start.stage.levers.micro_batch) if np.isnan(values[g]).any()]
        own = [group for group, _ in part_of_rank(groups, rank=start.ranks.rank, num_ranks=start.ranks.size)]
        calls = (collating(start.collator, [pairs[int(row)] for row in rows[group]]) for group in own)
        for group, batch in zip(own, made(start.workers, calls), strict=True):
            sums = _sums(start, batch)
            for places, found in start.ranks.gather((group, sums.tolist())):
                values[places] = _require_numbers(name, np.array(found, np.float32))
            self._rest()

    def _rest(self) -> None:
        """Between two micro-batches."""
        start, now = self._start, time.monotonic()
        reason = start.stop.agreed(start.ranks)
        if reason is not None or now - self._saved >= _SAVE_SECONDS:
            self._save()
        if reason is not None:
            raise Interrupted(f"stopped by {reason} before the first step; {self._words()}")
        if now - self._told >= _TOLD_SECONDS:
            self._tell()

    def _save(self) -> None:
        if self._start.ranks.is_first:
            _write(self._start.where.reference, self._key, self._values)
        self._saved = time.monotonic()

    def _tell(self) -> None:
        if self._start.ranks.is_first:
            self._start.metrics.write(event="reference", done=self._total() - self._missing(), total=self._total())
        self._told = time.monotonic()

    def _missing(self) -> int:
        return sum(int(np.isnan(values).any(axis=1).sum()) for values in self._values.values())

    def _total(self) -> int:
        return sum(map(len, self._values.values()))

    def _words(self) -> str:
        return f"the reference of {self._total() - self._missing():,} of {self._total():,} pairs is kept"


def _sums(start: Start, batch: Batch) -> NDArray[np.float32]:
    """Of both sides of each pair. The adapter of a model that no step has changed is part of where it starts."""
    with still(start.model):
        sums_R = sequence_sums(start.forward(on_device(batch, start.stage.device)), paired_of(batch))
    sides: NDArray[np.float32] = sums_R.float().cpu().numpy().reshape(2, -1).T
    return sides


def _require_numbers(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise FindingError(
            f"the starting model gives a pair of {name} the log-probabilities {values[~np.isfinite(values).all(axis=1)][0].tolist()}: nothing can be "
            "measured from there",
            "set precision: fp32 to see whether it overflows; else the weights are damaged",
        )
    return values


def _nothing_yet(pairs: Mapping[str, ExamplePairs]) -> Values:
    return {name: np.full((len(found.distinct()[0]), 2), np.nan, np.float32) for name, found in pairs.items()}


def _key(start: Start) -> str:
    """Of all that the numbers depend on but for rounding: rows, weights, tokens, the adapter that training goes on from, precision."""
    stage = start.stage
    rows = {name: sha256 for name, sha256 in stage.prepared.items() if name.endswith(".safetensors")}
    adapter = starting_adapter(stage.tuning, start.where.run)
    content = None if adapter is None else read_file(adapter / WEIGHTS, adapter).sha256
    tuning = stage.tuning.model_dump(mode="json", exclude={"adapter", "dropout"})
    stands_on: list[Any] = [rows, stage.model_fingerprint, stage.template_sha256, tuning, content, stage.precision]
    return hashlib.sha256(json.dumps(stands_on, sort_keys=True).encode()).hexdigest()


def _write(path: Path, key: str, values: Values) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with full_disk_named(path, sum(array.nbytes for array in values.values())):
        try:
            save_file(values, temporary, metadata={"key": key, "sha256": _digest(values)})
            sync_file(temporary)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _read(path: Path, key: str, wanted: Values) -> Values | None:
    """What was kept of these rows and this model; None where there is nothing, or nothing to be trusted."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            found: Values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    except SafetensorError as error:
        log.warning("%s cannot be read (%s) and is made anew", path.name, error)
        return None
    if told.get("key") != key or {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in wanted.items()}:
        log.warning("%s belongs to other rows or another model and is made anew", path.name)
        return None
    if told.get("sha256") != _digest(found):
        log.warning("%s is damaged and is made anew", path.name)
        return None
    return {name: array.copy() for name, array in found.items()}


def _digest(values: Values) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode() + np.ascontiguousarray(values[name]).tobytes())
    return digest.hexdigest()
