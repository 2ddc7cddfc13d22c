"""The starting model's log-probabilities of all pairs, computed once before the first step and kept in the stage
directory; and the proof that DPO starts at its reference.

The file's key covers all that its numbers depend on. Pairs that are not done yet are NaN, so a stopped computation
resumes. The micro-batches do not depend on where it was stopped, so neither do the numbers.
"""

import hashlib
import json
import logging
import math
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

from finefit.artifacts.atomic import Journal, staged_file
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, grouped
from finefit.data.examples import ExamplePairs, Pair, TrainRow
from finefit.data.order import part_of_rank, rows_of_step
from finefit.errors import FindingError, Interrupted
from finefit.facts.files import sha256_of
from finefit.model.load import starting_adapter
from finefit.model.resolve_model import ADAPTER_WEIGHTS
from finefit.objective.batch import Batch, Forward
from finefit.objective.losses import paired_of, sequence_sums
from finefit.spec.schema import Dpo
from finefit.step.forward import eval_without_grad, is_reference_cached
from finefit.step.state import random_state, restore_random
from finefit.train.batches import batch_call, collate_call, on_device, prefetched
from finefit.train.context import TrainContext
from finefit.train.monitors import StopRequest
from finefit.train.ranks import Ranks

log = logging.getLogger("finefit")

_SAVE_SECONDS = 60.0
_TOLD_SECONDS = 10.0

Values = dict[str, NDArray[np.float32]]
"""By file: a row for each distinct pair, a column for each side."""


class ReferencedPairs(Sequence[Pair]):
    """Pairs with the starting model's log-probabilities."""

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
class ReferenceInputs:
    """A model that no step has changed yet, and what its reference is computed with."""

    where: StageDir
    stage: Stage
    model: nn.Module
    forward: Forward
    collator: Collator
    workers: BatchWorkers
    ranks: Ranks
    stop: StopRequest
    metrics: Journal


def with_reference(start: ReferenceInputs, rows: Mapping[str, Sequence[TrainRow]]) -> dict[str, Sequence[TrainRow]]:
    """By the names of their files; unchanged where no reference is cached. To be called before a checkpoint is
    restored: a missing file is made again, always from the starting weights."""
    pairs = {name: found for name, found in rows.items() if isinstance(found, ExamplePairs)}
    if not is_reference_cached(start.stage.objective, start.stage.tuning):
        return dict(rows)
    key = _key(start)
    values = {name: np.full((len(found.distinct()[0]), 2), np.nan, np.float32) for name, found in pairs.items()}
    values = _read(start.where.reference, key, values) or values
    start.ranks.barrier()  # no rank writes before all have read
    _ReferencePass(start, key, values).finish(pairs)
    return {name: ReferencedPairs(found, values[name]) for name, found in pairs.items()}


class _ReferencePass:
    def __init__(self, start: ReferenceInputs, key: str, values: Values) -> None:
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
        calls = (collate_call(start.collator, [pairs[int(row)] for row in rows[group]]) for group in own)
        for group, batch in zip(own, prefetched(start.workers, calls), strict=True):
            for places, found in start.ranks.gather((group, _sums(start, batch).tolist())):
                values[places] = np.array(found, np.float32)
                if not np.isfinite(values[places]).all():
                    odd = next(sides for sides in found if not np.isfinite(sides).all())
                    problem = f"the starting model gives a pair of {name} the log-probabilities {odd}"
                    remedy = "set precision: fp32 to see whether it overflows; else the weights are damaged"
                    raise FindingError(f"{problem}, which cannot be a reference", remedy)
            self._rest()

    def _rest(self) -> None:
        """Between two micro-batches."""
        start, now = self._start, time.monotonic()
        reason = start.stop.agreed(start.ranks)
        if reason is not None or now - self._saved >= _SAVE_SECONDS:
            self._save()
        if reason is not None:
            done = f"{self._total() - self._missing():,} of {self._total():,} pairs"
            raise Interrupted(f"stopped by {reason} before the first step; the reference of {done} is kept")
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


def _sums(start: ReferenceInputs, batch: Batch) -> NDArray[np.float32]:
    """Of both sides of each pair. An adapter that no step has changed belongs to the starting model."""
    with eval_without_grad(start.model):
        sums_R = sequence_sums(start.forward(on_device(batch, start.stage.device)), paired_of(batch))
    sides: NDArray[np.float32] = sums_R.float().cpu().numpy().reshape(2, -1).T
    return sides


def _key(start: ReferenceInputs) -> str:
    """Covers all that the numbers depend on except rounding: rows, weights, tokens, adapter, precision."""
    stage = start.stage
    rows = {name: sha256 for name, sha256 in stage.prepared.items() if name.endswith(".safetensors")}
    adapter = starting_adapter(stage.tuning, start.where.run)
    content = None if adapter is None else sha256_of(adapter / ADAPTER_WEIGHTS)
    tuning = stage.tuning.model_dump(mode="json", exclude={"adapter", "dropout"})
    inputs: list[Any] = [rows, stage.model_fingerprint, stage.template_sha256, tuning, content, stage.precision]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _write(path: Path, key: str, values: Values) -> None:
    with staged_file(path, sum(array.nbytes for array in values.values())) as temporary:
        save_file(values, temporary, metadata={"key": key, "sha256": _digest(values)})


def _read(path: Path, key: str, wanted: Values) -> Values | None:
    """The cached values of these rows and this model; None where there are none, or none that can be trusted."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            found: Values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not a dict
    except SafetensorError as error:
        log.warning("%s cannot be read (%s) and is made again", path.name, error)
        return None
    if about.get("key") != key or {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in wanted.items()}:
        log.warning("%s belongs to other rows or another model and is made again", path.name)
        return None
    if about.get("sha256") != _digest(found):
        log.warning("%s is damaged and is made again", path.name)
        return None
    return {name: array.copy() for name, array in found.items()}


def _digest(values: Values) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode() + np.ascontiguousarray(values[name]).tobytes())
    return digest.hexdigest()


_NOISE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}
"""Difference of a token's log-probability in another batch with the same weights, by precision."""
_EXACT = 1e-6
_ROWS = 4


def require_dpo_start(ctx: TrainContext) -> None:
    """Before the first update the model is its own reference, so the DPO loss is ln 2, whatever the rows; else the
    reference is another model. Tested on the first rows of the first step, one at a time, the same on every rank and
    without dropout. The random numbers are restored."""
    stage, asked = ctx.stage, ctx.stage.objective
    if not isinstance(asked, Dpo):
        return
    rows = rows_of_step(0, num_rows=len(ctx.examples), global_batch=stage.global_batch, seed=stage.seed)[:_ROWS]
    batches = list(prefetched(ctx.workers, (batch_call(ctx, ctx.examples, [row], 0) for row in rows)))
    random_before = random_state()
    with eval_without_grad(ctx.model):
        found = [ctx.objective(ctx.forward, on_device(batch, stage.device)) for batch in batches]
    restore_random(random_before)
    loss = sum(part.total.item() for part in found) / sum(part.count for part in found)
    # errors of single tokens have either sign, so those of a pair grow with the root of their number
    tokens = sum(batch.num_supervised for batch in batches) / len(batches)
    allowed = _EXACT + asked.beta * _NOISE[stage.precision] * math.sqrt(tokens)
    ctx.metrics.write(event="dpo_start", found=loss if math.isfinite(loss) else str(loss), allowed=allowed)
    is_off = not abs(loss - math.log(2)) <= allowed  # so that NaN is off too
    if not ctx.ranks.any(is_off):
        return
    worst = next(found for found, off in ctx.ranks.gather((loss, is_off)) if off)
    remedy = "please report it with the spec; objective.reference: cached computes the reference beforehand"
    if is_reference_cached(asked, stage.tuning):
        remedy = "remove reference.safetensors from the stage directory and give the same command again"
    raise FindingError(
        f"before the first step the DPO loss is {worst:.6f}; it must be ln 2 = {math.log(2):.6f} (to {allowed:.0e}), "
        "since model and reference are the same weights there: the reference is not where training starts",
        remedy,
    )
