"""The micro-batches of a step under the current levers, and the loader that makes them ahead."""

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
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, grouped, images_of, lengths_of, pack, packs_of, supervised_counts_of
from finefit.data.examples import Example, TrainRow
from finefit.data.order import Capacity, capacity_of, num_sides, rows_of_rank
from finefit.errors import FinefitError, WorkerDied
from finefit.objective.batch import Batch
from finefit.objective.custom import seed_of
from finefit.train.context import TrainContext

MakeBatches = Callable[[int], list[Batch]]
"""The micro-batches of a step: a pure function, so that those of a step that is never taken do no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatches:
    batches: list[Batch]
    """On the host."""
    wait_seconds: float
    """Time that the loop waited for them."""


def _named(make: MakeBatches, step: int) -> list[Batch]:
    """Errors name the step."""
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


class BatchLoader:
    """While the device computes a step, one thread makes the micro-batches of the next. The thread lives as long as the
    `with` block; its errors are raised where the step is taken."""

    def __init__(self, make: MakeBatches, *, total_steps: int) -> None:
        self._make, self._total_steps = make, total_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def take(self, step: int) -> LoadedBatches:
        """Of any step; the one after it is then made ahead."""
        began = time.perf_counter()
        batches = self._asked(step).result()
        waited = time.perf_counter() - began
        self._ahead = (step + 1, self._submit(step + 1)) if step + 1 < self._total_steps else None
        return LoadedBatches(batches=batches, wait_seconds=waited)

    def change(self, make: MakeBatches) -> None:
        """From the next step that is taken; what was made ahead is dropped."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._make, self._ahead = make, None

    def _asked(self, step: int) -> Future[list[Batch]]:
        if self._ahead is not None:
            expected, future = self._ahead
            if expected == step:
                return future
            future.cancel()
        return self._submit(step)

    def _submit(self, step: int) -> Future[list[Batch]]:
        return self._thread.submit(_named, self._make, step)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)


def capacity_under(ctx: TrainContext, levers: Levers) -> Capacity | None:
    """Of a pack: what was rehearsed. None where rows are not packed."""
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
    """Of this rank, in pinned memory for a card. Empty where the step has fewer rows than there are ranks."""
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
    """`rows`: numbers of examples, packed where a capacity is given, else grouped by length. `occasion`: a step, or
    another purpose."""
    chosen = [examples[row] for row in rows]
    if capacity is not None:
        return [pack([chosen[at] for at in group]) for group in packs_of(chosen, capacity)]
    groups = grouped(lengths_of(chosen), micro_batch)
    calls = (batch_call(ctx, examples, [rows[at] for at in group], occasion) for group in groups)
    return list(prefetched(ctx.workers, calls))


class BatchCall(NamedTuple):
    """Makes a batch, here or in another process."""

    make: Callable[..., Batch]
    args: tuple[object, ...]
    is_long: bool
    """Whether it decodes images or runs code of a custom model, which must not see a card."""

    def __call__(self) -> Batch:
        return self.make(*self.args)


def batch_call(ctx: TrainContext, examples: Sequence[TrainRow], rows: Sequence[int], occasion: int | str) -> BatchCall:
    """The random numbers of a custom model's row depend on no other row."""
    chosen = [examples[row] for row in rows]
    if ctx.compose is not None:
        seeds = [seed_of(ctx.stage.seed, occasion, row) for row in rows]
        return BatchCall(ctx.compose, ([single(row) for row in chosen], seeds), True)
    return collate_call(ctx.collator, chosen)


def collate_call(collator: Collator, rows: Sequence[TrainRow]) -> BatchCall:
    return BatchCall(collator, (rows,), any(images_of(row) for row in rows))


def prefetched(workers: BatchWorkers, calls: Iterable[BatchCall]) -> Iterator[Batch]:
    """In order; while one is used, the next ones are made."""
    waiting: deque[BatchCall | Future[Batch]] = deque()
    for call in calls:
        waiting.append(workers.submit(call.make, *call.args) if call.is_long else call)
        if len(waiting) > workers.count:
            yield _taken(waiting.popleft())
    yield from map(_taken, waiting)


def _taken(waiting: "BatchCall | Future[Batch]") -> Batch:
    return waiting() if isinstance(waiting, BatchCall) else waiting.result()


def single(row: TrainRow) -> Example:
    if not isinstance(row, Example):
        raise FinefitError("a custom model was given a preference pair")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """A rank's share of a step, or that of all ranks together."""

    batches: int
    rows: int
    count: int
    """What the loss is a mean of."""
    tokens: int
    supervised: int
    digest: str
    """Identifies the rows, so that two runs can be compared step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """A step as this rank sees it."""

    own: list[Batch]
    idle: list[Batch]
    """Run with weight zero, so that every rank runs as many micro-batches as the one with most."""
    whole: StepShare
    """Over all ranks."""


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
    digests = [share.digest for share in shares]
    joined = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    whole = StepShare(
        batches=max(share.batches for share in shares),
        rows=sum(share.rows for share in shares),
        count=sum(share.count for share in shares),
        tokens=sum(share.tokens for share in shares),
        supervised=sum(share.supervised for share in shares),
        digest=digests[0] if len(digests) == 1 else joined,
    )
    missing = whole.batches - own.batches
    return StepBatches(own=batches, idle=[_shortest(ctx)] * missing if missing else [], whole=whole)


def _shortest(ctx: TrainContext) -> Batch:
    lengths = lengths_of(ctx.examples)
    row = int(lengths.reshape(len(lengths), -1).sum(axis=1).argmin())
    (batch,) = cut_batches(ctx, ctx.examples, [row], "idle", micro_batch=1)
    return batch


def require_all_rows(step: int, whole: StepShare, num_rows: int) -> None:
    """A row that is lost or repeated between order and batch would show nowhere else."""
    if whole.rows != num_rows:
        raise FinefitError(f"step {step + 1} has {whole.rows} rows where its order has {num_rows}")


def on_device(batch: Batch, device: str) -> Batch:
    return batch.moved(lambda tensor: tensor.to(device, non_blocking=True))


def batches_digest(batches: Sequence[Batch]) -> str:
    """Identifies the rows of a step, so that two runs can be compared."""
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.input_ids_BT.numpy().tobytes())
        found.update(batch.positions_N.numpy().tobytes())
        if batch.extra is not None:
            found.update(batch.extra.identity.encode())
    return found.hexdigest()[:16]
