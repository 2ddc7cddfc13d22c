"""The rehearsed model: the config of a step; the model, built on the meta device as training or an evaluation would
load it, and then made of fake tensors; and the images of a batch, as large as those of the row with the most image
tokens."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit import vision
from finefit.artifacts.forecasts import TowerSize
from finefit.artifacts.records import Levers
from finefit.custom.inputs import custom_on_meta
from finefit.facts.files import reading_model
from finefit.model.attention import STRETCHED_ROPE, choose_attention, for_answers
from finefit.model.experts import active_parameters, choose_experts, experts_of
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.model.loadable import require_causal, require_known_type
from finefit.model.quantised import packed_layers, packed_weights, require_trainable
from finefit.model.resolve_model import custom_source_in
from finefit.model.targets import left_out
from finefit.objective.batch import Extra
from finefit.rehearse import fake_kernels, fake_layers
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, Dpo, Objective, Sft
from finefit.step.forward import keep_reference_copy
from finefit.step.levers import layers_of, other_layers
from finefit.step.state import trainable_of
from finefit.vision.attention import PIECES, by_piece
from finefit.vision.family import Grid, ImageGeometry, ImageInput

_ATTENTION = "rehearsed"
_TAKE_CONFIG = "use the config.json of the published model; `finefit doctor` shows the installed versions"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Everything that a rehearsal depends on."""

    config: dict[str, Any]
    tuning: Tuning
    optimizer: AdamW
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Literal["bf16", "fp16", "fp32"]
    levers: Levers
    tokens: int
    """Tokens of the longest sequence; a micro-batch is padded to this length, or packed into as many tokens."""
    supervised: int
    """Supervised tokens of a sequence."""
    accumulates: bool
    """Whether a step has more than one micro-batch: its gradients are then kept while the next one is computed."""
    objective: Objective = field(default_factory=lambda: Sft(kind="sft"))
    rows_per_step: int | None = None
    """Maximum rows of a pack; None if unknown."""
    validation: tuple[int, int] | None = None
    """Tokens and supervised tokens of the longest validation row; None if there are none."""
    grids: tuple[tuple[int, ...], ...] = ()
    """Grids of the images in the row with the most image tokens; every row is assumed to have them, including
    validation rows."""
    is_deterministic: bool = False
    """Attention then processes images one by one, not all in one kernel."""
    is_quick: bool = False
    """Rehearses one micro-batch, with gradients and state already present: slightly off in reserved memory, and without
    a gradient map."""

    @property
    def sides(self) -> int:
        """Sequences per row: a preference pair has two."""
        return 2 if isinstance(self.objective, Dpo) else 1


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    """Reads the config of the unpacked model, and refuses models that finefit cannot train."""
    require_known_type(values)
    packed_weights(values)
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    with reading_model("the model's config", _TAKE_CONFIG):
        return AutoConfig.for_model(**given)


def build_on_meta(cfg: StepConfig, kernels: fake_kernels.DeviceKernels, *, answers: bool = False) -> nn.Module:
    """`answers`: build the model as an evaluation loads it, with nothing trained."""
    dtype = weight_dtype(cfg.precision, cfg.tuning)
    if answers and cfg.precision == "bf16":  # an evaluation keeps weights in bf16 that are no longer trained
        dtype = torch.bfloat16
    if (found := custom_source_in(cfg.config)) is not None:
        custom = custom_on_meta(found, cfg.tuning, dtype, answers=answers)
        if kernels.device == "cuda":
            fake_layers.fuse_dropout(custom)
        return custom
    config = read_config(cfg.config)
    config.use_cache = config.get_text_config().use_cache = False
    attention = choose_attention("cpu", (0, 0), cfg.precision, config, packing=cfg.levers.packing and not answers)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.decode_attention if answers else kernels.attention)
        has_kernel = (lambda *_: False) if cfg.is_deterministic else kernels.has_varlen
        AttentionInterface.register(_ATTENTION + PIECES, partial(by_piece, kernels.attention, has_kernel))
        AttentionMaskInterface.register(_ATTENTION, fake_kernels.rehearsed_mask)
    elif answers:
        attention = for_answers(attention)
    with torch.device("meta"):
        with reading_model(f"the config of this {config.model_type} model", _TAKE_CONFIG):
            try:
                model = _built(config, dtype, attention)
            # the model has its own attention classes: the CPU's kernel replaces the card's, which needs about
            # the same memory
            except KeyError:
                model = _built(config, dtype, "sdpa")
        if (stored := packed_weights(cfg.config)) is not None:
            if not answers:
                require_trainable(stored, cfg.tuning)
            ids = set(map(id, packed_layers(model, stored).values()))
            fake_layers.quantise(model, stored.bits, ids, is_nested=stored.is_nested, is_stored=True)
        elif bits := base_bits(cfg.tuning):
            head, towers = model.get_output_embeddings(), vision.vision_forward_of(model.config)
            linear = [(name, id(module)) for name, module in model.named_modules() if type(module) is nn.Linear]
            # bitsandbytes quantises all layers but the head; in a vision-language model, those of its language tower
            packed = {at for name, at in linear if towers is None or vision.tower_of(towers, name) == "language"}
            fake_layers.quantise(model, bits, packed - {id(head)})
        if answers and not isinstance(cfg.tuning, Lora):  # a checkpoint is a whole model
            trained: nn.Module = model
        else:
            trained = make_trainable(model, cfg.tuning, name="rehearsed")
        if answers:
            trained.requires_grad_(False)
        else:
            keep_reference_copy(cfg.objective, cfg.tuning, trained)
    if kernels.device == "cuda":
        fake_layers.fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            # these read the largest position, but fake tensors have no values
            module.rope_type = "default"  # type: ignore[assignment]
    return trained


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    require_causal(config)
    kind = vision.auto_class(config)
    chosen = {"attn_implementation": attention, "experts_implementation": choose_experts()}
    model: PreTrainedModel = kind.from_config(config, dtype=dtype, **chosen)
    return model


@lru_cache(maxsize=64)
def layer_shapes(values: str) -> tuple[str, ...] | None:
    """Returns the class and the tensors of every layer; None if layers share weights. `values`: a config, as JSON."""
    config = read_config(json.loads(values))
    with torch.device("meta"), reading_model("the model's config", _TAKE_CONFIG):
        layers = layers_of(_built(config, torch.bfloat16, "eager"))
    tensors = [[(name, id(p), tuple(p.shape)) for name, p in layer.named_parameters()] for layer in layers]
    owners = Counter(ident for named in tensors for ident in {ident for _, ident, _ in named})
    if any(count > 1 for count in owners.values()):
        return None
    shapes = ([(name, shape) for name, _, shape in named] for named in tensors)
    return tuple(repr((type(layer).__name__, found)) for layer, found in zip(layers, shapes, strict=True))


def stored_dtypes(cfg: StepConfig, *, answers: bool = False) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the files that are mapped into memory while weights are loaded: those of the base, and of a
    checkpoint with full weights, which is evaluated. The files of a custom model are unknown."""
    if cfg.device == "cuda" or custom_source_in(cfg.config) is not None or packed_weights(cfg.config) is not None:
        return ()
    named = str(cfg.config.get("dtype") or cfg.config.get("torch_dtype"))
    base = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named, torch.float32)
    return (base, torch.float32) if answers and not isinstance(cfg.tuning, Lora) else (base,)


def materialise_fakes(
    model: nn.Module,
    recorder: Recorder,
    *,
    is_loaded: bool,
    loaded: torch.dtype = torch.float32,
    stored: Sequence[torch.dtype] = (),
) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first
    allocates the sum of all weights in one piece and frees it, then fills the tensors. `loaded`: the dtype of trained
    weights before they are widened. `stored`: the dtypes of the files; weights of the same dtype are the mapped file
    itself, and others are copies that exist beside it until all weights are read. Beside packed weights all are
    copies."""
    if is_loaded:
        weights = [(name, p) for name, p in model.named_parameters() if "lora_" not in name]
        total = sum(p.numel() * _loaded_as(name, p, loaded).itemsize for name, p in weights)
        ident = recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE)
        recorder.trace.free(ident, OUTSIDE, "load")
    unit_of = {id(m): at for at, layer in enumerate([*layers_of(model), *other_layers(model)]) for m in layer.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    mapped: list[Tensor] = []
    is_packed = any(isinstance(module, fake_layers.Nf4Linear | fake_layers.Int8Linear) for module in model.modules())
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = _dense(module)
                mapped += [] if is_adapter else _mapped(name, module, made, loaded, stored, is_packed=is_packed)
                _fill(name, module, made, loaded)
                del dense  # quantised weights are made from it on the device
        recorder.place(OUTSIDE)
        recorder.name(mapped, "weights_file")
        mapped.clear()
    made.clear()
    _widen(model, loaded)
    recorder.name((p for name, p in model.named_parameters() if "lora_" in name), "adapters")
    recorder.name((p for name, p in trainable_of(model).items() if "lora_" not in name), "weights")


def _dense(module: nn.Module) -> list[Tensor]:
    """Returns the tensors from which a quantised layer is made: as they are read, and for 8 bits also in fp16."""
    if not isinstance(module, fake_layers.Nf4Linear | fake_layers.Int8Linear):
        return []
    return [torch.zeros(module.out_features, module.in_features, dtype=dtype) for dtype in module.made_from]


def _mapped(
    path: str,
    module: nn.Module,
    made: Mapping[int, tuple[Tensor, Tensor]],
    loaded: torch.dtype,
    stored: Sequence[torch.dtype],
    *,
    is_packed: bool,
) -> list[Tensor]:
    """Returns the part of a file from which a module's weights are copied."""
    found = []
    for name, old in module._parameters.items():
        if old is None or id(old) in made:
            continue
        others = [dtype for dtype in stored if is_packed or dtype is not _loaded_as(path, old, loaded)]
        if others:
            is_matrix = name == "weight" and isinstance(module, fake_layers.Nf4Linear | fake_layers.Int8Linear)
            count = module.in_features * module.out_features if is_matrix else old.numel()  # type: ignore[operator]
            dtype = max(others, key=lambda one: one.itemsize)
            found.append(torch.empty(count, dtype=dtype, device="cpu"))  # type: ignore[arg-type]
    return found


def _fill(path: str, module: nn.Module, made: dict[int, tuple[Tensor, Tensor]], loaded: torch.dtype) -> None:
    for slots in (module._parameters, module._buffers):
        for name, old in slots.items():
            if old is None:
                continue
            if id(old) not in made:
                dtype = _loaded_as(path, old, loaded)
                new: Tensor = torch.empty_strided(old.shape, old.stride(), dtype=dtype, device="cpu")
                made[id(old)] = (
                    nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new,
                    old,
                )
            slots[name] = made[id(old)][0]  # type: ignore[assignment]


def _loaded_as(path: str, tensor: Tensor, loaded: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a tensor is loaded: that of trained model weights is `loaded`; adapters are never
    loaded."""
    return loaded if tensor.requires_grad and "lora_" not in path else tensor.dtype


def _widen(model: nn.Module, loaded: torch.dtype) -> None:
    """Widens one tensor after another, and frees each narrow one at once."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The size of a model, which is known without a rehearsal."""

    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Bytes of the frozen and the trained weights on the device."""
    trainable_bytes: int
    paged_bytes: int = 0
    """Bytes of optimizer state that the driver moves between card and host."""
    active: int | None = None
    """Parameters of a mixture of experts that one token uses; None if it uses all."""
    expert_bytes: int = 0
    """Bytes of weights in tensors that hold several experts."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Sizes of a vision-language model's towers."""
    tower_names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Trained tensors of each tower."""
    unused: tuple[str, ...] = ()
    """Modules of a vision tower that no image reaches."""
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers that all-linear does not adapt, by reason."""


def measure_size(cfg: StepConfig) -> ModelFootprint:
    """A quantised parameter counts with the number of values that it holds."""
    model = build_on_meta(cfg, fake_kernels.device_kernels(cfg.device, cfg.capability, cfg.precision))
    trained, kind = trainable_of(model), cfg.optimizer.kind
    is_paged, is_eight_bit = kind.startswith("paged"), kind.endswith("8bit")
    quantised = [module for module in model.modules() if isinstance(module, fake_layers.Nf4Linear)]
    packed = sum(module.in_features * module.out_features - module.weight.numel() for module in quantised)
    of_experts = [p for experts in experts_of(model).values() for p in experts.parameters()]
    has_vision = vision.vision_forward_in(model) is not None
    towers: dict[str, TowerSize] = {}
    tower_names: dict[str, set[str]] = {}
    values = {id(module.weight): module.in_features * module.out_features for module in quantised}
    for name, parameter in model.named_parameters() if has_vision else ():
        tower, count = str(vision.tower_in(model, name)), values.get(id(parameter), parameter.numel())
        before = towers.get(tower, TowerSize(parameters=0, trainable=0, tensors=0))
        towers[tower] = TowerSize(
            parameters=before.parameters + count,
            trainable=before.trainable + count * parameter.requires_grad,
            tensors=before.tensors + parameter.requires_grad,
        )
        if parameter.requires_grad:
            tower_names.setdefault(tower, set()).add(name)
    return ModelFootprint(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        active=active_parameters(model) + packed if of_experts else None,
        expert_bytes=_bytes(of_experts),
        trainable=sum(p.numel() for p in trained.values()),
        trainable_tensors=len(trained),
        weight_bytes=_bytes(model.parameters()),
        trainable_bytes=_bytes(trained.values()),
        paged_bytes=fake_layers.paged_bytes(trained.values(), is_eight_bit=is_eight_bit) if is_paged else 0,
        towers=towers,
        tower_names={tower: frozenset(names) for tower, names in tower_names.items()},
        unused=vision.unused_modules(model) if has_vision else (),
        left_out=_left_out(model, cfg.tuning),
    )


def _left_out(model: nn.Module, tuning: Tuning) -> dict[str, tuple[str, ...]]:
    base, found = vision.without_adapter(model), dict[str, tuple[str, ...]]()
    targets = tuning.targets if isinstance(tuning, Lora) else ()
    takes_all = "all-linear" in (targets.values() if isinstance(targets, dict) else (targets,))
    for name, reason in left_out(base).items() if takes_all and isinstance(base, PreTrainedModel) else ():
        found[reason] = (*found.get(reason, ()), name)
    return found


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.nbytes for p in parameters)


def fake_images(config: Mapping[str, Any], *, rows: int, tokens: int, grids: Sequence[Grid]) -> Extra | None:
    """Returns the images of `rows` equal rows on the meta device; None for a model without vision. Do not call it under
    fake tensors: a geometry counts and sorts, so it works on blank pixels, and only the shapes of its tensors are
    kept."""
    geometry = vision.geometry_of(config)
    return None if geometry is None else _fake_images(geometry, rows, tokens, tuple(grids))  # type: ignore[arg-type] # every geometry is frozen


@lru_cache(maxsize=64)
def _fake_images(geometry: ImageGeometry, rows: int, tokens: int, grids: tuple[Grid, ...]) -> Extra:
    """Puts a word before each image, and fills the row with words. Cached, because a model of fewer layers has the same
    geometry."""
    row = [ImageInput(grid, geometry.blank_pixels(grid)) for grid in grids]
    word = int(geometry.image_token == 0)
    ids = [token for grid in grids for token in (word, *[geometry.image_token] * geometry.num_tokens(grid))]
    ids += [word] * (tokens - len(ids))
    ids_BT = np.tile(np.array(ids, dtype=np.int64), (rows, 1))
    return geometry.extra(ids_BT, [ids_BT.shape[1]] * rows, [row] * rows).moved(
        lambda tensor: torch.empty_like(tensor, device="meta")
    )


def num_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Returns the minimum tokens of a row with these images: theirs, a word before each, and one of the answer."""
    return image_tokens(config, grids) + len(grids) + 1


def image_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    geometry = vision.geometry_of(config)
    return 0 if geometry is None else sum(map(geometry.num_tokens, grids))


def fitting(config: Mapping[str, Any], grids: Sequence[Grid], tokens: int) -> tuple[Grid, ...]:
    """Returns as many of the images as fit into a shorter row."""
    counts = range(len(grids), 0, -1)
    return next((tuple(grids[:count]) for count in counts if num_tokens(config, grids[:count]) <= tokens), ())


def num_values(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Returns the number of pixel values of these images."""
    geometry = vision.geometry_of(config)
    return 0 if geometry is None else sum(part.size for grid in grids for part in geometry.blank_pixels(grid).values())
