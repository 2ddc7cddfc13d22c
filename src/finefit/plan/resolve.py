"""Decides once what a run will do: every value has its source. The spec itself is never changed."""

import math
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, Literal

import torch
from pydantic import BaseModel

from finefit.artifacts.forecasts import Forecast, Resolved
from finefit.artifacts.records import Inputs, Levers
from finefit.artifacts.stage_records import Stage
from finefit.data.order import steps_per_epoch
from finefit.errors import SpecError
from finefit.facts.cards import parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.spec import Period
from finefit.spec.data import Fields
from finefit.spec.models import Lora
from finefit.spec.schema import AutoEngine, Common, Single, Spec
from finefit.step.engine_choice import require_possible

Leaves = Iterable[tuple[str, Any, bool]]
"""Every value in a spec, as (dotted key, value, whether the user wrote it)."""


def device_of(spec: Common, machine: Machine) -> str:
    return str(_device(spec, machine, Resolved(value=spec.device, source="spec")).value)


def precision_on(device: Literal["cpu", "cuda"]) -> Literal["bf16", "fp16", "fp32"]:
    """Returns the precision of answers if no spec names one. A missing GPU is an error; the CPU does not replace it."""
    if device == "cpu":
        return "fp32"
    if not torch.cuda.is_available():
        raise _no_card("--device cuda", read_machine(), "--device cpu answers here")
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _no_card(asked: str, machine: Machine, otherwise: str) -> SpecError:
    reason = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
    cards = ", ".join(card.name for card in machine.cards) or "no card"
    problem = f"{asked} is requested, but {reason} (the driver shows {cards})"
    return SpecError(problem, f"`finefit doctor` explains what to install; {otherwise}")


def resolve(
    spec: Spec, *, overrides: Collection[str], machine: Machine, num_rows: int, forecast: Forecast
) -> dict[str, Resolved]:
    """Resolves the spec's own values first, then what follows from them and from the forecast."""
    names = [override.split("=", 1)[0] for override in overrides]
    values = {}
    for key, value, given in leaves(spec):
        is_set = any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)
        values[key] = Resolved(value=value, source="--set" if is_set else "spec" if given else "default")
    values["device"] = _device(spec, machine, values["device"])
    values["precision"] = _precision(spec, str(values["device"].value), values["precision"])
    if values["engine.kind"].value == "auto":  # what the user has named keeps its source
        engine, reason = forecast.engine, forecast.reasons.get("engine", "one device")
        values["engine.kind"] = Resolved(value=engine.kind, source=reason)
        devices = 1 if isinstance(engine, Single) else engine.devices
        values["engine.devices"] = Resolved(value=devices, source=reason)
    threads = min(torch.get_num_threads(), machine.num_cores)
    values["threads"] = Resolved(value=threads, source="torch's own choice (cores, or OMP_NUM_THREADS)")
    return values | _lengths(spec, num_rows) | _levers(spec, values, forecast, num_rows)


def make_stage(
    spec: Spec,
    values: dict[str, Resolved],
    *,
    inputs: Inputs,
    forecast: Forecast,
    num_rows: int,
    prepared: dict[str, str],
) -> Stage:
    def of(key: str) -> Any:
        return values[key].value

    # a named engine is taken from the spec: its paths are relative to the spec
    engine = forecast.engine if isinstance(spec.engine, AutoEngine) else spec.engine
    stage = Stage(
        name=spec.objective.kind,
        seed=spec.seed,
        device=of("device"),
        precision=of("precision"),
        deterministic=spec.deterministic,
        threads=of("threads"),
        model=spec.model,
        model_name=inputs.model,
        model_fingerprint=inputs.model_fingerprint,
        tuning=spec.tuning,
        objective=spec.objective,
        engine=engine,
        num_ranks=forecast.devices,
        trackers=spec.trackers,
        template=spec.data.template,
        template_options=spec.data.template_options,
        template_sha256=inputs.template_sha256,
        images=spec.data.images,
        max_prompt_tokens=spec.max_prompt_tokens(),
        form=spec.data.task,
        eval_limits=forecast.eval_limits,
        optimizer=spec.optimizer,
        schedule=spec.schedule.kind,
        total_steps=of("total_steps"),
        warmup_steps=of("warmup_steps"),
        steps_per_epoch=of("steps_per_epoch"),
        num_rows=num_rows,
        global_batch=spec.global_batch,
        levers=forecast.levers,
        predicted_bytes=forecast.predicted_bytes(of("device")),
        candidates=forecast.candidates if of("device") == "cuda" else (),
        save=spec.save,
        validate_every=spec.validation.every,
        on_nan=spec.on_nan,
        evaluate=spec.evaluate,
        prepared=prepared,
    )
    require_unscaled(stage.levers, stage.precision)
    require_possible(stage)
    return stage


def require_unscaled(levers: Levers, precision: str) -> None:
    if levers.update == "inside" and precision == "fp16":
        problem = "levers.update: inside cannot take the loss scale of fp16 out of the gradients first"
        raise SpecError(problem, "--set levers.update=after")


def leaves(part: BaseModel, prefix: str = "", *, given: bool = True) -> Leaves:
    for name, field in type(part).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(part, name)
        written = given and name in part.model_fields_set
        if isinstance(value, BaseModel) and not isinstance(value, (Period, Fields)):
            yield from leaves(value, f"{key}.", given=written)
        else:
            yield key, _plain(value), written


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, BaseModel):
        is_period = isinstance(value, Period)
        return str(value) if is_period else value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return value


def _device(spec: Common, machine: Machine, asked: Resolved) -> Resolved:
    has_cuda = torch.cuda.is_available()
    match spec.device:
        case "cpu":
            return asked
        case "cuda" if parse_card(spec.card).is_cpu:
            raise SpecError("device: cuda and card: cpu contradict each other", "remove one of them")
        case "auto" if parse_card(spec.card).is_cpu:
            return Resolved(value="cpu", source="card: cpu")
        case "cuda" if not has_cuda:
            raise _no_card("device: cuda", machine, "device: cpu trains here")
        case "cuda":
            return asked
        case "auto" if has_cuda:
            return Resolved(value="cuda", source=f"auto: {torch.cuda.get_device_name()}")
        case "auto":
            unused = ", and Apple's GPU (MPS) is not used" if machine.has_apple_gpu else ""
            return Resolved(value="cpu", source=f"auto: torch finds no CUDA device{unused}")


def _precision(spec: Spec, device: str, asked: Resolved) -> Resolved:
    has_bf16 = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if spec.precision == "bf16" and not has_bf16:
        problem = f"precision: bf16 is requested, but {torch.cuda.get_device_name()} does not support it"
        raise SpecError(problem, "set precision: fp16 or fp32")
    if spec.precision != "auto":
        return asked
    if device == "cpu":
        return Resolved(value="fp32", source="auto: exact and fastest for small models on a CPU")
    if has_bf16:
        weights = "bf16 base, fp32 adapters" if isinstance(spec.tuning, Lora) else "fp32 weights under autocast"
        return Resolved(value="bf16", source=f"auto: {torch.cuda.get_device_name()} supports it ({weights})")
    return Resolved(value="fp16", source=f"auto: {torch.cuda.get_device_name()} has no bf16; losses are scaled")


def _lengths(spec: Spec, num_rows: int) -> dict[str, Resolved]:
    per_epoch, asked = steps_per_epoch(num_rows, spec.global_batch), spec.schedule.warmup
    total = Resolved(value=spec.schedule.steps, source="schedule.steps")
    if total.value is None:
        epochs = spec.schedule.epochs or 1
        source = f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'} x {per_epoch} steps"
        total = Resolved(value=spec.schedule.num_steps(per_epoch), source=source)
    warmup = Resolved(value=asked, source="schedule.warmup")
    if not isinstance(asked, int):
        share = f"{asked:g} of {total.value} steps, rounded up"
        warmup = Resolved(value=math.ceil(asked * total.value), source=share)
    steps = Resolved(value=per_epoch, source=f"{num_rows} rows / {spec.global_batch} global, rounded up")
    return {"steps_per_epoch": steps, "total_steps": total, "warmup_steps": warmup}


def _levers(spec: Spec, values: dict[str, Resolved], forecast: Forecast, num_rows: int) -> dict[str, Resolved]:
    """Levers as the forecast has chosen them, with its reasons; what the user has set keeps its source."""
    found, levers, devices = {}, forecast.levers, forecast.devices
    for lever in fields(levers):
        asked = values.get(f"levers.{lever.name}")
        reason = forecast.reasons.get(lever.name, "auto")
        source = reason if asked is None or asked.value == "auto" else asked.source
        found[f"levers.{lever.name}"] = Resolved(value=getattr(levers, lever.name), source=source)
    whole, micro = min(spec.global_batch, num_rows), levers.micro_batch
    asked = values.get("levers.micro_batch")
    if asked is not None and isinstance(asked.value, int) and asked.value > micro:
        source = f"{asked.source} requests {asked.value}, but a step has only {whole} rows"
        found["levers.micro_batch"] = Resolved(value=micro, source=source)
    if levers.packing:
        pack = f"{micro} x {forecast.lengths.longest:,} tokens"
        source = f"packs of up to {pack} (micro_batch x the longest row) that a mean step fills"
        found["accumulation"] = Resolved(value=forecast.accumulation, source=source)
    else:
        source = f"{whole} rows / {micro} micro x {devices} {'device' if devices == 1 else 'devices'}"
        found["accumulation"] = Resolved(value=math.ceil(math.ceil(whole / devices) / micro), source=source)
    return found
