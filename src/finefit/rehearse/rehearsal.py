"""The real step, executed on fake tensors: no GPU, no weights.

Two optimizer steps: the first allocates the optimizer's state, the second is the steady state.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finefit.custom.inputs import blank_extra
from finefit.data.order import capacity_of
from finefit.errors import ModelError
from finefit.model.load import weight_dtype
from finefit.model.resolve_model import custom_source_in
from finefit.objective.batch import Batch, Extra, Forward, Packed, Paired
from finefit.objective.batch import Objective as Minimised
from finefit.objective.losses import DpoLoss
from finefit.rehearse.fake_images import fake_images, num_tokens
from finefit.rehearse.fake_kernels import (
    BitsAndBytesAdamW,
    DeviceKernels,
    FakeFusedKernels,
    device_kernels,
    fake_dense_weight,
    leave_uncast,
    widen_norms,
)
from finefit.rehearse.fake_model import build_on_meta, materialise_fakes, trainable_of
from finefit.rehearse.gradients import explain, frozen_adapters
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.step_config import StepConfig
from finefit.rehearse.trace import OUTSIDE, Trace
from finefit.spec.schema import AdamW
from finefit.step.forward import autocast_for, bind, eval_without_grad, is_reference_cached, keeps_casts, make_objective
from finefit.step.levers import apply_levers, layers_of, other_layers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer

_REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    trace: Trace
    unreached: tuple[str, ...]
    """Trained tensors that no gradient reached."""
    causes: tuple[str, ...]
    """Why, as far as the rehearsal can tell."""
    frozen: tuple[str, ...]
    """Adapters that are not trained."""
    kernels: DeviceKernels


def rehearse(
    cfg: StepConfig,
    adjust: Callable[[nn.Module], None] = lambda _: None,
    bend: Callable[[Forward], Forward] = lambda f: f,
) -> Rehearsal:
    """`adjust` may change the model before the first step, as user code would, and `bend` the forward."""
    kernels = device_kernels(cfg.device, cfg.capability, cfg.precision)
    model = build_on_meta(cfg, kernels)
    adjust(model)
    padded = _validation_config(cfg)
    extras = _Extras(train=_extra(cfg), validation=None if padded is None else _extra(padded))
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        materialise_fakes(
            model, recorder, is_loaded=cfg.device == "cuda", loaded=weight_dtype(cfg.precision, cfg.tuning)
        )
        recorder.watch(model, [*layers_of(model), *other_layers(model)])
        apply_levers(model, cfg.levers, _HostMemory(recorder.trace), _fused(cfg), fake_dense_weight)
        if cfg.device == "cuda" and cfg.precision != "fp32":
            leave_uncast(model)
            widen_norms(model)
        if not trainable_of(model):
            what = ", ".join(frozen_adapters(model)) or "every tensor"
            raise ModelError(f"nothing is trained: {what} is frozen", "leave requires_grad of what is to be trained on")
        optimizer = _optimizer(model, cfg.optimizer, cfg.device)
        unreached = _steps(cfg, model, optimizer, recorder, bend, extras)
    return Rehearsal(
        trace=recorder.finish(),
        unreached=unreached,
        causes=explain(model, unreached, recorder.entered, shows_images=bool(cfg.grids)),
        frozen=frozen_adapters(model),
        kernels=kernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extras:
    """What batches have beside their tokens, on the meta device."""

    train: Extra | None
    validation: Extra | None


def _extra(cfg: StepConfig) -> Extra | None:
    rows, tokens = cfg.levers.micro_batch, cfg.tokens
    if (found := custom_source_in(cfg.config)) is not None:
        return blank_extra(found, rows=rows, tokens=tokens, supervised=cfg.supervised, sizes=cfg.grids)
    return fake_images(cfg.config, rows=rows * cfg.sides, tokens=tokens, grids=cfg.grids)


def _validation_config(cfg: StepConfig) -> StepConfig | None:
    """Validation rows are never packed."""
    if cfg.validation is None:
        return None
    tokens, supervised = cfg.validation
    tokens = max(tokens, num_tokens(cfg.config, cfg.grids))
    return replace(cfg, tokens=tokens, supervised=supervised, levers=replace(cfg.levers, packing=False))


def _steps(
    cfg: StepConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    bend: Callable[[Forward], Forward],
    extras: _Extras,
) -> tuple[str, ...]:
    unreached: list[str] = []

    def decide(_: Tensor) -> bool:
        gradients = {name: p.grad for name, p in trainable_of(model).items()}
        recorder.name((g for g in gradients.values() if g is not None), "gradients")
        updated = {id(parameter) for parameter in optimizer.state}  # inside backward, whose gradients are gone by now
        unreached[:] = [name for name, p in trainable_of(model).items() if p.grad is None and id(p) not in updated]
        return True

    forward = bend(_forward(cfg, model, recorder))
    scale = 2.0 if cfg.precision == "fp16" else 1.0  # any scale but 1: the step divides it out again
    objective = _with_reference_instant(make_objective(cfg.objective, cfg.tuning, model, forward), recorder)
    if is_reference_cached(cfg.objective, cfg.tuning):
        _cache_reference(cfg, model, forward, recorder, extras)
    if cfg.is_quick:
        _settle(cfg, model, optimizer, recorder)
    for num_batches in (1,) if cfg.is_quick else (1, 2 if cfg.accumulates else 1):
        recorder.phase = "batch"
        recorder.place(OUTSIDE)
        batches = [_batch(cfg, extras.train) for _ in range(num_batches)]
        recorder.phase = "step"
        recorder.trace.marks["step"] = len(recorder.trace.events)
        recorder.trace.costs.clear()
        recorder.trace.operations.clear()
        try:
            optimizer_step(
                batches,
                forward=forward,
                objective=objective,
                optimizer=optimizer,
                clip=cfg.optimizer.clip,
                decide=decide,
                loss_scale=scale,
                update=cfg.levers.update,
            )
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "does not require grad" in str(error):  # no trained tensor contributes to the loss
                return tuple(trainable_of(model))
            raise untraceable(model, recorder, error) from error
        _note_state(optimizer, recorder)
        del batches
    padded = _validation_config(cfg)
    if padded is not None:
        _validate(padded, model, forward, objective, recorder, extras)
    return tuple(unreached)


def _forward(cfg: StepConfig, model: nn.Module, recorder: Recorder) -> Forward:
    levers = cfg.levers
    autocast = autocast_for("cpu", cfg.precision, with_cache=keeps_casts(cfg.tuning, levers))
    return bind(
        model,
        loss_chunk=levers.loss_chunk,
        autocast=autocast,
        is_fused=levers.kernels == "fused",
        kernels=_fused(cfg),
        watch=recorder.reading,
    )


def _fused(cfg: StepConfig) -> FakeFusedKernels | None:
    return FakeFusedKernels() if cfg.levers.kernels == "fused" and cfg.device == "cuda" else None


def _with_reference_instant(objective: Minimised, recorder: Recorder) -> Minimised:
    """The pass through the reference is an instant of its own."""
    if not isinstance(objective, DpoLoss):
        return objective
    reference = objective.reference

    def timed(batch: Batch) -> Tensor:
        recorder.phase, before = _REFERENCE if recorder.phase == "step" else recorder.phase, recorder.phase
        try:
            return reference(batch)
        finally:
            recorder.phase = before

    return DpoLoss(beta=objective.beta, reference=timed)


def _cache_reference(cfg: StepConfig, model: nn.Module, forward: Forward, recorder: Recorder, extras: _Extras) -> None:
    """Before the first step, without gradients and optimizer state; never packed."""
    recorder.phase = _REFERENCE
    with eval_without_grad(model):
        forward(_batch(replace(cfg, levers=replace(cfg.levers, packing=False)), extras.train))


def _settle(cfg: StepConfig, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """As after some steps and, where gradients accumulate, some micro-batches."""
    recorder.phase = "update"
    for parameter in trainable_of(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if not cfg.accumulates:
        optimizer.zero_grad(set_to_none=True)
    _note_state(optimizer, recorder)


def _note_state(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for parameter, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.name(tensors, "optimizer")
        recorder.join(tensors, parameter)


def _validate(
    cfg: StepConfig, model: nn.Module, forward: Forward, objective: Minimised, recorder: Recorder, extras: _Extras
) -> None:
    recorder.phase = "validation"
    model.eval()
    with torch.no_grad():
        objective(forward, _batch(cfg, extras.validation))


def untraceable(model: nn.Module, recorder: Recorder, error: Exception) -> ModelError:
    module, operation = recorder.last
    place = f" in {module}" if module else ""
    problem = f"{operation}{place} failed on fake tensors: {str(error).strip().splitlines()[0]}"
    remedy = "remove `.item()`, boolean masks and `if tensor` from this module's forward"
    return ModelError(
        f"{type(model).__name__} cannot be rehearsed: {problem}", f"a rehearsal has shapes but no values: {remedy}"
    )


def _batch(cfg: StepConfig, extra: Extra | None) -> Batch:
    sequences = cfg.levers.micro_batch * cfg.sides
    supervised = sequences * cfg.supervised
    shape = (1, sequences * cfg.tokens) if cfg.levers.packing else (sequences, cfg.tokens)
    return Batch(
        input_ids_BT=torch.ones(shape, dtype=torch.long),
        positions_N=torch.zeros(supervised, dtype=torch.long),
        targets_N=torch.zeros(supervised, dtype=torch.long),
        num_supervised=supervised,
        num_tokens=sequences * cfg.tokens,
        packed=_packed(cfg) if cfg.levers.packing else None,
        paired=_paired(cfg, sequences) if cfg.sides > 1 else None,
        lengths=(cfg.tokens,) * sequences,
        supervised=(cfg.supervised,) * sequences,
        extra=None if extra is None else extra.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)),
    )


def _paired(cfg: StepConfig, sequences: int) -> Paired:
    reference = torch.zeros(sequences) if is_reference_cached(cfg.objective, cfg.tuning) else None
    return Paired(supervised=(cfg.supervised,) * sequences, reference_R=reference)


def _packed(cfg: StepConfig) -> Packed:
    """The longest rows, with boundaries for as many as a pack may have: the kernel's memory grows with both."""
    rows, sides, tokens = cfg.levers.micro_batch, cfg.sides, cfg.tokens
    most = cfg.rows_per_step or rows * tokens
    capacity = capacity_of(micro_batch=rows, longest=tokens, supervised=cfg.supervised, rows_per_step=most, sides=sides)
    return Packed(
        position_ids_BT=torch.zeros(1, sides * rows * tokens, dtype=torch.long),
        boundaries_R1=torch.zeros(sides * capacity.rows + 1, dtype=torch.int32),
        lengths=(tokens,) * sides * rows,
    )


def _optimizer(model: nn.Module, spec: AdamW, device: str) -> torch.optim.Optimizer:
    real = make_optimizer(model, spec.model_copy(update={"kind": "adamw"}), device=device)
    if spec.kind == "adamw":
        return real
    groups = (copy.copy(group) for group in real.param_groups)
    return BitsAndBytesAdamW(groups, is_eight_bit=spec.kind.endswith("8bit"), is_paged=spec.kind.startswith("paged"))


class _HostMemory:
    """Stands for pinned memory, which is counted apart from the device's. One tensor is on its way out, one on its way
    back."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._now = trace, 0
        self._leaving: Tensor | None = None
        self._waiting: list[tuple[torch.Size, torch.dtype]] = []
        self._coming: Tensor | None = None

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._now += tensor.numel() * tensor.element_size()
        self._trace.host_bytes = max(self._trace.host_bytes, self._now)
        self._leaving = tensor
        self._waiting.append((tensor.shape, tensor.dtype))
        return self._fetch

    def _fetch(self) -> Tensor:
        self._leaving = None
        found = self._coming if self._coming is not None else self._called()
        assert found is not None
        self._coming = self._called()
        return found

    def _called(self) -> Tensor | None:
        if not self._waiting:
            return None
        shape, dtype = self._waiting.pop()
        tensor = torch.empty(shape, dtype=dtype)
        self._now -= tensor.numel() * tensor.element_size()
        return tensor
