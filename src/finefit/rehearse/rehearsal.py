"""The real step, executed on fake tensors: no GPU, no weights.

Two optimizer steps: the first allocates the optimizer's state, the second is the steady state.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finefit.data.packing import capacity_of
from finefit.errors import ModelError
from finefit.model.custom import own_of
from finefit.model.custom_files import written_in
from finefit.model.load import weight_dtype
from finefit.model.sight import read
from finefit.objective.batch import Batch, Extra, Forward, Packed, Paired
from finefit.objective.batch import Objective as Minimised
from finefit.objective.dpo import Dpo as DpoLoss
from finefit.objective.dpo import Reference
from finefit.rehearse.custom import blank_extra
from finefit.rehearse.fake_model import on_meta, put_fakes_in_place, trainable_of
from finefit.rehearse.fused import FusedShadows, dense_shadow
from finefit.rehearse.gradients import explain, frozen_adapters
from finefit.rehearse.kernels import Kernels, kernels_for
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.scene import Scene
from finefit.rehearse.shadows import BitsAndBytesAdamW, leave_uncast, widen_norms
from finefit.rehearse.showing import num_tokens, shown
from finefit.rehearse.trace import OUTSIDE, Trace
from finefit.spec.schema import AdamW
from finefit.step.custom import bind_own
from finefit.step.forward import autocast_for, bind, keeps_casts
from finefit.step.levers import layers_beside, layers_of, pull
from finefit.step.objective import is_cached, make_objective, still
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer

_REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    trace: Trace
    unreached: tuple[str, ...]
    """Trained tensors that no gradient reached."""
    causes: tuple[str, ...]
    """Why, as far as the rehearsal can tell."""
    frozen: tuple[str, ...]
    """Adapters that are not trained."""
    kernels: Kernels


def rehearse(
    scene: Scene, adjust: Callable[[nn.Module], None] = lambda _: None, bend: Callable[[Forward], Forward] = lambda f: f
) -> Rehearsed:
    """`adjust` may change the model before the first step, as a user's own code would, and `bend` the call that makes its log-probabilities."""
    kernels = kernels_for(scene.device, scene.capability, scene.precision)
    model = on_meta(scene, kernels)
    adjust(model)
    shows = Shows(train=_shown(scene), validation=_shown(_of_validation(scene)))
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        put_fakes_in_place(
            model, recorder, is_loaded=scene.device == "cuda", loaded=weight_dtype(scene.precision, scene.tuning)
        )
        recorder.watch(model, [*layers_of(model), *layers_beside(model)])
        pull(model, scene.levers, _HostMemory(recorder.trace), _fused(scene), dense_shadow)
        if scene.device == "cuda" and scene.precision != "fp32":
            leave_uncast(model)
            widen_norms(model)
        if not trainable_of(model):
            raise ModelError(
                f"nothing is trained: {', '.join(frozen_adapters(model)) or 'every tensor'} is frozen",
                "leave requires_grad of what is to be trained on",
            )
        optimizer = _optimizer(model, scene.optimizer, scene.device)
        unreached = _steps(scene, model, optimizer, recorder, bend, shows)
    return Rehearsed(
        trace=recorder.finish(),
        unreached=unreached,
        causes=explain(model, unreached, recorder.entered, shows_images=bool(scene.grids)),
        frozen=frozen_adapters(model),
        kernels=kernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What batches have beside their tokens, on the meta device."""

    train: Extra | None
    validation: Extra | None


def _shown(scene: Scene | None) -> Extra | None:
    if scene is None:
        return None
    if (found := written_in(scene.config)) is not None:
        return blank_extra(
            found, rows=scene.levers.micro_batch, tokens=scene.tokens, supervised=scene.supervised, sizes=scene.grids
        )
    return shown(scene.config, rows=scene.levers.micro_batch * scene.sides, tokens=scene.tokens, grids=scene.grids)


def _of_validation(scene: Scene) -> Scene | None:
    """Never packed."""
    if scene.validation is None:
        return None
    tokens, supervised = scene.validation
    tokens = max(tokens, num_tokens(scene.config, scene.grids))
    return replace(scene, tokens=tokens, supervised=supervised, levers=replace(scene.levers, packing=False))


def _steps(
    scene: Scene,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    bend: Callable[[Forward], Forward],
    shows: Shows,
) -> tuple[str, ...]:
    unreached: list[str] = []

    def decide(_: Tensor) -> bool:
        gradients = {name: p.grad for name, p in trainable_of(model).items()}
        recorder.name((g for g in gradients.values() if g is not None), "gradients")
        updated = {id(parameter) for parameter in optimizer.state}  # inside backward, where gradients are gone by now
        unreached[:] = [name for name, p in trainable_of(model).items() if p.grad is None and id(p) not in updated]
        return True

    forward = bend(_forward(scene, model, recorder))
    scale = 2.0 if scene.precision == "fp16" else 1.0  # any but one: it is taken out again
    objective = _apart(make_objective(scene.objective, scene.tuning, model, forward), recorder)
    if is_cached(scene.objective, scene.tuning):
        _cache_reference(scene, model, forward, recorder, shows)
    if scene.is_quick:
        _settle(scene, model, optimizer, recorder)
    for num_batches in (1,) if scene.is_quick else (1, 2 if scene.accumulates else 1):
        recorder.phase = "batch"
        recorder.place(OUTSIDE)
        batches = [_batch(scene, shows.train) for _ in range(num_batches)]
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
                clip=scene.optimizer.clip,
                decide=decide,
                loss_scale=scale,
                update=scene.levers.update,
            )
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "does not require grad" in str(error):  # nothing that is trained has a part in the loss
                return tuple(trainable_of(model))
            raise untraceable(model, recorder, error) from error
        _note_state(optimizer, recorder)
        del batches
    padded = _of_validation(scene)
    if padded is not None:
        _validate(padded, model, forward, objective, recorder, shows)
    return tuple(unreached)


def _forward(scene: Scene, model: nn.Module, recorder: Recorder) -> Forward:
    levers = scene.levers
    autocast = autocast_for("cpu", scene.precision, with_cache=keeps_casts(scene.tuning, levers))
    if (own := own_of(model)) is not None:
        return bind_own(own, autocast=autocast, watch=recorder.reading)
    return bind(
        model,
        loss_chunk=levers.loss_chunk,
        autocast=autocast,
        is_fused=levers.kernels == "fused",
        kernels=_fused(scene),
        reading=recorder.reading(read),
    )


def _fused(scene: Scene) -> FusedShadows | None:
    return FusedShadows() if scene.levers.kernels == "fused" and scene.device == "cuda" else None


def _apart(objective: Minimised, recorder: Recorder) -> Minimised:
    """The pass through the reference is an instant of its own."""
    if not isinstance(objective, DpoLoss):
        return objective
    return DpoLoss(beta=objective.beta, reference=_during_reference(objective.reference, recorder))


def _during_reference(reference: Reference, recorder: Recorder) -> Reference:
    def asked(batch: Batch) -> Tensor:
        recorder.phase, before = _REFERENCE if recorder.phase == "step" else recorder.phase, recorder.phase
        try:
            return reference(batch)
        finally:
            recorder.phase = before

    return asked


def _cache_reference(scene: Scene, model: nn.Module, forward: Forward, recorder: Recorder, shows: Shows) -> None:
    """Before the first step, when there is neither gradient nor optimizer state; never packed."""
    recorder.phase = _REFERENCE
    with still(model):
        forward(_batch(replace(scene, levers=replace(scene.levers, packing=False)), shows.train))


def _settle(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """As after some steps and, where gradients accumulate, some micro-batches."""
    recorder.phase = "update"
    for parameter in trainable_of(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if not scene.accumulates:
        optimizer.zero_grad(set_to_none=True)
    _note_state(optimizer, recorder)


def _note_state(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for parameter, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.name(tensors, "optimizer")
        recorder.join(tensors, parameter)


def _validate(
    scene: Scene, model: nn.Module, forward: Forward, objective: Minimised, recorder: Recorder, shows: Shows
) -> None:
    recorder.phase = "validation"
    model.eval()
    with torch.no_grad():
        objective(forward, _batch(scene, shows.validation))


def untraceable(model: nn.Module, recorder: Recorder, error: Exception) -> ModelError:
    module, operation = recorder.last
    place = f" in {module}" if module else ""
    return ModelError(
        f"{type(model).__name__} cannot be rehearsed: {operation}{place} failed on fake tensors: {str(error).strip().splitlines()[0]}",
        "a rehearsal has shapes but no values: remove `.item()`, boolean masks and `if tensor` from this module's forward",
    )


def _batch(scene: Scene, shows: Extra | None) -> Batch:
    sequences = scene.levers.micro_batch * scene.sides
    supervised = sequences * scene.supervised
    shape = (1, sequences * scene.tokens) if scene.levers.packing else (sequences, scene.tokens)
    return Batch(
        input_ids_BT=torch.ones(shape, dtype=torch.long),
        positions_N=torch.zeros(supervised, dtype=torch.long),
        targets_N=torch.zeros(supervised, dtype=torch.long),
        num_supervised=supervised,
        num_tokens=sequences * scene.tokens,
        packed=_packed(scene) if scene.levers.packing else None,
        paired=_paired(scene, sequences) if scene.sides > 1 else None,
        lengths=(scene.tokens,) * sequences,
        supervised=(scene.supervised,) * sequences,
        extra=None if shows is None else shows.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)),
    )


def _paired(scene: Scene, sequences: int) -> Paired:
    reference = torch.zeros(sequences) if is_cached(scene.objective, scene.tuning) else None
    return Paired(supervised=(scene.supervised,) * sequences, reference_R=reference)


def _packed(scene: Scene) -> Packed:
    """The longest rows, with boundaries for as many as a pack may have: what the kernel takes grows with both."""
    rows, sides = scene.levers.micro_batch, scene.sides
    most = scene.rows_per_step or rows * scene.tokens
    capacity = capacity_of(
        micro_batch=rows, longest=scene.tokens, supervised=scene.supervised, rows_per_step=most, sides=sides
    )
    return Packed(
        position_ids_BT=torch.zeros(1, sides * rows * scene.tokens, dtype=torch.long),
        boundaries_R1=torch.zeros(sides * capacity.rows + 1, dtype=torch.int32),
        lengths=(scene.tokens,) * sides * rows,
    )


def _optimizer(model: nn.Module, spec: AdamW, device: str) -> torch.optim.Optimizer:
    real = make_optimizer(model, spec.model_copy(update={"kind": "adamw"}), device=device)
    if spec.kind == "adamw":
        return real
    groups = (copy.copy(group) for group in real.param_groups)
    return BitsAndBytesAdamW(groups, is_eight_bit=spec.kind.endswith("8bit"), is_paged=spec.kind.startswith("paged"))


class _HostMemory:
    """Stands for pinned memory: what is put there is counted apart from the device's. One tensor is on its way out, one on its way back."""

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
