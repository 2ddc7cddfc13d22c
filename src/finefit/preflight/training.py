"""The forecast of a training on this machine, and checks of one training: one function per check, yielding findings.
No weight is loaded."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finefit.artifacts.forecasts import Forecast, Lengths, Suggestion, grouped_names
from finefit.artifacts.records import Finding, Levers
from finefit.data.order import steps_per_epoch
from finefit.errors import SpecError
from finefit.facts.card_table import CardKind
from finefit.facts.cards import find_kind, parse_card
from finefit.facts.machine import Machine, read_machine, read_version
from finefit.plan.client import forecast
from finefit.plan.resolve import device_of
from finefit.plan.target import require_same_count
from finefit.preflight import in_order
from finefit.spec.models import Lora, ShapeModel
from finefit.spec.part import Period
from finefit.spec.schema import AdamW, AutoEngine, DeepSpeed, Engine, SlurmLauncher, Spec
from finefit.spec.tasks import LmEval
from finefit.step.deepspeed import config_contradictions, user_config
from finefit.step.engine_choice import engine_problems

_OPTIONAL = (
    *("bitsandbytes", "liger-kernel", "deepspeed", "submitit", "lm-eval"),
    *("tensorboard", "wandb", "mlflow", "trackio"),
)
"""Packages that only some specs need."""


def forecast_here(spec: Spec, base: Path, lengths: Lengths, machine: Machine, *, nodes: int | None = None) -> Forecast:
    """On the device that a run gets on this machine. Of a card that the spec names only the size counts, as a limit."""
    asked, device = parse_card(spec.card), device_of(spec, machine)
    if asked.count > 1:
        spec = _for_several_cards(spec, asked.count, device)
    kind_bytes = asked.kind.memory_bytes if asked.kind is not None else asked.memory_bytes
    budget = kind_bytes if device == "cuda" else None
    (found,) = forecast(spec, base, ("cpu" if device == "cpu" else "auto",), lengths, budget_bytes=budget, nodes=nodes)
    return found


def forecaster_here(spec: Spec, base: Path, lengths: Lengths) -> tuple[Forecast, ...]:
    return (forecast_here(spec, base, lengths, read_machine()),)


def _for_several_cards(spec: Spec, count: int, device: str) -> Spec:
    """A run takes the cards of this machine; the spec's card gives only their number."""
    if device != "cuda":
        raise SpecError(
            f"card: {spec.card} means {count} cards, but this run uses the CPU",
            f"set card: cpu and engine.devices: {count}",
        )
    if isinstance(spec.engine, AutoEngine) and spec.engine.devices is None:
        return spec.model_copy(update={"engine": AutoEngine(kind="auto", devices=count)})
    require_same_count(parse_card(spec.card), spec.engine)
    return spec


# Checks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    spec: Spec
    forecast: Forecast
    absent: frozenset[str] = frozenset()
    """Optional packages that are not installed."""
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    """The content of the file `engine.config`."""

    @classmethod
    def read(cls, spec: Spec, forecast: Forecast, base: Path) -> "TrainingFacts":
        absent = frozenset(name for name in _OPTIONAL if read_version(name) is None)
        return cls(spec=spec, forecast=forecast, absent=absent, engine_config=user_config(spec.engine, base))

    @property
    def is_cpu(self) -> bool:
        return self.forecast.card == "cpu"

    @property
    def card_kind(self) -> CardKind | None:
        return find_kind(self.forecast.card.removeprefix(f"{self.forecast.devices}x"), None)

    @property
    def epoch_steps(self) -> int | None:
        num_rows = self.forecast.lengths.num_rows
        return None if num_rows is None else steps_per_epoch(num_rows, self.spec.global_batch)


def model_has_weights(found: TrainingFacts) -> Iterator[Finding]:
    if isinstance(found.spec.model, ShapeModel):
        problem = "a model of kind shape has no weights to train"
        yield Finding(level="error", problem=problem, remedy="plan it, or name a model that has weights")


def packages_are_installed(found: TrainingFacts) -> Iterator[Finding]:
    for key, package, remedy in _needed_packages(found):
        if package in found.absent:
            yield Finding(level="error", problem=f"{key} needs {package}, which is not installed", remedy=remedy)
    for tracker in found.spec.trackers:
        if tracker.kind in found.absent:
            problem = f"trackers: {tracker.kind} is not installed, so the run goes on without it"
            remedy = f"pip install {tracker.kind}, or leave it out of trackers"
            yield Finding(level="warning", problem=problem, remedy=remedy)


def _needed_packages(found: TrainingFacts) -> Iterator[tuple[str, str, str]]:
    """(the setting that needs it, the package, the remedy)."""
    spec, is_gpu, gpu = found.spec, not found.is_cpu, "pip install 'finefit[gpu]'"
    if found.forecast.levers.kernels == "fused" and is_gpu:
        yield "levers.kernels fused", "liger-kernel", f"{gpu}, or --set levers.kernels=torch"
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        yield "tuning.base_bits", "bitsandbytes", gpu
    if spec.optimizer.kind != "adamw" and is_gpu:
        yield f"optimizer.kind {spec.optimizer.kind}", "bitsandbytes", gpu
    if isinstance(spec.engine, DeepSpeed):
        remedy = "pip install 'finefit[deepspeed]', or set engine.kind: fsdp2, which shards the same"
        yield "engine.kind deepspeed", "deepspeed", remedy
    if isinstance(spec.launcher, SlurmLauncher):
        yield "launcher.kind slurm", "submitit", "pip install submitit, or set launcher.kind: local"
    for evaluation in spec.evaluate:
        if isinstance(evaluation.task, LmEval):
            remedy = "pip install 'finefit[lm-eval]', or leave it out of evaluate"
            yield f"evaluate {evaluation.label}", "lm-eval", remedy


def engine_supports_the_spec(found: TrainingFacts) -> Iterator[Finding]:
    """With the levers that the forecast has chosen."""
    yield from engine_problems(found.forecast.engine, found.spec.tuning, found.spec.optimizer, found.forecast.levers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineSettings:
    """As the stage will have them."""

    engine: Engine
    optimizer: AdamW
    levers: Levers
    precision: str
    global_batch: int
    num_ranks: int


def engine_config_agrees(found: TrainingFacts) -> Iterator[Finding]:
    """The spec decides; a DeepSpeed file that says otherwise would be ignored."""
    spec, forecast, own = found.spec, found.forecast, dict(found.engine_config)
    if not isinstance(forecast.engine, DeepSpeed):
        return
    precision = _precision(found)
    if precision is None:  # only the run itself knows it
        own = {key: value for key, value in own.items() if key not in ("bf16", "fp16")}
    settings = _EngineSettings(
        engine=forecast.engine,
        optimizer=spec.optimizer,
        levers=forecast.levers,
        precision=precision or "auto",
        global_batch=spec.global_batch,
        num_ranks=forecast.devices,
    )
    for line in config_contradictions(settings, own):
        problem = f"engine.config contradicts the spec: {line}"
        yield Finding(level="error", problem=problem, remedy='take it out, or write "auto"; the spec decides')


def _precision(found: TrainingFacts) -> str | None:
    """None where the card is not in the table."""
    if found.spec.precision != "auto":
        return found.spec.precision
    if found.is_cpu:
        return "fp32"
    kind = found.card_kind
    return None if kind is None else "bf16" if kind.has_bf16 else "fp16"


def optimizer_has_its_device(found: TrainingFacts) -> Iterator[Finding]:
    kind = found.spec.optimizer.kind
    if kind != "adamw" and found.is_cpu:
        problem = f"optimizer.kind {kind} needs a CUDA device"
        yield Finding(level="error", problem=problem, remedy="set optimizer.kind: adamw")


def update_can_be_inside(found: TrainingFacts) -> Iterator[Finding]:
    """A tensor that is updated during backward sees neither the norm of all gradients nor later micro-batches."""
    spec, accumulation = found.spec, found.forecast.accumulation
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    if spec.optimizer.clip is not None:
        problem = f"levers.update: inside cannot clip, and optimizer.clip is {spec.optimizer.clip:g}"
        yield Finding(level="error", problem=problem, remedy="--set optimizer.clip=null, or --set levers.update=after")
    if accumulation > 1:
        problem = f"levers.update: inside needs the whole step in one micro-batch, and it has {accumulation}"
        yield Finding(level="error", problem=problem, remedy="--set levers.update=after, or a smaller global_batch")
    if spec.optimizer.kind != "adamw":
        why = "whose kernel skips values that are not finite"
        problem = f"levers.update: inside needs optimizer.kind adamw, {why}; it is {spec.optimizer.kind}"
        yield Finding(level="error", problem=problem, remedy="--set optimizer.kind=adamw, or --set levers.update=after")


def precision_suits_the_device(found: TrainingFacts) -> Iterator[Finding]:
    """fp16 is for cards without bf16: its small range needs loss scaling, and steps that overflow are skipped."""
    if found.spec.precision != "fp16":
        return
    kind = found.card_kind
    if found.is_cpu:
        problem = "precision: fp16 on a CPU is slower than fp32, which needs no loss scaling"
        yield Finding(level="warning", problem=problem, remedy="--set precision=fp32")
    elif kind is not None and kind.has_bf16:
        problem = f"precision is fp16, but {kind.name} has bf16, which is as fast and needs no loss scaling"
        yield Finding(level="warning", problem=problem, remedy="--set precision=auto")


def quantised_dora_is_slow(found: TrainingFacts) -> Iterator[Finding]:
    tuning = found.spec.tuning
    if isinstance(tuning, Lora) and tuning.dora and tuning.base_bits is not None:
        problem = f"tuning.dora with base_bits {tuning.base_bits} unpacks every weight once more per step for its norm"
        yield Finding(level="note", problem=problem, remedy="tuning.rank_stabilised: true costs nothing")


def every_process_has_rows(found: TrainingFacts) -> Iterator[Finding]:
    devices, batch = found.forecast.devices, found.spec.global_batch
    rows = min(batch, found.forecast.lengths.num_rows or batch)
    if rows < devices:
        problem = f"a step has {rows} rows for {devices} processes: {devices - rows} of them only wait"
        remedy = f"set global_batch to {devices} or more, or take {rows} devices"
        yield Finding(level="warning", problem=problem, remedy=remedy)


def gradients_reach_every_trained_tensor(found: TrainingFacts) -> Iterator[Finding]:
    """A tensor without a gradient stays as it began, and the loss does not show it."""
    gradients = found.forecast.gradients
    if gradients.unreached:
        names = ", ".join(grouped_names(gradients.unreached))
        count = f"{len(gradients.unreached):,} of {gradients.trainable:,}"
        unknown = "look for what cuts them off in the model's forward, or leave them out of tuning.targets"
        problem = f"no gradient reaches {count} trained tensors: {names}"
        yield Finding(level="error", problem=problem, remedy=". ".join(gradients.causes) or unknown)


def adapters_are_trained(found: TrainingFacts) -> Iterator[Finding]:
    """A frozen adapter is not among the trained tensors, so no gradient is missing."""
    if frozen := found.forecast.gradients.frozen:
        problem = f"adapters are attached but not trained: {', '.join(frozen)}"
        yield Finding(level="error", problem=problem, remedy="leave their requires_grad on")


def memory_fits(found: TrainingFacts) -> Iterator[Finding]:
    forecast, max_tokens = found.forecast, found.spec.data.max_tokens
    if not forecast.fits:
        place = f"{forecast.peak_instant} in {forecast.peak_module}" if forecast.peak_module else forecast.peak_instant
        needed = f"a step needs {forecast.peak_bytes:,} bytes at its peak ({place})"
        problem = f"{needed}, {forecast.card} has {forecast.budget_bytes:,} to give"
        fitting = next((suggestion for suggestion in forecast.suggestions if suggestion.fits), None)
        larger = "no lever is enough: take a larger card, a smaller model, or lower data.max_tokens"
        remedy = f"{larger} (now {max_tokens:,})" if fitting is None else _command(fitting)
        yield Finding(level="error", problem=problem, remedy=remedy)


def _command(suggestion: Suggestion) -> str:
    options = " ".join(f"--set {shlex.quote(change)}" for change in suggestion.changes)
    return f"{options} ({suggestion.peak_bytes:,} bytes; {suggestion.price})"


def warm_up_ends_before_the_run(found: TrainingFacts) -> Iterator[Finding]:
    """One step of warm-up has the whole learning rate already."""
    total, asked = found.forecast.total_steps, found.spec.schedule.warmup
    if total is None:
        return
    warm_up = asked if isinstance(asked, int) else math.ceil(asked * total)
    if warm_up > 1 and warm_up >= total:
        problem = f"schedule.warmup {asked:g} makes all {total} steps of the run warm-up"
        yield Finding(level="error", problem=problem, remedy="--set schedule.warmup=0, or give the run more steps")


def run_is_saved_and_validated_before_its_end(found: TrainingFacts) -> Iterator[Finding]:
    """The end of a run is always saved, and every save validates."""
    spec, total = found.spec, found.forecast.total_steps
    quarter = f"{max(1, (total or 0) // 4)} steps"
    if _is_never_due(spec.save.every, found):
        lost = "only its end is saved, and a machine that fails earlier loses all of it"
        problem = f"save.every is {spec.save.every}, the run has {total}: {lost}"
        yield Finding(level="warning", problem=problem, remedy=f"--set save.every='{quarter}'")
    every = spec.validation.every
    if spec.data.validation is not None and every is not None and _is_never_due(every, found):
        seldom = "the validation loss is only computed when the run is saved"
        problem = f"validate.every is {every}, the run has {total}: {seldom}"
        yield Finding(level="warning", problem=problem, remedy=f"--set validate.every='{quarter}'")


def _is_never_due(every: Period, found: TrainingFacts) -> bool:
    """Never True for minutes: how long a run takes is an estimate."""
    total, epoch = found.forecast.total_steps, found.epoch_steps
    due = {"steps": every.count, "epoch": epoch, "minutes": None}[every.unit]
    return total is not None and due is not None and due > total


def steps_see_every_row(found: TrainingFacts) -> Iterator[Finding]:
    steps, num_rows, epoch = found.spec.schedule.steps, found.forecast.lengths.num_rows, found.epoch_steps
    if steps is not None and num_rows and epoch is not None and steps < epoch:
        seen = steps * found.spec.global_batch
        rows = f"{seen:,} of {num_rows:,} rows ({100 * seen / num_rows:.1f} %) are seen"
        problem = f"schedule.steps {steps:,} ends before the first epoch does: {rows}"
        yield Finding(level="note", problem=problem, remedy=f"--set schedule.steps={epoch} sees every row once")


CHECKS: tuple[Callable[[TrainingFacts], Iterator[Finding]], ...] = (
    model_has_weights,
    packages_are_installed,
    engine_supports_the_spec,
    engine_config_agrees,
    optimizer_has_its_device,
    update_can_be_inside,
    precision_suits_the_device,
    quantised_dora_is_slow,
    every_process_has_rows,
    gradients_reach_every_trained_tensor,
    adapters_are_trained,
    memory_fits,
    warm_up_ends_before_the_run,
    run_is_saved_and_validated_before_its_end,
    steps_see_every_row,
)


def check_training(found: TrainingFacts) -> tuple[Finding, ...]:
    return in_order(finding for check in CHECKS for finding in check(found))
