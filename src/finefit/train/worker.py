"""`python -m finefit.train.worker STAGE_DIR`: trains one stage, from its newest verified checkpoint if there is one, and leaves a result."""

import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from finefit.artifacts.checkpoint import list_checkpoints, step_of, sweep
from finefit.artifacts.journal import Journal, read_steps
from finefit.artifacts.launcher import Place, find_place, recorded_variables
from finefit.artifacts.records import Failure, Levers, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage, StageResult, TrainState
from finefit.data.collate import Collator
from finefit.data.looking import OwnEye
from finefit.data.render import open_renderer
from finefit.data.store import open_examples
from finefit.data.workers import Workers, num_workers
from finefit.errors import DiskFull, FindingError, FinefitError, RunError
from finefit.facts.usage import Read, Usage, open_card
from finefit.model.attention import attention_here
from finefit.model.custom_files import written
from finefit.model.kept import kept_of
from finefit.model.load import base_bits, counts, load_base, load_custom, make_trainable, quiet, weight_dtype
from finefit.model.locate import locate_start
from finefit.objective.batch import Forward
from finefit.spec.models import CustomModel, Full
from finefit.step import scaling
from finefit.step.custom import Compose
from finefit.step.engines import loads_on, make_engine
from finefit.step.forward import autocast_for, bind, keeps_casts
from finefit.step.levers import pull
from finefit.step.liger import kernels_here
from finefit.step.objective import keep_start, make_objective
from finefit.step.proof import frozen_sums, require_unmoved
from finefit.step.state import make_optimizer
from finefit.train.audit import Audit
from finefit.train.corrections import Corrections
from finefit.train.live import Live, Rig
from finefit.train.loop import train
from finefit.train.meeting import PATIENCE, Visitor, introduce, meet, require_alike
from finefit.train.own import prove_sum
from finefit.train.ranks import ONE_RANK, Ranks, joined, lost_peers, open_store, peers_lost
from finefit.train.reference import Start, with_reference
from finefit.train.routing import note_routing
from finefit.train.saver import Saver, agreed_checkpoint
from finefit.train.spikes import Spikes
from finefit.train.stopping import StopRequest
from finefit.train.tracking import Tracking
from finefit.train.watchdog import Watchdog

log = logging.getLogger("finefit")


def run_stage(
    where: StageDir, stop: StopRequest, place: Place | None = None, store: Store | None = None
) -> StageResult:
    """`place`: of this process among the ranks; `store`: where they leave word for each other, if it is open already."""
    stage = read_record(where.stage, Stage)
    _set_up_torch(stage, place)
    with _company(where, stage, place, store) as (ranks, visitors):
        where.checkpoints.mkdir(exist_ok=True)
        if ranks.is_first:
            sweep(where.checkpoints)
        with Journal(where.metrics_of(ranks.rank)) as metrics, Journal(where.memory_of(ranks.rank)) as memory:
            metrics.write(
                event="environment",
                variables=recorded_variables(os.environ),
                threads=torch.get_num_threads(),
                ranks=_who(visitors),
            )
            return _trained(where, stage, stop, ranks, metrics, memory)


def _trained(
    where: StageDir, stage: Stage, stop: StopRequest, ranks: Ranks, metrics: Journal, memory: Journal
) -> StageResult:
    note_memory = _memory_notes(memory, stage.device)
    note_memory("start", 0)
    with Workers(num_workers(ranks.size)) as workers:
        live, state = _make_live(where, stage, stop, ranks, metrics, note_memory, workers)
        note_memory("loaded", state.step)
        began = time.perf_counter()
        with live.watchdog, live.usage, Tracking(where, stage.trackers if ranks.is_first else (), metrics.write):
            state = train(live, state)
    note_routing(live, where, state.step)
    unmoved = require_unmoved(live.frozen, live.model)
    note_memory("end", state.step)
    size = counts(live.model)
    return StageResult(
        step=state.step,
        total_steps=stage.total_steps,
        checkpoint=f"checkpoint-{state.step}",
        trainable_parameters=size.trainable,
        parameters=size.total,
        tokens=state.tokens,
        seconds=time.perf_counter() - began,
        peak_bytes=max(ranks.gather(_peak_bytes(stage.device))),
        frozen_unchanged=unmoved,
    )


@contextmanager
def _company(
    where: StageDir, stage: Stage, place: Place | None, store: Store | None
) -> Iterator[tuple[Ranks, Sequence[Visitor]]]:
    """The other ranks, met and found alike."""
    if place is None or place.size == 1:
        yield ONE_RANK, ()
        return
    store = store or open_store(place, patience=PATIENCE)
    visitors = meet(introduce(where, stage, place), store, size=place.size)
    for line in require_alike(visitors, stage):
        log.warning(line)
    with joined(place, store, device=stage.device) as ranks:
        yield ranks, visitors


def _who(visitors: Sequence[Visitor]) -> list[dict[str, object]]:
    return [
        {
            "rank": v.rank,
            "host": v.host,
            "pid": v.pid,
            "device": v.device,
            "threads": v.threads,
            "free_bytes": v.free_bytes,
        }
        for v in visitors
    ]


def _set_up_torch(stage: Stage, place: Place | None) -> None:
    if stage.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "this stage was planned for a CUDA device and torch sees none here",
            "`finefit doctor` says why; start again with --new --set device=cpu",
        )
    threads, local_rank = (stage.threads, 0) if place is None else (place.share(stage.threads), place.local_rank)
    torch.set_num_threads(threads)
    if stage.device == "cuda":
        _take_card(local_rank)
    if stage.device == "cpu" or stage.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if stage.device == "cpu":
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # read when DeepSpeed is first imported, which transformers may do long before us
    torch.manual_seed(stage.seed)


def _take_card(local_rank: int) -> None:
    """The one of this rank, among those that CUDA_VISIBLE_DEVICES leaves."""
    if local_rank >= torch.cuda.device_count():
        raise RunError(
            f"local rank {local_rank} needs a card of its own, and torch sees {torch.cuda.device_count()} here",
            "lower engine.devices, or make more cards visible with CUDA_VISIBLE_DEVICES",
        )
    torch.cuda.set_device(local_rank)


def _make_live(
    where: StageDir,
    stage: Stage,
    stop: StopRequest,
    ranks: Ranks,
    metrics: Journal,
    note_memory: Callable[[str, int], None],
    workers: Workers,
) -> tuple[Live, TrainState]:
    checkpoint = _checkpoint(where, stage, ranks, metrics)  # verified before a weight is loaded
    examples = {
        name: open_examples(where.verified(name, stage.prepared))
        for name in stage.prepared
        if name.endswith(".safetensors")
    }
    folder = _folder(where, stage)
    model = make_trainable(
        _base(folder, stage, where.run, num_ranks=ranks.size), stage.tuning, name=stage.model_name, base=where.run
    )
    kept = (
        None if isinstance(stage.tuning, Full) else kept_of(model, folder)
    )  # what little of a whole model is frozen is saved as the rest is
    keep_start(stage.objective, stage.tuning, model)
    engine = make_engine(stage, ranks, folder=where.path, run=where.run)
    watchdog = Watchdog(metrics.write)
    forward = Rig(
        lambda levers: engine.around(partial(_forward, model, stage, levers)), stage.levers, beat=watchdog.beat
    )
    optimizer = engine.prepare(model, partial(make_optimizer, spec=stage.optimizer, device=stage.device))
    saver = Saver(where=where, stage=stage, model=model, optimizer=optimizer, layout=engine, ranks=ranks, kept=kept)
    frozen = frozen_sums(model)  # as loaded and divided, before a checkpoint is put back
    if ranks.rank:  # weights were made alike; dropout is every rank's own
        torch.manual_seed(stage.seed + ranks.rank)
    pad = open_renderer(where.tokenizer, stage.template, template_options=stage.template_options).pad
    collator = Collator(pad=pad, see=OwnEye(where.tokenizer, folder / "config.json", stage.images))
    start = Start(
        where=where,
        stage=stage,
        model=model,
        forward=forward,
        collator=collator,
        workers=workers,
        ranks=ranks,
        stop=stop,
        metrics=metrics,
    )
    rows = with_reference(start, examples)  # of the starting weights, so before a checkpoint is put back
    state = _fresh_state(stage)
    if checkpoint is None:
        metrics.write(event="started", step=0)
    else:
        state = saver.restore(checkpoint)
        log.info("resumed from %s", checkpoint.name)
        metrics.write(event="resumed", step=state.step, checkpoint=checkpoint.name)
    forward.change(state.levers)
    compose = Compose(found=written(stage.model, where.run), pad=pad) if isinstance(stage.model, CustomModel) else None
    live = Live(
        stage=stage,
        model=model,
        frozen=frozen,
        forward=forward,
        objective=make_objective(stage.objective, stage.tuning, model, forward),
        engine=engine,
        ranks=ranks,
        optimizer=optimizer,
        examples=rows["train.safetensors"],
        validation=rows.get("validation.safetensors", ()),
        collator=collator,
        workers=workers,
        compose=compose,
        saver=saver,
        metrics=metrics,
        stop=stop,
        note_memory=note_memory,
        corrections=Corrections(where.path),
        audit=Audit(
            model, engine, ranks, metrics.write, unfuse=partial(forward.change, replace(state.levers, kernels="torch"))
        ),
        spikes=Spikes(line["loss"] for line in read_steps(where.metrics)),
        watchdog=watchdog,
        usage=Usage(_card(stage.device)),
    )
    if compose is not None and state.step == 0:
        prove_sum(live)
    return live, state


def _forward(model: nn.Module, stage: Stage, levers: Levers) -> Forward:
    """The model put into the state that the levers ask for, and bound."""
    is_fused = levers.kernels == "fused"
    kernels = kernels_here(stage.device) if is_fused else None
    pull(model, levers, kernels=kernels)
    autocast = autocast_for(stage.device, stage.precision, with_cache=keeps_casts(stage.tuning, levers))
    return bind(model, loss_chunk=levers.loss_chunk, autocast=autocast, is_fused=is_fused, kernels=kernels)


def _card(device: str) -> Read | None:
    return (
        open_card(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
        if device == "cuda"
        else None
    )


def _checkpoint(where: StageDir, stage: Stage, ranks: Ranks, metrics: Journal) -> Path | None:
    checkpoint, rejected = agreed_checkpoint(where, stage, ranks)
    for line in rejected:
        log.warning(line)
        metrics.write(event="rejected", note=line)
    return checkpoint


def _folder(where: StageDir, stage: Stage) -> Path:
    located = locate_start(stage.model, stage.tuning, where.run)
    if located.fingerprint != stage.model_fingerprint:
        raise RunError(
            f"the model {stage.model_name} has changed since this run began",
            "put the old one back, or start again with --new",
        )
    return located.folder


def _base(folder: Path, stage: Stage, run: Path, *, num_ranks: int) -> nn.Module:
    if isinstance(stage.model, CustomModel):
        dtype = weight_dtype(stage.precision, stage.tuning)
        return load_custom(stage.model, run, device=stage.device, dtype=dtype, seed=stage.seed)
    base: nn.Module = load_base(
        folder,
        device=loads_on(stage, num_ranks=num_ranks),
        dtype=weight_dtype(stage.precision, stage.tuning),
        attention=attention_here(stage.device, stage.precision, folder, packing=stage.levers.packing),
        bits=base_bits(stage.tuning),
    )
    return base


def _fresh_state(stage: Stage) -> TrainState:
    return TrainState(
        step=0,
        tokens=0,
        supervised_tokens=0,
        levers=stage.levers,
        loss_scale=scaling.start(stage.precision),
        model_name=stage.model_name,
        model_fingerprint=stage.model_fingerprint,
        template_sha256=stage.template_sha256,
        tuning=stage.tuning,
    )


def _memory_notes(journal: Journal, device: str) -> Callable[[str, int], None]:
    process = psutil.Process()

    def note(instant: str, step: int) -> None:
        values = {"resident_bytes": process.memory_info().rss}
        if device == "cuda":
            values |= {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        journal.write(instant=instant, step=step, time=round(time.time(), 3), peak_bytes=_peak_bytes(device), **values)

    return note


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def work(
    where: StageDir, place: Place | None = None, store: Store | None = None, *, is_child_of_ours: bool = True
) -> int:
    """The exit code; the reason of a failure is in this rank's result. Of a success only the first rank writes one."""
    stop = StopRequest()
    stop.listen(is_child_of_ours=is_child_of_ours)
    rank = 0 if place is None else place.rank
    where.result_of(rank).unlink(missing_ok=True)
    try:
        result = run_stage(where, stop, place, store)
    except torch.OutOfMemoryError as error:
        log.error("%s", error)
        words = FindingError(
            f"out of memory: {error}", "lower levers.micro_batch: start again with --new --set levers.micro_batch=1"
        )
        result = _failed(where, Failure.of(words))
    except FinefitError as error:
        log.error("%s", error)
        result = _failed(where, Failure.of(error))
    except RuntimeError as error:  # a collective of an engine or of torch; our own are named where they are
        if place is None or not lost_peers(error):
            raise
        log.exception("rank %s", rank)
        result = _failed(where, Failure.of(peers_lost(rank, "training", error)))
    return _left(where, rank, result)


def _left(where: StageDir, rank: int, result: StageResult) -> int:
    try:
        if rank == 0 or result.failure:
            write_record(where.result_of(rank), result)
    except DiskFull as error:
        log.error("%s", error)
        return error.exit_code
    return result.failure.exit_code if result.failure else 0


def _failed(where: StageDir, failure: Failure) -> StageResult:
    stage = read_record(where.stage, Stage)
    newest = list_checkpoints(where.checkpoints)
    return StageResult(
        step=step_of(newest[-1]) if newest else 0,
        total_steps=stage.total_steps,
        checkpoint=newest[-1].name if newest else None,
        trainable_parameters=0,
        parameters=0,
        tokens=0,
        seconds=0.0,
        peak_bytes=_peak_bytes(stage.device),
        failure=failure,
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    quiet()
    sys.exit(work(StageDir(Path(sys.argv[1]).resolve()), find_place(os.environ)))


if __name__ == "__main__":
    main()
