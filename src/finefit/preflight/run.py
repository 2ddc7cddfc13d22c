"""What a forecast and a spec mean for the run that is about to begin: one function per check, each yielding findings. Nothing is measured here."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from finefit.artifacts.forecasts import Forecast, Suggestion
from finefit.artifacts.names import grouped
from finefit.artifacts.records import Finding, Levers
from finefit.data.order import steps_per_epoch
from finefit.facts.cards import CardKind, find_kind
from finefit.preflight.findings import in_order
from finefit.spec.every import Interval
from finefit.spec.models import Lora, ShapeModel
from finefit.spec.schema import AdamW, DeepSpeed, Engine, SlurmLauncher, Spec
from finefit.spec.tasks import LmEval
from finefit.step.engines.choose import engine_problems
from finefit.step.engines.zero_config import contradictions

TIGHT = 0.9
"""Share of the host's memory beyond which other programs push a run into swapping."""
OPTIONAL = (
    "bitsandbytes",
    "liger-kernel",
    "deepspeed",
    "submitit",
    "lm-eval",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
)
"""Packages that only some specs ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    spec: Spec
    forecast: Forecast
    total_steps: int | None
    """None where the data is not there to be counted."""
    free_disk_bytes: int
    """Where the run directory will lie."""
    host_memory_bytes: int
    missing_files: tuple[str, ...] = ()
    """Data files that the spec names and that are not there."""
    absent: frozenset[str] = frozenset()
    """Of `OPTIONAL`, what is not installed here."""
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    """What the file of `engine.config` says."""


def there_is_something_to_train(found: Preparation) -> Iterator[Finding]:
    if isinstance(found.spec.model, ShapeModel):
        yield Finding(
            level="error",
            problem="a model of kind shape has no weights to train",
            remedy="plan it, or name a model that has weights",
        )
    for path in found.missing_files:
        yield Finding(level="error", problem=f"{path} is not there", remedy="paths are relative to the spec file")


def packages_are_installed(found: Preparation) -> Iterator[Finding]:
    """What the spec asks of packages that not everybody has."""
    for key, package, remedy in _needs(found):
        if package in found.absent:
            yield Finding(level="error", problem=f"{key} needs {package}, which is not installed", remedy=remedy)
    for tracker in found.spec.trackers:
        if tracker.kind in found.absent:
            problem = f"trackers: {tracker.kind} is not installed, so the run goes on without it"
            yield Finding(
                level="warning", problem=problem, remedy=f"pip install {tracker.kind}, or leave it out of trackers"
            )


def _needs(found: Preparation) -> Iterator[tuple[str, str, str]]:
    """(what asks for it, the package, what to do)."""
    spec, is_cpu, gpu = found.spec, _is_cpu(found), "pip install 'finefit[gpu]'"
    if found.forecast.levers.kernels == "fused" and not is_cpu:
        yield "levers.kernels fused", "liger-kernel", f"{gpu}, or --set levers.kernels=torch"
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        yield "tuning.base_bits", "bitsandbytes", gpu
    if spec.optimizer.kind != "adamw" and not is_cpu:
        yield f"optimizer.kind {spec.optimizer.kind}", "bitsandbytes", gpu
    if isinstance(spec.engine, DeepSpeed):
        yield (
            "engine.kind deepspeed",
            "deepspeed",
            "pip install 'finefit[deepspeed]', or set engine.kind: fsdp2, which divides the same",
        )
    if isinstance(spec.launcher, SlurmLauncher):
        yield "launcher.kind slurm", "submitit", "pip install submitit, or set launcher.kind: local"
    for evaluation in spec.evaluate:
        if isinstance(evaluation.task, LmEval):
            yield (
                f"evaluate {evaluation.label}",
                "lm-eval",
                "pip install 'finefit[lm-eval]', or leave it out of evaluate",
            )


def _is_cpu(found: Preparation) -> bool:
    return found.forecast.card == "cpu"


def engine_can_do_it(found: Preparation) -> Iterator[Finding]:
    """With what it is to share, as the forecast has chosen it."""
    yield from engine_problems(found.forecast.engine, found.spec.tuning, found.spec.optimizer, found.forecast.levers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """As a stage will have it."""

    engine: Engine
    optimizer: AdamW
    levers: Levers
    precision: str
    global_batch: int
    num_ranks: int


def engine_config_agrees(found: Preparation) -> Iterator[Finding]:
    """The spec decides, and a file of DeepSpeed's that says otherwise would be followed by nobody."""
    spec, forecast, own = found.spec, found.forecast, dict(found.engine_config)
    if not isinstance(forecast.engine, DeepSpeed):
        return
    precision = _precision(found)
    if precision is None:  # known where the run is; left to it
        own = {key: value for key, value in own.items() if key not in ("bf16", "fp16")}
    decided = _Decided(
        engine=forecast.engine,
        optimizer=spec.optimizer,
        levers=forecast.levers,
        precision=precision or "auto",
        global_batch=spec.global_batch,
        num_ranks=forecast.devices,
    )
    for line in contradictions(decided, own):
        yield Finding(
            level="error",
            problem=f"engine.config contradicts the spec: {line}",
            remedy='take it out, or write "auto"; the spec decides',
        )


def _precision(found: Preparation) -> str | None:
    """None where the card is not in the table."""
    if found.spec.precision != "auto":
        return found.spec.precision
    if _is_cpu(found):
        return "fp32"
    kind = _kind(found)
    return None if kind is None else "bf16" if kind.has_bf16 else "fp16"


def _kind(found: Preparation) -> CardKind | None:
    return find_kind(found.forecast.card.removeprefix(f"{found.forecast.devices}x"), None)


def optimizer_has_its_device(found: Preparation) -> Iterator[Finding]:
    kind = found.spec.optimizer.kind
    if kind != "adamw" and _is_cpu(found):
        yield Finding(
            level="error", problem=f"optimizer.kind {kind} needs a CUDA device", remedy="set optimizer.kind: adamw"
        )


def update_can_be_inside(found: Preparation) -> Iterator[Finding]:
    """A tensor that is updated while backward goes on knows neither the norm of all gradients nor those of a later micro-batch."""
    spec, forecast = found.spec, found.forecast
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    if spec.optimizer.clip is not None:
        problem = f"levers.update: inside cannot clip, and optimizer.clip is {spec.optimizer.clip:g}"
        yield Finding(level="error", problem=problem, remedy="--set optimizer.clip=null, or --set levers.update=after")
    if forecast.accumulation > 1:
        problem = f"levers.update: inside needs the whole step in one micro-batch, and it has {forecast.accumulation}"
        yield Finding(level="error", problem=problem, remedy="--set levers.update=after, or a smaller global_batch")
    if spec.optimizer.kind != "adamw":
        problem = f"levers.update: inside needs optimizer.kind adamw, whose kernel leaves out what is not finite; it is {spec.optimizer.kind}"
        yield Finding(level="error", problem=problem, remedy="--set optimizer.kind=adamw, or --set levers.update=after")


def precision_suits_the_device(found: Preparation) -> Iterator[Finding]:
    """fp16 is for cards that have no bf16: its small range needs loss scaling, and steps that overflow are left out."""
    if found.spec.precision != "fp16":
        return
    kind = _kind(found)
    if _is_cpu(found):
        problem = "precision: fp16 on a CPU is slower than fp32, which needs no loss scaling"
        yield Finding(level="warning", problem=problem, remedy="--set precision=fp32")
    elif kind is not None and kind.has_bf16:
        problem = f"precision: fp16 is asked for, and {kind.name} has bf16, which is as fast and needs no loss scaling"
        yield Finding(level="warning", problem=problem, remedy="--set precision=auto")


def quantised_dora_is_slow(found: Preparation) -> Iterator[Finding]:
    tuning = found.spec.tuning
    if isinstance(tuning, Lora) and tuning.dora and tuning.base_bits is not None:
        problem = f"tuning.dora with base_bits {tuning.base_bits} unpacks every weight once more in each step, to measure its length"
        yield Finding(level="note", problem=problem, remedy="tuning.rank_stabilised: true costs nothing")


def every_process_has_rows(found: Preparation) -> Iterator[Finding]:
    devices, rows = (
        found.forecast.devices,
        min(found.spec.global_batch, found.forecast.lengths.num_rows or found.spec.global_batch),
    )
    if rows < devices:
        problem = f"a step has {rows} rows for {devices} processes: {devices - rows} of them only wait"
        yield Finding(
            level="warning", problem=problem, remedy=f"set global_batch to {devices} or more, or take {rows} devices"
        )


def gradients_reach_every_trained_tensor(found: Preparation) -> Iterator[Finding]:
    """A tensor without a gradient stays as it began, and the loss does not tell."""
    gradients = found.forecast.gradients
    if gradients.unreached:
        names = ", ".join(grouped(gradients.unreached))
        problem = (
            f"no gradient reaches {len(gradients.unreached):,} of {gradients.trainable:,} trained tensors: {names}"
        )
        unknown = "look for what cuts them off in the model's forward, or leave them out of tuning.targets"
        yield Finding(level="error", problem=problem, remedy=". ".join(gradients.causes) or unknown)


def adapters_are_trained(found: Preparation) -> Iterator[Finding]:
    """One that was frozen is among no trained tensors, so no gradient is missed."""
    if frozen := found.forecast.gradients.frozen:
        yield Finding(
            level="error",
            problem=f"adapters are attached but not trained: {', '.join(frozen)}",
            remedy="leave their requires_grad on",
        )


def memory_fits(found: Preparation) -> Iterator[Finding]:
    forecast = found.forecast
    if not forecast.fits:
        place = f"{forecast.peak_instant} in {forecast.peak_module}" if forecast.peak_module else forecast.peak_instant
        problem = f"a step needs {forecast.peak_bytes:,} bytes at its peak ({place}), {forecast.card} has {forecast.budget_bytes:,} to give"
        fitting = next((suggestion for suggestion in forecast.suggestions if suggestion.fits), None)
        yield Finding(
            level="error", problem=problem, remedy=_larger(found.spec) if fitting is None else _command(fitting)
        )


def _command(suggestion: Suggestion) -> str:
    options = " ".join(f"--set {shlex.quote(change)}" for change in suggestion.changes)
    return f"{options} ({suggestion.peak_bytes:,} bytes; {suggestion.price})"


def _larger(spec: Spec) -> str:
    return f"no lever is enough: take a larger card, a smaller model, or lower data.max_tokens (now {spec.data.max_tokens:,})"


def disk_holds_checkpoints(found: Preparation) -> Iterator[Finding]:
    needed, free, keep = found.forecast.disk_bytes, found.free_disk_bytes, found.spec.save.keep
    if needed > free:
        lower = f", or lower save.keep (now {keep})" if keep > 1 else ""
        problem = f"the run's checkpoints take up to {needed:,} bytes of disk, {free:,} are free"
        yield Finding(
            level="error", problem=problem, remedy=f"free {needed - free:,} bytes or work on another disk{lower}"
        )


def host_memory_suffices(found: Preparation) -> Iterator[Finding]:
    needed, there = found.forecast.host_bytes, found.host_memory_bytes
    problem = f"the run needs {needed:,} bytes of host memory, the machine has {there:,}"
    remedy = (
        "`--set levers.offload=none` keeps the layers' inputs on the card"
        if found.forecast.levers.offload
        else "take a smaller model"
    )
    if needed > there:
        yield Finding(level="error", problem=problem, remedy=f"{remedy}, or work on a machine with more memory")
    elif needed > TIGHT * there:
        yield Finding(level="warning", problem=problem, remedy=f"{remedy}, or close other programs before the run")


def warm_up_ends_before_the_run(found: Preparation) -> Iterator[Finding]:
    """One step of warm-up is none: it has the whole learning rate already."""
    if found.total_steps is None:
        return
    asked = found.spec.schedule.warmup
    warm_up = asked if isinstance(asked, int) else math.ceil(asked * found.total_steps)
    if warm_up > 1 and warm_up >= found.total_steps:
        problem = f"schedule.warmup {asked:g} makes all {found.total_steps} steps of the run warm-up"
        yield Finding(level="error", problem=problem, remedy="--set schedule.warmup=0, or let the run have more steps")


def something_is_saved_and_validated_inside_the_run(found: Preparation) -> Iterator[Finding]:
    """The end of a run is always saved, and every save validates."""
    spec, total = found.spec, found.total_steps
    if _is_never_due(spec.save.every, found):
        problem = f"save.every is {spec.save.every}, the run has {total}: only its end is saved, and a machine that fails before loses all of it"
        yield Finding(level="warning", problem=problem, remedy=f"--set save.every='{_some(total)} steps'")
    every = spec.validation.every
    if spec.data.validation is not None and every is not None and _is_never_due(every, found):
        problem = (
            f"validate.every is {every}, the run has {total}: the validation loss is taken only where the run is saved"
        )
        yield Finding(level="warning", problem=problem, remedy=f"--set validate.every='{_some(total)} steps'")


def _is_never_due(every: Interval, found: Preparation) -> bool:
    """Minutes are left out: how long a run takes is an estimate."""
    if found.total_steps is None:
        return False
    match every.unit:
        case "steps":
            return every.count > found.total_steps
        case "epoch":
            epoch = _epoch(found)
            return epoch is not None and epoch > found.total_steps
        case "minutes":
            return False


def _some(total_steps: int | None) -> int:
    """A quarter of the run."""
    return max(1, (total_steps or 0) // 4)


def steps_see_every_row(found: Preparation) -> Iterator[Finding]:
    spec, num_rows, epoch = found.spec, found.forecast.lengths.num_rows, _epoch(found)
    steps = spec.schedule.steps
    if steps is not None and num_rows and epoch is not None and steps < epoch:
        seen = steps * spec.global_batch
        problem = f"schedule.steps {steps:,} ends before the first epoch does: {seen:,} of {num_rows:,} rows ({100 * seen / num_rows:.1f} %) are seen"
        yield Finding(level="note", problem=problem, remedy=f"--set schedule.steps={epoch} sees every row once")


def _epoch(found: Preparation) -> int | None:
    """In steps."""
    num_rows = found.forecast.lengths.num_rows
    return None if num_rows is None else steps_per_epoch(num_rows, found.spec.global_batch)


CHECKS: tuple[Callable[[Preparation], Iterator[Finding]], ...] = (
    there_is_something_to_train,
    packages_are_installed,
    engine_can_do_it,
    engine_config_agrees,
    optimizer_has_its_device,
    update_can_be_inside,
    precision_suits_the_device,
    quantised_dora_is_slow,
    every_process_has_rows,
    gradients_reach_every_trained_tensor,
    adapters_are_trained,
    memory_fits,
    disk_holds_checkpoints,
    host_memory_suffices,
    warm_up_ends_before_the_run,
    something_is_saved_and_validated_inside_the_run,
    steps_see_every_row,
)


def examine(found: Preparation) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes."""
    findings = [finding for check in CHECKS for finding in check(found)]
    return in_order(findings)
