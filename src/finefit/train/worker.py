"""`python -m finefit.train.worker STAGE_DIR`: trains one stage, from its newest verified checkpoint if there is one, and leaves a result."""

import logging
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from finefit.artifacts.checkpoint import list_checkpoints, step_of, sweep
from finefit.artifacts.journal import Journal
from finefit.artifacts.records import Failure, Stage, StageResult, TrainState, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.data.render import open_renderer
from finefit.data.store import Examples
from finefit.errors import DiskFull, FindingError, FinefitError, RunError
from finefit.model.attention import attention_here
from finefit.model.load import base_bits, counts, load_base, make_trainable, quiet, weight_dtype
from finefit.model.locate import locate
from finefit.objective.sft import sft
from finefit.step.engine import ALONE
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import pull
from finefit.step.state import make_optimizer
from finefit.train.loop import Live, train
from finefit.train.ranks import ONE_RANK
from finefit.train.saver import Saver, find_checkpoint
from finefit.train.stopping import StopRequest

log = logging.getLogger("finefit")


def run_stage(where: StageDir, stop: StopRequest) -> StageResult:
    stage = read_record(where.stage, Stage)
    _set_up_torch(stage)
    where.checkpoints.mkdir(exist_ok=True)
    sweep(where.checkpoints)
    with Journal(where.metrics) as metrics, Journal(where.memory) as memory:
        note_memory = _memory_notes(memory, stage.device)
        note_memory("start", 0)
        live, state = _make_live(where, stage, stop, metrics, note_memory)
        note_memory("loaded", state.step)
        began = time.perf_counter()
        state = train(live, state)
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
        peak_bytes=_peak_bytes(stage.device),
    )


def _set_up_torch(stage: Stage) -> None:
    if stage.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "this stage was planned for a CUDA device and torch sees none here",
            "`finefit doctor` says why; start again with --new --set device=cpu",
        )
    torch.set_num_threads(stage.threads)
    if stage.device == "cpu" or stage.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(stage.seed)


def _make_live(
    where: StageDir, stage: Stage, stop: StopRequest, metrics: Journal, note_memory: Callable[[str, int], None]
) -> tuple[Live, TrainState]:
    checkpoint = _checkpoint(where, stage, metrics)  # verified before a weight is loaded
    examples = {name: Examples(where.verified(name, stage.prepared)) for name in stage.prepared if name.endswith(".safetensors")}
    model = make_trainable(_base(where, stage), stage.tuning, name=stage.model_name)
    pull(model, stage.levers)
    optimizer = make_optimizer(model, stage.optimizer, device=stage.device)
    saver = Saver(where=where, stage=stage, model=model, optimizer=optimizer)
    state = _fresh_state(stage)
    if checkpoint is None:
        metrics.write(event="started", step=0)
    else:
        state = saver.restore(checkpoint)
        log.info("resumed from %s", checkpoint.name)
        metrics.write(event="resumed", step=state.step, checkpoint=checkpoint.name)
    live = Live(
        stage=stage,
        model=model,
        forward=bind(model, loss_chunk=stage.levers.loss_chunk, autocast=autocast_for(stage.device, stage.precision)),
        objective=sft,
        engine=ALONE,
        ranks=ONE_RANK,
        optimizer=optimizer,
        examples=examples["train.safetensors"],
        validation=examples.get("validation.safetensors", ()),
        pad=open_renderer(where.tokenizer, stage.template, template_options=stage.template_options).pad,
        saver=saver,
        metrics=metrics,
        stop=stop,
        note_memory=note_memory,
    )
    return live, state


def _checkpoint(where: StageDir, stage: Stage, metrics: Journal) -> Path | None:
    checkpoint, rejected = find_checkpoint(where, stage)
    for line in rejected:
        log.warning(line)
        metrics.write(event="rejected", note=line)
    return checkpoint


def _base(where: StageDir, stage: Stage) -> PreTrainedModel:
    located = locate(stage.model, where.run)
    if located.fingerprint != stage.model_fingerprint:
        raise RunError(f"the model {stage.model_name} has changed since this run began", "put the old one back, or start again with --new")
    return load_base(
        located.folder,
        device=stage.device,
        dtype=weight_dtype(stage.precision, stage.tuning),
        attention=attention_here(stage.device, stage.precision, located.folder, packing=stage.levers.packing),
        bits=base_bits(stage.tuning),
    )


def _fresh_state(stage: Stage) -> TrainState:
    return TrainState(
        step=0,
        tokens=0,
        supervised_tokens=0,
        levers=stage.levers,
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


def work(where: StageDir) -> int:
    """The exit code; the reason of a failure is in the result."""
    stop = StopRequest()
    stop.listen()
    where.result.unlink(missing_ok=True)
    try:
        result = run_stage(where, stop)
    except torch.OutOfMemoryError as error:
        log.error("%s", error)
        words = FindingError(f"out of memory: {error}", "lower levers.micro_batch: start again with --new --set levers.micro_batch=1")
        result = _failed(where, Failure.of(words))
    except FinefitError as error:
        log.error("%s", error)
        result = _failed(where, Failure.of(error))
    try:
        write_record(where.result, result)
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
    sys.exit(work(StageDir(Path(sys.argv[1]).resolve())))


if __name__ == "__main__":
    main()
