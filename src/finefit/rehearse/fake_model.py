"""The model of a rehearsal: built on the meta device as training or an evaluation would load it, then of fake
tensors."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit.artifacts.forecasts import TowerSize
from finefit.custom.inputs import custom_on_meta
from finefit.errors import ModelError
from finefit.model.attention import STRETCHED_ROPE, choose_attention, for_answers
from finefit.model.experts import active_parameters, choose_experts, experts_of
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.model.resolve_model import custom_source_in
from finefit.rehearse.fake_kernels import (
    DeviceKernels,
    Int8Linear,
    Nf4Linear,
    device_kernels,
    fuse_dropout,
    paged_bytes,
    quantise,
    rehearsed_mask,
)
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.step_config import StepConfig
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block
from finefit.spec.models import Lora
from finefit.step.forward import keep_reference_copy
from finefit.step.levers import layers_of, other_layers
from finefit.vision import auto_class, tower_in, tower_of, unused_modules, vision_forward_in, vision_forward_of
from finefit.vision.attention import PIECES, by_piece

_ATTENTION = "rehearsed"
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    if "model_type" not in given:
        problem = "the model's config has no model_type, so its architecture is unknown"
        raise ModelError(problem, "take the config.json that belongs to the model")
    try:
        return AutoConfig.for_model(**given)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        problem = f"the model's config cannot be read: {' '.join(str(error).split())}"
        raise ModelError(problem, "`finefit doctor` shows the installed versions") from error


def build_on_meta(cfg: StepConfig, kernels: DeviceKernels, *, answers: bool = False) -> nn.Module:
    """`answers`: as an evaluation loads it, where nothing is trained."""
    dtype = weight_dtype(cfg.precision, cfg.tuning)
    if answers and cfg.precision == "bf16":  # an evaluation keeps what is no longer trained in bf16
        dtype = torch.bfloat16
    if (found := custom_source_in(cfg.config)) is not None:
        custom = custom_on_meta(found, cfg.tuning, dtype, answers=answers)
        if kernels.device == "cuda":
            fuse_dropout(custom)
        return custom
    config = read_config(cfg.config)
    if config.model_type in _ENCODERS and not config.is_decoder:
        problem = f"{config.model_type} is an encoder: each token would see the one that it has to predict"
        raise ModelError(problem, "name a causal language model")
    config.use_cache = config.get_text_config().use_cache = False
    attention = choose_attention("cpu", (0, 0), cfg.precision, config, packing=cfg.levers.packing and not answers)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.answering if answers else kernels.attention)
        has_kernel = (lambda *_: False) if cfg.is_deterministic else kernels.has_varlen
        AttentionInterface.register(_ATTENTION + PIECES, partial(by_piece, kernels.attention, has_kernel))
        AttentionMaskInterface.register(_ATTENTION, rehearsed_mask)
    elif answers:
        attention = for_answers(attention)
    with torch.device("meta"):
        try:
            model = _built(config, dtype, attention)
        # the model has attention classes of its own: the CPU's kernel stands for the card's, which takes about as much
        except KeyError:
            model = _built(config, dtype, "sdpa")
        if bits := base_bits(cfg.tuning):
            quantise(model, bits, _is_packed(model))
        if answers and not isinstance(cfg.tuning, Lora):  # a checkpoint is a whole model
            trained: nn.Module = model
        else:
            trained = make_trainable(model, cfg.tuning, name="rehearsed")
        if answers:
            trained.requires_grad_(False)
        else:
            keep_reference_copy(cfg.objective, cfg.tuning, trained)
    if kernels.device == "cuda":
        fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            # those read the largest position, and fake tensors have no values
            module.rope_type = "default"  # type: ignore[assignment]
    return trained


def _is_packed(model: PreTrainedModel) -> Callable[[str, nn.Module], bool]:
    """Which linear layers bitsandbytes quantises: all but the head, in a vision-language model those of its language
    tower."""
    head, vision_forward = model.get_output_embeddings(), vision_forward_of(model.config)
    return lambda name, module: (
        module is not head and (vision_forward is None or tower_of(vision_forward, name) == "language")
    )


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    chosen = {"attn_implementation": attention, "experts_implementation": choose_experts()}
    try:
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, **chosen)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        problem = f"{config.model_type} cannot be built as a causal language model: {error}"
        raise ModelError(problem, "name a causal language model") from error
    return model


def materialise_fakes(
    model: nn.Module, recorder: Recorder, *, is_loaded: bool, loaded: torch.dtype = torch.float32
) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first
    allocates the sum of all weights in one piece and frees it, then fills the pieces. `loaded`: the dtype of trained
    weights before they are widened."""
    if is_loaded:
        weights = [(name, p) for name, p in model.named_parameters() if "lora_" not in name]
        total = sum(p.numel() * _loaded_as(name, p, loaded).itemsize for name, p in weights)
        ident = recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE)
        recorder.trace.free(ident, OUTSIDE, "load")
    unit_of = {id(m): at for at, layer in enumerate([*layers_of(model), *other_layers(model)]) for m in layer.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = _dense(module)
                _fill(name, module, made, loaded)
                del dense  # quantised weights are made from it on the device
    recorder.place(OUTSIDE)
    made.clear()
    _widen(model, loaded)
    recorder.name((p for name, p in model.named_parameters() if "lora_" in name), "adapters")
    recorder.name((p for name, p in trainable_of(model).items() if "lora_" not in name), "weights")


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
                made[id(old)] = (
                    nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new,
                    old,
                )
            slots[name] = made[id(old)][0]  # type: ignore[assignment]


def _loaded_as(path: str, tensor: Tensor, loaded: torch.dtype) -> torch.dtype:
    """Trained weights of the model itself are loaded like the rest; adapters are never loaded."""
    return loaded if tensor.requires_grad and "lora_" not in path else tensor.dtype


def _widen(model: nn.Module, loaded: torch.dtype) -> None:
    """One tensor after the other, each freed at once."""
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


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The size of a model, known without a rehearsal."""

    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Of the frozen and the trained weights on the device."""
    trainable_bytes: int
    paged_bytes: int = 0
    """Of optimizer state that the driver moves between card and host."""
    active: int | None = None
    """Parameters that a token uses in a mixture of experts; None where it uses all."""
    expert_bytes: int = 0
    """Of weights in tensors that hold several experts."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Of a vision-language model."""
    tower_names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Trained tensors of each."""
    unused: tuple[str, ...] = ()
    """Modules of a vision tower that no image passes."""


def measure_size(cfg: StepConfig) -> ModelFootprint:
    """A quantised parameter counts as the values that it holds."""
    model = build_on_meta(cfg, device_kernels(cfg.device, cfg.capability, cfg.precision))
    trained, kind = trainable_of(model), cfg.optimizer.kind
    is_paged, is_eight_bit = kind.startswith("paged"), kind.endswith("8bit")
    quantised = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    packed = sum(module.in_features * module.out_features - module.weight.numel() for module in quantised)
    of_experts = [p for experts in experts_of(model).values() for p in experts.parameters()]
    has_vision = vision_forward_in(model) is not None
    tower_names: dict[str, set[str]] = {}
    for name in trained if has_vision else ():
        tower_names.setdefault(str(tower_in(model, name)), set()).add(name)
    return ModelFootprint(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        active=active_parameters(model) + packed if of_experts else None,
        expert_bytes=_bytes(of_experts),
        trainable=sum(p.numel() for p in trained.values()),
        trainable_tensors=len(trained),
        weight_bytes=_bytes(model.parameters()),
        trainable_bytes=_bytes(trained.values()),
        paged_bytes=paged_bytes(trained.values(), is_eight_bit=is_eight_bit) if is_paged else 0,
        towers=_towers(model, quantised) if has_vision else {},
        tower_names={tower: frozenset(names) for tower, names in tower_names.items()},
        unused=unused_modules(model) if has_vision else (),
    )


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _towers(model: nn.Module, quantised: Iterable[Nf4Linear]) -> dict[str, TowerSize]:
    total, trained, tensors = Counter[str](), Counter[str](), Counter[str]()
    values = {id(module.weight): module.in_features * module.out_features for module in quantised}
    for name, parameter in model.named_parameters():
        tower, count = str(tower_in(model, name)), values.get(id(parameter), parameter.numel())
        total[tower] += count
        trained[tower] += count * parameter.requires_grad
        tensors[tower] += parameter.requires_grad
    return {
        tower: TowerSize(parameters=total[tower], trainable=trained[tower], tensors=tensors[tower]) for tower in total
    }
