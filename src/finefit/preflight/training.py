"""The forecast of a training on this machine, and its checks: one function per check. No weights are loaded."""

import importlib.util
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finefit.artifacts.forecasts import Forecast, Lengths, grouped_names
from finefit.artifacts.records import Finding, Levers
from finefit.data.order import steps_per_epoch
from finefit.errors import MissingPackage, SpecError
from finefit.facts.cards import CardKind, find_kind, parse_card
from finefit.facts.machine import Machine, read_machine, read_version
from finefit.facts.servers import VLLM_RANKS, vllm_rank
from finefit.plan.client import forecast
from finefit.plan.resolve import device_of
from finefit.plan.stage_forecasts import Forecaster
from finefit.plan.target import require_same_count
from finefit.preflight import error, in_order, note, warning
from finefit.spec.models import Lora, ShapeModel
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
    """Forecasts for the device that a run gets on this machine. A card that the spec names only limits the memory."""
    asked, device = parse_card(spec.card), device_of(spec, machine)
    if asked.count > 1:  # the spec's card only gives the number of cards that a run uses here
        if device != "cuda":
            problem = f"card: {spec.card} means {asked.count} cards, but this run uses the CPU"
            raise SpecError(problem, f"set card: cpu and engine.devices: {asked.count}")
        require_same_count(asked, spec.engine)
        if isinstance(spec.engine, AutoEngine):
            spec = spec.model_copy(update={"engine": AutoEngine(kind="auto", devices=asked.count)})
    kind_bytes = asked.kind.memory_bytes if asked.kind is not None else asked.memory_bytes
    budget = kind_bytes if device == "cuda" else None
    (found,) = forecast(spec, base, ("cpu" if device == "cpu" else "auto",), lengths, budget_bytes=budget, nodes=nodes)
    return found


def forecaster_here(nodes: int | None = None) -> Forecaster:
    """`nodes`: that ranks were started on already."""
    return lambda spec, base, lengths: (forecast_here(spec, base, lengths, read_machine(), nodes=nodes),)


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
        absent = frozenset(name for name in _OPTIONAL if not _is_installed(name))
        return cls(spec=spec, forecast=forecast, absent=absent, engine_config=user_config(spec.engine, base))

    @property
    def is_cpu(self) -> bool:
        return self.forecast.card == "cpu"

    @property
    def card_kind(self) -> CardKind | None:
        return find_kind(self.forecast.card.removeprefix(f"{self.forecast.devices}x"), None)


def model_has_weights(found: TrainingFacts) -> Iterator[Finding]:
    if isinstance(found.spec.model, ShapeModel):
        yield error("a model of kind shape has no weights to train", "plan it, or name a model that has weights")


def _is_installed(package: str) -> bool:
    return read_version(package) is not None and importlib.util.find_spec(package.replace("-", "_")) is not None


def require_packages(found: TrainingFacts) -> None:
    """Raises all that are missing at once: what to install is no matter of judgement, as a finding is."""
    spec, is_gpu, gpu = found.spec, not found.is_cpu, "pip install 'finefit[gpu]'"
    needed: list[tuple[str, str, str]] = []  # the setting that needs it, the package, the remedy
    if found.forecast.levers.kernels == "fused" and is_gpu:
        needed.append(("levers.kernels fused", "liger-kernel", f"{gpu}, or --set levers.kernels=torch"))
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        needed.append(("tuning.base_bits", "bitsandbytes", gpu))
    if spec.optimizer.kind != "adamw" and is_gpu:
        needed.append((f"optimizer.kind {spec.optimizer.kind}", "bitsandbytes", gpu))
    if isinstance(spec.engine, DeepSpeed):
        remedy = "pip install 'finefit[deepspeed]', or set engine.kind: fsdp2, which shards the same"
        needed.append(("engine.kind deepspeed", "deepspeed", remedy))
    if isinstance(spec.launcher, SlurmLauncher):
        needed.append(("launcher.kind slurm", "submitit", "pip install submitit, or set launcher.kind: local"))
    remedy = "pip install 'finefit[lm-eval]', or leave it out of evaluate"
    needed += [(f"evaluate {one.label}", "lm-eval", remedy) for one in spec.evaluate if isinstance(one.task, LmEval)]
    if missing := [one for one in needed if one[1] in found.absent]:
        problems = [f"{key} needs {package}, which is not installed" for key, package, _ in missing]
        raise MissingPackage("\n".join(problems), "\n".join(dict.fromkeys(remedy for *_, remedy in missing)))


def trackers_are_installed(found: TrainingFacts) -> Iterator[Finding]:
    """None of them can stop a run."""
    for tracker in found.spec.trackers:
        if tracker.kind in found.absent:
            problem = f"trackers: {tracker.kind} is not installed, so the run continues without it"
            yield warning(problem, f"pip install {tracker.kind}, or leave it out of trackers")


@dataclass(frozen=True, slots=True)
class _EngineSettings:
    """The settings that the stage will have."""

    engine: Engine
    optimizer: AdamW
    levers: Levers
    precision: str
    global_batch: int
    num_ranks: int


def engine_supports_the_spec(found: TrainingFacts) -> Iterator[Finding]:
    """Checks the levers that the forecast chose. The spec decides; a DeepSpeed file that differs would be ignored."""
    spec, forecast, own = found.spec, found.forecast, dict(found.engine_config)
    yield from engine_problems(forecast.engine, spec.tuning, spec.optimizer, forecast.levers)
    if not isinstance(forecast.engine, DeepSpeed):
        return
    kind, precision = found.card_kind, str(spec.precision)
    if precision == "auto" and found.is_cpu:
        precision = "fp32"
    elif precision == "auto" and kind is not None:
        precision = "bf16" if kind.has_bf16 else "fp16"
    elif precision == "auto":  # the card is not in the table: only the run itself knows it
        own = {key: value for key, value in own.items() if key not in ("bf16", "fp16")}
    decided = forecast.engine, spec.optimizer, forecast.levers, precision, spec.global_batch, forecast.devices
    for line in config_contradictions(_EngineSettings(*decided), own):
        yield error(f"engine.config contradicts the spec: {line}", 'remove it, or write "auto"; the spec decides')


def optimizer_can_update(found: TrainingFacts) -> Iterator[Finding]:
    """A tensor that is updated during backward sees neither the norm of all gradients nor later micro-batches."""
    spec, accumulation, kind = found.spec, found.forecast.accumulation, found.spec.optimizer.kind
    if kind != "adamw" and found.is_cpu:
        yield error(f"optimizer.kind {kind} needs a CUDA device", "set optimizer.kind: adamw")
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    if spec.optimizer.clip is not None:
        problem = f"levers.update: inside cannot clip, but optimizer.clip is {spec.optimizer.clip:g}"
        yield error(problem, "--set optimizer.clip=null, or --set levers.update=after")
    if accumulation > 1:
        problem = f"levers.update: inside needs the whole step in one micro-batch, but it has {accumulation}"
        yield error(problem, "--set levers.update=after, or a smaller global_batch")
    if kind != "adamw":
        why = "whose kernel skips values that are not finite"
        problem = f"levers.update: inside needs optimizer.kind adamw, {why}; it is {kind}"
        yield error(problem, "--set optimizer.kind=adamw, or --set levers.update=after")


def precision_suits_the_device(found: TrainingFacts) -> Iterator[Finding]:
    """fp16 is for cards without bf16: its small range needs loss scaling, and steps that overflow are skipped."""
    kind, tuning, is_fp16 = found.card_kind, found.spec.tuning, found.spec.precision == "fp16"
    if is_fp16 and found.is_cpu:
        problem = "precision: fp16 on a CPU is slower than fp32, which needs no loss scaling"
        yield warning(problem, "--set precision=fp32")
    elif is_fp16 and kind is not None and kind.has_bf16:
        problem = f"precision is fp16, but {kind.name} has bf16, which is as fast and needs no loss scaling"
        yield warning(problem, "--set precision=auto")
    if isinstance(tuning, Lora) and tuning.dora and tuning.base_bits is not None:
        problem = f"tuning.dora with base_bits {tuning.base_bits} unpacks every weight once more per step for its norm"
        yield note(problem, "tuning.rank_stabilised: true costs nothing")


def every_process_has_rows(found: TrainingFacts) -> Iterator[Finding]:
    devices, batch = found.forecast.devices, found.spec.global_batch
    rows = min(batch, found.forecast.lengths.num_rows or batch)
    if rows < devices:
        problem = f"a step has {rows} rows for {devices} processes: {devices - rows} of them only wait"
        yield warning(problem, f"set global_batch to {devices} or more, or use {rows} devices")


def gradients_reach_every_trained_tensor(found: TrainingFacts) -> Iterator[Finding]:
    """A tensor without a gradient keeps its initial value, and the loss does not show it. A frozen adapter is not among
    the trained tensors, so no gradient is missing."""
    gradients = found.forecast.gradients
    if gradients.unreached:
        names = ", ".join(grouped_names(gradients.unreached))
        count = f"{len(gradients.unreached):,} of {gradients.trainable:,}"
        unknown = "find out what cuts them off in the model's forward, or leave them out of tuning.targets"
        yield error(f"no gradient reaches {count} trained tensors: {names}", ". ".join(gradients.causes) or unknown)
    if gradients.frozen:
        problem = f"adapters are attached but not trained: {', '.join(gradients.frozen)}"
        yield error(problem, "keep their requires_grad on")


def memory_fits(found: TrainingFacts) -> Iterator[Finding]:
    forecast, max_tokens = found.forecast, found.spec.data.max_tokens
    if forecast.fits:
        return
    place = f"{forecast.peak_instant} in {forecast.peak_module}" if forecast.peak_module else forecast.peak_instant
    needed = f"a step needs {forecast.peak_bytes:,} bytes at its peak ({place})"
    larger = "use a larger card or a smaller model, or lower data.max_tokens"
    remedy = f"no lever is enough: {larger} (now {max_tokens:,})"
    if fitting := next((suggestion for suggestion in forecast.suggestions if suggestion.fits), None):
        options = " ".join(f"--set {shlex.quote(change)}" for change in fitting.changes)
        remedy = f"{options} ({fitting.peak_bytes:,} bytes; {fitting.price})"
    yield error(f"{needed}, but {forecast.card} has {forecast.budget_bytes:,} available", remedy)


def run_is_long_enough(found: TrainingFacts) -> Iterator[Finding]:
    """Checks that a run is longer than its warm-up, long enough for a save and a validation before its end (the end is
    always saved, and every save validates), and sees every row. One step of the warm-up already has the full learning
    rate."""
    spec, total, num_rows = found.spec, found.forecast.total_steps, found.forecast.lengths.num_rows
    epoch = None if num_rows is None else steps_per_epoch(num_rows, spec.global_batch)
    asked, steps = spec.schedule.warmup, spec.schedule.steps
    warm_up = 0 if total is None else asked if isinstance(asked, int) else math.ceil(asked * total)
    if total is not None and warm_up > 1 and warm_up >= total:
        problem = f"schedule.warmup {asked:g} makes all {total} steps of the run warm-up"
        yield error(problem, "--set schedule.warmup=0, or give the run more steps")
    lost = "only its end is saved, and a machine that fails earlier loses all of it"
    seldom = "the validation loss is only computed when the run is saved"
    validates = spec.validation.every if spec.data.validation is not None else None
    for key, every, effect in (("save.every", spec.save.every, lost), ("validate.every", validates, seldom)):
        # the duration of a run is an estimate, so minutes are never reported
        due = {"steps": every.count, "epoch": epoch, "minutes": None}[every.unit] if every is not None else None
        if total is not None and due is not None and due > total:
            problem = f"{key} is {every}, but the run has {total}: {effect}"
            yield warning(problem, f"--set {key}='{max(1, total // 4)} steps'")
    if steps is not None and num_rows and epoch is not None and steps < epoch:
        seen = steps * spec.global_batch
        rows = f"{seen:,} of {num_rows:,} rows ({100 * seen / num_rows:.1f} %) are seen"
        problem = f"schedule.steps {steps:,} ends before the first epoch does: {rows}"
        yield note(problem, f"--set schedule.steps={epoch} sees every row once")


def adapter_is_servable(found: TrainingFacts) -> Iterator[Finding]:
    """As it is; merged into its model every adapter is. What only the finished adapter shows, its export says."""
    tuning = found.spec.tuning
    if not isinstance(tuning, Lora):
        return
    remedy = "`finefit export --to merged` will make a whole model for them"
    if tuning.dora:
        yield note("tuning.dora: vLLM and SGLang do not load DoRA adapters", remedy)
    elif vllm_rank(tuning.rank) is None:
        yield note(f"tuning.rank {tuning.rank}: vLLM loads adapters of rank {VLLM_RANKS[-1]} at most", remedy)
    elif tuning.rank_stabilised:
        yield note("tuning.rank_stabilised: SGLang would scale the adapter by alpha / rank; vLLM does not", remedy)


CHECKS: tuple[Callable[[TrainingFacts], Iterator[Finding]], ...] = (
    model_has_weights,
    trackers_are_installed,
    engine_supports_the_spec,
    optimizer_can_update,
    precision_suits_the_device,
    every_process_has_rows,
    gradients_reach_every_trained_tensor,
    memory_fits,
    run_is_long_enough,
    adapter_is_servable,
)


def check_training(found: TrainingFacts) -> tuple[Finding, ...]:
    return in_order(finding for check in CHECKS for finding in check(found))
