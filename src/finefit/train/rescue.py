"""Out of memory in a step: the same rows again, fewer of them at once.

What the step held is given back, the random numbers stand where they stood, and the same rows are taken again under the next levers, on all ranks.
The global batch, its count and its loss stay as they are. Only when every exact lever is pulled does the run stop, resumable.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Levers, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.trainings import TrainState
from finefit.errors import Resumable
from finefit.spec.schema import DeepSpeed
from finefit.spec.schema import Engine as EngineSpec
from finefit.step.engine import Engine
from finefit.step.levers import layers_of
from finefit.step.shortage import is_shortage as is_shortage
from finefit.train.live import Live
from finefit.train.ranks import ONE_RANK, Ranks
from finefit.train.saver import agreed_checkpoint
from finefit.train.validation import validate

T = TypeVar("T")
_CHUNKS = (1024, 256)
_TILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """How an attempt ran out."""

    words: str
    bytes_held: dict[str, int]
    is_torn: bool
    """Whether weights may be changed already: it ran out within the update."""


def attempt(run: Callable[[Engine], T], live: Live, levers: Levers) -> T | Shortage:
    """What `run` gives, or how it ran out of memory on any rank; all ranks get the same of the two.

    Ranks that hold whole models ask one another before they exchange gradients. A rank that runs out later, or whose engine exchanges weights all the
    time, cannot be waited for: the correction is written down, the rank ends, and with it the others; the same command goes on."""
    can_agree = live.stage.engine.kind in ("single", "ddp")
    watched = _Watched(
        live.engine, live.ranks if can_agree else ONE_RANK, is_torn_in_backward=levers.update == "inside"
    )
    try:
        return run(watched)
    except _OutElsewhere:
        words, held, is_here = "another rank is out of memory", {}, False
    except (RuntimeError, MemoryError) as error:  # OutOfMemoryError is a RuntimeError
        if not is_shortage(error):
            raise
        words, held, is_here = _first_line(error), _bytes_held(live.stage.device), True
    _give_back(live)  # after the `except`: the frames of an error hold every tensor of the step
    shortage = Shortage(words=words, bytes_held=held, is_torn=watched.is_torn)
    if is_here and live.ranks.size > 1:
        if not can_agree or watched.has_agreed:
            raise shortage_of_a_rank(live, levers, shortage)
        live.ranks.any(True)
    return shortage


def corrected(live: Live, state: TrainState, shortage: Shortage) -> TrainState:
    """The same place under the next levers; the last checkpoint under them, where the weights may be torn."""
    levers = next_levers(state.levers, live)
    if levers is None:
        raise _nothing_left(live, state, shortage)
    earlier = _before_the_tear(live, state, levers, shortage) if shortage.is_torn else state
    live.corrections.add(earlier.step, levers, writes=live.ranks.is_first)
    live.metrics.write(
        event="rescued",
        step=state.step + 1,
        before=asdict(state.levers),
        after=asdict(levers),
        found=shortage.words,
        **shortage.bytes_held,
    )
    live.forward.change(levers)
    return replace(earlier, levers=levers)


def validate_rescued(live: Live, state: TrainState) -> dict[str, float] | None:
    """A validation that does not fit is made again with less at once, and so are those after it; training keeps its levers. None where nothing is
    left to pull: training goes on without."""
    levers = _no_larger(state.levers, live.corrections.validation)
    while isinstance(found := _validated_under(live, levers, state), Shortage):
        told = {"step": state.step, "found": found.words, **found.bytes_held}
        following = next_validation_levers(levers, live)
        if following is None:
            live.metrics.write(event="validation_left_out", **told)
            return None
        live.metrics.write(event="validation_rescued", before=asdict(levers), after=asdict(following), **told)
        levers = live.corrections.validation = following
    return found


def _validated_under(live: Live, levers: Levers, state: TrainState) -> dict[str, float] | Shortage:
    """The model is then again as training has it."""
    is_other_model = replace(levers, micro_batch=state.levers.micro_batch) != state.levers
    if is_other_model:
        live.forward.change(levers)
    found = attempt(partial(_validate, live, levers.micro_batch), live, state.levers)
    if is_other_model:
        live.forward.change(state.levers)
    return found


def _validate(live: Live, micro_batch: int, engine: Engine) -> dict[str, float]:
    return validate(replace(live, engine=engine), micro_batch)


def next_validation_levers(levers: Levers, live: Live) -> Levers | None:
    """Of the exact levers those that save something where nothing is kept for a backward."""
    if (at_once := min(levers.micro_batch, len(live.validation))) > 1:
        return replace(levers, micro_batch=at_once // 2)
    if live.compose is not None:  # of a model of the user's own nothing else is known to save anything here
        return None
    num_layers = len(layers_of(live.model))
    without_backward = replace(levers, recompute=num_layers, keep_attention=False, offload=True)
    pulled = _next_model_lever(without_backward, live.stage.engine, num_layers=num_layers)
    return pulled and replace(levers, loss_chunk=pulled.loss_chunk, mlp_tiles=pulled.mlp_tiles)


def _no_larger(levers: Levers, known: Levers | None) -> Levers:
    """As training has them, but nothing larger at once than what is known to fit a validation."""
    if known is None:
        return levers
    chunks = [chunk for chunk in (levers.loss_chunk, known.loss_chunk) if chunk is not None]
    return replace(
        levers,
        micro_batch=min(levers.micro_batch, known.micro_batch),
        loss_chunk=min(chunks, default=None),
        mlp_tiles=max(levers.mlp_tiles, known.mlp_tiles),
    )


def next_levers(levers: Levers, live: Live) -> Levers | None:
    """The next exact lever in the order of its price; None when all are pulled."""
    rows = -(-min(live.stage.global_batch, len(live.examples)) // live.ranks.size)
    if (
        levers.update == "after" and (at_once := min(levers.micro_batch, rows)) > 1
    ):  # an update inside backward needs all rows in one micro-batch
        return replace(levers, micro_batch=at_once // 2)
    num_layers = len(layers_of(live.model))
    if live.compose is not None:
        return replace(levers, recompute=num_layers) if levers.recompute < num_layers else None
    return _next_model_lever(levers, live.stage.engine, num_layers=num_layers)


def _next_model_lever(levers: Levers, engine: EngineSpec, *, num_layers: int) -> Levers | None:
    if levers.recompute < num_layers:
        return replace(levers, recompute=num_layers)
    for chunk in _CHUNKS:
        if levers.loss_chunk is None or levers.loss_chunk > chunk:
            return replace(levers, loss_chunk=chunk)
    if levers.keep_attention:
        return replace(levers, keep_attention=False)
    if not levers.offload:
        return replace(levers, offload=True)
    if (
        isinstance(engine, DeepSpeed) and engine.stage == 3
    ):  # gathers weights for each piece, and on short rows there are fewer of them
        return None
    return replace(levers, mlp_tiles=_TILES) if levers.mlp_tiles < _TILES else None


def _before_the_tear(live: Live, state: TrainState, levers: Levers, shortage: Shortage) -> TrainState:
    checkpoint, _ = agreed_checkpoint(live.saver.where, live.stage, live.ranks)
    if checkpoint is None:
        live.corrections.add(0, levers, writes=live.ranks.is_first)
        raise Resumable(
            f"out of memory in the update of step {state.step + 1}, before the first checkpoint: {shortage.words}",
            f"give the same command again: it starts from step 0 with {_changes(state.levers, levers)}",
        )
    earlier = live.saver.restore(checkpoint)
    live.metrics.write(event="rolled_back", step=earlier.step)
    return earlier


def shortage_of_a_rank(live: Live, levers: Levers, shortage: Shortage) -> Resumable:
    """The levers of the next attempt are written down, so that the same command goes on with them."""
    step = live.saver.last or 0
    if (following := next_levers(levers, live)) is None:
        return Resumable(
            f"rank {live.ranks.rank} is out of memory with every exact lever pulled: {shortage.words}",
            _suggestions(live),
        )
    live.corrections.add(step, following)
    return Resumable(
        f"rank {live.ranks.rank} is out of memory while others wait for it: {shortage.words}",
        f"give the same command again: it goes on from step {step} with {_changes(levers, following)}",
    )


def _nothing_left(live: Live, state: TrainState, shortage: Shortage) -> Resumable:
    what = (
        "in the update of its weights"
        if shortage.is_torn
        else f"with every exact lever pulled, {state.levers.micro_batch} row(s) at a time"
    )
    return Resumable(
        f"step {state.step + 1} is out of memory {what}: {shortage.words}. The last checkpoint stands",
        _suggestions(live),
    )


def _suggestions(live: Live) -> str:
    """As the plan of this run has them."""
    plan = RunDir(live.saver.where.run).plan
    forecast = read_record(plan, Plan).forecasts.get(live.stage.name) if plan.exists() else None
    found = (
        [
            f"--set {' --set '.join(s.changes)} saves {s.saves_bytes / 2**30:.2f} GiB ({s.price})"
            for s in forecast.suggestions
        ]
        if forecast
        else []
    )
    return (
        "; ".join(found)
        or "close what else uses the card and give the same command again, or ask `finefit plan` for a smaller spec and start with --new"
    )


def _changes(before: Levers, after: Levers) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(after).items() if value != getattr(before, name))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def _bytes_held(device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    return {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}


def _give_back(live: Live) -> None:
    live.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if live.stage.device == "cuda":
        torch.cuda.empty_cache()


class _OutElsewhere(Exception):
    pass


class _Watched:
    """The engine of one attempt: asks the other ranks before what all have to do together, and knows how far it came."""

    def __init__(self, engine: Engine, ranks: Ranks, *, is_torn_in_backward: bool) -> None:
        self._engine, self._ranks, self._is_torn_in_backward = engine, ranks, is_torn_in_backward
        self.has_agreed = self.is_torn = False

    def _agree(self) -> None:
        """Once in an attempt, before the first exchange: a rank that runs out before it answers the same question from its `except`."""
        if self._ranks.size > 1 and not self.has_agreed:
            self.has_agreed = True
            if self._ranks.any(False):
                raise _OutElsewhere

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.is_torn = self._is_torn_in_backward
        if not is_last or self._ranks.size == 1:
            self._engine.backward(loss, is_last=is_last)
            return
        self._engine.backward(loss, is_last=False)
        self._agree()
        nothing = torch.zeros((), device=loss.device, requires_grad=True)
        self._engine.backward(nothing, is_last=True)  # only the exchange is left

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return self._engine.gradients(parameters)

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return self._engine.grad_norm(gradients)

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        self._engine.clip(parameters, most, grad_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_torn = True
        self._engine.update(optimizer)

    def sum(self, value: Tensor) -> Tensor:
        self._agree()
        return self._engine.sum(value)
