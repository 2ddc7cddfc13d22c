"""Computes the starting model's log-probabilities of all pairs before the first step, keeps them in the stage
directory, and proves that DPO starts at its reference. Pairs that are not done yet are NaN, so a stopped computation
resumes. The micro-batches do not depend on where it was stopped, so neither do the numbers."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from finefit.artifacts.atomic import Journal, staged_file
from finefit.artifacts.cache import content_key
from finefit.artifacts.reading import is_there
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, grouped
from finefit.data.examples import ExamplePairs, Pair, TrainRow
from finefit.data.order import part_of_rank, rows_of_step
from finefit.errors import FindingError, Interrupted, ModelError, first_line
from finefit.facts.files import read_weight_file, sha256_of
from finefit.model.load import starting_adapter
from finefit.model.resolve_model import ADAPTER_WEIGHTS
from finefit.objective.batch import Batch, Forward
from finefit.objective.losses import paired_of, sequence_sums
from finefit.spec.schema import Dpo
from finefit.step.forward import eval_without_grad, is_reference_cached
from finefit.step.state import random_state, restore_random
from finefit.train.batches import batch_call, collate_call, on_device, prefetched
from finefit.train.context import StopRequest, TrainContext
from finefit.train.saver import Saver

log = logging.getLogger("finefit")
_SAVE_SECONDS, _TOLD_SECONDS = 60.0, 10.0
Values = dict[str, NDArray[np.float32]]
"""A row for each distinct pair and a column for each side, by file."""


class ReferencedPairs(Sequence[Pair]):
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


@dataclass(slots=True, kw_only=True)
class ReferencePass:
    """Computes the reference of a model that no step has changed yet."""

    saver: Saver
    """The saver of the same model, stage and ranks."""
    forward: Forward
    collator: Collator
    workers: BatchWorkers
    stop: StopRequest
    metrics: Journal
    _key: str = field(init=False)
    _values: Values = field(init=False)
    _saved: float = field(init=False)
    _told: float = field(init=False)

    def rows(self, rows: Mapping[str, Sequence[TrainRow]]) -> dict[str, Sequence[TrainRow]]:
        """The rows with their references, by file name; unchanged if no reference is cached. Call it before a
        checkpoint is restored, because a missing file is computed again and needs the starting weights."""
        stage = self.saver.stage
        if not is_reference_cached(stage.objective, stage.tuning):
            return dict(rows)
        pairs = {name: found for name, found in rows.items() if isinstance(found, ExamplePairs)}
        unknown = {name: np.full((len(found.distinct()[0]), 2), np.nan, np.float32) for name, found in pairs.items()}
        # all that the numbers depend on except rounding: rows, weights, tokens, adapter, precision
        files = {name: sha256 for name, sha256 in stage.prepared.items() if name.endswith(".safetensors")}
        adapter = starting_adapter(stage.tuning, self.saver.where.run)
        content = None if adapter is None else sha256_of(adapter / ADAPTER_WEIGHTS)
        tuning = stage.tuning.model_dump(mode="json", exclude={"adapter", "dropout"})
        key = [files, stage.model_fingerprint, stage.template_sha256, tuning, content, stage.precision]
        self._key = content_key(key)
        self._values = _read(self.saver.where.reference, self._key, unknown, self._reject) or unknown
        self.saver.ranks.barrier()  # no rank writes before all have read
        self._saved = self._told = time.monotonic()
        if self._num_missing():
            for name, found in pairs.items():
                self._compute(name, found)
            self._save()
            self._tell()
        return {name: ReferencedPairs(found, self._values[name]) for name, found in pairs.items()}

    def _compute(self, name: str, pairs: ExamplePairs) -> None:
        values, rows = self._values[name], pairs.distinct()[0]
        micro_batch, ranks = self.saver.stage.levers.micro_batch, self.saver.ranks
        groups = [group for group in grouped(pairs.lengths[rows], micro_batch) if np.isnan(values[group]).any()]
        own = [group for group, _ in part_of_rank(groups, rank=ranks.rank, num_ranks=ranks.size)]
        calls = (collate_call(self.collator, [pairs[int(row)] for row in rows[group]]) for group in own)
        for group, batch in zip(own, prefetched(self.workers, calls), strict=True):
            for places, found in ranks.gather((group, self._sums(batch).tolist())):
                values[places] = np.array(found, np.float32)
                if not np.isfinite(values[places]).all():
                    odd = next(sides for sides in found if not np.isfinite(sides).all())
                    problem = f"the starting model gives a pair of {name} the log-probabilities {odd}"
                    remedy = "set precision: fp32 to see whether it overflows; else the weights are damaged"
                    raise FindingError(f"{problem}, which cannot be a reference", remedy)
            now, reason = time.monotonic(), self.stop.agreed(ranks)
            if reason is not None or now - self._saved >= _SAVE_SECONDS:
                self._save()
            if reason is not None:
                done = f"{self._num_pairs() - self._num_missing():,} of {self._num_pairs():,} pairs"
                raise Interrupted(f"stopped by {reason} before the first step; the reference of {done} is kept")
            if now - self._told >= _TOLD_SECONDS:
                self._tell()

    def _sums(self, batch: Batch) -> NDArray[np.float32]:
        """The summed log-probabilities of both sides of each pair. An adapter that no step has changed is part of the
        starting model."""
        with eval_without_grad(self.saver.model):
            sums_R = sequence_sums(self.forward(on_device(batch, self.saver.stage.device)), paired_of(batch))
        sides: NDArray[np.float32] = sums_R.float().cpu().numpy().reshape(2, -1).T
        return sides

    def _save(self) -> None:
        if self.saver.ranks.is_first:
            about = {"key": self._key, "sha256": _digest(self._values)}
            with staged_file(self.saver.where.reference, sum(v.nbytes for v in self._values.values())) as temporary:
                save_file(self._values, temporary, metadata=about)
        self._saved = time.monotonic()

    def _reject(self, why: str) -> None:
        line = f"{self.saver.where.reference.name} {why} and is made again"
        log.warning(line)
        self.metrics.write(event="rejected", note=line)

    def _tell(self) -> None:
        if self.saver.ranks.is_first:
            total = self._num_pairs()
            self.metrics.write(event="reference", done=total - self._num_missing(), total=total)
        self._told = time.monotonic()

    def _num_missing(self) -> int:
        return sum(int(np.isnan(values).any(axis=1).sum()) for values in self._values.values())

    def _num_pairs(self) -> int:
        return sum(map(len, self._values.values()))


def _read(path: Path, key: str, wanted: Values, reject: Callable[[str], None]) -> Values | None:
    """The cached values of these rows and this model; None where there are none, or none that can be trusted, which
    `reject` hears: nothing but time is lost with them."""
    if not is_there(path):
        return None
    try:
        read_weight_file(path)  # a file, and as large as its header says
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            found: Values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not a dict
        if about.get("key") != key or {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in wanted.items()}:
            why = "belongs to other rows or another model"
        elif about.get("sha256") != _digest(found):
            why = "is damaged"
        else:
            return {name: array.copy() for name, array in found.items()}
    except (SafetensorError, ModelError, OSError) as error:
        why = f"cannot be read ({first_line(error)})"
    reject(why)
    return None


def _digest(values: Values) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode() + np.ascontiguousarray(values[name]).tobytes())
    return digest.hexdigest()


_NOISE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}
"""How much a token's log-probability differs in another batch with the same weights, by precision."""
_EXACT, _ROWS = 1e-6, 4


def require_dpo_start(ctx: TrainContext) -> None:
    """Before the first update the model is its own reference, so the DPO loss is ln 2, whatever the rows. This is
    tested on the first rows of the first step, one at a time, without dropout. The random numbers are restored."""
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
        f"before the first step the DPO loss is {worst:.6f} and not ln 2 = {math.log(2):.6f} (within {allowed:.0e}), "
        "although model and reference have the same weights there: the reference is not the starting model",
        remedy,
    )
