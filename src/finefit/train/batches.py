"""The micro-batches of a step, as the levers in force cut them."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from finefit.artifacts.records import Levers
from finefit.data.collate import Collator, grouped, lengths_of, pack, packs_of, pictures_of, supervised_counts_of
from finefit.data.examples import Example
from finefit.data.order import rows_of_rank
from finefit.data.packing import Capacity, capacity_of, num_sides
from finefit.data.pairs import Trained
from finefit.data.workers import Workers
from finefit.errors import FinefitError
from finefit.objective.batch import Batch
from finefit.objective.custom import seed_of
from finefit.train.feed import Make
from finefit.train.live import Live


def maker(live: Live, levers: Levers) -> Make:
    return partial(_batches, live, levers.micro_batch, capacity_under(live, levers))


def capacity_under(live: Live, levers: Levers) -> Capacity | None:
    """Of a pack: what was rehearsed, and no more. None where rows are not packed."""
    if not levers.packing:
        return None
    return capacity_of(
        micro_batch=levers.micro_batch,
        longest=int(lengths_of(live.examples).max()),
        supervised=int(supervised_counts_of(live.examples).max()),
        rows_per_step=min(live.stage.global_batch, len(live.examples)),
        sides=num_sides(lengths_of(live.examples)),
    )


def _batches(live: Live, micro_batch: int, capacity: Capacity | None, step: int) -> list[Batch]:
    """Of this rank, in memory that a card can copy from while it computes. None where the step has fewer rows than there are ranks."""
    stage, ranks = live.stage, live.ranks
    rows = rows_of_rank(
        step,
        rank=ranks.rank,
        num_ranks=ranks.size,
        num_rows=len(live.examples),
        global_batch=stage.global_batch,
        seed=stage.seed,
    )
    batches = cut(live, live.examples, rows, step, micro_batch=micro_batch, capacity=capacity) if rows else []
    return [batch.moved(Tensor.pin_memory) for batch in batches] if stage.device == "cuda" else batches


def cut(
    live: Live,
    examples: Sequence[Trained],
    rows: Sequence[int],
    occasion: int | str,
    *,
    micro_batch: int,
    capacity: Capacity | None = None,
) -> list[Batch]:
    """`rows`: numbers of examples, packed where a capacity is given; else cut by length. `occasion`: a step, or what else they are taken for."""
    chosen = [examples[row] for row in rows]
    if capacity is not None:
        return [pack([chosen[at] for at in group]) for group in packs_of(chosen, capacity)]
    groups = grouped(lengths_of(chosen), micro_batch)
    return list(
        made(live.workers, (call_for(live, examples, [rows[at] for at in group], occasion) for group in groups))
    )


class Call(NamedTuple):
    """Makes a batch, here or in a process of its own."""

    make: Callable[..., Batch]
    args: tuple[object, ...]
    is_long: bool
    """Images are decoded for it, or code of the user's own runs, which may not see a card."""

    def __call__(self) -> Batch:
        return self.make(*self.args)


def call_for(live: Live, examples: Sequence[Trained], rows: Sequence[int], occasion: int | str) -> Call:
    """What is drawn for a row of a model of the user's own depends on no other."""
    chosen = [examples[row] for row in rows]
    if live.compose is not None:
        return Call(
            live.compose,
            ([single(row) for row in chosen], [seed_of(live.stage.seed, occasion, row) for row in rows]),
            True,
        )
    return collating(live.collator, chosen)


def collating(collator: Collator, rows: Sequence[Trained]) -> Call:
    return Call(collator, (rows,), any(pictures_of(row) for row in rows))


def made(workers: Workers, calls: Iterable[Call]) -> Iterator[Batch]:
    """In their order; while one is used, the next ones are made."""
    waiting: deque[Call | Future[Batch]] = deque()
    for call in calls:
        waiting.append(workers.submit(call.make, *call.args) if call.is_long else call)
        if len(waiting) > workers.count:
            yield _taken(waiting.popleft())
    while waiting:
        yield _taken(waiting.popleft())


def _taken(waiting: "Call | Future[Batch]") -> Batch:
    return waiting() if isinstance(waiting, Call) else waiting.result()


def single(row: Trained) -> Example:
    if not isinstance(row, Example):
        raise FinefitError("a model of the user's own was given a preference pair")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank has of a step, or all of them together."""

    batches: int
    rows: int
    count: int
    """What the loss is a mean of."""
    tokens: int
    supervised: int
    digest: str
    """Names the rows, so that two runs can be compared step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A step as this rank sees it."""

    own: list[Batch]
    idle: list[Batch]
    """To be run with weight zero, so that every rank runs as many micro-batches as the one with most."""
    whole: Share
    """Over all ranks."""


def dealt(live: Live, batches: list[Batch]) -> Dealt:
    own = Share(
        batches=len(batches),
        rows=sum(batch.num_rows for batch in batches),
        count=sum(live.objective.count(batch) for batch in batches),
        tokens=sum(batch.num_tokens for batch in batches),
        supervised=sum(batch.num_supervised for batch in batches),
        digest=digest(batches),
    )
    shares: Sequence[Share] = live.ranks.gather(own)
    whole = Share(
        batches=max(share.batches for share in shares),
        rows=sum(share.rows for share in shares),
        count=sum(share.count for share in shares),
        tokens=sum(share.tokens for share in shares),
        supervised=sum(share.supervised for share in shares),
        digest=_joined([share.digest for share in shares]),
    )
    missing = whole.batches - own.batches
    return Dealt(own=batches, idle=[_shortest(live)] * missing if missing else [], whole=whole)


def _joined(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _shortest(live: Live) -> Batch:
    lengths = lengths_of(live.examples)
    row = int(lengths.reshape(len(lengths), -1).sum(axis=1).argmin())
    (batch,) = cut(live, live.examples, [row], "idle", micro_batch=1)
    return batch


def require_all_rows(step: int, whole: Share, num_rows: int) -> None:
    """What is trained on is counted: a row that is lost or seen twice between order and batch would show nowhere else."""
    if whole.rows != num_rows:
        raise FinefitError(f"step {step + 1} has {whole.rows} rows where its order has {num_rows}")


def on_device(batch: Batch, device: str) -> Batch:
    return batch.moved(lambda tensor: tensor.to(device, non_blocking=True))


def digest(batches: Sequence[Batch]) -> str:
    """Names what was trained on, so that two runs can be compared step by step."""
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch.input_ids_BT.numpy().tobytes())
        found.update(batch.positions_N.numpy().tobytes())
        if batch.extra is not None:
            found.update(batch.extra.identity.encode())
    return found.hexdigest()[:16]
