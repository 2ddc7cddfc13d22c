"""Executes the real step on fake tensors: no GPU, no weights.

It takes two optimizer steps: the first allocates the optimizer's state, the second is the steady state.

If a trained tensor gets no gradient, the rehearsal reports the reason as far as it can. On the path from the model to
the tensor, gradients end at the first module that was called without them. If there is none, the tensor's own module
was never called, or its output was never used."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.forecasts import grouped_names
from finefit.custom.inputs import blank_extra
from finefit.data.order import capacity_of
from finefit.errors import ModelError, first_line
from finefit.model.adapter import REFERENCE
from finefit.model.load import weight_dtype
from finefit.model.resolve_model import custom_source_in
from finefit.objective.batch import Batch, Extra, Forward, Packed, Paired
from finefit.objective.batch import Objective as Minimised
from finefit.objective.losses import DpoLoss
from finefit.rehearse import fake_kernels, fake_layers
from finefit.rehearse.fake_model import (
    StepConfig,
    build_on_meta,
    fake_images,
    materialise_fakes,
    num_tokens,
    stored_dtypes,
)
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.trace import OUTSIDE, Trace
from finefit.spec.schema import AdamW
from finefit.step.forward import autocast_for, bind, eval_without_grad, is_reference_cached, keeps_casts, make_objective
from finefit.step.levers import apply_levers, layers_of, other_layers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer, trainable_of
from finefit.vision import tower_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    trace: Trace
    unreached: tuple[str, ...]
    """Trained tensors that no gradient reaches."""
    causes: tuple[str, ...]
    """The reasons, as far as the rehearsal can tell."""
    frozen: tuple[str, ...]
    """Adapters that are not trained."""
    kernels: fake_kernels.DeviceKernels


def rehearse(
    cfg: StepConfig,
    adjust: Callable[[nn.Module], None] = lambda _: None,
    bend: Callable[[Forward], Forward] = lambda f: f,
) -> Rehearsal:
    """`adjust` may change the model before the first step, as user code would, and `bend` may change the forward."""
    kernels = fake_kernels.device_kernels(cfg.device, cfg.capability, cfg.precision)
    model = build_on_meta(cfg, kernels)
    adjust(model)
    extra, validation = _extra(cfg), None
    if cfg.validation is not None:  # validation rows are never packed
        tokens = max(cfg.validation[0], num_tokens(cfg.config, cfg.grids))
        levers = replace(cfg.levers, packing=False)
        padded = replace(cfg, tokens=tokens, supervised=cfg.validation[1], levers=levers)
        validation = padded, _extra(padded)
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        loaded = weight_dtype(cfg.precision, cfg.tuning)
        materialise_fakes(model, recorder, is_loaded=cfg.device == "cuda", loaded=loaded, stored=stored_dtypes(cfg))
        recorder.watch(model, [*layers_of(model), *other_layers(model)])
        recorder.is_selective = cfg.levers.keep_attention
        is_fused = cfg.levers.kernels == "fused" and cfg.device == "cuda"
        fused = recorder.launching(fake_kernels.FakeFusedKernels()) if is_fused else None
        apply_levers(model, cfg.levers, _HostMemory(recorder.trace), fused, fake_layers.fake_dense_weight)
        if cfg.device == "cuda" and cfg.precision != "fp32":
            fake_layers.leave_uncast(model)
            fake_layers.widen_norms(model)
        if not trainable_of(model):
            what = ", ".join(frozen_adapters(model)) or "every tensor"
            raise ModelError(f"nothing is trained: {what} is frozen", "keep requires_grad=True for trained tensors")
        optimizer = _optimizer(model, cfg.optimizer, cfg.device)
        forward = bind(
            model,
            loss_chunk=cfg.levers.loss_chunk,
            autocast=autocast_for("cpu", cfg.precision, with_cache=keeps_casts(cfg.tuning, cfg.levers)),
            is_fused=cfg.levers.kernels == "fused",
            kernels=fused,
            watch=recorder.reading,
        )
        unreached = _steps(cfg, model, optimizer, recorder, bend(forward), extra, validation)
    return Rehearsal(
        trace=recorder.finish(),
        unreached=unreached,
        causes=explain(model, unreached, recorder.entered, shows_images=bool(cfg.grids)),
        frozen=frozen_adapters(model),
        kernels=kernels,
    )


def _extra(cfg: StepConfig) -> Extra | None:
    """Returns what a batch has besides its tokens, on the meta device."""
    rows, tokens = cfg.levers.micro_batch, cfg.tokens
    if (found := custom_source_in(cfg.config)) is not None:
        return blank_extra(found, rows=rows, tokens=tokens, supervised=cfg.supervised, sizes=cfg.grids)
    return fake_images(cfg.config, rows=rows * cfg.sides, tokens=tokens, grids=cfg.grids)


def _steps(
    cfg: StepConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    forward: Forward,
    extra: Extra | None,
    validation: tuple[StepConfig, Extra | None] | None,
) -> tuple[str, ...]:
    """Returns the names of trained tensors that no gradient reaches."""
    unreached: list[str] = []

    def decide(_: Tensor) -> bool:
        recorder.name((p.grad for p in trainable_of(model).values() if p.grad is not None), "gradients")
        updated = {id(parameter) for parameter in optimizer.state}  # inside backward, which has freed their gradients
        unreached[:] = [name for name, p in trainable_of(model).items() if p.grad is None and id(p) not in updated]
        return True

    scale = 2.0 if cfg.precision == "fp16" else 1.0  # any scale but 1: the step divides by it again
    objective = _with_reference_instant(make_objective(cfg.objective, cfg.tuning, model, forward), recorder)
    if is_reference_cached(cfg.objective, cfg.tuning):
        recorder.phase = "reference"
        with eval_without_grad(model):  # before there are gradients and optimizer state; never packed
            forward(_batch(replace(cfg, levers=replace(cfg.levers, packing=False)), extra))
    if cfg.is_quick:
        _settle(cfg, model, optimizer, recorder)
    for num_batches in (1,) if cfg.is_quick else (1, 2 if cfg.accumulates else 1):
        recorder.phase = "batch"
        recorder.place(OUTSIDE)
        batches = [_batch(cfg, extra) for _ in range(num_batches)]
        recorder.phase = "step"
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
    if validation is not None:
        recorder.phase = "validation"
        model.eval()
        with torch.no_grad():
            objective(forward, _batch(*validation))
    return tuple(unreached)


def _with_reference_instant(objective: Minimised, recorder: Recorder) -> Minimised:
    """Records the pass through the reference as an instant of its own."""
    if not isinstance(objective, DpoLoss):
        return objective
    reference = objective.reference

    def timed(batch: Batch) -> Tensor:
        recorder.phase, before = "reference" if recorder.phase == "step" else recorder.phase, recorder.phase
        try:
            return reference(batch)
        finally:
            recorder.phase = before

    return DpoLoss(beta=objective.beta, reference=timed)


def _settle(cfg: StepConfig, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Puts optimizer and gradients in their steady state."""
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


def untraceable(model: nn.Module, recorder: Recorder, error: Exception) -> ModelError:
    module, operation = recorder.last
    place = f" in {module}" if module else ""
    problem = f"{operation}{place} failed on fake tensors: {first_line(error)}"
    if isinstance(error, _NEEDS_VALUES):
        problem = f"{module or 'its forward'} reads values of tensors to choose what it computes ({operation})"
        remedy = "remove `.item()`, boolean masks and `if tensor` from this module's forward"
        remedy = f"a rehearsal has shapes but no values: {remedy}"
    else:
        remedy = "use the config.json of the published model; if you do already, please report a fault of finefit"
    return ModelError(f"{type(model).__name__} cannot be rehearsed: {problem}", remedy)


def _batch(cfg: StepConfig, extra: Extra | None) -> Batch:
    sequences = cfg.levers.micro_batch * cfg.sides
    supervised, of_each = sequences * cfg.supervised, (cfg.supervised,) * sequences
    is_cached = is_reference_cached(cfg.objective, cfg.tuning)
    shape = (1, sequences * cfg.tokens) if cfg.levers.packing else (sequences, cfg.tokens)
    return Batch(
        input_ids_BT=torch.ones(shape, dtype=torch.long),
        positions_N=torch.zeros(supervised, dtype=torch.long),
        targets_N=torch.zeros(supervised, dtype=torch.long),
        num_supervised=supervised,
        num_tokens=sequences * cfg.tokens,
        packed=_packed(cfg) if cfg.levers.packing else None,
        paired=Paired(supervised=of_each, reference_R=torch.zeros(sequences) if is_cached else None)
        if cfg.sides > 1
        else None,
        lengths=(cfg.tokens,) * sequences,
        supervised=of_each,
        extra=None if extra is None else extra.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)),
    )


def _packed(cfg: StepConfig) -> Packed:
    """Packs the longest rows, with boundaries for the maximum number of rows: the kernel's memory grows with both."""
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
    is_eight_bit, is_paged = spec.kind.endswith("8bit"), spec.kind.startswith("paged")
    return fake_layers.BitsAndBytesAdamW(groups, is_eight_bit=is_eight_bit, is_paged=is_paged)


class _HostMemory:
    """Replaces pinned memory, which is counted separately. One tensor is on its way out, and one on its way back."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._now = trace, 0
        self._leaving: Tensor | None = None
        self._waiting: list[tuple[torch.Size, torch.dtype]] = []
        self._coming: Tensor | None = None

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._now += tensor.nbytes
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
        self._now -= tensor.nbytes
        return tensor


_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""These modules are never called themselves."""

_NO_INPUT = "gets no input (a tower that the batch does not use); feed it, or leave it out of tuning.targets"
_NO_IMAGE = (
    "no row has an image; give rows with images, or train the language tower alone "
    "(tuning.targets without towers, or tuning: {kind: subset, trainable: [language]})"
)
_ADAPTER_IS_OFF = "is called without its adapter, which gets no input; unmerge the adapter, or make it the active one"
_NO_GRAD = "is computed under no_grad; remove it from the forward that makes the call, or do not train these layers"
_REENTRANT = (
    "re-entrant checkpointing passes no gradient to layers whose input requires none; use non-reentrant checkpointing "
    "or enable_input_require_grads()"
)
_UNUSED = "its output does not reach the loss: it is dropped, detached, or used only where gradients are off"


def explain(
    model: nn.Module, unreached: Sequence[str], entered: Mapping[str, bool], *, shows_images: bool = True
) -> tuple[str, ...]:
    """`entered`: the called modules, in the order of their first calls, and whether gradients were enabled in any call.
    `shows_images`: whether any row has images."""
    modules = dict(model.named_modules())
    places: dict[str, list[str]] = {}  # by cause
    for name in unreached:
        if not shows_images and tower_in(model, name) in ("vision", "projector"):
            places.setdefault(_NO_IMAGE, []).append(f"the tower {tower_in(model, name)}")
            continue
        around = [above for above in _path(name)[:-1] if not isinstance(modules[above], _CONTAINERS)]
        sentence, place = _cause(around[-1], modules, entered)
        places.setdefault(sentence, []).append(place or "the model")
    return tuple(f"{', '.join(grouped_names(found))}: {sentence}" for sentence, found in places.items())


def frozen_adapters(model: nn.Module) -> tuple[str, ...]:
    """Returns adapters that were attached and then frozen, so that they are not in `unreached`; without the frozen copy
    for a DPO reference."""
    found = (name for name, p in model.named_parameters() if "lora_" in name and not p.requires_grad)
    return tuple(grouped_names(name for name in found if f".{REFERENCE}" not in name))


def _cause(owner: str, modules: Mapping[str, nn.Module], entered: Mapping[str, bool]) -> tuple[str, str]:
    """Returns the cause, and the module that has it."""
    path = _path(owner)
    blind = next((at for at, above in enumerate(path) if entered.get(above) is False), None)
    if owner not in entered and blind is None:
        called = [f"{name}." for name in entered]
        silent = next((above for above in path[1:] if not any(name.startswith(f"{above}.") for name in called)), owner)
        base, adapter, _ = silent.partition(".lora_")
        return (_ADAPTER_IS_OFF, base) if adapter else (_NO_INPUT, silent)
    if blind is None:
        return _UNUSED, owner.partition(".lora_")[0]
    callers = [at for at in range(blind) if path[at] in entered]
    if any(_is_reentrant(modules[above]) for above in path[callers[-1] if callers else 0 : blind + 1]):
        return _REENTRANT, path[blind]
    # after a trained module its input most likely requires gradients, and no kind of checkpointing stops them
    before = takewhile(lambda name: name != path[blind], entered)
    earlier = (p for name in before if entered[name] for p in modules[name].parameters(recurse=False))
    is_plain = not callers or any(p.requires_grad for p in earlier)
    return _NO_GRAD if is_plain else f"{_NO_GRAD}; if it is checkpointed: {_REENTRANT}", path[blind]


def _is_reentrant(module: nn.Module) -> bool:
    """Returns whether the module checkpoints what it calls, or itself, re-entrantly."""
    functions: list[Any] = [module.forward]
    if getattr(module, "gradient_checkpointing", False):
        functions.append(getattr(module, "_gradient_checkpointing_func", None))
    for function in functions:
        given: dict[str, Any] = {}
        while isinstance(function, partial):
            given, function = {**function.keywords, **given}, function.func
        if function is checkpoint and given.get("use_reentrant") in (True, None):
            return True
    return False


def _path(name: str) -> list[str]:
    """Returns the path from the model, whose name is empty, to the module itself."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
