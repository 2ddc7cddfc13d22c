"""The real step, executed on fake tensors: no GPU, no weights.

Two optimizer steps: the first allocates the optimizer's state, the second is the steady state.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit.artifacts.forecasts import TowerSize
from finefit.artifacts.records import Levers
from finefit.data.packing import capacity_of
from finefit.errors import ModelError
from finefit.model.attention import STRETCHED_ROPE, choose_attention, for_answers
from finefit.model.custom import own_of
from finefit.model.custom_files import written_in
from finefit.model.experts import active_parameters, choose_experts, experts_of
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.model.sight import auto_class, bare, read, sight_in, sight_of, tower_in, tower_of
from finefit.model.sight.attention import PIECES, by_piece
from finefit.model.sight.unused import unused_in
from finefit.objective.batch import Batch, Extra, Forward, Packed, Paired
from finefit.objective.batch import Objective as Minimised
from finefit.objective.dpo import Dpo as DpoLoss
from finefit.objective.dpo import Reference
from finefit.rehearse.custom import blank_extra, own_on_meta
from finefit.rehearse.fused import FusedShadows, dense_shadow
from finefit.rehearse.gradients import explain, frozen_adapters
from finefit.rehearse.kernels import Kernels, kernels_for, rehearsed_mask
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.shadows import BitsAndBytesAdamW, Int8Linear, Nf4Linear, fuse_dropout, leave_uncast, paged_bytes, quantise, widen_norms
from finefit.rehearse.showing import num_tokens, shown
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block, Trace
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, Dpo, Objective, Sft
from finefit.step.custom import bind_own
from finefit.step.forward import autocast_for, bind, keeps_casts
from finefit.step.levers import layers_of, pull
from finefit.step.objective import is_cached, keep_start, make_objective, still
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer

_ATTENTION = "rehearsed"
_REFERENCE = "reference"
_SFT = Sft(kind="sft")
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that a rehearsal is told."""

    config: dict[str, Any]
    tuning: Tuning
    optimizer: AdamW
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Literal["bf16", "fp16", "fp32"]
    levers: Levers
    tokens: int
    """Of the longest sequence; a micro-batch is padded to it, or packed into as much."""
    supervised: int
    """Of a sequence's tokens."""
    accumulates: bool
    """Whether a step has more than one micro-batch: gradients then wait while the next one is computed."""
    objective: Objective = _SFT
    rows_per_step: int | None = None
    """No pack has more rows; None where that is not known."""
    validation: tuple[int, int] | None = None
    """Tokens and supervised tokens of the longest validation row; None where there are none."""
    grids: tuple[tuple[int, ...], ...] = ()
    """Of the images of the row that shows most; every row shows them, those of validation too."""
    is_deterministic: bool = False
    """Then images are looked at one by one, not all by one kernel."""
    is_quick: bool = False
    """One micro-batch with gradients and optimizer state already there: enough to compare, a little off in what the allocator holds, and without a
    gradient map."""

    @property
    def sides(self) -> int:
        """Sequences of a row: a preference pair has two."""
        return 2 if isinstance(self.objective, Dpo) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Of the frozen and the trained weights as they lie on the device."""
    trainable_bytes: int
    paged_bytes: int = 0
    """Of optimizer state that the driver moves between card and host."""
    active: int | None = None
    """Parameters that a token meets, in a mixture of experts; None where it meets all."""
    expert_bytes: int = 0
    """Of weights in tensors that hold several experts."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Of a model that sees."""
    tower_names: dict[str, frozenset[str]] = field(default_factory=dict)
    """What is trained of each."""
    unused: tuple[str, ...] = ()
    """Modules of a vision tower that no image passes."""


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


def rehearse(scene: Scene, adjust: Callable[[nn.Module], None] = lambda _: None, bend: Callable[[Forward], Forward] = lambda f: f) -> Rehearsed:
    """`adjust` may change the model before the first step, as a user's own code would, and `bend` the call that makes its log-probabilities."""
    kernels = kernels_for(scene.device, scene.capability, scene.precision)
    model = on_meta(scene, kernels)
    adjust(model)
    shows = Shows(train=_shown(scene), validation=_shown(_of_validation(scene)))
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        put_fakes_in_place(model, recorder, is_loaded=scene.device == "cuda", loaded=weight_dtype(scene.precision, scene.tuning))
        recorder.watch(model, layers_of(model))
        pull(model, scene.levers, _HostMemory(recorder.trace), _fused(scene), dense_shadow)
        if scene.device == "cuda" and scene.precision != "fp32":
            leave_uncast(model)
            widen_norms(model)
        if not _trainable(model):
            raise ModelError(
                f"nothing is trained: {', '.join(frozen_adapters(model)) or 'every tensor'} is frozen",
                "leave requires_grad of what is to be trained on",
            )
        optimizer = _optimizer(model, scene.optimizer, scene.device)
        unreached = _steps(scene, model, optimizer, recorder, bend, shows)
    return Rehearsed(
        trace=recorder.trace,
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
        return blank_extra(found, rows=scene.levers.micro_batch, tokens=scene.tokens, supervised=scene.supervised, sizes=scene.grids)
    return shown(scene.config, rows=scene.levers.micro_batch * scene.sides, tokens=scene.tokens, grids=scene.grids)


def _of_validation(scene: Scene) -> Scene | None:
    """Never packed."""
    if scene.validation is None:
        return None
    tokens, supervised = scene.validation
    tokens = max(tokens, num_tokens(scene.config, scene.grids))
    return replace(scene, tokens=tokens, supervised=supervised, levers=replace(scene.levers, packing=False))


def survey(scene: Scene) -> Size:
    """How large the model is, without a rehearsal."""
    return _size(on_meta(scene, kernels_for(scene.device, scene.capability, scene.precision)), scene.optimizer)


def _size(model: nn.Module, optimizer: AdamW) -> Size:
    """A parameter that is packed into bits counts as what it stands for."""
    trained = _trainable(model).values()
    is_paged, is_eight_bit = optimizer.kind.startswith("paged"), optimizer.kind.endswith("8bit")
    packed = sum(module.in_features * module.out_features - module.weight.numel() for module in model.modules() if isinstance(module, Nf4Linear))
    of_experts = [p for experts in experts_of(model).values() for p in experts.parameters()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        active=active_parameters(model) + packed if of_experts else None,
        expert_bytes=sum(p.numel() * p.element_size() for p in of_experts),
        trainable=sum(p.numel() for p in trained),
        trainable_tensors=len(trained),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        trainable_bytes=sum(p.numel() * p.element_size() for p in trained),
        paged_bytes=paged_bytes(trained, is_eight_bit=is_eight_bit) if is_paged else 0,
        towers=_towers(model),
        tower_names=_tower_names(model),
        unused=() if (sight := sight_in(model)) is None else unused_in(bare(model), sight),
    )


def _towers(model: nn.Module) -> dict[str, TowerSize]:
    if sight_in(model) is None:
        return {}
    total, trained, tensors = Counter[str](), Counter[str](), Counter[str]()
    stands_for = {id(module.weight): module.in_features * module.out_features for module in model.modules() if isinstance(module, Nf4Linear)}
    for name, parameter in model.named_parameters():
        tower, count = str(tower_in(model, name)), stands_for.get(id(parameter), parameter.numel())
        total[tower] += count
        trained[tower] += count * parameter.requires_grad
        tensors[tower] += parameter.requires_grad
    return {tower: TowerSize(parameters=total[tower], trainable=trained[tower], tensors=tensors[tower]) for tower in total}


def _tower_names(model: nn.Module) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name in _trainable(model) if sight_in(model) is not None else ():
        found.setdefault(str(tower_in(model, name)), set()).add(name)
    return {tower: frozenset(names) for tower, names in found.items()}


def _steps(
    scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder, bend: Callable[[Forward], Forward], shows: Shows
) -> tuple[str, ...]:
    unreached: list[str] = []

    def decide(_: Tensor) -> bool:
        gradients = {name: p.grad for name, p in _trainable(model).items()}
        recorder.name((g for g in gradients.values() if g is not None), "gradients")
        updated = {id(parameter) for parameter in optimizer.state}  # inside backward, where gradients are gone by now
        unreached[:] = [name for name, p in _trainable(model).items() if p.grad is None and id(p) not in updated]
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
                return tuple(_trainable(model))
            raise untraceable(model, recorder, error) from error
        recorder.name((t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)), "optimizer")
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
    for parameter in _trainable(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if not scene.accumulates:
        optimizer.zero_grad(set_to_none=True)


def _validate(scene: Scene, model: nn.Module, forward: Forward, objective: Minimised, recorder: Recorder, shows: Shows) -> None:
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
    capacity = capacity_of(micro_batch=rows, longest=scene.tokens, supervised=scene.supervised, rows_per_step=most, sides=sides)
    return Packed(
        position_ids_BT=torch.zeros(1, sides * rows * scene.tokens, dtype=torch.long),
        boundaries_R1=torch.zeros(sides * capacity.rows + 1, dtype=torch.int32),
        lengths=(scene.tokens,) * sides * rows,
    )


# the model


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    if "model_type" not in given:
        raise ModelError("the model's config has no model_type, so its architecture is unknown", "take the config.json that belongs to the model")
    try:
        return AutoConfig.for_model(**given)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"the model's config cannot be read: {' '.join(str(error).split())}", "`finefit doctor` shows the installed versions"
        ) from error


def on_meta(scene: Scene, kernels: Kernels, *, answers: bool = False) -> nn.Module:
    """`answers`: as an evaluation loads it, where nothing is trained."""
    if (found := written_in(scene.config)) is not None:
        dtype = answers_dtype(scene.precision, scene.tuning) if answers else weight_dtype(scene.precision, scene.tuning)
        own = own_on_meta(found, scene.tuning, dtype, answers=answers)
        if kernels.device == "cuda":
            fuse_dropout(own)
        return own
    config = read_config(scene.config)
    if config.model_type in _ENCODERS and not config.is_decoder:
        raise ModelError(f"{config.model_type} is an encoder: each token would see the one that it has to predict", "name a causal language model")
    config.use_cache = config.get_text_config().use_cache = False
    dtype = answers_dtype(scene.precision, scene.tuning) if answers else weight_dtype(scene.precision, scene.tuning)
    attention = choose_attention("cpu", (0, 0), scene.precision, config, packing=scene.levers.packing and not answers)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.answering if answers else kernels.attention)
        has_kernel = _never if scene.is_deterministic else kernels.has_varlen
        AttentionInterface.register(_ATTENTION + PIECES, partial(by_piece, kernels.attention, has_kernel))
        AttentionMaskInterface.register(_ATTENTION, rehearsed_mask)
    elif answers:
        attention = for_answers(attention)
    with torch.device("meta"):
        try:
            model = _built(config, dtype, attention)
        except KeyError:  # attention classes of the model's own: the CPU's kernel then stands for the card's, which takes about as much
            model = _built(config, dtype, "sdpa")
        if bits := base_bits(scene.tuning):
            quantise(model, bits, _is_packed(model))
        if answers and not isinstance(scene.tuning, Lora):  # a checkpoint is a whole model
            trained: nn.Module = model
        else:
            trained = make_trainable(model, scene.tuning, name="rehearsed")
        if answers:
            trained.requires_grad_(False)
        else:
            keep_start(scene.objective, scene.tuning, trained)
    if kernels.device == "cuda":
        fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            module.rope_type = "default"  # type: ignore[assignment] # those ask for the largest position, which a rehearsal does not have
    return trained


def _never(*_: Tensor) -> bool:
    return False


def _is_packed(model: PreTrainedModel) -> Callable[[str, nn.Module], bool]:
    """Which linear layers bitsandbytes packs: all but the head, of a model that sees those of its language tower."""
    head, sight = model.get_output_embeddings(), sight_of(model.config)
    return lambda name, module: module is not head and (sight is None or tower_of(sight, name) == "language")


def answers_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """What an evaluation loads weights in: what is not trained any more is kept in bf16 where the card has it."""
    return torch.bfloat16 if precision == "bf16" else weight_dtype(precision, tuning)


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    chosen = {"attn_implementation": attention, "experts_implementation": choose_experts()}
    try:
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, **chosen)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"{config.model_type} cannot be built as a causal language model: {error}", "name a causal language model") from error
    return model


def put_fakes_in_place(model: nn.Module, recorder: Recorder, *, is_loaded: bool, loaded: torch.dtype = torch.float32) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first takes the sum of all weights
    from the allocator in one piece and gives it back, then fills the pieces. `loaded`: in halves, of which what is trained is then widened."""
    if is_loaded:
        total = sum(p.numel() * _loaded_as(name, p, loaded).itemsize for name, p in model.named_parameters() if "lora_" not in name)
        recorder.trace.free(recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE), OUTSIDE, "load")
    unit_of = {id(m): at for at, layer in enumerate(layers_of(model)) for m in layer.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = _dense(module)
                _fill(name, module, made, loaded)
                del dense  # packed weights are made from it on the device
    recorder.place(OUTSIDE)
    made.clear()
    _widen(model, loaded)
    recorder.name((p for name, p in model.named_parameters() if "lora_" in name), "adapters")
    recorder.name((p for name, p in _trainable(model).items() if "lora_" not in name), "weights")


def _dense(module: nn.Module) -> list[Tensor]:
    """What a quantised layer's weights are made from: as they are read, and for 8 bits once more in fp16."""
    match module:
        case Nf4Linear():
            dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
        case Int8Linear():
            dtypes = (torch.bfloat16, torch.float16)
        case _:
            return []
    return [torch.zeros(module.out_features, module.in_features, dtype=dtype) for dtype in dtypes]


def _fill(path: str, module: nn.Module, made: dict[int, tuple[Tensor, Tensor]], loaded: torch.dtype) -> None:
    for slots in (module._parameters, module._buffers):
        for name, old in slots.items():
            if old is None:
                continue
            if id(old) not in made:
                dtype = _loaded_as(path, old, loaded)
                new: Tensor = torch.empty_strided(old.shape, old.stride(), dtype=dtype, device="cpu")
                made[id(old)] = (nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new, old)
            slots[name] = made[id(old)][0]  # type: ignore[assignment]


def _loaded_as(path: str, tensor: Tensor, loaded: torch.dtype) -> torch.dtype:
    """What is trained of the model's own weights is loaded as the rest is; adapters are never loaded."""
    return loaded if tensor.requires_grad and "lora_" not in path else tensor.dtype


def _widen(model: nn.Module, loaded: torch.dtype) -> None:
    """One tensor after the other, each given back at once."""
    places: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
    for name, module in model.named_modules():
        for slot, old in module._parameters.items():
            if old is not None and old.requires_grad and "lora_" not in name and loaded is not torch.float32:
                places.setdefault(id(old), []).append((module._parameters, slot))
    for shared in places.values():
        slots, slot = shared[0]
        wide = nn.Parameter(slots[slot].detach().to(torch.float32))  # type: ignore[union-attr]
        for slots, slot in shared:
            slots[slot] = wide


def _optimizer(model: nn.Module, spec: AdamW, device: str) -> torch.optim.Optimizer:
    real = make_optimizer(model, spec.model_copy(update={"kind": "adamw"}), device=device)
    if spec.kind == "adamw":
        return real
    groups = (copy.copy(group) for group in real.param_groups)
    return BitsAndBytesAdamW(groups, is_eight_bit=spec.kind.endswith("8bit"), is_paged=spec.kind.startswith("paged"))


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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
