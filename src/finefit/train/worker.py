"""`python -m finefit.train.worker STAGE_DIR`: trains one stage, from its newest verified checkpoint if it has one."""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from finefit.artifacts.atomic import Journal, read_steps, sweep
from finefit.artifacts.checkpoint import list_checkpoints, step_of
from finefit.artifacts.processes import RankEnv, rank_env_of, recorded_variables
from finefit.artifacts.reading import require_regular_files
from finefit.artifacts.records import Failure, Levers, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage, StageResult, TrainState
from finefit.custom.inputs import CustomCollate
from finefit.custom.model import load_custom
from finefit.data.batch_workers import BatchWorkers, num_workers
from finefit.data.collate import Collator
from finefit.data.examples import open_examples
from finefit.data.image_check import ModelProcessor
from finefit.data.render import open_renderer
from finefit.errors import DiskFull, FindingError, FinefitError, RunError
from finefit.facts.cards import find_kind
from finefit.facts.files import free_bytes
from finefit.facts.nvml import CardUsage, open_card
from finefit.model.attention import attention_here
from finefit.model.load import base_bits, counts, load_base, make_trainable, quiet, weight_dtype
from finefit.model.resolve_model import custom_source, resolve_start
from finefit.model.saved_weights import FrozenWeights, frozen_weights_of
from finefit.objective.batch import Forward
from finefit.spec.models import CustomModel, Full
from finefit.step import optimize
from finefit.step.engine_choice import loads_on, make_engine
from finefit.step.forward import autocast_for, bind, keep_reference_copy, keeps_casts, make_objective
from finefit.step.fused import kernels_here
from finefit.step.levers import apply_levers
from finefit.step.state import frozen_checksums, make_optimizer, require_frozen_unchanged
from finefit.train.audit import Audit
from finefit.train.batches import prove_sum
from finefit.train.candidates import record_step_time
from finefit.train.context import (
    LeverChanges,
    LiveRequests,
    SpikeDetector,
    StopRequest,
    SwitchableForward,
    TrainContext,
    Watchdog,
    peak_bytes,
)
from finefit.train.loop import train
from finefit.train.ranks import Ranks, lost_peers, peers_lost, rank_group
from finefit.train.reference import ReferencePass
from finefit.train.saver import Saver, agreed_checkpoint
from finefit.train.step_clock import StepClock
from finefit.train.trackers import Tracking
from finefit.train.validation import record_routing

log = logging.getLogger("finefit")


def run_stage(
    where: StageDir, stop: StopRequest, place: RankEnv | None = None, store: Store | None = None
) -> StageResult:
    """`place` is this process's position among the ranks; `store` is where they exchange messages, if it is open
    already."""
    stage = read_record(where.stage, Stage)
    _set_up_torch(stage, place)
    with rank_group(where, stage, place, store) as (ranks, infos):
        where.checkpoints.mkdir(exist_ok=True)
        if ranks.is_first:
            sweep(where.checkpoints)
        with Journal(where.metrics_of(ranks.rank)) as metrics, Journal(where.memory_of(ranks.rank)) as memory:
            about = {"variables": recorded_variables(os.environ), "threads": torch.get_num_threads()}
            keys = ("rank", "host", "pid", "device", "threads", "free_bytes")
            who = [{key: getattr(info, key) for key in keys} for info in infos]
            metrics.write(event="environment", **about, ranks=who)
            note_memory = _memory_notes(memory, stage.device, where.path)
            note_memory("start", 0)
            with BatchWorkers(num_workers(ranks.size)) as workers:
                ctx, state = _make_context(where, stage, stop, ranks, metrics, note_memory, workers)
                note_memory("loaded", state.step)
                began = time.perf_counter()
                with ctx.watchdog, ctx.usage, Tracking(where, stage.trackers if ranks.is_first else (), metrics.write):
                    state = train(ctx, state)
                record_step_time(ctx, state)
            record_routing(ctx, where, state.step)
            unmoved = require_frozen_unchanged(ctx.frozen, ctx.model)
            note_memory("end", state.step)
            size = counts(ctx.model)
            return StageResult(
                step=state.step,
                total_steps=stage.total_steps,
                checkpoint=f"checkpoint-{state.step}",
                trainable_parameters=size.trainable,
                parameters=size.total,
                tokens=state.tokens,
                seconds=time.perf_counter() - began,
                peak_bytes=max(ranks.gather(peak_bytes(stage.device))),
                predicted_bytes=stage.predicted_bytes_with(state.levers),
                frozen_unchanged=unmoved,
            )


def _set_up_torch(stage: Stage, place: RankEnv | None) -> None:
    if stage.device == "cuda" and not torch.cuda.is_available():
        problem = "this stage was planned for a CUDA device and torch sees none here"
        raise RunError(problem, "`finefit doctor` says why; start again with --new --set device=cpu")
    threads, local_rank = (stage.threads, 0) if place is None else (place.share(stage.threads), place.local_rank)
    torch.set_num_threads(threads)
    if stage.device == "cuda":
        if local_rank >= (count := torch.cuda.device_count()):  # of those that CUDA_VISIBLE_DEVICES leaves
            problem = f"local rank {local_rank} needs a card of its own, and torch sees {count} here"
            raise RunError(problem, "lower engine.devices, or make more cards visible with CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(local_rank)
    if stage.device == "cpu" or stage.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if stage.device == "cpu":
        # read when DeepSpeed is first imported, which transformers may do before us
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.manual_seed(stage.seed)


def _make_context(
    where: StageDir,
    stage: Stage,
    stop: StopRequest,
    ranks: Ranks,
    metrics: Journal,
    note_memory: Callable[[str, int], None],
    workers: BatchWorkers,
) -> tuple[TrainContext, TrainState]:
    """Nothing is restored before `_start_or_resume`."""
    checkpoint, rejected = agreed_checkpoint(where, stage, ranks)  # verified before a weight is loaded
    for line in rejected:
        log.warning(line)
        metrics.write(event="rejected", note=line)
    require_regular_files(where.tokenizer)
    names = [name for name in stage.prepared if name.endswith(".safetensors")]
    examples = {name: open_examples(where.verified(name, stage.prepared)) for name in names}
    model, folder, kept = _load_model(where, stage, num_ranks=ranks.size)
    engine = make_engine(stage, ranks, folder=where.path, run=where.run)
    watchdog = Watchdog(metrics.write)
    forward = SwitchableForward(
        lambda levers: engine.around(partial(_forward, model, stage, levers)), stage.levers, beat=watchdog.beat
    )
    optimizer = engine.prepare(model, partial(make_optimizer, spec=stage.optimizer, device=stage.device))
    saver = Saver(where=where, stage=stage, model=model, optimizer=optimizer, layout=engine, ranks=ranks, kept=kept)
    frozen = frozen_checksums(model)  # as loaded and sharded, before a checkpoint is restored
    if ranks.rank:  # all ranks start with the same weights, but each has its own dropout
        torch.manual_seed(stage.seed + ranks.rank)
    pad = open_renderer(where.tokenizer, stage.template, template_options=stage.template_options).pad
    processor = ModelProcessor(where.tokenizer, folder / "config.json", stage.images)
    collator = Collator(pad=pad, processor_factory=processor)
    reference = ReferencePass(
        saver=saver, forward=forward, collator=collator, workers=workers, stop=stop, metrics=metrics
    )
    rows = reference.rows(examples)  # of the starting weights, so before a checkpoint is restored
    state = _start_or_resume(stage, saver, checkpoint, metrics)
    forward.change(state.levers)
    compose = None
    if isinstance(stage.model, CustomModel):
        compose = CustomCollate(source=custom_source(stage.model, where.run), pad=pad)
    unfused = replace(state.levers, kernels="torch")
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid if stage.device == "cuda" else None
    ctx = TrainContext(
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
        requests=LiveRequests(where.requests, metrics.write),
        note_memory=note_memory,
        lever_changes=LeverChanges(where.path),
        audit=Audit(model, engine, ranks, metrics.write, unfuse=partial(forward.change, unfused)),
        spikes=SpikeDetector(line["loss"] for line in read_steps(where.metrics)),
        watchdog=watchdog,
        usage=CardUsage(open_card(f"GPU-{uuid}") if uuid else None),
        clock=StepClock(stage.device),
        measured_card=measured_card(stage.device, num_ranks=ranks.size),
    )
    if compose is not None and state.step == 0:
        prove_sum(ctx)
    return ctx, state


def _load_model(where: StageDir, stage: Stage, *, num_ranks: int) -> tuple[nn.Module, Path, FrozenWeights | None]:
    """The model with what is trained, its folder, and the source of its frozen weights."""
    located = resolve_start(stage.model, stage.tuning, where.run)
    if located.fingerprint != stage.model_fingerprint:
        problem = f"the model {stage.model_name} has changed since this run began"
        raise RunError(problem, "restore the old one, or start again with --new")
    folder, dtype = located.folder, weight_dtype(stage.precision, stage.tuning)
    if isinstance(stage.model, CustomModel):
        base: nn.Module = load_custom(stage.model, where.run, device=stage.device, dtype=dtype, seed=stage.seed)
    else:
        base = load_base(
            folder,
            device=loads_on(stage, num_ranks=num_ranks),
            dtype=dtype,
            attention=attention_here(stage.device, stage.precision, folder, packing=stage.levers.packing),
            bits=base_bits(stage.tuning),
        )
    model = make_trainable(base, stage.tuning, name=stage.model_name, base=where.run)
    # with full tuning the few frozen tensors are saved like the rest
    kept = None if isinstance(stage.tuning, Full) else frozen_weights_of(model, folder)
    keep_reference_copy(stage.objective, stage.tuning, model)
    return model, folder, kept


def _start_or_resume(stage: Stage, saver: Saver, checkpoint: Path | None, metrics: Journal) -> TrainState:
    if checkpoint is not None:
        state = saver.restore(checkpoint)
        log.info("resumed from %s", checkpoint.name)
        metrics.write(event="resumed", step=state.step, checkpoint=checkpoint.name)
        return state
    metrics.write(event="started", step=0)
    return TrainState(
        step=0,
        tokens=0,
        supervised_tokens=0,
        levers=stage.levers,
        loss_scale=optimize.initial_loss_scale(stage.precision),
        model_name=stage.model_name,
        model_fingerprint=stage.model_fingerprint,
        template_sha256=stage.template_sha256,
        tuning=stage.tuning,
    )


def _forward(model: nn.Module, stage: Stage, levers: Levers) -> Forward:
    is_fused = levers.kernels == "fused"
    kernels = kernels_here(stage.device) if is_fused else None
    apply_levers(model, levers, kernels=kernels)
    autocast = autocast_for(stage.device, stage.precision, with_cache=keeps_casts(stage.tuning, levers))
    return bind(model, loss_chunk=levers.loss_chunk, autocast=autocast, is_fused=is_fused, kernels=kernels)


def _memory_notes(journal: Journal, device: str, folder: Path) -> Callable[[str, int], None]:
    process = psutil.Process()

    def note(instant: str, step: int) -> None:
        values = {"resident_bytes": process.memory_info().rss}
        values["host_free_bytes"] = psutil.virtual_memory().available
        with suppress(OSError):  # a disk that does not answer is not a reason to stop
            values["disk_free_bytes"] = free_bytes(folder)
        if device == "cuda":
            values |= {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        journal.write(instant=instant, step=step, time=round(time.time(), 3), peak_bytes=peak_bytes(device), **values)

    return note


def measured_card(device: str, *, num_ranks: int) -> str | None:
    if device != "cuda" or num_ranks > 1:
        return None
    name, total_bytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    kind = find_kind(name, total_bytes)
    return kind.name if kind else name


def work(
    where: StageDir, place: RankEnv | None = None, store: Store | None = None, *, is_child_of_ours: bool = True
) -> int:
    """The exit code; the reason of a failure is in this rank's result. After a success only the first rank writes a
    result."""
    stop = StopRequest()
    stop.listen(is_child_of_ours=is_child_of_ours)
    rank = 0 if place is None else place.rank
    where.result_of(rank).unlink(missing_ok=True)
    try:
        result = run_stage(where, stop, place, store)
    except torch.OutOfMemoryError as error:
        log.error("%s", error)
        remedy = "lower levers.micro_batch: start again with --new --set levers.micro_batch=1"
        result = _failed(where, FindingError(f"out of memory: {error}", remedy))
    except FinefitError as error:
        log.error("%s", error)
        result = _failed(where, error)
    except RuntimeError as error:  # from a collective of an engine or of torch; our own name the cause themselves
        if place is None or not lost_peers(error):
            raise
        log.exception("rank %s", rank)
        result = _failed(where, peers_lost(rank, "training", error))
    try:
        if rank == 0 or result.failure:
            write_record(where.result_of(rank), result)
    except DiskFull as error:
        log.error("%s", error)
        return error.exit_code
    return result.failure.exit_code if result.failure else 0


def _failed(where: StageDir, error: FinefitError) -> StageResult:
    stage, newest = read_record(where.stage, Stage), list_checkpoints(where.checkpoints)
    return StageResult(
        step=step_of(newest[-1]) if newest else 0,
        total_steps=stage.total_steps,
        checkpoint=newest[-1].name if newest else None,
        trainable_parameters=0,
        parameters=0,
        tokens=0,
        seconds=0.0,
        peak_bytes=peak_bytes(stage.device),
        failure=Failure.of(error),
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    quiet()
    sys.exit(work(StageDir(Path(sys.argv[1]).resolve()), rank_env_of(os.environ)))


if __name__ == "__main__":
    main()
