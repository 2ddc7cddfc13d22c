"""The micro-batches of a step under the current levers, the loader that makes them ahead of time, and the proof that
the split into micro-batches does not change the loss of a custom model."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import psutil
from torch import Tensor

from finefit.artifacts.records import Levers
from finefit.custom.model import CustomFamily, custom_family_of
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, grouped, images_of, lengths_of, pack, packs_of, supervised_counts_of
from finefit.data.examples import Example, TrainRow
from finefit.data.order import Capacity, capacity_of, num_sides, rows_of_rank
from finefit.errors import FinefitError, WorkerDied, is_out_of_memory
from finefit.objective.batch import Batch, Forward, seed_of
from finefit.objective.losses import custom_loss
from finefit.step.forward import eval_without_grad
from finefit.step.state import random_state, restore_random
from finefit.train.context import TrainContext

MakeBatches = Callable[[int], list[Batch]]
"""Makes the micro-batches of a step. It is a pure function, so batches of a step that is never taken do no harm."""


class BatchLoader:
    """One thread makes the micro-batches of the next step while the device computes this one. The thread lives as long
    as the `with` block; its errors are raised by `take`."""

    def __init__(self, make: MakeBatches, *, total_steps: int) -> None:
        self._make, self._total_steps = make, total_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None
        self.taken: list[Batch] = []
        """The batches of the last step, on the host."""

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The batches of any step, on the host, and the seconds spent waiting for them. Those of the next step are made
        ahead."""
        began = time.perf_counter()
        if self._ahead is not None and self._ahead[0] != step:
            self.change(self._make)
        self.taken = (self._ahead[1] if self._ahead else self._submit(step)).result()
        waited = time.perf_counter() - began
        self._ahead = (step + 1, self._submit(step + 1)) if step + 1 < self._total_steps else None
        return self.taken, waited

    def ahead(self) -> list[Batch]:
        """The batches of the step after the last one taken, if there is one and its levers are the same."""
        return self._ahead[1].result() if self._ahead else []

    def change(self, make: MakeBatches) -> None:
        """Uses `make` from the next step on; batches that were made ahead are dropped."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._make, self._ahead = make, None

    def _submit(self, step: int) -> Future[list[Batch]]:
        make = self._make

        def named() -> list[Batch]:
            """Adds the step to errors."""
            try:
                return make(step)
            except MemoryError:
                problem = f"host memory did not hold the micro-batches of step {step + 1}"
                free = psutil.virtual_memory().available / 2**30
                remedy = "close other programs and give the same command again: it resumes from the last checkpoint"
                raise WorkerDied(f"{problem}: {free:.1f} GiB are free", remedy) from None
            except Exception as error:
                error.add_note(f"while the batch loader made the micro-batches of step {step + 1}")
                raise

        return self._thread.submit(named)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)


def capacity_under(ctx: TrainContext, levers: Levers) -> Capacity | None:
    """The capacity of a pack, as rehearsed; None if rows are not packed."""
    if not levers.packing:
        return None
    examples, lengths = ctx.examples, lengths_of(ctx.examples)
    return capacity_of(
        micro_batch=levers.micro_batch,
        longest=int(lengths.max()),
        supervised=int(supervised_counts_of(examples).max()),
        rows_per_step=min(ctx.stage.global_batch, len(examples)),
        sides=num_sides(lengths),
    )


def batch_maker(ctx: TrainContext, levers: Levers) -> MakeBatches:
    """Makes this rank's micro-batches, in pinned memory if the device is a card. There are none if the step has fewer
    rows than there are ranks."""
    stage, ranks, examples, capacity = ctx.stage, ctx.ranks, ctx.examples, capacity_under(ctx, levers)
    share = partial(rows_of_rank, rank=ranks.rank, num_ranks=ranks.size, num_rows=len(examples))

    def make(step: int) -> list[Batch]:
        rows = share(step, global_batch=stage.global_batch, seed=stage.seed)
        if not rows:
            return []
        batches = cut_batches(ctx, examples, rows, step, micro_batch=levers.micro_batch, capacity=capacity)
        return [batch.moved(Tensor.pin_memory) for batch in batches] if stage.device == "cuda" else batches

    return make


def cut_batches(
    ctx: TrainContext,
    examples: Sequence[TrainRow],
    rows: Sequence[int],
    occasion: int | str,
    *,
    micro_batch: int,
    capacity: Capacity | None = None,
) -> list[Batch]:
    """`rows` are the numbers of examples; they are packed if a capacity is given, else grouped by length."""
    chosen = [examples[row] for row in rows]
    if capacity is not None:
        return [pack([chosen[at] for at in group]) for group in packs_of(chosen, capacity)]
    groups = grouped(lengths_of(chosen), micro_batch)
    calls = (batch_call(ctx, examples, [rows[at] for at in group], occasion) for group in groups)
    return list(prefetched(ctx.workers, calls))


class BatchCall(NamedTuple):
    """Makes one batch, here or in another process."""

    make: Callable[[], Batch]
    is_long: bool
    """Whether it decodes images or runs code of a custom model, which must not see a card."""


def batch_call(ctx: TrainContext, examples: Sequence[TrainRow], rows: Sequence[int], occasion: int | str) -> BatchCall:
    """The random numbers of a custom model's row depend on no other row."""
    chosen = [examples[row] for row in rows]
    if ctx.compose is None:
        return collate_call(ctx.collator, chosen)
    single = [row for row in chosen if isinstance(row, Example)]
    if len(single) < len(chosen):
        raise FinefitError("a custom model was given a preference pair")
    return BatchCall(partial(ctx.compose, single, [seed_of(ctx.stage.seed, occasion, row) for row in rows]), True)


def collate_call(collator: Collator, rows: Sequence[TrainRow]) -> BatchCall:
    return BatchCall(partial(collator, rows), any(images_of(row) for row in rows))


def prefetched(workers: BatchWorkers, calls: Iterable[BatchCall]) -> Iterator[Batch]:
    """The results in order; while one is used, the next ones are made."""
    waiting: deque[Callable[[], Batch]] = deque()
    for call in calls:
        waiting.append(workers.submit(call.make).result if call.is_long else call.make)
        if len(waiting) > workers.count:
            yield waiting.popleft()()
    for result in waiting:
        yield result()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """One rank's share of a step, or the shares of all ranks together."""

    batches: int
    rows: int
    count: int
    """The number that the loss is a mean over."""
    tokens: int
    supervised: int
    digest: str
    """Identifies the rows, so that two runs can be compared step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    own: list[Batch]
    idle: list[Batch]
    """Runs with weight zero, so that every rank runs as many micro-batches as the rank with the most."""
    whole: StepShare
    """The share of all ranks together."""


def share_step(ctx: TrainContext, batches: list[Batch]) -> StepBatches:
    own = StepShare(
        batches=len(batches),
        rows=sum(batch.num_rows for batch in batches),
        count=sum(ctx.objective.count(batch) for batch in batches),
        tokens=sum(batch.num_tokens for batch in batches),
        supervised=sum(batch.num_supervised for batch in batches),
        digest=batches_digest(batches),
    )
    shares: Sequence[StepShare] = ctx.ranks.gather(own)
    sums = {name: sum(getattr(share, name) for share in shares) for name in ("rows", "count", "tokens", "supervised")}
    together = hashlib.sha256("".join(share.digest for share in shares).encode()).hexdigest()[:16]
    digest = own.digest if len(shares) == 1 else together
    whole = StepShare(batches=max(share.batches for share in shares), digest=digest, **sums)
    idle: list[Batch] = []
    if missing := whole.batches - own.batches:
        lengths = lengths_of(ctx.examples)
        shortest = int(lengths.reshape(len(lengths), -1).sum(axis=1).argmin())
        idle = cut_batches(ctx, ctx.examples, [shortest], "idle", micro_batch=1) * missing
    return StepBatches(own=batches, idle=idle, whole=whole)


def on_device(batch: Batch, device: str) -> Batch:
    return batch.moved(lambda tensor: tensor.to(device, non_blocking=True))


def batches_digest(batches: Sequence[Batch]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.input_ids_BT.numpy().tobytes())
        found.update(batch.positions_N.numpy().tobytes())
        if batch.extra is not None:
            found.update(batch.extra.identity.encode())
    return found.hexdigest()[:16]


_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # of the sum: a mean of two rows is half of it


def prove_sum(ctx: TrainContext) -> None:
    """Runs on two rows before the first step of a custom model and restores the random number generators."""
    family = custom_family_of(ctx.model)
    if family is None or ctx.compose is None or len(ctx.examples) < 2:
        return
    (both,), parts = (
        [on_device(batch, ctx.stage.device) for batch in cut_batches(ctx, ctx.examples, (0, 1), 0, micro_batch=size)]
        for size in (2, 1)
    )
    random_before = random_state()
    try:
        with eval_without_grad(ctx.model):
            require_sum(family, ctx.forward, both, parts, tolerance=_TOLERANCE[ctx.stage.precision])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        ctx.metrics.write(event="sum_not_proved", step=0, note="two rows at once did not fit")
    finally:
        restore_random(random_before)


def require_sum(
    family: CustomFamily, forward: Forward, both: Batch, parts: Sequence[Batch], *, tolerance: float
) -> None:
    """Call it without gradients and dropout, on rows with the same seeds."""
    together, apart = custom_loss.count(both), sum(custom_loss.count(part) for part in parts)
    if together != apart:
        raise family.fault(
            f"counts {together} for {both.num_rows} rows together and {apart} for each alone: the cut into "
            "micro-batches would change the result"
        )
    whole, alone = forward(both).item(), sum(forward(part).item() for part in parts)
    if abs(whole - alone) > tolerance * max(abs(whole), abs(alone)):
        raise family.fault(
            f"has a loss of {whole:.6g} for {both.num_rows} rows together and of {alone:.6g} for each alone: give the "
            "sum over what count counts, never a mean, and let no row affect another"
        )
